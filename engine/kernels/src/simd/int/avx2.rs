//! AVX2: 16 chains in two registers. AVX-VNNI multiplies and adds four bytes at once; plain AVX2
//! needs two steps, which cannot overflow.

use std::arch::x86_64::*;

use super::{
    blocks::BlockUnit,
    dot::padded,
    form::{E2M1_RAISED, Form, RAISED_BY},
    quantize::{MAGNITUDE, Quantize},
    unit::{Chunks, Unit},
};
use crate::{
    Chunk,
    activations::{CHUNK_GROUPS, HALF, SECOND_HALF, first_half},
    blocks::{Blocks, Format, Vector},
    cpu::with_features,
    dtype::{E2M1_DOUBLED, GROUP, SUPER_BYTES},
    simd::{
        avx2::{load_16, reduce_8},
        prefetch,
    },
};

pub(super) mod base {
    super::with_features!(avx2, entry_points, super::Avx2<false>);
    super::with_features!(avx2, block_entry_points, super::Avx2<false>);
}
pub(super) mod vnni {
    super::with_features!(avx2_vnni, entry_points, super::Avx2<true>);
    super::with_features!(avx2_vnni, block_entry_points, super::Avx2<true>);
}

/// Registers of eight lanes, with or without AVX-VNNI.
pub(super) struct Avx2<const VNNI: bool>;

impl<const VNNI: bool> Quantize for Avx2<VNNI> {
    #[inline(always)]
    unsafe fn largest(group: &[f32; GROUP]) -> u32 {
        // SAFETY: the caller guarantees AVX2; the group is four registers long.
        unsafe {
            let mask = _mm256_set1_epi32(MAGNITUDE as i32);
            let mut max = _mm256_setzero_si256();
            for i in 0..4 {
                let values = load(group.as_ptr().add(8 * i).cast());
                max = _mm256_max_epu32(max, _mm256_and_si256(values, mask));
            }
            let upper = _mm256_extracti128_si256::<1>(max);
            let max = _mm_max_epu32(_mm256_castsi256_si128(max), upper);
            let max = _mm_max_epu32(max, _mm_unpackhi_epi64(max, max));
            let max = _mm_max_epu32(max, _mm_shuffle_epi32::<1>(max));
            _mm_cvtsi128_si32(max) as u32
        }
    }

    #[inline(always)]
    unsafe fn quants(group: &[f32; GROUP], inverse: f32) -> ([i8; GROUP], i32) {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let mut quants = [0i8; GROUP];
        // SAFETY: as in `largest`; the quants are one register long.
        unsafe {
            let inverse = _mm256_set1_ps(inverse);
            let mut whole = [_mm256_setzero_si256(); 4];
            for (i, whole) in whole.iter_mut().enumerate() {
                let values = _mm256_loadu_ps(group.as_ptr().add(8 * i));
                let rounded = _mm256_round_ps::<NEAREST>(_mm256_mul_ps(values, inverse));
                *whole = _mm256_cvttps_epi32(rounded);
            }
            let [a, b, c, d] = whole;
            let sums = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
            // Packing works within each half of a register: dwords 0, 4, 1, 5, … of the result are
            // in order.
            let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(bytes, order);
            _mm256_storeu_si256(quants.as_mut_ptr().cast(), bytes);
            let upper = _mm256_extracti128_si256::<1>(sums);
            let sum = _mm_add_epi32(_mm256_castsi256_si128(sums), upper);
            let sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<1>(sum));
            (quants, _mm_cvtsi128_si32(sum))
        }
    }
}

impl<const VNNI: bool> Unit for Avx2<VNNI> {
    type Sums = [__m256i; 2];
    type Chains = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn both(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: the caller guarantees AVX2.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn nibbles<F: Form>(quants: *const u8, groups: usize, x: &Chunk) -> [__m256i; 2] {
        // SAFETY: passed on from the caller; there is one token.
        let [sums] = unsafe { Self::nibbles_tokens::<F, 1>(quants, groups, [x]) };
        sums
    }

    #[inline(always)]
    unsafe fn nibbles_tokens<F: Form, const T: usize>(
        quants: *const u8,
        groups: usize,
        xs: Chunks<T>,
    ) -> [[__m256i; 2]; T] {
        // SAFETY: the caller guarantees the ISA, the groups, and `T` chunks of 512 bytes.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            for half in 0..2 {
                // Nibbles of two groups each, one in each half of a register.
                let mut nibbles = [[_mm256_setzero_si256(); 2]; 4];
                for i in 0..4 {
                    let pair = 4 * half + i;
                    let bytes = if 2 * pair + 1 < groups {
                        load(quants.add(32 * pair))
                    } else if 2 * pair < groups {
                        _mm256_zextsi128_si256(load_16(quants.add(32 * pair)))
                    } else {
                        break;
                    };
                    let high = _mm256_srli_epi16::<4>(bytes);
                    nibbles[i] = [
                        numbers::<F, VNNI>(_mm256_and_si256(bytes, mask)),
                        numbers::<F, VNNI>(_mm256_and_si256(high, mask)),
                    ];
                }
                for t in 0..T {
                    let x = xs[t].cast::<u8>();
                    let quants = x.add(std::mem::offset_of!(Chunk, quants));
                    let mut parts = [_mm256_setzero_si256(); 4];
                    for i in 0..4 {
                        let x = quants.add(first_half(8 * half + 2 * i));
                        let (x_low, x_high) = (load(x), load(x.add(SECOND_HALF)));
                        let [low, high] = nibbles[i];
                        parts[i] = if VNNI {
                            let zero = _mm256_setzero_si256();
                            let sums = _mm256_dpbusd_avx_epi32(zero, low, x_low);
                            _mm256_dpbusd_avx_epi32(sums, high, x_high)
                        } else {
                            // Eight sums of four products, at most 4 × 15 × 127 each.
                            _mm256_add_epi16(pairs::<F>(low, x_low), pairs::<F>(high, x_high))
                        };
                    }
                    let of_groups = if VNNI {
                        sums_of_groups(parts)
                    } else {
                        short_sums_of_groups(parts)
                    };
                    sums[t][half] = of_groups;
                    for _ in 0..by_8::<F, VNNI>() {
                        let by_8 = x.add(std::mem::offset_of!(Chunk, by_8));
                        sums[t][half] = _mm256_add_epi32(sums[t][half], load(by_8.add(32 * half)));
                    }
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn q8(quants: *const u8, groups: usize, x: &Chunk) -> [__m256i; 2] {
        // SAFETY: the caller guarantees the ISA and the groups; the chunk has 512 bytes.
        unsafe {
            let mut parts = [[_mm256_setzero_si256(); 4]; 2];
            for i in 0..8 {
                if 2 * i >= groups {
                    break;
                }
                let a = products_q8::<VNNI>(quants, x, 2 * i);
                let b = if 2 * i + 1 < groups {
                    products_q8::<VNNI>(quants, x, 2 * i + 1)
                } else {
                    _mm256_setzero_si256()
                };
                parts[i / 4][i % 4] = _mm256_add_epi32(
                    _mm256_permute2x128_si256::<0x20>(a, b),
                    _mm256_permute2x128_si256::<0x31>(a, b),
                );
            }
            let mut sums = [sums_of_groups(parts[0]), sums_of_groups(parts[1])];
            if VNNI {
                for i in 0..2 {
                    let by_8 = load(x.by_8[8 * i..].as_ptr().cast());
                    let by_128 = _mm256_slli_epi32::<{ Chunk::BY_128 }>(by_8);
                    sums[i] = _mm256_add_epi32(sums[i], by_128);
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn scales(scales: *const u8, groups: usize) -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2 and the scales.
        unsafe {
            let halves = padded(scales, groups);
            let [low, high] = [0, 8].map(|i| halves[i..].as_ptr().cast());
            [
                _mm256_cvtph_ps(load_16(low)),
                _mm256_cvtph_ps(load_16(high)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn chains(values: &[f32; CHUNK_GROUPS]) -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2; the values are two registers long.
        unsafe {
            [
                _mm256_loadu_ps(values.as_ptr()),
                _mm256_loadu_ps(values.as_ptr().add(8)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [[__m256; 2]; 2] {
        // SAFETY: the caller guarantees AVX2 and 32 bytes.
        unsafe {
            let (scales_of, mins_of) = entries(scales);
            let head = |at: usize| scales.add(at).cast::<i32>().read_unaligned();
            let heads = _mm_insert_epi32::<1>(_mm_cvtsi32_si128(head(0)), head(SUPER_BYTES));
            let heads = _mm_cvtph_ps(heads);
            let heads = _mm256_set_m128(heads, heads);
            let low = |six_bits| _mm256_cvtepu16_epi32(_mm256_castsi256_si128(six_bits));
            let high = |six_bits| _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(six_bits));
            let times = |unit, six_bits| _mm256_mul_ps(unit, _mm256_cvtepi32_ps(six_bits));
            [
                [
                    times(_mm256_permute_ps::<0x00>(heads), low(scales_of)),
                    times(_mm256_permute_ps::<0xaa>(heads), high(scales_of)),
                ],
                [
                    times(_mm256_permute_ps::<0x55>(heads), low(mins_of)),
                    times(_mm256_permute_ps::<0xff>(heads), high(mins_of)),
                ],
            ]
        }
    }

    #[inline(always)]
    unsafe fn less(chains: [__m256; 2], mins: [__m256; 2], x: &Chunk) -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2; the chunk has 16 sums.
        unsafe {
            let mut chains = chains;
            for i in 0..2 {
                let sums = _mm256_loadu_ps(x.sums.as_ptr().add(8 * i));
                chains[i] = _mm256_fnmadd_ps(mins[i], sums, chains[i]);
            }
            chains
        }
    }

    #[inline(always)]
    unsafe fn add(
        chains: [__m256; 2],
        sums: [__m256i; 2],
        scales: [__m256; 2],
        x: &Chunk,
    ) -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2; the chunk has 16 scales.
        unsafe {
            let mut chains = chains;
            for i in 0..2 {
                let scale = _mm256_loadu_ps(x.scales.as_ptr().add(8 * i));
                let scale = _mm256_mul_ps(scales[i], scale);
                chains[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[i]), scale, chains[i]);
            }
            chains
        }
    }

    #[inline(always)]
    unsafe fn fold(chains: [__m256; 2]) -> f32 {
        // SAFETY: the caller guarantees AVX2.
        unsafe { reduce_8(_mm256_add_ps(chains[0], chains[1])) }
    }

    #[inline(always)]
    fn prefetch(line: *const u8) {
        prefetch(line);
    }
}

impl<const VNNI: bool> Vector for Avx2<VNNI> {
    type Bytes = __m256i;
    type Values = [__m256; 2];

    const LANES: usize = 2;

    #[inline(always)]
    unsafe fn load<'a>(at: impl Fn(usize) -> &'a [u8; HALF]) -> __m256i {
        let (first, second) = (at(0), at(1));
        // SAFETY: the caller guarantees AVX2; both are 16 bytes long.
        unsafe {
            let low = load_16(first.as_ptr());
            if std::ptr::eq(first, second) {
                _mm256_broadcastsi128_si256(low)
            } else {
                _mm256_set_m128i(load_16(second.as_ptr()), low)
            }
        }
    }

    #[inline(always)]
    unsafe fn splat(byte: u8) -> __m256i {
        // SAFETY: the caller guarantees AVX2.
        unsafe { _mm256_set1_epi8(byte.cast_signed()) }
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2.
        unsafe { _mm256_and_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2.
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn shift(bytes: __m256i, left: impl Fn(usize) -> i32) -> __m256i {
        let (a, b) = (left(0), left(1));
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let by = |a: i32, b: i32| _mm256_setr_epi32(a, a, a, a, b, b, b, b);
            match (a, b) {
                (0, 0) => bytes,
                _ if a >= 0 && b >= 0 => _mm256_sllv_epi32(bytes, by(a, b)),
                _ if a <= 0 && b <= 0 => _mm256_srlv_epi32(bytes, by(-a, -b)),
                _ => {
                    let right = _mm256_srlv_epi32(bytes, by((-a).max(0), (-b).max(0)));
                    _mm256_sllv_epi32(right, by(a.max(0), b.max(0)))
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], at: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2; the table is 16 bytes long.
        unsafe {
            let table = _mm256_broadcastsi128_si256(load_16(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, at)
        }
    }

    #[inline(always)]
    unsafe fn spread(words: impl Fn(usize) -> u32, half: usize) -> __m256i {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let word = |lane| _mm_set1_epi32(words(lane).cast_signed());
            let words = _mm256_set_m128i(word(1), word(0));
            let at = 2 * half as i64 * 0x0101_0101_0101_0101;
            let next = at + 0x0101_0101_0101_0101;
            let bytes = _mm256_shuffle_epi8(words, _mm256_setr_epi64x(at, next, at, next));
            let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits)
        }
    }

    #[inline(always)]
    unsafe fn words(of: impl Fn(usize) -> [u64; 2]) -> __m256i {
        let ([a, b], [c, d]) = (of(0), of(1));
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let [a, b, c, d] = [a, b, c, d].map(u64::cast_signed);
            _mm256_setr_epi64x(a, b, c, d)
        }
    }

    #[inline(always)]
    unsafe fn plus(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2.
        unsafe { _mm256_add_epi8(a, b) }
    }

    #[inline(always)]
    unsafe fn negate(bytes: __m256i, by: __m256i) -> __m256i {
        // SAFETY: the caller guarantees AVX2.
        unsafe { _mm256_sub_epi8(_mm256_xor_si256(bytes, by), by) }
    }

    #[inline(always)]
    unsafe fn values(values: &[f32; CHUNK_GROUPS]) -> [__m256; 2] {
        // SAFETY: passed on from the caller.
        unsafe { Self::chains(values) }
    }

    #[inline(always)]
    unsafe fn wide(halves: &[u16; CHUNK_GROUPS]) -> [__m256; 2] {
        // SAFETY: passed on from the caller; all scales are there.
        unsafe { Self::scales(halves.as_ptr().cast(), CHUNK_GROUPS) }
    }

    #[inline(always)]
    unsafe fn times(values: [__m256; 2], by: &[i8; CHUNK_GROUPS]) -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2; there are 16 bytes.
        unsafe {
            let by = load_16(by.as_ptr().cast());
            let low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(by));
            let high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(by, by)));
            [
                _mm256_mul_ps(values[0], low),
                _mm256_mul_ps(values[1], high),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scaled(values: [__m256; 2], by: f32) -> [__m256; 2] {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let by = _mm256_set1_ps(by);
            [_mm256_mul_ps(values[0], by), _mm256_mul_ps(values[1], by)]
        }
    }
}

impl<const VNNI: bool> BlockUnit for Avx2<VNNI> {
    #[inline(always)]
    unsafe fn blocks<B: Format, const T: usize>(
        chunk: Blocks<'_, B>,
        xs: Chunks<T>,
    ) -> [[__m256i; 2]; T] {
        // SAFETY: the caller guarantees the ISA and the chunks.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); 2]; T];
            let steps = B::steps(chunk);
            for half in 0..2 {
                // Weights of two groups each, one in each half of a register.
                let mut weights = [[_mm256_setzero_si256(); 2]; 4];
                let mut by = [[_mm256_setzero_si256(); 2]; 4];
                for i in 0..4 {
                    let g = 8 * half + 2 * i;
                    for part in 0..2 {
                        weights[i][part] = B::unpack::<Self>(chunk, g, part);
                    }
                    if B::STEPS {
                        by[i] = pairs_of_steps(&steps, g);
                    }
                }
                for t in 0..T {
                    let x = &*xs[t];
                    let quants = x.quants.as_ptr().cast::<u8>();
                    let mut parts = [_mm256_setzero_si256(); 4];
                    for i in 0..4 {
                        let at = quants.add(first_half(8 * half + 2 * i));
                        let x = [load(at), load(at.add(SECOND_HALF))];
                        parts[i] = block_products::<B, VNNI>(weights[i], by[i], x);
                    }
                    let of_groups = match B::MOST {
                        _ if VNNI || B::STEPS => sums_of_groups(parts),
                        0..=15 => short_sums_of_groups(parts),
                        16..=31 => medium_sums_of_groups(parts),
                        _ => sums_of_groups(parts),
                    };
                    let by_8 = load(x.by_8[8 * half..].as_ptr().cast());
                    sums[t][half] = match VNNI && B::SIGNED {
                        _ if B::STEPS => of_groups,
                        true => {
                            let by_128 = _mm256_slli_epi32::<{ Chunk::BY_128 }>(by_8);
                            _mm256_add_epi32(of_groups, by_128)
                        }
                        false => {
                            let mut sum = of_groups;
                            for _ in 0..B::RAISED / 8 {
                                sum = _mm256_add_epi32(sum, by_8);
                            }
                            sum
                        }
                    };
                }
            }
            sums
        }
    }
}

/// The steps of the first and of the second halves of groups `g` and `g + 1`, in 16 bits: those of a
/// group in its half of a register.
///
/// # Safety
/// The CPU has AVX2; `g` is even and below 16.
#[inline(always)]
unsafe fn pairs_of_steps(steps: &[i8; 2 * CHUNK_GROUPS], g: usize) -> [__m256i; 2] {
    // SAFETY: the caller guarantees AVX2 and the group; eight steps from a multiple of eight on exist.
    unsafe {
        let eight = _mm_loadl_epi64(steps.as_ptr().add(2 * g / 8 * 8).cast());
        let eight = _mm256_broadcastsi128_si256(_mm_cvtepi8_epi16(eight));
        // Bytes of word `i` of eight, in both bytes of a word.
        let word = |i: i64| 0x0001_0001_0001_0001 * (((2 * i + 1) << 8) | (2 * i));
        let i = (2 * g % 8) as i64;
        let order = |i: i64| {
            let (a, b) = (word(i), word(i + 2));
            _mm256_setr_epi64x(a, a, b, b)
        };
        [
            _mm256_shuffle_epi8(eight, order(i)),
            _mm256_shuffle_epi8(eight, order(i + 1)),
        ]
    }
}

/// Partial sums of the products of two groups, one in each half of a register: eight of 16 bits for each
/// group if the weights are small and there are neither steps nor VNNI, otherwise four of 32 bits. With
/// VNNI signed weights count as raised by 128.
///
/// # Safety
/// The CPU has AVX2, and AVX-VNNI if `VNNI`.
#[inline(always)]
unsafe fn block_products<B: Format, const VNNI: bool>(
    weights: [__m256i; 2],
    by: [__m256i; 2],
    x: [__m256i; 2],
) -> __m256i {
    // SAFETY: the caller guarantees the ISA.
    unsafe {
        if B::STEPS {
            let raised = _mm256_set1_epi8(B::RAISED.cast_signed());
            let mut sums = [_mm256_setzero_si256(); 2];
            for i in 0..2 {
                // At most 2 × 63 × 127 each, and 2 × 32 × 127 the difference.
                let mut products = signed_pairs::<B>(weights[i], x[i]);
                if B::RAISED > 0 {
                    products = _mm256_sub_epi16(products, _mm256_maddubs_epi16(raised, x[i]));
                }
                sums[i] = _mm256_madd_epi16(products, by[i]);
            }
            return _mm256_add_epi32(sums[0], sums[1]);
        }
        if VNNI {
            let flip = _mm256_set1_epi8(if B::SIGNED { i8::MIN } else { 0 });
            let mut sum = _mm256_setzero_si256();
            for i in 0..2 {
                sum = _mm256_dpbusd_avx_epi32(sum, _mm256_xor_si256(weights[i], flip), x[i]);
            }
            return sum;
        }
        let mut sums = [_mm256_setzero_si256(); 2];
        for i in 0..2 {
            sums[i] = signed_pairs::<B>(weights[i], x[i]);
            if B::MOST > 31 {
                sums[i] = _mm256_madd_epi16(sums[i], _mm256_set1_epi16(1));
            }
        }
        match B::MOST {
            0..=31 => _mm256_add_epi16(sums[0], sums[1]),
            _ => _mm256_add_epi32(sums[0], sums[1]),
        }
    }
}

/// Sums of two products of unpacked weights, in 16 bits.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn signed_pairs<B: Format>(weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        match B::SIGNED {
            // The weight's sign moves to the activation, which is never −128.
            true => _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights)),
            false => _mm256_maddubs_epi16(weights, x),
        }
    }
}

/// [`short_sums_of_groups`] of sums that are no more than 15,748 in magnitude: two of them do not
/// overflow.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn medium_sums_of_groups(parts: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let [a, b, c, d] = parts;
        let ones = _mm256_set1_epi16(1);
        let ab = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let cd = _mm256_add_epi16(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        let (ab, cd) = (_mm256_madd_epi16(ab, ones), _mm256_madd_epi16(cd, ones));
        let sums = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
        _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    }
}

/// The six-bit scales and minimums of two whole super-blocks, in 16 bits each.
///
/// # Safety
/// The CPU has AVX2, and `from` is valid for reads of 32 bytes.
#[inline(always)]
pub(super) unsafe fn entries(from: *const u8) -> (__m256i, __m256i) {
    // SAFETY: the caller guarantees AVX2 and 32 readable bytes.
    unsafe {
        // The two bytes that hold entry g; an even one ends four bits before them, so that a
        // multiplication by 16 puts both kinds in the upper twelve.
        let order = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15,
        ));
        let pairs = _mm256_shuffle_epi8(load(from), order);
        let upper = _mm256_mullo_epi16(pairs, _mm256_set1_epi32(1 << 16 | 16));
        let scales = _mm256_and_si256(_mm256_srli_epi16::<4>(upper), _mm256_set1_epi16(63));
        (scales, _mm256_srli_epi16::<10>(upper))
    }
}

/// 32 bytes.
///
/// # Safety
/// The CPU has AVX2, and `from` is valid for reads of 32 bytes; it need not be aligned.
#[inline(always)]
pub(super) unsafe fn load(from: *const u8) -> __m256i {
    // SAFETY: the caller guarantees 32 readable bytes.
    unsafe { _mm256_loadu_si256(from.cast()) }
}

/// The numbers that nibbles, each in a byte, stand for: if they are floats, [`E2M1_RAISED`] for VNNI,
/// whose weights are unsigned, and signed ones without it; else themselves.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn numbers<F: Form, const VNNI: bool>(nibbles: __m256i) -> __m256i {
    if !F::FLOATS {
        return nibbles;
    }
    let table = if VNNI { &E2M1_RAISED } else { &E2M1_DOUBLED };
    // SAFETY: the caller guarantees AVX2; the table is 16 bytes long.
    unsafe {
        let table = _mm256_broadcastsi128_si256(load_16(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, nibbles)
    }
}

/// How often −8 times the sum of the activations is added to a group's products of [`numbers`].
#[inline(always)]
pub(super) const fn by_8<F: Form, const VNNI: bool>() -> usize {
    match F::FLOATS {
        true if VNNI => RAISED_BY as usize / 8,
        _ => F::EIGHTS,
    }
}

/// Sums of two products of weights as they are packed without VNNI, in 16 bits.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn pairs<F: Form>(weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        match F::SIGNED {
            // The weight's sign moves to the activation, which is never −128.
            true => _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights)),
            false => _mm256_maddubs_epi16(weights, x),
        }
    }
}

/// Eight sums of four products each that make up group `g`; with VNNI of weights raised
/// by 128.
///
/// # Safety
/// The CPU has AVX2, and AVX-VNNI if `VNNI`. `g < 16`, and `quants` is valid for reads of
/// `32 * (g + 1)` bytes.
#[inline(always)]
unsafe fn products_q8<const VNNI: bool>(quants: *const u8, x: &Chunk, g: usize) -> __m256i {
    // SAFETY: the caller guarantees the ISA and the group.
    unsafe {
        let weights = load(quants.add(g * GROUP));
        let x = x.quants.as_ptr().cast::<u8>().add(first_half(g));
        let x = _mm256_set_m128i(load_16(x.add(SECOND_HALF)), load_16(x));
        if VNNI {
            let raised = _mm256_xor_si256(weights, _mm256_set1_epi8(i8::MIN));
            _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), raised, x)
        } else {
            // The weight's sign moves to the activation, which is never −128. A pair sums to at
            // most 2 × 128 × 127, which fits.
            let pairs =
                _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }
}

/// Half `l` of part `i` holds the four partial sums of group `2i + l`; lane `g` of the
/// result is the sum of group `g`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn sums_of_groups(parts: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let [a, b, c, d] = parts;
        let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        let sums = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
        _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    }
}

/// [`sums_of_groups`] of parts with eight sums of 16 bits for each group, no more than 7,620 in
/// magnitude: four of them do not overflow.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn short_sums_of_groups(parts: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let [a, b, c, d] = parts;
        let ab = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let cd = _mm256_add_epi16(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        let sums = _mm256_add_epi16(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
        let sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
        _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    }
}

/// Scales and minimums of two whole super-blocks, for the kernels of floats.
///
/// # Safety
/// The CPU has AVX2, and `scales` is valid for reads of 32 bytes.
#[inline(always)]
pub(in crate::simd) unsafe fn super_blocks(scales: *const u8) -> [[f32; CHUNK_GROUPS]; 2] {
    let mut out = [[0.0; CHUNK_GROUPS]; 2];
    // SAFETY: the caller guarantees the instruction set and 32 bytes; a store fills 8 floats.
    unsafe {
        for (out, factors) in out
            .iter_mut()
            .zip(<Avx2<false> as Unit>::super_blocks(scales))
        {
            _mm256_storeu_ps(out.as_mut_ptr(), factors[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), factors[1]);
        }
    }
    out
}
