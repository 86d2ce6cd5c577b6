//! Plain Rust for machines without a supported vector unit, written so that the compiler
//! can use whatever the target guarantees (SSE2 on x86-64).

use std::array;

use super::lanes::{Lanes, Register};
use crate::math::f16_to_f32;

entry_points!([] Portable, 2, 2);

/// 32 f32 lanes in an array.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 32]);

impl Lanes for Portable {
    type Register = Quad;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; 32])
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; 32])
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const u8) -> Self {
        // SAFETY: the caller guarantees 128 readable bytes; any bits are an f32.
        Portable(unsafe { from.cast::<[f32; 32]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees 64 readable bytes.
        Portable(unsafe { from.cast::<[u16; 32]>().read_unaligned() }.map(f16_to_f32))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees 64 readable bytes.
        let halves = unsafe { from.cast::<[u16; 32]>().read_unaligned() };
        Portable(halves.map(|half| f32::from_bits(u32::from(half) << 16)))
    }

    #[inline(always)]
    unsafe fn load_q8(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees 32 readable bytes.
        let quants = unsafe { from.cast::<[i8; 32]>().read_unaligned() };
        Portable(quants.map(|quant| f32::from(quant) * scale))
    }

    #[inline(always)]
    unsafe fn load_q4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees 16 readable bytes.
        let bytes = unsafe { from.cast::<[u8; 16]>().read_unaligned() };
        Portable(array::from_fn(|i| {
            let nibble = if i < 16 {
                bytes[i] & 15
            } else {
                bytes[i - 16] >> 4
            };
            f32::from(nibble as i8 - 8) * scale
        }))
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const u8) -> [f32; 16] {
        // SAFETY: the caller guarantees 32 readable bytes.
        unsafe { from.cast::<[u16; 16]>().read_unaligned() }.map(f16_to_f32)
    }

    #[inline(always)]
    unsafe fn store_f32(self, to: *mut u8) {
        // SAFETY: the caller guarantees 128 writable bytes.
        unsafe { to.cast::<[f32; 32]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        let halves = self.0.map(|value| half::f16::from_f32(value).to_bits());
        // SAFETY: the caller guarantees 64 writable bytes.
        unsafe { to.cast::<[u16; 32]>().write_unaligned(halves) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Portable(array::from_fn(|i| fused(self.0[i], b.0[i], c.0[i])))
    }

    #[inline(always)]
    unsafe fn reduce(low: Self, high: Self) -> f32 {
        let mut lanes: [f32; 32] = array::from_fn(|j| low.0[j] + high.0[j]);
        let mut width = 16;
        while width > 0 {
            for j in 0..width {
                lanes[j] += lanes[j + width];
            }
            width /= 2;
        }
        lanes[0]
    }
}

/// Four f32 lanes.
#[derive(Clone, Copy)]
pub(crate) struct Quad([f32; 4]);

impl Register for Quad {
    const WIDTH: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Quad([value; 4])
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Quad([0.0; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller guarantees 4 readable values.
        Quad(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller guarantees 4 writable values.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Quad(array::from_fn(|i| fused(self.0[i], b.0[i], c.0[i])))
    }
}

/// `a * b + c` rounded once, without an FMA instruction or a library call.
///
/// The product of two f32 is exact in f64. The f64 sum is rounded to odd: if it is inexact, the
/// neighbour with an odd last bit is taken. That bit records the truncated part, so the final
/// rounding to f32 is correct.
#[inline(always)]
pub(super) fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    // The exact error of the addition.
    let c_part = sum - product;
    let error = (product - (sum - c_part)) + (c - c_part);
    // False for NaN, which an infinite operand leaves here.
    let inexact = error.abs() > 0.0;
    let bits = sum.to_bits();
    let outward = (error > 0.0) == (sum > 0.0);
    let step = u64::from(inexact) & !bits & 1;
    let odd = if outward {
        bits.wrapping_add(step)
    } else {
        bits.wrapping_sub(step)
    };
    f64::from_bits(odd) as f32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Numbers whose sums hit ties, cancellation, subnormals and the ends of the range.
    fn number() -> impl Strategy<Value = f32> {
        prop_oneof![
            2 => any::<u32>().prop_map(f32::from_bits),
            2 => (-300i32..300, -30i32..30).prop_map(|(m, e)| m as f32 * (e as f32).exp2()),
            1 => (1u32..4, 0u32..254, any::<bool>())
                .prop_map(|(low, e, up)| f32::from_bits(e << 23 | if up { low } else { 0x80_0000 - low })),
            1 => prop::sample::select(vec![0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, 1.0, f32::INFINITY]),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn fused_equals_the_fma_of_the_standard_library(a in number(), b in number(), c in number()) {
            let (got, expected) = (fused(a, b, c), a.mul_add(b, c));
            prop_assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                "{a:e} * {b:e} + {c:e} = {got:e}, expected {expected:e}");
            // The product cancels against the sum, up to its rounding.
            let near = -(a * b);
            let (got, expected) = (fused(a, b, near), a.mul_add(b, near));
            prop_assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
        }
    }
}
