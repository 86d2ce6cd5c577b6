// The FFN of a part of a bank, and products of rows, with the CPU's bits: chains and lanes, fused multiply-adds and
// polynomials are those of engine/kernels (see its lib.rs). The host defines
//
//   Q4, Q8, F16, BF16 or F32                        the rows' format
//   D, CLUSTER                                      elements of a row, neurons of a cluster
//   RELU, FATRELU, RELU2, SILU or GELU_TANH         the activation; THRESHOLD of FATRELU
//   UNGATED, RELU_ON_UP                             where the model is so
//   TILE                                            most tokens of an item: they share the reading of a row
//
// A part holds its rows matrix by matrix (Gate, Up, Down), each row with its scales behind it, as the host reads them.

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

#define ROW (QUANTS + SCALES)

#if defined(Q4) || defined(Q8)
#define TOKEN_BYTES (((GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS) * CHUNK_BYTES)

// The weights of a group: its first and its last 16, in Q4 more by 8.
typedef struct {
    short16 low, high;
} Group;

Group group_at(bytes quants) {
    Group w;
#ifdef Q4
    uchar16 both = vload16(0, quants);
    w.low = convert_short16(both & (uchar16)15);
    w.high = convert_short16(both >> (uchar16)4);
#else
    __global const char *signs = (__global const char *)quants;
    w.low = convert_short16(vload16(0, signs));
    w.high = convert_short16(vload16(1, signs));
#endif
    return w;
}

// The integer product of a group, `g`-th of its chunk, with a token. Activations are within 127 and weights within
// 128, so that two products fit 16 bits.
int group_product(Group w, bytes chunk, int g) {
    __global const char *x = (__global const char *)chunk + g / 4 * 128 + g % 4 * HALF;
    short16 two = w.low * convert_short16(vload16(0, x)) +
                  w.high * convert_short16(vload16(0, x + SECOND_HALF));
    int8 a = convert_int8(two.lo) + convert_int8(two.hi);
    int4 b = a.lo + a.hi;
    int2 c = b.lo + b.hi;
    int sum = c.x + c.y;
#ifdef Q4
    sum += ((__global const int *)(chunk + CHUNK_BY_8))[g];
#endif
    return sum;
}

// The sum of a token's chains.
float of_chains(float *chain) {
    for (int width = CHUNK_GROUPS / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            chain[j] += chain[j + width];
        }
    }
    return chain[0];
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
            int sum = group_product(group_at(quants + (first + g) * (QUANTS / GROUPS)), chunk, g);
            float scale = f16_at(scales, first + g) * of_x[g];
            chain[g] = fma((float)sum, scale, chain[g]);
        }
    }
    return of_chains(chain);
}

// A row times `count` tokens, TILE at most, each by the same rule.
void tile(bytes quants, bytes scales, bytes tokens, int count, float *out) {
    float chain[TILE][CHUNK_GROUPS];
    for (int t = 0; t < TILE; ++t) {
        for (int g = 0; g < CHUNK_GROUPS; ++g) {
            chain[t][g] = 0.0f;
        }
    }
    for (int first = 0; first < GROUPS; first += CHUNK_GROUPS) {
        bytes chunks = tokens + first / CHUNK_GROUPS * CHUNK_BYTES;
        int groups = min(CHUNK_GROUPS, GROUPS - first);
        for (int g = 0; g < groups; ++g) {
            Group w = group_at(quants + (first + g) * (QUANTS / GROUPS));
            float of_row = f16_at(scales, first + g);
            for (int t = 0; t < count; ++t) {
                bytes chunk = chunks + (size_t)t * TOKEN_BYTES;
                float scale = of_row * ((__global const float *)(chunk + CHUNK_SCALES))[g];
                chain[t][g] = fma((float)group_product(w, chunk, g), scale, chain[t][g]);
            }
        }
    }
    for (int t = 0; t < count; ++t) {
        out[t] = of_chains(chain[t]);
    }
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

// The sum of a token's lanes.
float of_lanes(float *lane) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            lane[j] += lane[j + width];
        }
    }
    return lane[0];
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
    return of_lanes(lane);
}

// A row times `count` tokens, TILE at most, each by the same rule.
void tile(bytes quants, bytes scales, bytes tokens, int count, float *out) {
    float lane[TILE][LANES];
    for (int t = 0; t < TILE; ++t) {
        for (int j = 0; j < LANES; ++j) {
            lane[t][j] = 0.0f;
        }
    }
    for (int first = 0; first < D; first += LANES) {
        int lanes = min(LANES, D - first);
        float w[LANES];
        for (int j = 0; j < lanes; ++j) {
            w[j] = weight(quants, first + j);
        }
        for (int t = 0; t < count; ++t) {
            __global const float *x = (__global const float *)(tokens + (size_t)t * TOKEN_BYTES);
            for (int j = 0; j < lanes; ++j) {
                lane[t][j] = fma(w[j], x[first + j], lane[t][j]);
            }
        }
    }
    for (int t = 0; t < count; ++t) {
        out[t] = of_lanes(lane[t]);
    }
}
#endif

// A row times those of `count` tokens whose bit is set.
void products(bytes quants, bytes scales, bytes tokens, int count, uint wanted, float *out) {
    if (popcount(wanted) > 1) {
        tile(quants, scales, tokens, count, out);
        return;
    }
    for (int t = 0; t < count; ++t) {
        if (wanted >> t & 1) {
            out[t] = product(quants, scales, tokens + (size_t)t * TOKEN_BYTES);
        }
    }
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
    return v / (1.0f + exp_of(-v));
#else
    float cubic = fma(0.044715f * v * v, v, v);
    return v / (1.0f + exp_of(as_float(0xbfcc4229u) * cubic));
#endif
}

#define MASKED 1
#define GATE_BIAS 2
#define UP_BIAS 4

// hidden[n][row] of neurons `first + n` of a part of `neurons`: zero from neuron `end` on, where the mask
// does not want the pair, and where the gate does not fire. `fired` counts the pairs that fire. An item has
// a neuron and TILE rows.
__kernel void hidden_values(bytes part, bytes x, __global const ulong *mask,
                            __global const float *gate_bias, __global const float *up_bias,
                            __global float *hidden, __global int *fired, int first, int neurons,
                            int end, int rows, int flags, float cut) {
    int n = get_global_id(0), row = get_global_id(1) * TILE, here = min(TILE, rows - row);
    size_t i = first + n, pair = (size_t)n * rows + row, all = neurons;
    bytes of_gate = part + i * ROW, of_up = of_gate + all * ROW;
    bytes tokens = x + (size_t)row * TOKEN_BYTES;
    float gate[TILE];
    uint wanted = 0, fires = 0;
    for (int t = 0; t < here && i < end; ++t) {
        size_t p = pair + t;
        if (!(flags & MASKED) || (mask[p / 64] >> (p % 64) & 1)) {
            wanted |= 1u << t;
        }
    }
    products(of_gate, of_gate + QUANTS, tokens, here, wanted, gate);
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
    if (fires) {
        atomic_add(fired, (int)popcount(fires));
    }
#ifndef UNGATED
    float up[TILE];
    products(of_up, of_up + QUANTS, tokens, here, fires, up);
#endif
    for (int t = 0; t < here; ++t) {
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

// The `j`-th element of a row of Down, and what it is multiplied by.
float2 element_of(bytes quants, int j) {
#if defined(Q4)
    int e = j % GROUP;
    uchar both = quants[j / GROUP * 16 + e % 16];
    int quant = (e < 16 ? both & 15 : both >> 4) - 8;
    return (float2)((float)quant, f16_at(quants + QUANTS, j / GROUP));
#elif defined(Q8)
    int quant = ((__global const char *)quants)[j];
    return (float2)((float)quant, f16_at(quants + QUANTS, j / GROUP));
#else
    return (float2)(weight(quants, j), 1.0f);
#endif
}

// An element of a cluster's sums for `here` rows: its hidden values times its Down rows, in order. `hidden` begins
// at the first of the rows.
void sums_of(bytes downs, __global const float *hidden, int neurons, int rows, int here, int j,
             float *sum) {
    for (int t = 0; t < TILE; ++t) {
        sum[t] = 0.0f;
    }
    for (int n = 0; n < neurons; ++n) {
        __global const float *of_row = hidden + (size_t)n * rows;
        bool any = false;
        for (int t = 0; t < here; ++t) {
            any |= of_row[t] != 0.0f;
        }
        if (!any) {
            continue;
        }
        float2 of = element_of(downs + (size_t)n * ROW, j);
        for (int t = 0; t < here; ++t) {
            float h = of_row[t];
            if (h != 0.0f) {
                sum[t] = fma(h * of.y, of.x, sum[t]);
            }
        }
    }
}

// sums[cluster][row][element] of the clusters from neuron `first` to neuron `end`. An item has an element of TILE
// rows. Those beyond the last element have nothing to do.
__kernel void cluster_sums(bytes part, __global const float *hidden, __global float *sums,
                           int first, int neurons, int end, int rows) {
    int j = get_global_id(0), row = get_global_id(1) * TILE, cluster = get_global_id(2);
    if (j >= D) {
        return;
    }
    const size_t down = (size_t)neurons * (MATRICES - 1), at = cluster * CLUSTER;
    int count = min(CLUSTER, end - first - cluster * CLUSTER), here = min(TILE, rows - row);
    float sum[TILE];
    sums_of(part + (down + first + at) * ROW, hidden + at * rows + row, count, rows, here, j, sum);
    for (int t = 0; t < here; ++t) {
        sums[((size_t)cluster * rows + row + t) * D + j] = sum[t];
    }
}

// totals[row][element]: the sums of `clusters` clusters, added one after the other to zero, or to what is there. Items
// as above, but for the clusters.
__kernel void row_totals(bytes part, __global const float *hidden, __global float *totals,
                         int first, int neurons, int end, int rows, int clusters, int goes_on) {
    int j = get_global_id(0), row = get_global_id(1) * TILE;
    if (j >= D) {
        return;
    }
    const size_t down = (size_t)neurons * (MATRICES - 1);
    int here = min(TILE, rows - row);
    float total[TILE], sum[TILE];
    for (int t = 0; t < here; ++t) {
        total[t] = goes_on ? totals[(size_t)(row + t) * D + j] : 0.0f;
    }
    for (int cluster = 0; cluster < clusters; ++cluster) {
        size_t at = cluster * CLUSTER;
        int count = min(CLUSTER, end - first - cluster * CLUSTER);
        sums_of(part + (down + first + at) * ROW, hidden + at * rows + row, count, rows, here, j,
                sum);
        for (int t = 0; t < here; ++t) {
            total[t] += sum[t];
        }
    }
    for (int t = 0; t < here; ++t) {
        totals[(size_t)(row + t) * D + j] = total[t];
    }
}

// y[token][row] of `count` rows from `first` on of a matrix, each with its scales behind it. An item has a
// row and TILE tokens.
__kernel void row_products(bytes matrix, bytes x, __global float *y, int first, int count, int at,
                           int tokens) {
    int row = get_global_id(0), token = get_global_id(1) * TILE, here = min(TILE, tokens - token);
    if (row >= count) {
        return;
    }
    bytes quants = matrix + (size_t)(first + row) * ROW;
    float out[TILE];
    bytes of = x + (size_t)token * TOKEN_BYTES;
    products(quants, quants + QUANTS, of, here, (1u << here) - 1, out);
    for (int t = 0; t < here; ++t) {
        y[(size_t)at + (size_t)(token + t) * count + row] = out[t];
    }
}
