// Rows of matrices: where they lie and what a step along one adds to its product. The host defines
//
//   Q4, Q4K, Q8, F16, BF16 or F32  the rows' format
//   D                              elements of a row
//   TILES, TILE_ROWS               where rows lie in tiles; else one after the other, each with its scales behind it
//   PACKED_DOTS                    where integer products of four bytes at once are to be used
//   NVIDIA_DOTS                    the same by the instruction of NVIDIA's devices
//   PLAIN_DOTS                     the same by plain arithmetic, for tests
//
// A tile of TILE_ROWS rows has their units of 16 bytes, the first of all rows, then the second of all rows, and so on, so
// that items of neighbouring rows read neighbouring bytes; then, row by row, elements that fill no unit; then the scales,
// again the first of all rows, then the second; but the super-blocks of Q4K row by row.
//
// The chains of a product (engine/kernels/src/lib.rs) are the same for all formats here: step `s` of a row goes to chain
// s % CHAINS. A step is a group, and a chain a number; or it is four elements, and a chain four lanes.

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
// Groups of a super-block, its bytes, and those before its groups' entries: see engine/kernels/src/q4k.rs.
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
// Bytes of whole units, and of elements behind them.
#define UNITS (QUANTS / UNIT * UNIT)
#define REST (QUANTS - UNITS)

#ifdef TILES
#define STRIDE TILE_ROWS
#else
#define STRIDE 1
#endif

// A row: its first unit, and what is behind the units: scales, or elements that fill no unit.
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
// A number of 16 bits at any byte.
ushort two_at(bytes at) { return at[0] | (ushort)(at[1] << 8); }

float half_of(ushort bits) { return vload_half(0, (const half *)&bits); }

// The scale and the minimum of group `g` of a row whose super-blocks are at `scales`: both are exact.
float2 factors_at(bytes scales, int g) {
    bytes of = scales + g / SUPER * SUPER_BYTES;
    bytes at = of + SUPER_HEAD + g % SUPER / 2 * 3 + g % 2;
    // The second of two entries begins in the middle of a byte. The last one of a short super-block may end there.
    int entry = g % 2 ? two_at(at) >> 4 : two_at(at) & 0xfff;
    return (float2)(half_of(two_at(of)) * (float)(entry & 63),
                    half_of(two_at(of + 2)) * (float)(entry >> 6));
}
#endif

typedef float Chain;

Chain no_sum(void) { return 0.0f; }

float of_chain(Chain sum) { return sum; }

#define TOKEN_BYTES (((GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS) * CHUNK_BYTES)

// 16 bytes. Tiles begin at multiples of 16.
uint4 word4_at(bytes at) {
#ifdef TILES
    return *(__global const uint4 *)at;
#else
    return as_uint4(vload16(0, at));
#endif
}

#ifdef PACKED_DOTS
// The products of four bytes of `a` and of `b`, added to a sum.
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

// The weights of a group: its first and its last 16, in Q4 more by 8; its scale, and what is taken from all of them.
typedef struct {
    uint4 low, high;
    float scale, minimum;
} Weights;

// 32 activations: those of a group's first and last 16.
typedef uint4 Half;

Half half_at(bytes x) { return vload4(0, (__global const uint *)x); }

// A group's integer product with 32 activations, added to a sum.
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

// Activations are within 127 and weights within 128, so that two products fit 16 bits.
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

// The activations of a step, their scale, what Q4 adds to their product, and their sum times their scale.
typedef struct {
    Half low, high;
    int by_8;
    float scale, sum;
} Inputs;

// Step `s` of a token.
Inputs inputs_at(bytes token, int s) {
    int g = s % CHUNK_GROUPS;
    bytes chunk = token + s / CHUNK_GROUPS * CHUNK_BYTES, x = chunk + g / 4 * 128 + g % 4 * HALF;
    Inputs of;
    of.low = half_at(x);
    of.high = half_at(x + SECOND_HALF);
#ifdef Q4
    of.by_8 = ((__global const int *)(chunk + CHUNK_BY_8))[g];
#else
    of.by_8 = 0;
#endif
    of.scale = ((__global const float *)(chunk + CHUNK_SCALES))[g];
#ifdef MINIMUMS
    of.sum = ((__global const float *)(chunk + CHUNK_SUMS))[g];
#else
    of.sum = 0.0f;
#endif
    return of;
}

// A chain with step `s` of a row and a token added. A product is below 2^22, so that it can become a float as the last bits
// of one: 12582912 is 2^23 and 2^22.
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
// Elements of a unit, and of all units.
#define PER_UNIT (UNIT / ELEMENT_BYTES)
#define IN_UNITS (UNITS / ELEMENT_BYTES)

typedef float4 Chain;
typedef float4 Weights;

Chain no_sum(void) { return (float4)0.0f; }

float of_chain(Chain sum) {
    float2 two = sum.lo + sum.hi;
    return two.x + two.y;
}

Weights no_weights(void) { return (float4)0.0f; }

// Four elements, or one.
float4 four_at(bytes at) {
#if defined(F32)
    return vload4(0, (__global const float *)at);
#elif defined(F16)
    return vload_half4(0, (__global const half *)at);
#else
    return as_float4(convert_uint4(vload4(0, (__global const ushort *)at)) << 16);
#endif
}

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

// Step `s` of a token. Lanes beyond the last element have any value.
Inputs inputs_at(bytes token, int s) {
    __global const float *x = (__global const float *)token + 4 * s;
#if D % 4 > 0
    if (4 * s + 4 > D) {
        return (float4)(x[0], D % 4 > 1 ? x[1] : 0.0f, D % 4 > 2 ? x[2] : 0.0f, 0.0f);
    }
#endif
    return vload4(0, x);
}

// A chain with step `s` of a row and a token added. Lanes beyond the last element stay as they are.
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
