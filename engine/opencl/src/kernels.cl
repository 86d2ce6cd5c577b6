// The FFN of a part of a bank, and products of rows, with the CPU's bits: chains and lanes, fused multiply-adds and
// polynomials are those of engine/kernels (see its lib.rs). The host defines
//
//   Q4, Q8, F16, BF16 or F32                        the rows' format
//   D, CLUSTER                                      elements of a row, neurons of a cluster
//   RELU, FATRELU, RELU2, SILU or GELU_TANH         the activation; THRESHOLD of FATRELU
//   UNGATED, RELU_ON_UP                             where the model is so
//
// A part holds its rows matrix by matrix (Gate, Up, Down), then their scales likewise.

#pragma OPENCL FP_CONTRACT OFF

#define GROUP 32
#define GROUPS ((D + GROUP - 1) / GROUP)

#if defined(Q4)
#define QUANTS (GROUPS * 16)
#define SCALES (GROUPS * 2)
#elif defined(Q8)
#define QUANTS (GROUPS * 32)
#define SCALES (GROUPS * 2)
#elif defined(F32)
#define QUANTS (D * 4)
#define SCALES 0
#else
#define QUANTS (D * 2)
#define SCALES 0
#endif

typedef __global const uchar *bytes;

float f16_at(bytes at, int i) { return vload_half(i, (__global const half *)at); }

#if defined(Q4) || defined(Q8)
// A chunk of quantised activations: see engine/kernels/src/activations.rs.
#define CHUNK_GROUPS 16
#define CHUNK_BYTES 768
#define CHUNK_SCALES 512
#define CHUNK_BY_8 576
#define HALF 16
#define SECOND_HALF 64
#define TOKEN_BYTES (((GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS) * CHUNK_BYTES)

int total(int16 v) {
    int8 a = v.lo + v.hi;
    int4 b = a.lo + a.hi;
    int2 c = b.lo + b.hi;
    return c.x + c.y;
}

// The integer product of a group, `g`-th of its chunk, with a token.
int group_product(bytes quants, bytes chunk, int g) {
    __global const char *x = (__global const char *)chunk + g / 4 * 128 + g % 4 * HALF;
    int16 low = convert_int16(vload16(0, x));
    int16 high = convert_int16(vload16(0, x + SECOND_HALF));
#ifdef Q4
    uchar16 w = vload16(0, quants);
    int start = ((__global const int *)(chunk + CHUNK_BY_8))[g];
    return start + total(convert_int16(w & (uchar16)15) * low + convert_int16(w >> (uchar16)4) * high);
#else
    __global const char *w = (__global const char *)quants;
    return total(convert_int16(vload16(0, w)) * low + convert_int16(vload16(1, w)) * high);
#endif
}

// A row times a token by the chain rule.
float product(bytes quants, bytes scales, bytes token) {
    float chain[CHUNK_GROUPS];
    for (int g = 0; g < CHUNK_GROUPS; ++g) {
        chain[g] = 0.0f;
    }
    for (int first = 0; first < GROUPS; first += CHUNK_GROUPS) {
        bytes chunk = token + first / CHUNK_GROUPS * CHUNK_BYTES;
        __global const float *of_x = (__global const float *)(chunk + CHUNK_SCALES);
        int count = min(CHUNK_GROUPS, GROUPS - first);
        for (int g = 0; g < count; ++g) {
            int sum = group_product(quants + (first + g) * (QUANTS / GROUPS), chunk, g);
            float scale = f16_at(scales, first + g) * of_x[g];
            chain[g] = fma((float)sum, scale, chain[g]);
        }
    }
    for (int width = CHUNK_GROUPS / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            chain[j] += chain[j + width];
        }
    }
    return chain[0];
}
#else
#define TOKEN_BYTES (D * 4)
#define LANES 64

// An element of a row.
float weight(bytes quants, int i) {
#if defined(F32)
    return ((__global const float *)quants)[i];
#elif defined(F16)
    return f16_at(quants, i);
#else
    return as_float((uint)((__global const ushort *)quants)[i] << 16);
#endif
}

// A row times a token by the lane rule.
float product(bytes quants, bytes scales, bytes token) {
    __global const float *x = (__global const float *)token;
    float lane[LANES];
    for (int j = 0; j < LANES; ++j) {
        lane[j] = 0.0f;
    }
    for (int first = 0; first < D; first += LANES) {
        for (int j = 0; j < LANES && first + j < D; ++j) {
            lane[j] = fma(weight(quants, first + j), x[first + j], lane[j]);
        }
    }
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            lane[j] += lane[j + width];
        }
    }
    return lane[0];
}
#endif

#if defined(SILU) || defined(GELU_TANH)
float power_of_two(int n) { return as_float((uint)(n + 127) << 23); }

// math::exp
float exp_of(float x) {
    const float ROUND = 12582912.0f;
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = fma(x, as_float(0x3fb8aa3bu), ROUND);
    float n = shifted - ROUND;
    float r = fma(n, -as_float(0xb102e308u), fma(n, -as_float(0x3f317218u), x));
    float p = 1.0f / 5040.0f;
    p = fma(r, p, 1.0f / 720.0f);
    p = fma(r, p, 1.0f / 120.0f);
    p = fma(r, p, 1.0f / 24.0f);
    p = fma(r, p, 1.0f / 6.0f);
    p = fma(r, p, 0.5f);
    p = fma(r, p, 1.0f);
    p = fma(r, p, 1.0f);
    int whole = (int)(as_uint(shifted) - as_uint(ROUND));
    int half_of = whole >> 1;
    return p * power_of_two(half_of) * power_of_two(whole - half_of);
}
#endif

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

// hidden[n][row] of neurons `first + n` of a part of `neurons`: zero beyond its end, where the mask
// does not want the pair, and where the gate does not fire. `fired` counts the pairs that fire.
__kernel void hidden_values(bytes part, bytes x, __global const ulong *mask,
                            __global const float *gate_bias, __global const float *up_bias,
                            __global float *hidden, __global int *fired, int first, int neurons,
                            int rows, int flags, float cut) {
    int n = get_global_id(0), row = get_global_id(1);
    size_t i = first + n, pair = (size_t)n * rows + row, all = neurons;
    float h = 0.0f;
    bool wanted = i < all;
    if (wanted && (flags & MASKED)) {
        wanted = mask[pair / 64] >> (pair % 64) & 1;
    }
    if (wanted) {
        const size_t scales = all * QUANTS * (MATRICES);
        bytes token = x + (size_t)row * TOKEN_BYTES;
        float gate = product(part + i * QUANTS, part + scales + i * SCALES, token);
        if (flags & GATE_BIAS) {
            gate += gate_bias[n];
        }
        gate = activated(gate);
        if (fabs(gate) < cut) {
            gate = 0.0f;
        }
        if (gate != 0.0f) {
            atomic_inc(fired);
#ifdef UNGATED
            h = gate;
#else
            size_t of_up = all + i;
            float up = product(part + of_up * QUANTS, part + scales + of_up * SCALES, token);
            if (flags & UP_BIAS) {
                up += up_bias[n];
            }
#ifdef RELU_ON_UP
            up = fmax(up, 0.0f);
#endif
            h = gate * up;
#endif
        }
    }
    hidden[pair] = h;
}

// sums[cluster][row][element]: the hidden values of a cluster times their Down rows, in order. Items
// beyond the last element have nothing to do.
__kernel void cluster_sums(bytes part, __global const float *hidden, __global float *sums,
                           int first, int neurons, int rows) {
    int j = get_global_id(0), row = get_global_id(1), cluster = get_global_id(2);
    if (j >= D) {
        return;
    }
    const size_t all = neurons, down = all * (MATRICES - 1);
    const size_t scales = all * QUANTS * (MATRICES);
    int end = min(CLUSTER, neurons - first - cluster * CLUSTER);
    float sum = 0.0f;
    for (int n = 0; n < end; ++n) {
        size_t pair = (size_t)(cluster * CLUSTER + n) * rows + row;
        float h = hidden[pair];
        if (h == 0.0f) {
            continue;
        }
        size_t i = down + first + cluster * CLUSTER + n;
        bytes quants = part + i * QUANTS;
#if defined(Q4) || defined(Q8)
        float scale = f16_at(part + scales + i * SCALES, j / GROUP);
#ifdef Q4
        int e = j % GROUP;
        uchar both = quants[j / GROUP * 16 + e % 16];
        int quant = (e < 16 ? both & 15 : both >> 4) - 8;
#else
        int quant = ((__global const char *)quants)[j];
#endif
        sum = fma(h * scale, (float)quant, sum);
#else
        sum = fma(h, weight(quants, j), sum);
#endif
    }
    sums[((size_t)cluster * rows + row) * D + j] = sum;
}

// y[token][row] of `count` rows from `first` on of a matrix, each with its scales behind it.
__kernel void row_products(bytes matrix, bytes x, __global float *y, int first, int count, int at) {
    int row = get_global_id(0), token = get_global_id(1);
    if (row >= count) {
        return;
    }
    bytes quants = matrix + (size_t)(first + row) * (QUANTS + SCALES);
    y[(size_t)at + (size_t)token * count + row] =
        product(quants, quants + QUANTS, x + (size_t)token * TOKEN_BYTES);
}
