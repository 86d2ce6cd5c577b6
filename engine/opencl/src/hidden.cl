// Hidden values of the FFN of a part of a bank. The host defines
//
//   CLUSTER                                      neurons of a cluster
//   MATRICES                                     of a neuron: Gate, Up, Down, or Gate and Down
//   RELU, FATRELU, RELU2, SILU or GELU_TANH      the activation; THRESHOLD of FATRELU
//   UNGATED, RELU_ON_UP                          where the model is so

float activated(float v) {
#if defined(RELU)
    return fmax(v, 0.0f);
#elif defined(FATRELU)
    return v > THRESHOLD ? v : 0.0f;
#elif defined(RELU2)
    float r = fmax(v, 0.0f);
    return r * r;
#elif defined(SILU)
    return v / (1.0f + exp_of(-v));
#else
    float cubic = fma(0.044715f * v * v, v, v);
    return v / (1.0f + exp_of(as_float(0xbfcc4229u) * cubic));
#endif
}

#define MASKED 1
#define GATE_BIAS 2
#define UP_BIAS 4

// Row `matrix` of neuron `i` of a part of `neurons`.
Row neuron_row(bytes part, int matrix, size_t i, int neurons) {
#ifdef TILES
    return row_at(part, (i / CLUSTER * MATRICES + matrix) * CLUSTER + i % CLUSTER);
#else
    return row_at(part, (size_t)matrix * neurons + i);
#endif
}

// hidden[n][row] of neurons `first + n` of a part of `neurons`: zero from neuron `end` on, where the mask
// does not want the pair (these rows are not read), and where the gate does not fire. `fired` counts the pairs that fire. An item, or a team, has
// a neuron and TILE rows.
SIZED __kernel void hidden_values(bytes part, bytes x, __global const ulong *mask,
                                  __global const float *gate_bias, __global const float *up_bias,
                                  __global float *hidden, __global int *fired, int first,
                                  int neurons, int end, int rows, int flags, float cut ROOM) {
    Member of = member();
    int n = row_of(of), row = get_global_id(1) * TILE, here = min(TILE, rows - row);
    size_t i = first + n, pair = (size_t)n * rows + row;
    bytes tokens = x + (size_t)row * TOKEN_BYTES;
    float gate[TILE];
    uint wanted = 0, fires = 0;
    for (int t = 0; t < here && i < end; ++t) {
        size_t p = pair + t;
        if (!(flags & MASKED) || (mask[p / 64] >> (p % 64) & 1)) {
            wanted |= 1u << t;
        }
    }
    products(neuron_row(part, 0, i, neurons), tokens, here, wanted, gate, of ITS_ROOM);
    for (int t = 0; t < here; ++t) {
        if (!(wanted >> t & 1)) {
            continue;
        }
        if (flags & GATE_BIAS) {
            gate[t] += gate_bias[n];
        }
        gate[t] = activated(gate[t]);
        if (!(fabs(gate[t]) < cut) && gate[t] != 0.0f) {
            fires |= 1u << t;
        }
    }
    if (fires && of.chain == 0) {
        atomic_add(fired, (int)popcount(fires));
    }
#ifndef UNGATED
    float up[TILE];
    products(neuron_row(part, 1, i, neurons), tokens, here, fires, up, of ITS_ROOM);
#endif
    for (int t = 0; t < here && of.chain == 0; ++t) {
        float h = 0.0f;
        if (fires >> t & 1) {
#ifdef UNGATED
            h = gate[t];
#else
            if (flags & UP_BIAS) {
                up[t] += up_bias[n];
            }
#ifdef RELU_ON_UP
            up[t] = fmax(up[t], 0.0f);
#endif
            h = gate[t] * up[t];
#endif
        }
        hidden[pair + t] = h;
    }
}
