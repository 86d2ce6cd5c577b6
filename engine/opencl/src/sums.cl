// Sums of hidden values times rows of Down. The host defines CLUSTER, MATRICES and TILE as for hidden.cl, and AT_ONCE, the
// number of neurons whose rows a work item reads in flight. Neighbouring work items have neighbouring elements of the same
// rows, so Down is not tiled: with TILES its rows are stored row by row, and the scales of a cluster after all of its rows.

// Rows of Down of a cluster.
typedef struct {
    bytes quants, scales;
} Downs;

#ifdef TILES
#define NEXT_QUANTS QUANTS
#define NEXT_SCALES SCALES
#else
#define NEXT_QUANTS ROW
#define NEXT_SCALES ROW
#endif

// The rows of the cluster whose first neuron is `i`.
Downs downs_of(bytes part, size_t i, int neurons) {
    Downs downs;
#ifdef TILES
    downs.quants = part + (i / CLUSTER * MATRICES + MATRICES - 1) * CLUSTER * ROW;
    downs.scales = downs.quants + CLUSTER * QUANTS;
#else
    downs.quants = part + ((size_t)neurons * (MATRICES - 1) + i) * ROW;
    downs.scales = downs.quants + QUANTS;
#endif
    return downs;
}

// Element `j` of row `n`, and its factor.
float2 element_of(Downs downs, int n, int j) {
    bytes quants = downs.quants + (size_t)n * NEXT_QUANTS;
#ifdef GROUPED
#ifdef NIBBLES
    int e = j % GROUP;
    uchar both = quants[j / GROUP * 16 + e % 16];
    int quant = e < 16 ? both & 15 : both >> 4;
#else
    int quant = ((__global const char *)quants)[j];
#endif
#ifdef MINIMUMS
    float2 factors = factors_at(downs.scales + (size_t)n * NEXT_SCALES, j / GROUP);
    return (float2)(fma((float)quant, factors.x, -factors.y), 1.0f);
#endif
#ifdef Q4
    quant -= 8;
#endif
    return (float2)((float)quant, f16_at(downs.scales + (size_t)n * NEXT_SCALES, j / GROUP));
#else
    return (float2)(one_at(quants + (size_t)j * ELEMENT_BYTES), 1.0f);
#endif
}

// Element `j` of a cluster's sum for a single row, over neurons in order. Reads of AT_ONCE neurons are issued together.
float sum_of(Downs downs, __global const float *hidden, int neurons, int j) {
    float sum = 0.0f;
    for (int n = 0; n < neurons; n += AT_ONCE) {
        float h[AT_ONCE];
        float2 element[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) {
            h[k] = n + k < neurons ? hidden[n + k] : 0.0f;
        }
        for (int k = 0; k < AT_ONCE; ++k) {
            element[k] = h[k] != 0.0f ? element_of(downs, n + k, j) : (float2)(0.0f);
        }
        for (int k = 0; k < AT_ONCE; ++k) {
            float next = fma(h[k] * element[k].y, element[k].x, sum);
            sum = h[k] != 0.0f ? next : sum;
        }
    }
    return sum;
}

// The same for `here` of `rows` rows. `hidden` starts at the first of them.
void sums_of(Downs downs, __global const float *hidden, int neurons, int rows, int here, int j,
             float *sum) {
    if (rows == 1) {
        sum[0] = sum_of(downs, hidden, neurons, j);
        return;
    }
    for (int t = 0; t < TILE; ++t) {
        sum[t] = 0.0f;
    }
    for (int n = 0; n < neurons; n += AT_ONCE) {
        float2 element[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) {
            __global const float *values = hidden + (size_t)(n + k) * rows;
            bool any = false;
            for (int t = 0; t < here && n + k < neurons; ++t) {
                any |= values[t] != 0.0f;
            }
            element[k] = any ? element_of(downs, n + k, j) : (float2)(0.0f);
        }
        for (int k = 0; k < AT_ONCE && n + k < neurons; ++k) {
            __global const float *values = hidden + (size_t)(n + k) * rows;
            for (int t = 0; t < here; ++t) {
                float h = values[t], next = fma(h * element[k].y, element[k].x, sum[t]);
                sum[t] = h != 0.0f ? next : sum[t];
            }
        }
    }
}

#define GOES_ON 1

// Stores the number of pairs that fired after the sums, and resets the counter.
void counted(__global float *sums, size_t end, __global int *fired) {
    ((__global int *)sums)[end] = fired[0];
    fired[0] = 0;
}

// sums[cluster][row][element] of the clusters of neurons `first` to `end`. A work item computes an element for TILE rows;
// those past the last element do nothing. With `counts` the number of pairs that fired follows the sums.
__kernel void cluster_sums(bytes part, __global const float *hidden, __global float *sums,
                           int first, int neurons, int end, int rows, __global int *fired,
                           int counts) {
    int j = get_global_id(0), row = get_global_id(1) * TILE, cluster = get_global_id(2);
    if (counts && j == 0 && row == 0 && cluster == 0) {
        counted(sums, get_global_size(2) * (size_t)rows * D, fired);
    }
    if (j >= D) {
        return;
    }
    const size_t at = cluster * CLUSTER;
    int count = min(CLUSTER, end - first - cluster * CLUSTER), here = min(TILE, rows - row);
    float sum[TILE];
    sums_of(downs_of(part, first + at, neurons), hidden + at * rows + row, count, rows, here, j,
            sum);
    for (int t = 0; t < here; ++t) {
        sums[((size_t)cluster * rows + row + t) * D + j] = sum[t];
    }
}

// totals[row][element]: the sums of `clusters` clusters, added in order to zero, or with GOES_ON to the current totals. A
// work item computes an element for TILE rows. The number of pairs that fired follows the totals.
__kernel void row_totals(bytes part, __global const float *hidden, __global float *totals,
                         int first, int neurons, int end, int rows, int clusters,
                         __global int *fired, int how) {
    int j = get_global_id(0), row = get_global_id(1) * TILE;
    if (j == 0 && row == 0) {
        counted(totals, (size_t)rows * D, fired);
    }
    if (j >= D) {
        return;
    }
    int here = min(TILE, rows - row);
    float total[TILE], sum[TILE];
    for (int t = 0; t < here; ++t) {
        total[t] = how & GOES_ON ? totals[(size_t)(row + t) * D + j] : 0.0f;
    }
    for (int cluster = 0; cluster < clusters; ++cluster) {
        size_t at = cluster * CLUSTER;
        int count = min(CLUSTER, end - first - cluster * CLUSTER);
        sums_of(downs_of(part, first + at, neurons), hidden + at * rows + row, count, rows, here, j,
                sum);
        for (int t = 0; t < here; ++t) {
            total[t] += sum[t];
        }
    }
    for (int t = 0; t < here; ++t) {
        totals[(size_t)(row + t) * D + j] = total[t];
    }
}

// The same totals from sums of clusters. A work item computes an element of a row.
__kernel void added_sums(__global const float *sums, __global float *totals, int rows,
                         int clusters, __global int *fired, int how) {
    int j = get_global_id(0), row = get_global_id(1);
    if (j == 0 && row == 0) {
        counted(totals, (size_t)rows * D, fired);
    }
    if (j >= D) {
        return;
    }
    size_t at = (size_t)row * D + j;
    float total = how & GOES_ON ? totals[at] : 0.0f;
    for (int cluster = 0; cluster < clusters; ++cluster) {
        total += sums[(size_t)cluster * rows * D + at];
    }
    totals[at] = total;
}

#if defined(GROUPED) && defined(TILES)
// Wide sums: a work item computes 8 elements of a group, which it reads at once, for up to 8 rows.
#define WIDE 8
#define WIDE_ROWS 8

// Quantised values of work item `item`: four from FIRST(item) on, and four that are APART elements further.
#ifdef NIBBLES
typedef uint Quants;
#define FIRST(item) ((item) / 4 * GROUP + (item) % 4 * 4)
#define APART 16
// A nibble is converted to float by the low bits of 2^23; 8388616 is 2^23 + 8, the offset of Q4.
#ifdef Q4
#define ZERO 8388616.0f
#else
#define ZERO 8388608.0f
#endif
#define LOW_OF(q, b) (as_float((q) >> 8 * (b) & 15 | 0x4b000000u) - ZERO)
#define HIGH_OF(q, b) (as_float((q) >> (8 * (b) + 4) & 15 | 0x4b000000u) - ZERO)
#else
typedef uint2 Quants;
#define FIRST(item) ((item) * WIDE)
#define APART 4
#define LOW_OF(q, b) ((float)(char)((q).x >> 8 * (b) & 255))
#define HIGH_OF(q, b) ((float)(char)((q).y >> 8 * (b) & 255))
#endif

Quants quants_at(Downs downs, int n, int item) {
    return ((__global const Quants *)(downs.quants + (size_t)n * NEXT_QUANTS))[item];
}

// Scale and minimum of the group of work item `item`.
float2 scale_at(Downs downs, int n, int item) {
    bytes scales = downs.scales + (size_t)n * NEXT_SCALES;
#ifdef MINIMUMS
    return factors_at(scales, item / 4);
#else
    return (float2)(f16_at(scales, item / 4), 0.0f);
#endif
}

// A term of a sum is FACTOR · VALUE: without minimums the scale is part of the factor, as on the CPU.
#ifdef MINIMUMS
#define VALUE(quant, scale) fma(quant, (scale).x, -(scale).y)
#define FACTOR(h, scale) (h)
#else
#define VALUE(quant, scale) (quant)
#define FACTOR(h, scale) ((h) * (scale).x)
#endif

// See sum_of.
void wide_of_one(Downs downs, __global const float *hidden, int count, int item, float *sum) {
    for (int n = 0; n < count; n += AT_ONCE) {
        float h[AT_ONCE];
        float2 scale[AT_ONCE];
        Quants quants[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) {
            h[k] = n + k < count ? hidden[n + k] : 0.0f;
        }
        for (int k = 0; k < AT_ONCE; ++k) {
            quants[k] = 0;
            scale[k] = (float2)(0.0f);
            if (h[k] != 0.0f) {
                quants[k] = quants_at(downs, n + k, item);
                scale[k] = scale_at(downs, n + k, item);
            }
        }
        for (int k = 0; k < AT_ONCE; ++k) {
            float factor = FACTOR(h[k], scale[k]);
            for (int b = 0; b < 4; ++b) {
                float next = fma(factor, VALUE(LOW_OF(quants[k], b), scale[k]), sum[b]);
                float other = fma(factor, VALUE(HIGH_OF(quants[k], b), scale[k]), sum[4 + b]);
                sum[b] = h[k] != 0.0f ? next : sum[b];
                sum[4 + b] = h[k] != 0.0f ? other : sum[4 + b];
            }
        }
    }
}

// Adds neuron `n` to the sums of `here` rows with hidden values `h`. A row in which it does not fire adds a zero, which
// changes no sum, because no sum is -0.
void wide_step(Downs downs, int n, int item, const float *h, int here, float sum[WIDE_ROWS][WIDE]) {
    Quants quants = quants_at(downs, n, item);
    float2 scale = scale_at(downs, n, item);
    float value[WIDE];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        value[b] = VALUE(LOW_OF(quants, b), scale);
        value[4 + b] = VALUE(HIGH_OF(quants, b), scale);
    }
#pragma unroll
    for (int t = 0; t < WIDE_ROWS; ++t) {
        if (t < here) {
            float factor = h[t] != 0.0f ? FACTOR(h[t], scale) : 0.0f;
#pragma unroll
            for (int b = 0; b < WIDE; ++b) {
                sum[t][b] = fma(factor, value[b], sum[t][b]);
            }
        }
    }
}

// See sums_of. Of 8 rows nearly every neuron fires in one, so all are read; with fewer rows only neurons that fire.
void wide_of_some(Downs downs, __global const float *hidden, int count, int rows, int here,
                  int item, float sum[WIDE_ROWS][WIDE]) {
    if (here == WIDE_ROWS && rows % 4 == 0) {
#pragma unroll 2
        for (int n = 0; n < count; ++n) {
            __global const float4 *four = (__global const float4 *)(hidden + (size_t)n * rows);
            float4 a = four[0], b = four[1];
            float h[WIDE_ROWS] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            wide_step(downs, n, item, h, WIDE_ROWS, sum);
        }
        return;
    }
    for (int n = 0; n < count; ++n) {
        float h[WIDE_ROWS];
        bool any = false;
#pragma unroll
        for (int t = 0; t < WIDE_ROWS; ++t) {
            h[t] = t < here ? hidden[(size_t)n * rows + t] : 0.0f;
            any |= h[t] != 0.0f;
        }
        if (any) {
            wide_step(downs, n, item, h, here, sum);
        }
    }
}

void set_zero(float sum[WIDE_ROWS][WIDE]) {
#pragma unroll
    for (int t = 0; t < WIDE_ROWS; ++t) {
#pragma unroll
        for (int b = 0; b < WIDE; ++b) {
            sum[t][b] = 0.0f;
        }
    }
}

void wide_put(__global float *to, int item, const float *sum) {
    int j = FIRST(item);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        if (j + b < D) {
            to[j + b] = sum[b];
        }
        if (j + b + APART < D) {
            to[j + b + APART] = sum[4 + b];
        }
    }
}

// Like `cluster_sums`, without the counter.
__kernel void wide_sums(bytes part, __global const float *hidden, __global float *sums, int first,
                        int neurons, int end, int rows) {
    int item = get_global_id(0), row = get_global_id(1) * WIDE_ROWS, cluster = get_global_id(2);
    if (item / 4 * GROUP >= D) {
        return;
    }
    const size_t at = cluster * CLUSTER;
    int count = min(CLUSTER, end - first - cluster * CLUSTER), here = min(WIDE_ROWS, rows - row);
    Downs downs = downs_of(part, first + at, neurons);
    __global float *to = sums + ((size_t)cluster * rows + row) * D;
    float sum[WIDE_ROWS][WIDE];
    set_zero(sum);
    if (rows == 1) {
        wide_of_one(downs, hidden + at, count, item, sum[0]);
        wide_put(to, item, sum[0]);
        return;
    }
    wide_of_some(downs, hidden + at * rows + row, count, rows, here, item, sum);
#pragma unroll
    for (int t = 0; t < WIDE_ROWS; ++t) {
        if (t < here) {
            wide_put(to + (size_t)t * D, item, sum[t]);
        }
    }
}

// Like `row_totals`, for several rows.
__kernel void wide_totals(bytes part, __global const float *hidden, __global float *totals,
                          int first, int neurons, int end, int rows, int clusters,
                          __global int *fired, int how) {
    int item = get_global_id(0), row = get_global_id(1) * WIDE_ROWS, here = min(WIDE_ROWS, rows - row);
    if (item == 0 && row == 0) {
        counted(totals, (size_t)rows * D, fired);
    }
    if (item / 4 * GROUP >= D) {
        return;
    }
    int j = FIRST(item);
    float total[WIDE_ROWS][WIDE];
#pragma unroll
    for (int t = 0; t < WIDE_ROWS; ++t) {
        __global const float *before = totals + (size_t)(row + t) * D;
#pragma unroll
        for (int b = 0; b < WIDE; ++b) {
            int e = j + b % 4 + b / 4 * APART;
            total[t][b] = how & GOES_ON && t < here && e < D ? before[e] : 0.0f;
        }
    }
    for (int cluster = 0; cluster < clusters; ++cluster) {
        size_t at = cluster * CLUSTER;
        int count = min(CLUSTER, end - first - cluster * CLUSTER);
        float sum[WIDE_ROWS][WIDE];
        set_zero(sum);
        wide_of_some(downs_of(part, first + at, neurons), hidden + at * rows + row, count, rows,
                     here, item, sum);
#pragma unroll
        for (int t = 0; t < WIDE_ROWS; ++t) {
#pragma unroll
            for (int b = 0; b < WIDE; ++b) {
                total[t][b] += sum[t][b];
            }
        }
    }
#pragma unroll
    for (int t = 0; t < WIDE_ROWS; ++t) {
        if (t < here) {
            wide_put(totals + (size_t)(row + t) * D, item, total[t]);
        }
    }
}
#endif
