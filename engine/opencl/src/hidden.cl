// Hidden values of the FFN of a part of a bank. The host defines
//
//   CLUSTER                                      neurons of a cluster
//   MATRICES                                     of a neuron: Gate, Up, Down, or Gate and Down
//   RELU, FATRELU, RELU2, SILU or GELU_TANH      the activation; THRESHOLD of FATRELU
//   CLAMPED_SILU or CLAMPED_SWIGLU               SiLU of gates up to LIMIT, times Up within it, or within it plus 1; ALPHA
//                                                of CLAMPED_SWIGLU multiplies the argument of the sigmoid
//   UNGATED, RELU_ON_UP                          where the model is so

float silu(float v) {
    return v / (1.0f + exp_of(-v));
}

float activated(float v) {
#if defined(RELU)
    return fmax(v, 0.0f);
#elif defined(FATRELU)
    return v > THRESHOLD ? v : 0.0f;
#elif defined(RELU2)
    float r = fmax(v, 0.0f);
    return r * r;
#elif defined(SILU)
    return silu(v);
#elif defined(CLAMPED_SILU)
    return silu(fmin(v, LIMIT));
#elif defined(CLAMPED_SWIGLU)
    return silu(fmin(v, LIMIT) * ALPHA) / ALPHA;
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

// Bits of those of `here` pairs from number `pair` on that are wanted.
uint wanted_from(__global const ulong *mask, size_t pair, int here, int flags) {
    uint all = (1u << here) - 1;
    if (!(flags & MASKED)) {
        return all;
    }
    int at = pair % 64;
    uint some = (uint)(mask[pair / 64] >> at);
    if (at + here > 64) {
        some |= (uint)(mask[pair / 64 + 1] << (64 - at));
    }
    return some & all;
}

// A gate with its bias, activated; zero where it does not fire.
float gate_of(float sum, __global const float *bias, int n, int flags, float cut) {
    if (flags & GATE_BIAS) {
        sum += bias[n];
    }
    float gate = activated(sum);
    return fabs(gate) < cut ? 0.0f : gate;
}

// The hidden value of a gate that fires.
float hidden_of(float gate, float up, __global const float *bias, int n, int flags) {
#ifdef UNGATED
    return gate;
#else
    if (flags & UP_BIAS) {
        up += bias[n];
    }
#if defined(CLAMPED_SILU)
    up = clamp(up, -LIMIT, LIMIT);
#elif defined(CLAMPED_SWIGLU)
    up = clamp(up, -LIMIT, LIMIT) + 1.0f;
#elif defined(RELU_ON_UP)
    up = fmax(up, 0.0f);
#endif
    return gate * up;
#endif
}

// hidden[n][row] of neurons `first + n` of a part of `neurons`, up to neuron `end`: zero where the mask does not want the
// pair, and where the gate does not fire. Rows of which no pair is wanted are not read. `fired` counts the pairs that fire. A
// work group has a block; or an item, or a team, has a neuron and TILE rows.
#ifdef BLOCKS
__kernel void hidden_values(bytes part, bytes x, __global const ulong *mask,
                            __global const float *gate_bias, __global const float *up_bias,
                            __global float *hidden, __global int *fired, int first, int neurons,
                            int end, int rows, int flags, float cut, __local Chain *chains) {
    __local int count;
    Member of = member();
    int row = get_global_id(1) * BLOCK_TOKENS, here = min(BLOCK_TOKENS, rows - row);
    bytes tokens = x + (size_t)row * TOKEN_BYTES;
    if (get_local_id(0) == 0) {
        count = 0;
    }
    Row its[ITS_ROWS];
    uint read = 0;
#pragma unroll
    for (int r = 0; r < ITS_ROWS; ++r) {
        int n = row_of(of, r);
        its[r] = neuron_row(part, 0, first + n, neurons);
        if (first + n < end && wanted_from(mask, (size_t)n * rows + row, here, flags)) {
            read |= 1u << r;
        }
    }
    float gate[ENDS];
    products(its, read, tokens, here, gate, of, chains);
    uint fires = 0;
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
        End at = end_at(of, k);
        int n = end_row(of, at);
        size_t pair = (size_t)n * rows + row + at.t;
        if (!at.is || at.t >= here || first + n >= end || !wanted_from(mask, pair, 1, flags)) {
            continue;
        }
        gate[k] = gate_of(gate[k], gate_bias, n, flags, cut);
        fires |= (uint)(gate[k] != 0.0f) << k;
    }
    if (fires) {
        atomic_add(&count, (int)popcount(fires));
    }
    float up[ENDS] = {0.0f};
#ifndef UNGATED
#pragma unroll
    for (int r = 0; r < ITS_ROWS; ++r) {
        its[r] = neuron_row(part, 1, first + row_of(of, r), neurons);
    }
    products(its, read, tokens, here, up, of, chains);
#endif
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
        End at = end_at(of, k);
        int n = end_row(of, at);
        if (!at.is || at.t >= here || first + n >= end) {
            continue;
        }
        float h = fires >> k & 1 ? hidden_of(gate[k], up[k], up_bias, n, flags) : 0.0f;
        hidden[(size_t)n * rows + row + at.t] = h;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) == 0 && count > 0) {
        atomic_add(fired, count);
    }
}
#else
__kernel void hidden_values(bytes part, bytes x, __global const ulong *mask,
                            __global const float *gate_bias, __global const float *up_bias,
                            __global float *hidden, __global int *fired, int first, int neurons,
                            int end, int rows, int flags, float cut ROOM) {
    Member of = member();
    int n = row_of(of), row = get_global_id(1) * TILE, here = min(TILE, rows - row);
    size_t i = first + n, pair = (size_t)n * rows + row;
    bytes tokens = x + (size_t)row * TOKEN_BYTES;
    float gate[TILE];
    uint wanted = i < end ? wanted_from(mask, pair, here, flags) : 0, fires = 0;
    products(neuron_row(part, 0, i, neurons), tokens, here, wanted, gate, of ITS_ROOM);
    for (int t = 0; t < here; ++t) {
        if (!(wanted >> t & 1)) {
            continue;
        }
        gate[t] = gate_of(gate[t], gate_bias, n, flags, cut);
        fires |= (uint)(gate[t] != 0.0f) << t;
    }
    if (fires && of.chain == 0) {
        atomic_add(fired, (int)popcount(fires));
    }
    float up[TILE] = {0.0f};
#ifndef UNGATED
    products(neuron_row(part, 1, i, neurons), tokens, here, fires, up, of ITS_ROOM);
#endif
    for (int t = 0; t < here && of.chain == 0 && i < end; ++t) {
        float h = fires >> t & 1 ? hidden_of(gate[t], up[t], up_bias, n, flags) : 0.0f;
        hidden[pair + t] = h;
    }
}
#endif
