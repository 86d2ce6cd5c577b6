//! AVX-512 with VNNI: 16 chains in one register, 64 products per instruction and lane
//! quadruple.

use std::arch::x86_64::*;

use super::{
    avx2::entries,
    form::{E2M1_RAISED, Form},
    quantize::{MAGNITUDE, Quantize},
    unit::Unit,
};
use crate::{
    activations::CHUNK_GROUPS,
    cpu::with_features,
    dtype::{DType, GROUP, SUPER_BYTES},
    simd::{
        avx2::{load_16, reduce_8},
        prefetch,
    },
};

with_features!(avx512_vnni, entry_points, Avx512);
with_features!(avx512_vnni, block_entry_points, Avx512);

const Q4_BYTES: usize = DType::Q4.quants_bytes(GROUP);

/// One register of sixteen lanes.
pub(super) struct Avx512;

impl Quantize for Avx512 {
    #[inline(always)]
    unsafe fn largest(group: &[f32; GROUP]) -> u32 {
        // SAFETY: the caller guarantees AVX-512; the group is two registers long.
        unsafe {
            let from = group.as_ptr().cast::<u8>();
            let mask = _mm512_set1_epi32(MAGNITUDE as i32);
            let first = _mm512_and_si512(load(from), mask);
            let second = _mm512_and_si512(load(from.add(64)), mask);
            _mm512_reduce_max_epu32(_mm512_max_epu32(first, second))
        }
    }

    #[inline(always)]
    unsafe fn quants(group: &[f32; GROUP], inverse: f32) -> ([i8; GROUP], i32) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let mut quants = [0i8; GROUP];
        // SAFETY: as in `largest`; 16 quants are stored at each half.
        unsafe {
            let inverse = _mm512_set1_ps(inverse);
            let first = _mm512_mul_ps(_mm512_loadu_ps(group.as_ptr()), inverse);
            let second = _mm512_mul_ps(_mm512_loadu_ps(group.as_ptr().add(16)), inverse);
            let first = _mm512_cvt_roundps_epi32::<NEAREST>(first);
            let second = _mm512_cvt_roundps_epi32::<NEAREST>(second);
            let to = quants.as_mut_ptr();
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(first));
            _mm_storeu_si128(to.add(16).cast(), _mm512_cvtepi32_epi8(second));
            let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
            (quants, sum)
        }
    }
}

impl Unit for Avx512 {
    type Sums = __m512i;
    type Chains = __m512;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller guarantees AVX-512.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn both(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the caller guarantees AVX-512.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn nibbles<F: Form>(quants: *const u8, groups: usize, x: &Chunk) -> __m512i {
        // SAFETY: the caller guarantees AVX-512 VNNI and the groups; the chunk has 512 bytes.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            let mut parts = [_mm512_setzero_si512(); 4];
            for (i, part) in parts.iter_mut().enumerate() {
                if 64 * i >= groups * Q4_BYTES {
                    break;
                }
                let bytes = load_up_to(quants, 64 * i, groups * Q4_BYTES);
                let low = numbers::<F>(_mm512_and_si512(bytes, mask));
                let high = numbers::<F>(_mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask));
                let x = x.quants.as_ptr().cast::<u8>().add(128 * i);
                *part = _mm512_dpbusd_epi32(*part, low, load(x));
                *part = _mm512_dpbusd_epi32(*part, high, load(x.add(64)));
            }
            let sums = sums_of_groups(parts);
            if !F::CENTRED && !F::FLOATS {
                return sums;
            }
            let correction = load(x.by_8.as_ptr().cast());
            let sums = _mm512_add_epi32(sums, correction);
            match F::FLOATS {
                true => _mm512_add_epi32(sums, correction),
                false => sums,
            }
        }
    }

    #[inline(always)]
    unsafe fn q8(quants: *const u8, groups: usize, x: &Chunk) -> __m512i {
        // SAFETY: the caller guarantees AVX-512 VNNI and the groups; the chunk has 512 bytes.
        unsafe {
            // The instruction takes unsigned weights: add 128, which is a flip of the sign.
            let flip = _mm512_set1_epi8(i8::MIN);
            let mut parts = [_mm512_setzero_si512(); 4];
            for (i, part) in parts.iter_mut().enumerate() {
                if 128 * i >= groups * GROUP {
                    break;
                }
                let a = _mm512_xor_si512(load_up_to(quants, 128 * i, groups * GROUP), flip);
                let b = _mm512_xor_si512(load_up_to(quants, 128 * i + 64, groups * GROUP), flip);
                // Even lanes are first halves, odd lanes second ones.
                let low = _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b);
                let high = _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b);
                let x = x.quants.as_ptr().cast::<u8>().add(128 * i);
                *part = _mm512_dpbusd_epi32(*part, low, load(x));
                *part = _mm512_dpbusd_epi32(*part, high, load(x.add(64)));
            }
            let by_128 =
                _mm512_slli_epi32::<{ Chunk::BY_128 as u32 }>(load(x.by_8.as_ptr().cast()));
            _mm512_add_epi32(sums_of_groups(parts), by_128)
        }
    }

    #[inline(always)]
    unsafe fn scales(scales: *const u8, groups: usize) -> __m512 {
        // SAFETY: the caller guarantees AVX-512 and the scales.
        unsafe {
            let wanted = ((1u32 << groups) - 1) as u16;
            let halves = if groups == CHUNK_GROUPS {
                _mm256_loadu_si256(scales.cast())
            } else {
                _mm256_maskz_loadu_epi16(wanted, scales.cast())
            };
            _mm512_cvtph_ps(halves)
        }
    }

    #[inline(always)]
    unsafe fn chains(values: &[f32; CHUNK_GROUPS]) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; the values are a register long.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [__m512; 2] {
        // SAFETY: the caller guarantees AVX-512 and 32 bytes.
        unsafe {
            let (scales_of, mins_of) = entries(scales);
            // d and dmin of both super-blocks, each over its eight groups
            let head = |block: usize| {
                scales
                    .add(block * SUPER_BYTES)
                    .cast::<i32>()
                    .read_unaligned()
            };
            let heads = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_set_epi32(0, 0, head(1), head(0))));
            let spread = |unit: i32| {
                let (a, b) = (unit, unit + 2);
                let order = _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b);
                _mm512_permutexvar_ps(order, heads)
            };
            let whole = |six_bits| _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(six_bits));
            [
                _mm512_mul_ps(spread(0), whole(scales_of)),
                _mm512_mul_ps(spread(1), whole(mins_of)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn less(chains: __m512, mins: __m512, x: &Chunk) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; the chunk has 16 sums.
        unsafe { _mm512_fnmadd_ps(mins, _mm512_loadu_ps(x.sums.as_ptr()), chains) }
    }

    #[inline(always)]
    unsafe fn add(chains: __m512, sums: __m512i, scales: __m512, x: &Chunk) -> __m512 {
        // SAFETY: the caller guarantees AVX-512; the chunk has 16 scales.
        unsafe {
            let scales = _mm512_mul_ps(scales, _mm512_loadu_ps(x.scales.as_ptr()));
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scales, chains)
        }
    }

    #[inline(always)]
    unsafe fn fold(chains: __m512) -> f32 {
        // SAFETY: the caller guarantees AVX-512.
        unsafe {
            let upper = _mm512_extractf32x8_ps::<1>(chains);
            reduce_8(_mm256_add_ps(_mm512_castps512_ps256(chains), upper))
        }
    }

    #[inline(always)]
    fn prefetch(line: *const u8) {
        prefetch(line);
    }
}

/// 64 bytes.
///
/// # Safety
/// The CPU has AVX-512, and `from` is valid for reads of 64 bytes; it need not be aligned.
#[inline(always)]
pub(super) unsafe fn load(from: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 64 readable bytes.
    unsafe { _mm512_loadu_si512(from.cast()) }
}

/// The numbers that nibbles, each in a byte, stand for, as unsigned ones: [`E2M1_RAISED`] if they are
/// floats, else themselves.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
pub(super) unsafe fn numbers<F: Form>(nibbles: __m512i) -> __m512i {
    // SAFETY: the caller guarantees AVX-512BW; the table is 16 bytes long.
    unsafe {
        match F::FLOATS {
            true => {
                let table = load_16(E2M1_RAISED.as_ptr().cast());
                _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles)
            }
            false => nibbles,
        }
    }
}

/// 64 bytes from byte `at` on, zeros from byte `end` on.
///
/// # Safety
/// The CPU has AVX-512, and `from` is valid for reads of `end` bytes; it need not be
/// aligned.
#[inline(always)]
pub(super) unsafe fn load_up_to(from: *const u8, at: usize, end: usize) -> __m512i {
    // SAFETY: the caller guarantees AVX-512BW and `end` readable bytes; a masked load
    // touches no others.
    unsafe {
        if at + 64 <= end {
            load(from.add(at))
        } else {
            let left = end.saturating_sub(at);
            _mm512_maskz_loadu_epi8((1u64 << left) - 1, from.wrapping_add(at).cast())
        }
    }
}

/// Quarter `l` of part `i` holds the four partial sums of group `4i + l`; lane `g` of the
/// result is the sum of group `g`.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn sums_of_groups(parts: [__m512i; 4]) -> __m512i {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        let [a, b, c, d] = parts;
        let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        let sums = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_permutexvar_epi32(order, sums)
    }
}

/// Scales and minimums of two whole super-blocks, for the kernels of floats.
///
/// # Safety
/// The CPU has AVX-512, and `scales` is valid for reads of 32 bytes.
#[inline(always)]
pub(in crate::simd) unsafe fn super_blocks(scales: *const u8) -> [[f32; CHUNK_GROUPS]; 2] {
    let mut out = [[0.0; CHUNK_GROUPS]; 2];
    // SAFETY: the caller guarantees the instruction set and 32 bytes; a store fills 16 floats.
    unsafe {
        for (out, factors) in out.iter_mut().zip(<Avx512 as Unit>::super_blocks(scales)) {
            _mm512_storeu_ps(out.as_mut_ptr(), factors);
        }
    }
    out
}
