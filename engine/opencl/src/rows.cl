// Rows of matrices: their layout, and one step of a product along a row. The host defines
//
//   Q4, Q4K, Q8, F16, BF16 or F32  format of rows
//   D                              elements per row
//   TILES, TILE_ROWS               rows in tiles; otherwise row by row, each followed by its scales
//   PACKED_DOTS                    integer dot products of four bytes
//   NVIDIA_DOTS                    these by NVIDIA's instruction
//   PLAIN_DOTS                     these by plain arithmetic, for tests
//
// A tile has TILE_ROWS rows in units of 16 bytes: unit 0 of all rows, unit 1 of all rows, and so on, so that work items of
// neighbouring rows read neighbouring bytes. Elements that fill no unit follow row by row, then the scales in the order of
// units. Super-blocks of Q4K stay together.
//
// Chains (engine/kernels/src/lib.rs) are the same for all formats: step `s` of a row belongs to chain s % CHAINS. For groups
// a step is a group and a chain a float; for float formats a step is four elements and a chain a float4.

#define CHAINS 16
#define UNIT 16
#define GROUPS ((D + GROUP - 1) / GROUP)

#if defined(Q4)
#define GROUPED
#define NIBBLES
#define QUANTS (GROUPS * 16)
#define SCALES (GROUPS * 2)
#define SCALE 2
#elif defined(Q4K)
// Groups per super-block, its bytes, and its bytes before the entries of groups: see engine/kernels/src/q4k.rs.
#define SUPER 8
#define SUPER_BYTES 16
#define SUPER_HEAD 4
#define GROUPED
#define NIBBLES
#define MINIMUMS
#define QUANTS (GROUPS * 16)
#define LAST (GROUPS % SUPER)
#define SCALES (GROUPS / SUPER * SUPER_BYTES + (LAST > 0 ? SUPER_HEAD + (3 * LAST + 1) / 2 : 0))
#define SCALE SCALES
#elif defined(Q8)
#define GROUPED
#define QUANTS (GROUPS * 32)
#define SCALES (GROUPS * 2)
#define SCALE 2
#elif defined(F32)
#define ELEMENT_BYTES 4
#define QUANTS (D * 4)
#define SCALES 0
#define SCALE REST
#else
#define ELEMENT_BYTES 2
#define QUANTS (D * 2)
#define SCALES 0
#define SCALE REST
#endif

#define ROW (QUANTS + SCALES)
// Bytes of whole units, and of the elements after them.
#define UNITS (QUANTS / UNIT * UNIT)
#define REST (QUANTS - UNITS)

#ifdef TILES
#define STRIDE TILE_ROWS
#else
#define STRIDE 1
#endif

// A row: its first unit, and the bytes after its units, which are scales or elements that fill no unit.
typedef struct {
    bytes units, rest;
} Row;

// Row `i` of a matrix.
Row row_at(bytes matrix, size_t i) {
    Row row;
#ifdef TILES
    bytes tile = matrix + i / TILE_ROWS * TILE_ROWS * ROW;
    size_t r = i % TILE_ROWS;
    row.units = tile + r * UNIT;
    row.rest = tile + TILE_ROWS * UNITS + r * SCALE;
#else
    row.units = matrix + i * ROW;
    row.rest = row.units + UNITS;
#endif
    return row;
}

bytes unit_at(Row row, int u) { return row.units + (size_t)u * (STRIDE * UNIT); }

#ifdef GROUPED
#define STEPS GROUPS

#ifdef MINIMUMS
// An unaligned 16-bit number.
ushort two_at(bytes at) { return at[0] | (ushort)(at[1] << 8); }

float half_of(ushort bits) { return vload_half(0, (const half *)&bits); }

// Scale and minimum of group `g` of a row whose super-blocks start at `scales`; both are exact.
float2 factors_at(bytes scales, int g) {
    bytes block = scales + g / SUPER * SUPER_BYTES;
    bytes at = block + SUPER_HEAD + g % SUPER / 2 * 3 + g % 2;
    // Entries have 12 bits: the second of a pair starts in the middle of a byte, where a short super-block may end.
    int entry = g % 2 ? two_at(at) >> 4 : two_at(at) & 0xfff;
    return (float2)(half_of(two_at(block)) * (float)(entry & 63),
                    half_of(two_at(block + 2)) * (float)(entry >> 6));
}
#endif

typedef float Chain;

Chain no_sum(void) { return 0.0f; }

float sum_of_lanes(Chain sum) { return sum; }

#define TOKEN_BYTES (((GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS) * CHUNK_BYTES)

// 16 bytes. Tiles are aligned to 16.
uint4 word4_at(bytes at) {
#ifdef TILES
    return *(__global const uint4 *)at;
#else
    return as_uint4(vload16(0, at));
#endif
}

#ifdef PACKED_DOTS
// Adds the dot product of the four bytes of `a` and of `b` to a sum.
#if defined(PLAIN_DOTS)
int dot_plain(uint a, uint b, bool is_signed, int sum) {
    char4 x = as_char4(a), y = as_char4(b);
    uchar4 u = as_uchar4(a);
    int4 p = (is_signed ? convert_int4(x) : convert_int4(u)) * convert_int4(y);
    return sum + p.x + p.y + p.z + p.w;
}
#define DOT_UNSIGNED(a, b, sum) dot_plain(a, b, false, sum)
#define DOT_SIGNED(a, b, sum) dot_plain(a, b, true, sum)
#elif defined(NVIDIA_DOTS)
int dot_unsigned(uint a, uint b, int sum) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}
int dot_signed(uint a, uint b, int sum) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}
#define DOT_UNSIGNED dot_unsigned
#define DOT_SIGNED dot_signed
#else
#define DOT_UNSIGNED(a, b, sum) ((sum) + dot_4x8packed_us_int(a, b))
#define DOT_SIGNED(a, b, sum) ((sum) + dot_4x8packed_ss_int(a, b))
#endif

#ifdef NIBBLES
#define DOT DOT_UNSIGNED
#else
#define DOT DOT_SIGNED
#endif

// Weights of a group: its first and last 16 (plus 8 in Q4), scale and minimum.
typedef struct {
    uint4 low, high;
    float scale, minimum;
} Weights;

// 16 activations, those of half a group.
typedef uint4 Half;

Half half_at(bytes x) { return vload4(0, (__global const uint *)x); }

// Adds the integer product of a group with 32 activations to a sum.
int integer_product(Weights w, Half a, Half b, int sum) {
    sum = DOT(w.low.x, a.x, sum);
    sum = DOT(w.low.y, a.y, sum);
    sum = DOT(w.low.z, a.z, sum);
    sum = DOT(w.low.w, a.w, sum);
    sum = DOT(w.high.x, b.x, sum);
    sum = DOT(w.high.y, b.y, sum);
    sum = DOT(w.high.z, b.z, sum);
    return DOT(w.high.w, b.w, sum);
}

#ifdef NIBBLES
uint4 low_of(uint4 both) { return both & (uint4)0x0f0f0f0fu; }
uint4 high_of(uint4 both) { return both >> 4 & (uint4)0x0f0f0f0fu; }
#else
uint4 quants_of(uint4 bits) { return bits; }
#endif
#else
typedef struct {
    short16 low, high;
    float scale, minimum;
} Weights;

typedef short16 Half;

Half half_at(bytes x) { return convert_short16(vload16(0, (__global const char *)x)); }

// Activations are within ±127 and weights within ±128, so two products fit into 16 bits.
int integer_product(Weights w, Half a, Half b, int sum) {
    short16 two = w.low * a + w.high * b;
    int8 c = convert_int8(two.lo) + convert_int8(two.hi);
    int4 d = c.lo + c.hi;
    int2 e = d.lo + d.hi;
    return sum + e.x + e.y;
}

#ifdef NIBBLES
short16 low_of(uint4 both) { return convert_short16(as_uchar16(both) & (uchar16)15); }
short16 high_of(uint4 both) { return convert_short16(as_uchar16(both) >> (uchar16)4); }
#else
short16 quants_of(uint4 bits) { return convert_short16(as_char16(bits)); }
#endif
#endif

Weights no_weights(void) {
    Weights w;
    w.low = w.high = 0;
    w.scale = w.minimum = 0.0f;
    return w;
}

// The weights of step `s`.
Weights weights_at(Row row, int s) {
    Weights w;
#ifdef NIBBLES
    uint4 both = word4_at(unit_at(row, s));
    w.low = low_of(both);
    w.high = high_of(both);
#else
    w.low = quants_of(word4_at(unit_at(row, 2 * s)));
    w.high = quants_of(word4_at(unit_at(row, 2 * s + 1)));
#endif
#ifdef MINIMUMS
    float2 factors = factors_at(row.rest, s);
    w.scale = factors.x;
    w.minimum = factors.y;
#else
    w.scale = f16_at(row.rest, s * STRIDE);
    w.minimum = 0.0f;
#endif
    return w;
}

// Activations of a step: integers, the correction of Q4's offset (by_8), scale, and the sum of the dequantised activations.
typedef struct {
    Half low, high;
    int by_8;
    float scale, sum;
} Inputs;

// Activations of step `s` of a token.
Inputs inputs_at(bytes token, int s) {
    int g = s % CHUNK_GROUPS;
    bytes chunk = token + s / CHUNK_GROUPS * CHUNK_BYTES, x = chunk + g / 4 * 128 + g % 4 * HALF;
    Inputs inputs;
    inputs.low = half_at(x);
    inputs.high = half_at(x + SECOND_HALF);
#ifdef Q4
    inputs.by_8 = ((__global const int *)(chunk + CHUNK_BY_8))[g];
#else
    inputs.by_8 = 0;
#endif
    inputs.scale = ((__global const float *)(chunk + CHUNK_SCALES))[g];
#ifdef MINIMUMS
    inputs.sum = ((__global const float *)(chunk + CHUNK_SUMS))[g];
#else
    inputs.sum = 0.0f;
#endif
    return inputs;
}

// Adds step `s` of a row and a token to a chain. Integer products are within ±2^22, so they are converted to floats by the
// low bits of 12582912 = 2^23 + 2^22.
Chain added(Weights w, Inputs x, int s, Chain sum) {
    int product = integer_product(w, x.low, x.high, x.by_8 + 0x4b400000);
    sum = fma(as_float(product) - 12582912.0f, w.scale * x.scale, sum);
#ifdef MINIMUMS
    sum = fma(-w.minimum, x.sum, sum);
#endif
    return sum;
}
#else
#define STEPS ((D + 3) / 4)
#define TOKEN_BYTES (D * 4)
// Elements per unit, and of all units of a row.
#define PER_UNIT (UNIT / ELEMENT_BYTES)
#define IN_UNITS (UNITS / ELEMENT_BYTES)

typedef float4 Chain;
typedef float4 Weights;

Chain no_sum(void) { return (float4)0.0f; }

float sum_of_lanes(Chain sum) {
    float2 two = sum.lo + sum.hi;
    return two.x + two.y;
}

Weights no_weights(void) { return (float4)0.0f; }

// Four elements.
float4 four_at(bytes at) {
#if defined(F32)
    return vload4(0, (__global const float *)at);
#elif defined(F16)
    return vload_half4(0, (__global const half *)at);
#else
    return as_float4(convert_uint4(vload4(0, (__global const ushort *)at)) << 16);
#endif
}

// One element.
float one_at(bytes at) {
#if defined(F32)
    return *(__global const float *)at;
#elif defined(F16)
    return f16_at(at, 0);
#else
    return as_float((uint)*(__global const ushort *)at << 16);
#endif
}

// The weights of step `s`.
Weights weights_at(Row row, int s) {
    int i = 4 * s;
    if (i + 4 <= IN_UNITS) {
        return four_at(unit_at(row, i / PER_UNIT) + i % PER_UNIT * ELEMENT_BYTES);
    }
#if REST > 0
    bytes at = row.rest + (i - IN_UNITS) * ELEMENT_BYTES;
    if (i + 4 <= D) {
        return four_at(at);
    }
    float4 w = 0.0f;
    w.x = one_at(at);
    if (D % 4 > 1) {
        w.y = one_at(at + ELEMENT_BYTES);
    }
    if (D % 4 > 2) {
        w.z = one_at(at + 2 * ELEMENT_BYTES);
    }
    return w;
#else
    return 0.0f;
#endif
}

typedef float4 Inputs;

// Step `s` of a token. Lanes past the last element are undefined.
Inputs inputs_at(bytes token, int s) {
    __global const float *x = (__global const float *)token + 4 * s;
#if D % 4 > 0
    if (4 * s + 4 > D) {
        return (float4)(x[0], D % 4 > 1 ? x[1] : 0.0f, D % 4 > 2 ? x[2] : 0.0f, 0.0f);
    }
#endif
    return vload4(0, x);
}

// Adds step `s` of a row and a token to a chain. Lanes past the last element do not change.
Chain added(Weights w, Inputs x, int s, Chain sum) {
#if D % 4 > 0
    if (4 * s + 4 > D) {
        sum.x = fma(w.x, x.x, sum.x);
        if (D % 4 > 1) {
            sum.y = fma(w.y, x.y, sum.y);
        }
        if (D % 4 > 2) {
            sum.z = fma(w.z, x.z, sum.z);
        }
        return sum;
    }
#endif
    return fma(w, x, sum);
}
#endif
