//! NEON (Advanced SIMD of 64-bit Arm): 32 lanes in eight registers of four.

use std::arch::{aarch64::*, asm};

use super::lanes::{Lanes, Register, by_registers, register};
use crate::{cpu::with_features, dtype::E2M1_DOUBLED};

// 16 accumulators, 4 weights and 1 input of the 32 registers.
with_features!(neon, entry_points, Neon, 4, 4);

/// 32 f32 lanes; register `k` holds lanes `4k..4k + 4`.
#[derive(Clone, Copy)]
pub(crate) struct Neon([float32x4_t; 8]);

impl Lanes for Neon {
    type Register = float32x4_t;

    by_registers!(Neon, 0 1 2 3 4 5 6 7);

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees NEON and 64 readable bytes.
        unsafe {
            let mut registers = [vdupq_n_f32(0.0); 8];
            for (k, register) in registers.iter_mut().enumerate() {
                *register = widen_f16(load_4_halves(from.add(8 * k)));
            }
            Neon(registers)
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees NEON and 64 readable bytes.
        unsafe {
            let mut registers = [vdupq_n_f32(0.0); 8];
            for (k, register) in registers.iter_mut().enumerate() {
                let halves = load_4_halves(from.add(8 * k));
                *register = vreinterpretq_f32_u32(vshll_n_u16::<16>(halves));
            }
            Neon(registers)
        }
    }

    #[inline(always)]
    unsafe fn load_q8(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees NEON and 32 readable bytes.
        unsafe {
            let low = vld1q_s8(from.cast());
            let high = vld1q_s8(from.add(16).cast());
            scale_bytes(low, high, scale)
        }
    }

    #[inline(always)]
    unsafe fn load_q4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees NEON and 16 readable bytes.
        unsafe {
            let bytes = vld1q_u8(from);
            let eight = vdupq_n_s8(8);
            let low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
            scale_bytes(vsubq_s8(low, eight), vsubq_s8(high, eight), scale)
        }
    }

    #[inline(always)]
    unsafe fn load_q4k(from: *const u8, scale: f32, min: f32) -> Self {
        // SAFETY: the caller guarantees NEON and 16 readable bytes.
        unsafe {
            let bytes = vld1q_u8(from);
            let low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
            let (scale, less) = (vdupq_n_f32(scale), vdupq_n_f32(-min));
            let nibbles = scale_bytes(low, high, 1.0).0;
            let mut values = nibbles;
            for value in &mut values {
                *value = vfmaq_f32(less, *value, scale);
            }
            Neon(values)
        }
    }

    #[inline(always)]
    unsafe fn load_mxfp4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees NEON and 16 readable bytes; the table is as long.
        unsafe {
            let (bytes, values) = (vld1q_u8(from), vld1q_s8(E2M1_DOUBLED.as_ptr()));
            let low = vqtbl1q_s8(values, vandq_u8(bytes, vdupq_n_u8(15)));
            let high = vqtbl1q_s8(values, vshrq_n_u8::<4>(bytes));
            scale_bytes(low, high, scale)
        }
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: passed on from the caller.
        unsafe { super::int::neon::super_blocks(scales) }
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const u8) -> [f32; 16] {
        let mut scales = [0.0; 16];
        for k in 0..4 {
            // SAFETY: the caller guarantees NEON and 32 readable bytes; the four stores
            // fill the array exactly.
            unsafe {
                let scale = widen_f16(load_4_halves(from.add(8 * k)));
                vst1q_f32(scales.as_mut_ptr().add(4 * k), scale);
            }
        }
        scales
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        for (k, register) in self.0.into_iter().enumerate() {
            // SAFETY: the caller guarantees NEON and 64 writable bytes.
            unsafe { vst1_u8(to.add(8 * k), vreinterpret_u8_u16(narrow_f16(register))) }
        }
    }

    #[inline(always)]
    unsafe fn reduce(low: Self, high: Self) -> f32 {
        // SAFETY: the caller guarantees NEON.
        unsafe {
            let mut sums = low.0;
            for (sum, high) in sums.iter_mut().zip(high.0) {
                *sum = vaddq_f32(*sum, high); // j + 32
            }
            for width in [4, 2, 1] {
                for k in 0..width {
                    sums[k] = vaddq_f32(sums[k], sums[k + width]); // + 16, + 8, + 4
                }
            }
            let two = vadd_f32(vget_low_f32(sums[0]), vget_high_f32(sums[0])); // + 2
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two) // + 1
        }
    }
}

register!(
    float32x4_t,
    4,
    vdupq_n_f32,
    vld1q_f32,
    vst1q_f32,
    |a, b, c| vfmaq_f32(c, a, b)
);

/// Four values of 16 bits.
///
/// # Safety
/// The CPU has NEON, and `from` is valid for reads of 8 bytes; it need not be aligned.
#[inline(always)]
unsafe fn load_4_halves(from: *const u8) -> uint16x4_t {
    // SAFETY: the caller guarantees NEON and 8 readable bytes.
    unsafe { vreinterpret_u16_u8(vld1_u8(from)) }
}

/// Four f16 to f32. The intrinsic is not stable yet; the instruction is baseline.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
pub(super) unsafe fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the caller guarantees NEON; only the named registers are touched.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// Four f32 to f16, rounded to nearest even.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn narrow_f16(wide: float32x4_t) -> uint16x4_t {
    let halves: uint16x4_t;
    // SAFETY: as in `widen_f16`; the rounding mode is never changed.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {wide:v}.4s",
            halves = lateout(vreg) halves,
            wide = in(vreg) wide,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    halves
}

/// 16 + 16 signed bytes to f32, times `scale`.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn scale_bytes(low: int8x16_t, high: int8x16_t, scale: f32) -> Neon {
    // SAFETY: the caller guarantees NEON.
    unsafe {
        let (a, b) = (vmovl_s8(vget_low_s8(low)), vmovl_high_s8(low));
        let (c, d) = (vmovl_s8(vget_low_s8(high)), vmovl_high_s8(high));
        let mut registers = [vdupq_n_f32(0.0); 8];
        for (k, eight) in [a, b, c, d].into_iter().enumerate() {
            let first = vcvtq_f32_s32(vmovl_s16(vget_low_s16(eight)));
            let second = vcvtq_f32_s32(vmovl_high_s16(eight));
            registers[2 * k] = vmulq_n_f32(first, scale);
            registers[2 * k + 1] = vmulq_n_f32(second, scale);
        }
        Neon(registers)
    }
}
