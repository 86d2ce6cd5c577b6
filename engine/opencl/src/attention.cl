// Attention of a layer for rows of spans, with the CPU's bits: the norm before its projections, what lies between them,
// and activations in 8 bits. The order of sums is that of engine/src/attention/pass.rs. The host defines
//
//   D                             elements of a row
//   HEADS, KV_HEADS, HEAD_DIM     heads of queries, those of keys and values, elements of one
//   ROTARY                        pairs of elements that are rotated
//   PAGE, ELEMENT                 positions of a page, bytes of one of its elements: 2 for f16, 4 for f32
//   BLOCK                         positions whose sums are merged
//   EPS, SCALE, CLIP              of norms of heads, of scores; the clamp, where the model has one
//   TEAM                          items that share a row or a head: a power of two, LANES at most
//
// Pages are as engine/src/kv/shape.rs has them; `pages` has where each page of each span begins, `begins` is where the
// layer begins in a page. `places` has five numbers for each row: its position, the first position that it sees, where its
// span's pages begin, the first position of its span, and that one's row. Positions before the span are in pages, the
// others in `fresh`.
//
// Scores are held for some rows at a time: `first` is the first of them.

#define LANES 64
#define OWN (LANES / TEAM)
#define WIDTH ((HEAD_DIM + GROUP - 1) / GROUP * GROUP)
#define PLACE 5

// Flags of a layer.
#define BIASES 1
#define NORMS 2
#define VALUE_NORM 4
#define ROTATES 8
#define SINKS 16
#define WHOLE 32

typedef __global const float *values;
typedef __global const int *numbers;

#if ELEMENT == 2
float element_at(bytes at, size_t i) { return vload_half(i, (__global const half *)at); }

float as_stored(float x) {
    ushort bits;
    vstore_half_rte(x, 0, (half *)&bits);
    return vload_half(0, (const half *)&bits);
}

void put(__global uchar *at, size_t i, float x) { vstore_half_rte(x, i, (__global half *)at); }
#else
float element_at(bytes at, size_t i) { return ((values)at)[i]; }

float as_stored(float x) { return x; }

void put(__global uchar *at, size_t i, float x) { ((__global float *)at)[i] = x; }
#endif

// The elements of a team's item. Each belongs to the same lane of `own` that the item has.
#define EACH(i, count) for (int i = get_local_id(0); i < (count); i += TEAM)
#define MINE(i) own[(i) / TEAM % OWN]
#define NO_SUM                                                                                     \
    for (int k = 0; k < OWN; ++k) {                                                                \
        own[k] = 0.0f;                                                                             \
    }

// The sum of a team's lanes in the CPU's order. All teams call it, whatever the layer has: a driver that takes barriers
// in branches for others computes wrongly there (PoCL 3.1).
float of_team(const float *own, __local float *lane) {
    int id = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < OWN; ++k) {
        lane[id + k * TEAM] = own[k];
    }
    for (int width = LANES / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int j = id; j < width; j += TEAM) {
            lane[j] += lane[j + width];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return lane[0];
}

// One over the root of the mean of squares.
float of_squares(const float *own, __local float *lane, int count, float eps) {
    return 1.0f / sqrt(of_team(own, lane) / (float)count + eps);
}

// Elements of a row that an item of a team has, `i` the place of its `k`-th. They are read without waiting for each other.
#define PER ((D + TEAM - 1) / TEAM)
#define EACH_OWN(k, i)                                                                             \
    _Pragma("unroll 16") for (int k = 0, i = get_local_id(0); k < PER && i < D; ++k, i += TEAM)

// A row, of which each item has its elements in `mine`, by RMSNorm, or by LayerNorm where it is to be centred.
void normed(float *mine, __global float *x, values weights, values biases, float eps, int centred,
            __local float *lane) {
    float own[OWN];
    NO_SUM
    EACH_OWN(k, i) { own[k % OWN] += mine[k]; }
    float mean = of_team(own, lane) / (float)D;
    NO_SUM
    EACH_OWN(k, i) {
        mine[k] = centred ? mine[k] - mean : mine[k];
        own[k % OWN] = fma(mine[k], mine[k], own[k % OWN]);
    }
    float scale = of_squares(own, lane, D, eps);
    EACH_OWN(k, i) {
        x[i] = centred ? fma(mine[k] * scale, weights[i], biases[i]) : mine[k] * scale * weights[i];
    }
}

// Rows of `x` by a norm. A team has a row.
__kernel __attribute__((reqd_work_group_size(TEAM, 1, 1))) void
row_norms(__global float *x, values weights, values biases, float eps, int centred) {
    __local float lane[LANES];
    float mine[PER];
    x += (size_t)get_global_id(1) * D;
    EACH_OWN(k, i) { mine[k] = x[i]; }
    normed(mine, x, weights, biases, eps, centred, lane);
}

// Adds rows of `plus`, from element `at` on, to the residual stream where it `adds`; `x` is that by a norm. A team has a row.
__kernel __attribute__((reqd_work_group_size(TEAM, 1, 1))) void
next_rows(__global float *residual, values plus, ulong at, int adds, __global float *x,
          values weights, values biases, float eps, int centred) {
    __local float lane[LANES];
    float mine[PER];
    size_t row = (size_t)get_global_id(1) * D;
    EACH_OWN(k, i) { mine[k] = residual[row + i]; }
    if (adds) {
        EACH_OWN(k, i) { mine[k] += plus[at + row + i]; }
        EACH_OWN(k, i) { residual[row + i] = mine[k]; }
    }
    normed(mine, x + row, weights, biases, eps, centred, lane);
}

// Biases of Q and K, and norms over all heads of each. A team has Q or K of a row.
__kernel __attribute__((reqd_work_group_size(TEAM, 1, 1))) void
whole_norms(__global float *qkv, values biases, values norms, int rows, int flags) {
    __local float lane[LANES];
    int kind = get_group_id(0), row = get_global_id(1), before = kind * HEADS * HEAD_DIM;
    int count = (kind == 0 ? HEADS : KV_HEADS) * HEAD_DIM;
    __global float *x = qkv + (size_t)rows * before + (size_t)row * count;
    if (flags & BIASES) {
        EACH(i, count) { x[i] += biases[before + i]; }
    }
    float own[OWN];
    NO_SUM
    EACH(i, count) { MINE(i) = fma(x[i], x[i], MINE(i)); }
    float scale = of_squares(own, lane, count, EPS);
    EACH(i, count) { x[i] = x[i] * scale * norms[before + i]; }
}

// Biases, clamp, norms and rotation of all heads of Q, K and V, `qkv` being all rows of Q, then of K, then of V; keys and
// values as pages have them go to `fresh`, [row][K, V][head][element]. A team has a head of a row.
__kernel __attribute__((reqd_work_group_size(TEAM, 1, 1))) void
heads(__global float *qkv, values biases, values norms, values angles, __global float *fresh,
      int rows, int flags) {
    __local float lane[LANES], x[HEAD_DIM];
    int head = get_group_id(0), row = get_global_id(1);
    // Q, K or V
    int kind = head < HEADS ? 0 : (head < HEADS + KV_HEADS ? 1 : 2);
    int before = kind == 0 ? 0 : HEADS + (kind - 1) * KV_HEADS, number = head - before;
    int here = kind == 0 ? HEADS : KV_HEADS;
    __global float *at = qkv + ((size_t)rows * before + (size_t)row * here + number) * HEAD_DIM;
    bool biased = flags & BIASES && (kind == 2 || !(flags & WHOLE));
    EACH(i, HEAD_DIM) {
        float value = at[i];
        if (biased) {
            value += biases[head * HEAD_DIM + i];
        }
#ifdef CLIP
        value = value < -CLIP ? -CLIP : value;
        value = value > CLIP ? CLIP : value;
#endif
        x[i] = value;
    }
    float own[OWN];
    NO_SUM
    EACH(i, HEAD_DIM) { MINE(i) = fma(x[i], x[i], MINE(i)); }
    float scale = of_squares(own, lane, HEAD_DIM, EPS);
    bool normed = kind == 2 ? flags & VALUE_NORM : flags & NORMS && !(flags & WHOLE);
    EACH(i, normed ? HEAD_DIM : 0) {
        x[i] = x[i] * scale;
        if (kind != 2) {
            x[i] = x[i] * norms[kind * HEAD_DIM + i];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    values cosines = angles + (size_t)row * ROTARY, sines = cosines + (size_t)rows * ROTARY;
    EACH(i, kind != 2 && flags & ROTATES ? ROTARY : 0) {
        float a = x[i], b = x[i + ROTARY];
        x[i] = fma(a, cosines[i], -(b * sines[i]));
        x[i + ROTARY] = fma(b, cosines[i], a * sines[i]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    __global float *to = fresh + (((size_t)row * 2 + kind - 1) * KV_HEADS + number) * HEAD_DIM;
    EACH(i, HEAD_DIM) {
        at[i] = kind == 0 ? x[i] * SCALE : x[i];
        if (kind != 0) {
            to[i] = as_stored(x[i]);
        }
    }
}

// The head of keys and values that belongs to one of queries.
int kv_head(int head) { return head / (HEADS / KV_HEADS); }

// The position with which a row's first block begins.
int begin_of(numbers place) { return place[1] / BLOCK * BLOCK; }

// A head of the keys (0) or values (1) of position `p` of a row's span.
values fresh_at(values fresh, numbers place, int p, int kind, int head) {
    size_t row = place[4] + p - place[3];
    return fresh + ((row * 2 + kind) * KV_HEADS + head) * HEAD_DIM;
}

// scores[row - first][head][position - begin], `stride` for each head. An item has a position.
__kernel void scores(values queries, values fresh, bytes pool, __global const ulong *pages,
                     numbers places, __global float *out, ulong begins, int first, int stride) {
    int at = get_global_id(0), query = get_global_id(1), row = first + query / HEADS;
    numbers place = places + row * PLACE;
    int p = begin_of(place) + at, head = kv_head(query % HEADS);
    if (p < place[1] || p > place[0]) {
        return;
    }
    values q = queries + ((size_t)first * HEADS + query) * HEAD_DIM;
    float sum = 0.0f;
    if (p >= place[3]) {
        values key = fresh_at(fresh, place, p, 0, head);
#pragma unroll 16
        for (int i = 0; i < HEAD_DIM; ++i) {
            sum = fma(q[i], key[i], sum);
        }
    } else {
        bytes keys = pool + pages[place[2] + p / PAGE] + begins + (size_t)head * PAGE * HEAD_DIM * ELEMENT;
        size_t begin = (size_t)(p % PAGE) / GROUP * GROUP * HEAD_DIM + p % GROUP;
#pragma unroll 16
        for (int i = 0; i < HEAD_DIM; ++i) {
            sum = fma(q[i], element_at(keys, begin + (size_t)i * GROUP), sum);
        }
    }
    out[(size_t)query * stride + at] = sum;
}

// The places in `scores` of the positions that a row sees of a block.
int2 seen(numbers place, int block) {
    int begin = begin_of(place);
    return (int2)(max(place[1] - begin, block * BLOCK),
                  min(place[0] + 1 - begin, (block + 1) * BLOCK));
}

// Scores `s` of a block become exp(s - most); states[row][head][block] are `most` and their sum. A team has a block.
__kernel __attribute__((reqd_work_group_size(TEAM, 1, 1))) void
block_sums(numbers places, __global float *scores, __global float *states, int first, int stride,
           int blocks) {
    __local float lane[LANES], largest[TEAM];
    int id = get_local_id(0), block = get_group_id(0), query = get_global_id(1);
    int2 here = seen(places + (first + query / HEADS) * PLACE, block);
    __global float *s = scores + (size_t)query * stride;
    float most = -INFINITY;
    for (int i = here.x + id; i < here.y; i += TEAM) {
        most = s[i] > most ? s[i] : most;
    }
    largest[id] = most;
    for (int width = TEAM / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (id < width && largest[id + width] > largest[id]) {
            largest[id] = largest[id + width];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    most = largest[0];
    float own[OWN];
    NO_SUM
    for (int k = 0, i = here.x + id; i < here.y; ++k, i += TEAM) {
        s[i] = exp_of(s[i] - most);
        own[k % OWN] += s[i];
    }
    float sum = of_team(own, lane);
    if (id == 0 && here.x < here.y) {
        __global float *state = states + ((size_t)query * blocks + block) * 2;
        state[0] = most;
        state[1] = sum;
    }
}

// mixes[row][head][block][element]: the block's values by their weights, in order. An item has an element.
__kernel void block_mixes(values fresh, bytes pool, __global const ulong *pages, numbers places,
                          values weights, __global float *mixes, ulong begins, int first,
                          int stride, int blocks) {
    int e = get_global_id(0), block = get_global_id(1), query = get_global_id(2);
    numbers place = places + (first + query / HEADS) * PLACE;
    int2 here = seen(place, block);
    if (e >= HEAD_DIM || here.x >= here.y) {
        return;
    }
    int head = kv_head(query % HEADS), begin = begin_of(place);
    values w = weights + (size_t)query * stride;
    const size_t of_values = (size_t)KV_HEADS * PAGE * HEAD_DIM + (size_t)head * PAGE * WIDTH;
    const int before = min(here.y, place[3] - begin);
    float sum = 0.0f;
    int i = here.x;
    while (i < before) {
        int p = begin + i, count = min(PAGE - p % PAGE, before - i);
        bytes page = pool + pages[place[2] + p / PAGE] + begins + of_values * ELEMENT;
        size_t at = (size_t)(p % PAGE) * WIDTH + e;
#pragma unroll 8
        for (int k = 0; k < count; ++k) {
            sum = fma(w[i + k], element_at(page, at + (size_t)k * WIDTH), sum);
        }
        i += count;
    }
#pragma unroll 8
    for (; i < here.y; ++i) {
        sum = fma(w[i], fresh_at(fresh, place, begin + i, 1, head)[e], sum);
    }
    mixes[((size_t)query * blocks + block) * HEAD_DIM + e] = sum;
}

// Puts keys and values of rows into the pages of a device's own memory, and behind element `at` of `log`, [row][K, V][head]
// [element], where it `logs`. An item has an element of both.
__kernel void stored(values fresh, __global uchar *pool, __global const ulong *pages,
                     numbers places, ulong begins, __global float *log, ulong at, int logs) {
    int e = get_global_id(0), row = get_global_id(1), head = e / HEAD_DIM, i = e % HEAD_DIM;
    if (head >= KV_HEADS) {
        return;
    }
    numbers place = places + row * PLACE;
    int p = place[0] % PAGE;
    __global uchar *page = pool + pages[place[2] + place[0] / PAGE] + begins;
    size_t key = (size_t)head * PAGE * HEAD_DIM + p / GROUP * GROUP * HEAD_DIM + i * GROUP + p % GROUP;
    size_t value = (size_t)KV_HEADS * PAGE * HEAD_DIM + ((size_t)head * PAGE + p) * WIDTH + i;
    float k = fresh_at(fresh, place, place[0], 0, head)[i];
    float v = fresh_at(fresh, place, place[0], 1, head)[i];
    put(page, key, k);
    put(page, value, v);
    if (logs) {
        size_t first = at + (size_t)row * 2 * KV_HEADS * HEAD_DIM + e;
        log[first] = k;
        log[first + KV_HEADS * HEAD_DIM] = v;
    }
}

// attended[row][head][element]: blocks merged in order, and normalised. An item has an element.
__kernel void merged(numbers places, values states, values mixes, values sinks,
                     __global float *attended, int first, int blocks, int flags) {
    int e = get_global_id(0), query = get_global_id(1);
    if (e >= HEAD_DIM) {
        return;
    }
    numbers place = places + (first + query / HEADS) * PLACE;
    int count = (place[0] - begin_of(place)) / BLOCK + 1;
    values state = states + (size_t)query * blocks * 2;
    values mix = mixes + (size_t)query * blocks * HEAD_DIM + e;
    float most = state[0], sum = state[1], out = mix[0];
    for (int block = 1; block < count; ++block) {
        float next = state[block * 2], larger = next > most ? next : most;
        float a = exp_of(most - larger), b = exp_of(next - larger);
        sum = fma(b, state[block * 2 + 1], a * sum);
        most = larger;
        out = fma(b, mix[(size_t)block * HEAD_DIM], a * out);
    }
    float scale;
    if (flags & SINKS) {
        float sink = sinks[query % HEADS], larger = sink > most ? sink : most;
        float part = exp_of(most - larger);
        scale = part / fma(part, sum, exp_of(sink - larger));
    } else {
        scale = 1.0f / sum;
    }
    attended[((size_t)first * HEADS + query) * HEAD_DIM + e] = out * scale;
}

// Rows of `count` elements as integers of 8 bits: engine/kernels/src/simd/int/quantize.rs. An item has a group.
__kernel void quantized(values from, __global uchar *to, int count) {
    const float ROUND = 12582912.0f;
    int group = get_global_id(0), row = get_global_id(1);
    int chunks = (count + GROUP * CHUNK_GROUPS - 1) / (GROUP * CHUNK_GROUPS);
    if (group >= chunks * CHUNK_GROUPS) {
        return;
    }
    int g = group % CHUNK_GROUPS, here = min(GROUP, count - group * GROUP), sum = 0;
    __global uchar *chunk = to + ((size_t)row * chunks + group / CHUNK_GROUPS) * CHUNK_BYTES;
    values from_here = from + (size_t)row * count + group * GROUP;
    float x[GROUP];
    uint largest = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        x[i] = i < here ? from_here[i] : 0.0f;
    }
    for (int i = 0; i < GROUP; ++i) {
        largest = max(largest, as_uint(x[i]) & 0x7fffffffu);
    }
    float most = as_float(largest), inverse = 127.0f / most, scale = most / 127.0f;
    bool zero = false;
    if (most < as_float((127u - 100u) << 23)) {
        scale = 0.0f;
        zero = true;
    } else if (largest >= 0x7f800000u) {
        scale = NAN;
        zero = true;
    }
    __global char *quants = (__global char *)chunk + g / 4 * 128 + g % 4 * HALF;
    for (int i = 0; i < GROUP; ++i) {
        char quant = 0;
        if (!zero && i < here) {
            quant = (char)(as_uint(x[i] * inverse + ROUND) & 0xff);
        }
        quants[i < HALF ? i : SECOND_HALF + i - HALF] = quant;
        sum += quant;
    }
    ((__global float *)(chunk + CHUNK_SCALES))[g] = scale;
    ((__global int *)(chunk + CHUNK_BY_8))[g] = -8 * sum;
}
