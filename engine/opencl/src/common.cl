// Definitions for all kernels. Multiply-adds are fused only where fma is written, and the exponential is the CPU's
// (math::exp in engine/kernels).

#pragma OPENCL FP_CONTRACT OFF

#define GROUP 32

// A chunk of quantised activations: see engine/kernels/src/activations.rs.
#define CHUNK_GROUPS 16
#define CHUNK_BYTES 768
#define CHUNK_SCALES 512
#define CHUNK_BY_8 576
#define CHUNK_SUMS 704
#define HALF 16
#define SECOND_HALF 64

typedef __global const uchar *bytes;

float f16_at(bytes at, int i) { return vload_half(i, (__global const half *)at); }

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
