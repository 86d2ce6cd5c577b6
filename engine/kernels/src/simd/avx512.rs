//! AVX-512: 32 lanes in two registers of sixteen.

use std::arch::x86_64::*;

use super::{
    avx2::{load_16, reduce_8},
    lanes::{Lanes, Register, by_registers, register},
};
use crate::{cpu::with_features, dtype::E2M1_DOUBLED};

with_features!(avx512, entry_points, Avx512, 4, 4);

/// 32 f32 lanes; register `k` holds lanes `16k..16k + 16`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512([__m512; 2]);

impl Lanes for Avx512 {
    type Register = __m512;

    by_registers!(Avx512, 0 1);

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees AVX-512 and 64 readable bytes.
        unsafe {
            Avx512([
                _mm512_cvtph_ps(load_32(from)),
                _mm512_cvtph_ps(load_32(from.add(32))),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller guarantees AVX-512 and 64 readable bytes.
        unsafe { Avx512([widen_bf16(load_32(from)), widen_bf16(load_32(from.add(32)))]) }
    }

    #[inline(always)]
    unsafe fn load_q8(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees AVX-512 and 32 readable bytes.
        unsafe {
            let scale = _mm512_set1_ps(scale);
            let low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(from)));
            let high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(from.add(16))));
            Avx512([_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale)])
        }
    }

    #[inline(always)]
    unsafe fn load_q4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees AVX-512 and 16 readable bytes.
        unsafe {
            // A nibble has 16 values and a register 16 lanes: scale the table of values once, then
            // look up both halves. The lookup ignores index bits above the lowest four, so the low
            // nibbles need no mask.
            let centred = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, //
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            let table = _mm512_mul_ps(centred, _mm512_set1_ps(scale));
            let bytes = _mm512_cvtepu8_epi32(load_16(from));
            Avx512([
                _mm512_permutexvar_ps(bytes, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table),
            ])
        }
    }

    const FOUR: bool = true;

    #[inline(always)]
    unsafe fn load_four_q4(from: *const u8) -> [Self; 4] {
        // SAFETY: the caller guarantees AVX-512 and 64 readable bytes.
        unsafe {
            let table = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, //
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            // Lane 4g + w holds bytes 4w to 4w + 3 of group g. Result b has their b-th bytes: the low
            // nibbles, which are elements 4w + b of the groups, then the high ones.
            let four = _mm512_loadu_si512(from.cast());
            [
                Avx512([
                    _mm512_permutexvar_ps(four, table),
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(four), table),
                ]),
                Avx512([
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(four), table),
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(four), table),
                ]),
                Avx512([
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(four), table),
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<20>(four), table),
                ]),
                Avx512([
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(four), table),
                    _mm512_permutexvar_ps(_mm512_srli_epi32::<28>(four), table),
                ]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn of_four(factors: &[f32; 16], first: usize) -> [Self; 4] {
        // SAFETY: the caller guarantees AVX-512; there are 16 factors.
        unsafe {
            let group = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            let group = _mm512_add_epi32(group, _mm512_set1_epi32(first as i32));
            let factors = _mm512_permutexvar_ps(group, _mm512_loadu_ps(factors.as_ptr()));
            [Avx512([factors; 2]); 4]
        }
    }

    #[inline(always)]
    unsafe fn in_order([a, b, c, d]: [Self; 4]) -> [Self; 4] {
        // SAFETY: the caller guarantees AVX-512.
        unsafe {
            let low = transposed([a.0[0], b.0[0], c.0[0], d.0[0]]);
            let high = transposed([a.0[1], b.0[1], c.0[1], d.0[1]]);
            [
                Avx512([low[0], high[0]]),
                Avx512([low[1], high[1]]),
                Avx512([low[2], high[2]]),
                Avx512([low[3], high[3]]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_q4k(from: *const u8, scale: f32, min: f32) -> Self {
        // SAFETY: the caller guarantees AVX-512 and 16 readable bytes.
        unsafe {
            // As for q4, with a table of what the nibbles stand for here.
            let nibbles = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, //
                8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
            );
            let table = _mm512_fmsub_ps(nibbles, _mm512_set1_ps(scale), _mm512_set1_ps(min));
            let bytes = _mm512_cvtepu8_epi32(load_16(from));
            Avx512([
                _mm512_permutexvar_ps(bytes, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_mxfp4(from: *const u8, scale: f32) -> Self {
        // SAFETY: the caller guarantees AVX-512 and 16 readable bytes; the table is as long.
        unsafe {
            // As for q4, with another table.
            let values = _mm512_cvtepi8_epi32(load_16(E2M1_DOUBLED.as_ptr().cast()));
            let table = _mm512_mul_ps(_mm512_cvtepi32_ps(values), _mm512_set1_ps(scale));
            let bytes = _mm512_cvtepu8_epi32(load_16(from));
            Avx512([
                _mm512_permutexvar_ps(bytes, table),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table),
            ])
        }
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: passed on from the caller.
        unsafe { super::int::avx512::super_blocks(scales) }
    }

    #[inline(always)]
    unsafe fn load_scales(from: *const u8) -> [f32; 16] {
        let mut scales = [0.0; 16];
        // SAFETY: the caller guarantees AVX-512 and 32 readable bytes; the store fills
        // the array exactly.
        unsafe { _mm512_storeu_ps(scales.as_mut_ptr(), _mm512_cvtph_ps(load_32(from))) };
        scales
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        // SAFETY: the caller guarantees AVX-512 and 64 writable bytes.
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<NEAREST>(self.0[0]));
            _mm256_storeu_si256(to.add(32).cast(), _mm512_cvtps_ph::<NEAREST>(self.0[1]));
        }
    }

    #[inline(always)]
    unsafe fn reduce(low: Self, high: Self) -> f32 {
        // SAFETY: the caller guarantees AVX-512.
        unsafe {
            let (a, b) = (
                _mm512_add_ps(low.0[0], high.0[0]),
                _mm512_add_ps(low.0[1], high.0[1]),
            ); // j + 32
            let c = _mm512_add_ps(a, b); // + 16
            let upper = _mm512_extractf32x8_ps::<1>(c);
            reduce_8(_mm256_add_ps(_mm512_castps512_ps256(c), upper)) // + 8 and down
        }
    }
}

register!(
    __m512,
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    |a, b, c| _mm512_fmadd_ps(a, b, c)
);

/// 32 bytes.
///
/// # Safety
/// The CPU has AVX2, and `from` is valid for reads of 32 bytes; it need not be aligned.
#[inline(always)]
unsafe fn load_32(from: *const u8) -> __m256i {
    // SAFETY: the caller guarantees 32 readable bytes.
    unsafe { _mm256_loadu_si256(from.cast()) }
}

/// Result `g` holds lane `4g + w` of value `b` in its lane `4w + b`.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn transposed(values: [__m512; 4]) -> [__m512; 4] {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        // within each quarter of a register: register w has the values' lanes 4g + w
        let [a, b, c, d] = values;
        let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        let ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        let a = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let b = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        let c = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
        let d = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
        // then the quarters
        let ab = _mm512_shuffle_f32x4::<0x44>(a, b);
        let cd = _mm512_shuffle_f32x4::<0x44>(c, d);
        let ab_high = _mm512_shuffle_f32x4::<0xee>(a, b);
        let cd_high = _mm512_shuffle_f32x4::<0xee>(c, d);
        [
            _mm512_shuffle_f32x4::<0x88>(ab, cd),
            _mm512_shuffle_f32x4::<0xdd>(ab, cd),
            _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high),
            _mm512_shuffle_f32x4::<0xdd>(ab_high, cd_high),
        ]
    }
}

/// 16 bf16 to f32.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn widen_bf16(halves: __m256i) -> __m512 {
    // SAFETY: the caller guarantees AVX-512.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))) }
}
