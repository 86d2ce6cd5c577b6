// Attention of a layer for rows of a position each, between its projections, with the CPU's bits: the order of sums is
// that of engine/src/attention/pass.rs. The host defines
//
//   HEADS, KV_HEADS, HEAD_DIM     heads of queries, those of keys and values, elements of one
//   ROTARY                        pairs of elements that are rotated
//   PAGE, ELEMENT                 positions of a page, bytes of one of its elements: 2 for f16, 4 for f32
//   BLOCK                         positions whose sums are merged
//   EPS, SCALE, CLIP              of norms, of scores; the clamp, where the model has one
//
// Pages are as engine/src/kv/shape.rs has them; `pages` has where the layer begins in each page of each row. `places`
// has three numbers for each row: its position, the first position that it sees, and where its pages begin.

#define LANES 64
#define WIDTH ((HEAD_DIM + GROUP - 1) / GROUP * GROUP)

// Flags of a layer.
#define BIASES 1
#define NORMS 2
#define VALUE_NORM 4
#define ROTATES 8
#define SINKS 16

typedef __global const float *values;
typedef __global const int *numbers;

#if ELEMENT == 2
float element_at(bytes at, size_t i) { return vload_half(i, (__global const half *)at); }

float as_stored(float x) {
    ushort bits;
    vstore_half_rte(x, 0, (half *)&bits);
    return vload_half(0, (const half *)&bits);
}
#else
float element_at(bytes at, size_t i) { return ((values)at)[i]; }

float as_stored(float x) { return x; }
#endif

// The sum of lanes in the CPU's order.
float of_lanes(float *lane) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) {
            lane[j] += lane[j + width];
        }
    }
    return lane[0];
}

// RMSNorm of a head; `weights` may be none.
void norm(__global float *x, values weights, bool weighted) {
    float lane[LANES];
    for (int j = 0; j < LANES; ++j) {
        lane[j] = 0.0f;
    }
    for (int i = 0; i < HEAD_DIM; ++i) {
        lane[i % LANES] = fma(x[i], x[i], lane[i % LANES]);
    }
    float scale = 1.0f / sqrt(of_lanes(lane) / (float)HEAD_DIM + EPS);
    for (int i = 0; i < HEAD_DIM; ++i) {
        x[i] = x[i] * scale;
        if (weighted) {
            x[i] = x[i] * weights[i];
        }
    }
}

// Biases, clamp, norms and rotation of all heads of Q, K and V, `qkv` being all rows of Q, then of K, then of V; keys and
// values as pages have them go to `fresh`, [row][K, V][head][element]. An item has a head of a row.
__kernel void heads(__global float *qkv, values biases, values norms, values angles,
                    __global float *fresh, int rows, int flags) {
    int head = get_global_id(0), row = get_global_id(1);
    if (head >= HEADS + 2 * KV_HEADS) {
        return;
    }
    // Q, K or V
    int kind = head < HEADS ? 0 : (head < HEADS + KV_HEADS ? 1 : 2);
    int number = head - (kind == 0 ? 0 : HEADS + (kind - 1) * KV_HEADS);
    int here = kind == 0 ? HEADS : KV_HEADS, before = kind == 0 ? 0 : HEADS + (kind - 1) * KV_HEADS;
    __global float *x = qkv + ((size_t)rows * before + (size_t)row * here + number) * HEAD_DIM;
    for (int i = 0; i < HEAD_DIM && (flags & BIASES); ++i) {
        x[i] += biases[head * HEAD_DIM + i];
    }
#ifdef CLIP
    for (int i = 0; i < HEAD_DIM; ++i) {
        float low = x[i] < -CLIP ? -CLIP : x[i];
        x[i] = low > CLIP ? CLIP : low;
    }
#endif
    if (kind == 2 ? flags & VALUE_NORM : flags & NORMS) {
        norm(x, norms + (kind == 1 ? HEAD_DIM : 0), kind != 2);
    }
    if (kind != 2 && flags & ROTATES) {
        values cosines = angles + (size_t)row * 2 * ROTARY, sines = cosines + ROTARY;
        for (int i = 0; i < ROTARY; ++i) {
            float a = x[i], b = x[i + ROTARY];
            x[i] = fma(a, cosines[i], -(b * sines[i]));
            x[i + ROTARY] = fma(b, cosines[i], a * sines[i]);
        }
    }
    __global float *to = fresh + (((size_t)row * 2 + kind - 1) * KV_HEADS + number) * HEAD_DIM;
    for (int i = 0; i < HEAD_DIM; ++i) {
        if (kind == 0) {
            x[i] *= SCALE;
        } else {
            to[i] = as_stored(x[i]);
        }
    }
}

// The head of keys and values that belongs to one of queries.
int kv_head(int head) { return head / (HEADS / KV_HEADS); }

// The position with which a row's first block begins.
int begin_of(numbers place) { return place[1] / BLOCK * BLOCK; }

// scores[row][head][position - begin], `stride` for each head. An item has a position.
__kernel void scores(values queries, values fresh, bytes pool, __global const ulong *pages,
                     numbers places, __global float *out, int stride) {
    int at = get_global_id(0), query = get_global_id(1), row = query / HEADS;
    numbers place = places + row * 3;
    int p = begin_of(place) + at, head = kv_head(query % HEADS);
    if (p < place[1] || p > place[0]) {
        return;
    }
    values q = queries + (size_t)query * HEAD_DIM;
    float sum = 0.0f;
    if (p == place[0]) {
        values key = fresh + ((size_t)row * 2 * KV_HEADS + head) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM; ++i) {
            sum = fma(q[i], key[i], sum);
        }
    } else {
        bytes keys = pool + pages[place[2] + p / PAGE] + (size_t)head * PAGE * HEAD_DIM * ELEMENT;
        size_t first = (size_t)(p % PAGE) / GROUP * GROUP * HEAD_DIM + p % GROUP;
        for (int i = 0; i < HEAD_DIM; ++i) {
            sum = fma(q[i], element_at(keys, first + (size_t)i * GROUP), sum);
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

// Scores `s` of a block become exp(s - most); states[row][head][block] are `most` and their sum. An item has a block.
__kernel void block_sums(numbers places, __global float *scores, __global float *states,
                         int stride, int blocks) {
    int block = get_global_id(0), query = get_global_id(1);
    int2 here = seen(places + query / HEADS * 3, block);
    if (here.x >= here.y) {
        return;
    }
    __global float *s = scores + (size_t)query * stride;
    float lane[LANES], most = -INFINITY;
    for (int j = 0; j < LANES; ++j) {
        lane[j] = 0.0f;
    }
    for (int i = here.x; i < here.y; ++i) {
        most = s[i] > most ? s[i] : most;
    }
    for (int i = here.x; i < here.y; ++i) {
        s[i] = exp_of(s[i] - most);
        lane[(i - here.x) % LANES] += s[i];
    }
    __global float *state = states + ((size_t)query * blocks + block) * 2;
    state[0] = most;
    state[1] = of_lanes(lane);
}

// mixes[row][head][block][element]: the block's values by their weights, in order. An item has an element.
__kernel void block_mixes(values fresh, bytes pool, __global const ulong *pages, numbers places,
                          values weights, __global float *mixes, int stride, int blocks) {
    int e = get_global_id(0), block = get_global_id(1), query = get_global_id(2), row = query / HEADS;
    numbers place = places + row * 3;
    int2 here = seen(place, block);
    if (e >= HEAD_DIM || here.x >= here.y) {
        return;
    }
    int head = kv_head(query % HEADS), begin = begin_of(place);
    values w = weights + (size_t)query * stride;
    const size_t of_values = (size_t)KV_HEADS * PAGE * HEAD_DIM + (size_t)head * PAGE * WIDTH;
    float sum = 0.0f;
    for (int i = here.x; i < here.y; ++i) {
        int p = begin + i;
        float value;
        if (p == place[0]) {
            value = fresh[(((size_t)row * 2 + 1) * KV_HEADS + head) * HEAD_DIM + e];
        } else {
            bytes page = pool + pages[place[2] + p / PAGE] + of_values * ELEMENT;
            value = element_at(page, (size_t)(p % PAGE) * WIDTH + e);
        }
        sum = fma(w[i], value, sum);
    }
    mixes[((size_t)query * blocks + block) * HEAD_DIM + e] = sum;
}

// attended[row][head][element]: blocks merged in order, and normalised. An item has an element.
__kernel void merged(numbers places, values states, values mixes, values sinks,
                     __global float *attended, int blocks, int flags) {
    int e = get_global_id(0), query = get_global_id(1);
    if (e >= HEAD_DIM) {
        return;
    }
    numbers place = places + query / HEADS * 3;
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
    attended[(size_t)query * HEAD_DIM + e] = out * scale;
}

#define ELEMENTS (HEADS * HEAD_DIM)
#define CHUNKS ((ELEMENTS + GROUP * CHUNK_GROUPS - 1) / (GROUP * CHUNK_GROUPS))

// Rows of `attended` as integers of 8 bits: engine/kernels/src/simd/int/quantize.rs. An item has a group.
__kernel void quantized(values attended, __global uchar *to) {
    const float ROUND = 12582912.0f;
    int group = get_global_id(0), row = get_global_id(1);
    if (group >= CHUNKS * CHUNK_GROUPS) {
        return;
    }
    int g = group % CHUNK_GROUPS, count = min(GROUP, ELEMENTS - group * GROUP), sum = 0;
    __global uchar *chunk = to + ((size_t)row * CHUNKS + group / CHUNK_GROUPS) * CHUNK_BYTES;
    values x = attended + (size_t)row * ELEMENTS + group * GROUP;
    uint largest = 0;
    for (int i = 0; i < count; ++i) {
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
        if (!zero && i < count) {
            quant = (char)(as_uint(x[i] * inverse + ROUND) & 0xff);
        }
        quants[i < HALF ? i : SECOND_HALF + i - HALF] = quant;
        sum += quant;
    }
    ((__global float *)(chunk + CHUNK_SCALES))[g] = scale;
    ((__global int *)(chunk + CHUNK_BY_8))[g] = -8 * sum;
}
