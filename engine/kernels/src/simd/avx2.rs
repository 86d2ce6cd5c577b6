//! AVX2 with FMA and F16C: 32 lanes in four registers of eight.

use std::arch::x86_64::*;

use super::lanes::{Lanes, Register, by_registers, register};
use crate::{cpu::with_features, dtype::E2M1_DOUBLED};

// 3 × 4 accumulators, 3 weights and 1 input fill the 16 registers.
with_features!(avx2, entry_points, Avx2, 3, 4);

/// 32 f32 lanes; register `k` holds lanes `8k..8k + 8`.
#[derive(Clone, Copy)]
pub(crate) struct Avx2([__m256; 4]);

impl Lanes for Avx2 {
    type Register = __m256;

    by_registers!(Avx2, 0 1 2 3);

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees F16C and 64 readable bytes.
        unsafe {
            Avx2([
                _mm256_cvtph_ps(load_16(from)),
                _mm256_cvtph_ps(load_16(from.add(16))),
                _mm256_cvtph_ps(load_16(from.add(32))),
                _mm256_cvtph_ps(load_16(from.add(48))),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees AVX2 and 64 readable bytes.
        unsafe {
            Avx2([
                widen_bf16(load_16(from)),
                widen_bf16(load_16(from.add(16))),
                widen_bf16(load_16(from.add(32))),
                widen_bf16(load_16(from.add(48))),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_q8(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees AVX2 and 32 readable bytes.
        unsafe {
            let scale = _mm256_set1_ps(scale);
            Avx2([
                scale_i32(_mm256_cvtepi8_epi32(load_8(from)), scale),
                scale_i32(_mm256_cvtepi8_epi32(load_8(from.add(8))), scale),
                scale_i32(_mm256_cvtepi8_epi32(load_8(from.add(16))), scale),
                scale_i32(_mm256_cvtepi8_epi32(load_8(from.add(24))), scale),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_q4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees AVX2 and 16 readable bytes.
        unsafe {
            let scale = _mm256_set1_ps(scale);
            // Centre all 32 nibbles while they are bytes: two subtractions instead of four.
            let bytes = load_16(from);
            let (mask, eight) = (_mm_set1_epi8(15), _mm_set1_epi8(8));
            let low = _mm_sub_epi8(_mm_and_si128(bytes, mask), eight);
            let high = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16::<4>(bytes), mask), eight);
            Avx2([
                scale_i32(_mm256_cvtepi8_epi32(low), scale),
                scale_i32(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(low, low)), scale),
                scale_i32(_mm256_cvtepi8_epi32(high), scale),
                scale_i32(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(high, high)), scale),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_q4k(from: *const u8, scale: f32, min: f32) -> Self {
        // SAFETY: the caller guarantees AVX2 and 16 readable bytes.
        unsafe {
            let (scale, min) = (_mm256_set1_ps(scale), _mm256_set1_ps(min));
            let (bytes, mask) = (load_16(from), _mm_set1_epi8(15));
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            let parts = [
                low,
                _mm_unpackhi_epi64(low, low),
                high,
                _mm_unpackhi_epi64(high, high),
            ];
            // A closure would not be compiled for the instruction set.
            let mut values = [_mm256_setzero_ps(); 4];
            for (value, nibbles) in values.iter_mut().zip(parts) {
                let nibbles = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(nibbles));
                *value = _mm256_fmsub_ps(nibbles, scale, min);
            }
            Avx2(values)
        }
    }

    #[inline(always)]
    unsafe fn load_mxfp4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees AVX2 and 16 readable bytes; the table is as long.
        unsafe {
            let scale = _mm256_set1_ps(scale);
            let (bytes, mask) = (load_16(from), _mm_set1_epi8(15));
            let values = load_16(E2M1_DOUBLED.as_ptr().cast());
            let low = _mm_shuffle_epi8(values, _mm_and_si128(bytes, mask));
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            let high = _mm_shuffle_epi8(values, high);
            Avx2([
                scale_i32(_mm256_cvtepi8_epi32(low), scale),
                scale_i32(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(low, low)), scale),
                scale_i32(_mm256_cvtepi8_epi32(high), scale),
                scale_i32(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(high, high)), scale),
            ])
        }
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: passed on from the caller.
        unsafe { super::int::avx2::super_blocks(scales) }
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const u8) -> [f32; 16] {
        let mut scales = [0.0; 16];
        // SAFETY: the caller guarantees F16C and 32 readable bytes; the two stores fill
        // the array exactly.
        unsafe {
            let to = scales.as_mut_ptr();
            _mm256_storeu_ps(to, _mm256_cvtph_ps(load_16(from)));
            _mm256_storeu_ps(to.add(8), _mm256_cvtph_ps(load_16(from.add(16))));
        }
        scales
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        // SAFETY: the caller guarantees F16C and 64 writable bytes.
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<NEAREST>(self.0[0]));
            _mm_storeu_si128(to.add(16).cast(), _mm256_cvtps_ph::<NEAREST>(self.0[1]));
            _mm_storeu_si128(to.add(32).cast(), _mm256_cvtps_ph::<NEAREST>(self.0[2]));
            _mm_storeu_si128(to.add(48).cast(), _mm256_cvtps_ph::<NEAREST>(self.0[3]));
        }
    }

    #[inline(always)]
    unsafe fn reduce(low: Self, high: Self) -> f32 {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let a = _mm256_add_ps(low.0[0], high.0[0]); // j + 32
            let b = _mm256_add_ps(low.0[1], high.0[1]);
            let c = _mm256_add_ps(low.0[2], high.0[2]);
            let d = _mm256_add_ps(low.0[3], high.0[3]);
            let (ac, bd) = (_mm256_add_ps(a, c), _mm256_add_ps(b, d)); // + 16
            reduce_8(_mm256_add_ps(ac, bd)) // + 8 and down
        }
    }
}

register!(
    __m256,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    |a, b, c| _mm256_fmadd_ps(a, b, c)
);

/// Lanes `j + 4`, `j + 2`, `j + 1` of the tree; shared with AVX-512.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn reduce_8(lanes: __m256) -> f32 {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(lanes),
            _mm256_extractf128_ps::<1>(lanes),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// 16 bytes.
///
/// # Safety
/// `from` is valid for reads of 16 bytes; it need not be aligned.
#[inline(always)]
pub(super) unsafe fn load_16(from: *const u8) -> __m128i {
    // SAFETY: the caller guarantees 16 readable bytes.
    unsafe { _mm_loadu_si128(from.cast()) }
}

/// 8 bytes, then zeros.
///
/// # Safety
/// `from` is valid for reads of 8 bytes; it need not be aligned.
#[inline(always)]
unsafe fn load_8(from: *const u8) -> __m128i {
    // SAFETY: the caller guarantees 8 readable bytes.
    unsafe { _mm_loadl_epi64(from.cast()) }
}

/// Eight bf16 to f32.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn widen_bf16(halves: __m128i) -> __m256 {
    // SAFETY: the caller guarantees AVX2.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves))) }
}

/// Eight i32 as f32, times `scale`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn scale_i32(quants: __m256i, scale: __m256) -> __m256 {
    // SAFETY: the caller guarantees AVX2.
    unsafe { _mm256_mul_ps(_mm256_cvtepi32_ps(quants), scale) }
}
