// Hidden values of the neurons in a buffer. The host defines
//
//   CLUSTER                                      neurons per cluster
//   MATRICES                                     rows per neuron: 3 (Gate, Up, Down) or 2 (Gate, Down)
//   RELU, FATRELU, RELU2, SILU or GELU_TANH      the activation; THRESHOLD for FATRELU
//   CLAMPED_SILU                                 silu(min(gate, LIMIT)) · clamp(up, ±LIMIT)
//   CLAMPED_SWIGLU                               the same with clamp(up, ±LIMIT) + 1, and the sigmoid's argument times ALPHA
//   UNGATED                                      neurons without Up
//   RELU_ON_UP                                   dReLU: ReLU of Up too

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

#ifdef LIMIT
// NaN stays NaN, which OpenCL's clamp does not promise.
float within_limit(float v) {
    return v < -LIMIT ? -LIMIT : v > LIMIT ? LIMIT : v;
}
#endif

#define MASKED 1
#define GATE_BIAS 2
#define UP_BIAS 4

// Row `matrix` (Gate 0, Up 1) of neuron `i` in a buffer of `neurons` neurons.
Row neuron_row(bytes part, int matrix, size_t i, int neurons) {
#ifdef TILES
    return row_at(part, (i / CLUSTER * MATRICES + matrix) * CLUSTER + i % CLUSTER);
#else
    return row_at(part, (size_t)matrix * neurons + i);
#endif
}

// Bits of the mask for `here` pairs from `pair` on.
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

// The activated gate with its bias; zero below the cut.
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
    up = within_limit(up);
#elif defined(CLAMPED_SWIGLU)
    up = within_limit(up) + 1.0f;
#elif defined(RELU_ON_UP)
    up = fmax(up, 0.0f);
#endif
    return gate * up;
#endif
}

// hidden[n][row] of neurons `first + n` below `end` in a buffer of `neurons` neurons: zero if the mask excludes the pair or
// the gate does not fire. Neurons without a selected pair are not read. `fired` counts the pairs that fire. A work group
// computes a block (BLOCKS); otherwise a work item, or a team, computes a neuron for TILE rows.
#ifdef BLOCKS
__kernel void hidden_values(bytes part, bytes x, __global const ulong *mask,
                            __global const float *gate_bias, __global const float *up_bias,
                            __global float *hidden, __global int *fired, int first, int neurons,
                            int end, int rows, int flags, float cut, __local Chain *chains) {
    __local int count;
    Member member = this_member();
    int row = get_global_id(1) * BLOCK_TOKENS, here = min(BLOCK_TOKENS, rows - row);
    bytes tokens = x + (size_t)row * TOKEN_BYTES;
    if (get_local_id(0) == 0) {
        count = 0;
    }
    Row weights[LANE_ROWS];
    uint read = 0;
#pragma unroll
    for (int r = 0; r < LANE_ROWS; ++r) {
        int n = row_of(member, r);
        weights[r] = neuron_row(part, 0, first + n, neurons);
        if (first + n < end && wanted_from(mask, (size_t)n * rows + row, here, flags)) {
            read |= 1u << r;
        }
    }
    float gate[ENDS];
    products(weights, read, tokens, here, gate, member, chains);
    uint fires = 0;
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
        End at = end_at(member, k);
        int n = end_row(member, at);
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
    for (int r = 0; r < LANE_ROWS; ++r) {
        weights[r] = neuron_row(part, 1, first + row_of(member, r), neurons);
    }
    products(weights, read, tokens, here, up, member, chains);
#endif
#pragma unroll
    for (int k = 0; k < ENDS; ++k) {
        End at = end_at(member, k);
        int n = end_row(member, at);
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
                            int end, int rows, int flags, float cut LOCAL_PARAMS) {
    Member member = this_member();
    int n = row_of(member), row = get_global_id(1) * TILE, here = min(TILE, rows - row);
    size_t i = first + n, pair = (size_t)n * rows + row;
    bytes tokens = x + (size_t)row * TOKEN_BYTES;
    float gate[TILE];
    uint wanted = i < end ? wanted_from(mask, pair, here, flags) : 0, fires = 0;
    products(neuron_row(part, 0, i, neurons), tokens, here, wanted, gate, member LOCAL_ARGS);
    for (int t = 0; t < here; ++t) {
        if (!(wanted >> t & 1)) {
            continue;
        }
        gate[t] = gate_of(gate[t], gate_bias, n, flags, cut);
        fires |= (uint)(gate[t] != 0.0f) << t;
    }
    if (fires && member.chain == 0) {
        atomic_add(fired, (int)popcount(fires));
    }
    float up[TILE] = {0.0f};
#ifndef UNGATED
    products(neuron_row(part, 1, i, neurons), tokens, here, fires, up, member LOCAL_ARGS);
#endif
    for (int t = 0; t < here && member.chain == 0 && i < end; ++t) {
        float h = fires >> t & 1 ? hidden_of(gate[t], up[t], up_bias, n, flags) : 0.0f;
        hidden[pair + t] = h;
    }
}
#endif
