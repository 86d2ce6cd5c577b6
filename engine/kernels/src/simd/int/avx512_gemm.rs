//! Matrix products with AVX-512 VNNI: sixteen rows per panel, four elements of each row
//! per register.

use std::arch::x86_64::*;

use super::{
    avx2::Avx2,
    avx512::{Avx512, load, numbers},
    avx512_few,
    blocks::{BlockTile, chunk_of},
    dot::{self, factors, scales_of},
    form::{Form, Of, RAISED_BY},
    gemm::{self, Panel, Step, Tile},
};
use crate::{
    ActivationsRef, Chunk, Row,
    activations::{CHUNK_GROUPS, SECOND_HALF, first_half},
    blocks::{Format, MAX_CHUNK_BYTES},
    columns::Columns,
    dtype::{DType, GROUP},
    matrix::Rows,
};

const ROWS: usize = 16;
/// Tokens from which transposing weights and activations pays off.
const FEW_FROM: usize = 4;
/// Registers of a packed group.
const STEPS: usize = GROUP / 4;

impl Tile for Avx512 {
    type Sums = __m512i;
    type Floats = __m512;

    const ROWS: usize = ROWS;
    const PACK_FROM: [usize; 2] = [13, 9];
    // 12 accumulators, 12 chains, weights and scales of the 32 registers.
    const TOKENS: usize = 12;
    // With two panels each broadcast activation is used twice, so loads are no longer the
    // bottleneck.
    const PAIR_TOKENS: usize = 6;

    chains_of_floats!(
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_mul_ps,
        _mm512_add_ps,
        _mm512_fmadd_ps,
        _mm512_fnmadd_ps,
        _mm512_cvtepi32_ps,
        _mm512_add_epi32
    );

    #[inline(always)]
    unsafe fn few<R: Rows, F: Form>(
        rows: R,
        xs: ActivationsRef<'_>,
        y: &mut Columns<'_, f32>,
        scratch: &mut [f32],
    ) {
        // SAFETY: passed on from the caller; the scratch memory is large enough for so many tokens.
        unsafe {
            if F::NIBBLES && !F::CHANNEL && xs.tokens() >= FEW_FROM {
                avx512_few::matmul::<R, F>(rows, xs, y, scratch);
            } else {
                dot::dots_tokens::<Avx512, R, F>(rows, xs, y);
            }
        }
    }

    #[inline(always)]
    unsafe fn pack<F: Form>(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: the caller guarantees AVX-512 and the memory of the panel.
        unsafe {
            if F::NIBBLES {
                pack_nibbles::<F>(rows, panel);
            } else {
                pack_q8(rows, panel);
            }
            if F::CHANNEL {
                return;
            }
            if F::MINS {
                pack_factors(rows, panel);
            } else {
                pack_scales::<F>(rows, panel);
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<F: Form, const P: usize, const T: usize>(at: Step) -> [[__m512i; T]; P] {
        let Step { group, apart, x, m } = at;
        let correction = std::mem::offset_of!(Chunk, by_8);
        // SAFETY: the caller guarantees AVX-512 VNNI, `P` packed groups, and `T` tokens.
        unsafe {
            let mut sums = [[_mm512_setzero_si512(); T]; P];
            if F::STEPS {
                for half in 0..2 {
                    let of_half = half_sums::<F, P, T>(at, half);
                    for p in 0..P {
                        let factors = group.add(p * apart + ROWS * GROUP).cast::<[i32; ROWS]>();
                        let steps = load(factors.add(gemm::STEPS_AT + half).cast());
                        for t in 0..T {
                            let product = _mm512_mullo_epi32(of_half[p][t], steps);
                            sums[p][t] = _mm512_add_epi32(sums[p][t], product);
                        }
                    }
                }
                return sums;
            }
            let raised_by_128 = F::SIGNED && !F::FLOATS;
            // What floats are raised by is twice eight.
            let eights = if F::FLOATS { 2 } else { F::EIGHTS };
            if raised_by_128 || eights > 0 {
                for t in 0..T {
                    let by_8 = splat(x.byte(t, correction + 4 * m));
                    let start = match raised_by_128 {
                        true => _mm512_slli_epi32::<{ Chunk::BY_128 as u32 }>(by_8),
                        false => _mm512_mullo_epi32(by_8, _mm512_set1_epi32(eights as i32)),
                    };
                    for p in 0..P {
                        sums[p][t] = start;
                    }
                }
            }
            for half in 0..2 {
                products::<P, T>(at, half, &mut sums);
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn of_halves(steps: *const [i16; 2], sums: [i16; 2]) -> __m512i {
        // SAFETY: the caller guarantees AVX-512 and sixteen pairs.
        unsafe {
            let pair = splat(sums.as_ptr().cast());
            _mm512_madd_epi16(load(steps.cast()), pair)
        }
    }
}

impl BlockTile for Avx512 {
    // AVX-VNNI is another extension, which a CPU with AVX-512 may lack.
    type Few = Avx2<false>;

    // For 6 tokens 0.93 to 1.55 times as fast as without, for 4 of them 0.72 to 1.33 (Zen 5).
    const FROM: usize = 6;

    #[inline(always)]
    unsafe fn pack_blocks<B: Format>(rows: &[Row<'_>], panel: Panel) {
        // What is added to unpacked weights, so that they are unsigned.
        let (add, flip) = match B::SIGNED {
            _ if Of::<B>::FLOATS => (RAISED_BY as u8, 0),
            signed => (0, if signed { 128 } else { 0 }),
        };
        let groups = rows[0].len().div_ceil(GROUP);
        let mut filled = [[0; MAX_CHUNK_BYTES]; ROWS];
        for (k, first) in (0..groups).step_by(CHUNK_GROUPS).enumerate() {
            let count = CHUNK_GROUPS.min(groups - first);
            let chunks = chunk_of::<B, ROWS>(rows, k, &mut filled);
            // SAFETY: only existing groups are stored; the caller guarantees AVX-512, which includes AVX2, and
            // the memory of the panel.
            unsafe {
                let (add, flip) = (_mm256_set1_epi8(add as i8), _mm256_set1_epi8(flip as i8));
                for g in (0..count).step_by(2) {
                    let mut lines = [_mm512_setzero_si512(); ROWS];
                    for r in 0..ROWS {
                        let mut halves = [_mm256_setzero_si256(); 2];
                        for half in 0..2 {
                            let weights = B::unpack::<Avx2<false>>(chunks[r], g, half);
                            halves[half] = _mm256_xor_si256(_mm256_add_epi8(weights, add), flip);
                        }
                        let [one, other] = halves;
                        let line =
                            _mm512_castsi256_si512(_mm256_permute2x128_si256::<0x20>(one, other));
                        let next = _mm256_permute2x128_si256::<0x31>(one, other);
                        lines[r] = _mm512_inserti64x4::<1>(line, next);
                    }
                    let columns = transpose(lines);
                    for (g, columns) in (g..count).zip(columns.chunks_exact(STEPS)) {
                        let to = panel.group(first + g);
                        for (step, &bytes) in columns.iter().enumerate() {
                            _mm512_store_si512(to.add(64 * step).cast(), bytes);
                        }
                    }
                }
                let factor = |part: usize| (GROUP + part * size_of::<f32>()) * ROWS;
                // [scales, minimums][row]
                let mut lines = [[_mm512_setzero_si512(); ROWS]; 2];
                for r in 0..ROWS {
                    for (lines, [low, high]) in
                        lines.iter_mut().zip(B::factors::<Avx2<false>>(chunks[r]))
                    {
                        let low = _mm512_castsi256_si512(_mm256_castps_si256(low));
                        lines[r] = _mm512_inserti64x4::<1>(low, _mm256_castps_si256(high));
                    }
                    if B::STEPS {
                        let steps = B::steps(chunks[r]);
                        for g in 0..count {
                            for half in 0..2 {
                                let to = panel.group(first + g).add(factor(gemm::STEPS_AT + half));
                                to.cast::<i32>()
                                    .add(r)
                                    .write(i32::from(steps[2 * g + half]));
                            }
                        }
                    }
                    if B::MIN_STEPS {
                        let steps = B::min_steps(chunks[r]);
                        for g in 0..count {
                            let these = [steps[2 * g], steps[2 * g + 1]].map(i16::from);
                            let part = const { gemm::min_steps_at::<Of<B>>() };
                            let to = panel.group(first + g).add(factor(part));
                            to.cast::<[i16; 2]>().add(r).write(these);
                        }
                    }
                }
                for (part, lines) in lines.into_iter().take(1 + B::MINS as usize).enumerate() {
                    for (i, &line) in transpose(lines)[..count].iter().enumerate() {
                        let to = panel
                            .group(first + i)
                            .add(factor(part * gemm::mins_at::<Of<B>>()));
                        _mm512_store_si512(to.cast(), line);
                    }
                }
            }
        }
    }
}

/// Adds the products of half `half` of the packed groups and of each of `T` tokens.
///
/// # Safety
/// As for [`Tile::sums`] of [`Avx512`].
#[inline(always)]
unsafe fn products<const P: usize, const T: usize>(
    at: Step,
    half: usize,
    sums: &mut [[__m512i; T]; P],
) {
    let Step { group, apart, x, m } = at;
    // SAFETY: passed on from the caller.
    unsafe {
        for step in 0..STEPS / 2 {
            let mut weights = [_mm512_setzero_si512(); P];
            for p in 0..P {
                let from = group.add(p * apart + 64 * (half * (STEPS / 2) + step));
                weights[p] = _mm512_load_si512(from.cast());
            }
            let at = first_half(m) + half * SECOND_HALF + step * 4;
            for t in 0..T {
                let x = splat(x.byte(t, at));
                for p in 0..P {
                    sums[p][t] = _mm512_dpbusd_epi32(sums[p][t], weights[p], x);
                }
            }
        }
    }
}

/// The sums of one half of the packed groups and each of `T` tokens, without steps.
///
/// # Safety
/// As for [`Tile::sums`] of [`Avx512`], in a format with steps.
#[inline(always)]
unsafe fn half_sums<F: Form, const P: usize, const T: usize>(
    at: Step,
    half: usize,
) -> [[__m512i; T]; P] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut sums = [[_mm512_setzero_si512(); T]; P];
        for t in 0..T {
            let of_x = i32::from((*at.x.chunk(t)).halves[2 * at.m + half]);
            let start = _mm512_set1_epi32(-i32::from(F::RAISED) * of_x);
            for p in 0..P {
                sums[p][t] = start;
            }
        }
        products::<P, T>(at, half, &mut sums);
        sums
    }
}

/// Four bytes in every lane.
///
/// # Safety
/// The CPU has AVX-512, and `from` is valid for reads of 4 bytes; it need not be aligned.
#[inline(always)]
unsafe fn splat(from: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 4 readable bytes.
    unsafe { _mm512_set1_epi32(from.cast::<i32>().read_unaligned()) }
}

/// 64 bytes of each row from byte `at` on, zeros beyond the row's end, transposed: register `c`
/// holds dword `c` of every row.
///
/// # Safety
/// The CPU has AVX-512; the rows have one format and length, which is `at` bytes at least.
#[inline(always)]
unsafe fn columns(rows: &[Row<'_>], at: usize) -> [__m512i; ROWS] {
    let left = rows[0].quants().len() - at;
    // SAFETY: full loads lie inside the row, masked ones touch only what is left of it.
    unsafe {
        let mut lines = [_mm512_setzero_si512(); ROWS];
        for (line, row) in lines.iter_mut().zip(rows) {
            let from = row.quants().as_ptr().add(at);
            *line = if left >= 64 {
                load(from)
            } else {
                _mm512_maskz_loadu_epi8((1u64 << left) - 1, from.cast())
            };
        }
        transpose(lines)
    }
}

/// What the nibbles of rows stand for, each in a byte.
///
/// # Safety
/// The CPU has AVX-512; `rows` and `panel` are as for [`Tile::pack`], in nibbles.
#[inline(always)]
unsafe fn pack_nibbles<F: Form>(rows: &[Row<'_>], panel: Panel) {
    const GROUPS: usize = 64 / DType::Q4.quants_bytes(GROUP);
    let groups = rows[0].len().div_ceil(GROUP);
    // SAFETY: only existing groups are stored; the caller guarantees AVX-512.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        for first in (0..groups).step_by(GROUPS) {
            let columns = columns(rows, first * DType::Q4.quants_bytes(GROUP));
            for (g, columns) in (first..groups).zip(columns.chunks_exact(STEPS / 2)) {
                let to = panel.group(g);
                for (step, &bytes) in columns.iter().enumerate() {
                    let low = numbers::<F>(_mm512_and_si512(bytes, mask));
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
                    let high = numbers::<F>(high);
                    _mm512_store_si512(to.add(64 * step).cast(), low);
                    _mm512_store_si512(to.add(64 * (step + STEPS / 2)).cast(), high);
                }
            }
        }
    }
}

/// The bytes of q8 rows, raised by 128.
///
/// # Safety
/// The CPU has AVX-512; `rows` and `panel` are as for [`Tile::pack`], in q8.
#[inline(always)]
unsafe fn pack_q8(rows: &[Row<'_>], panel: Panel) {
    const GROUPS: usize = 64 / DType::Q8.quants_bytes(GROUP);
    let groups = rows[0].len().div_ceil(GROUP);
    // SAFETY: as in `pack_nibbles`.
    unsafe {
        let flip = _mm512_set1_epi8(i8::MIN);
        for first in (0..groups).step_by(GROUPS) {
            let columns = columns(rows, first * DType::Q8.quants_bytes(GROUP));
            for (g, columns) in (first..groups).zip(columns.chunks_exact(STEPS)) {
                let to = panel.group(g);
                for (step, &bytes) in columns.iter().enumerate() {
                    let raised = _mm512_xor_si512(bytes, flip);
                    _mm512_store_si512(to.add(64 * step).cast(), raised);
                }
            }
        }
    }
}

/// The scales of rows without minimums, as f32.
///
/// # Safety
/// The CPU has AVX-512; `rows` and `panel` are as for [`Tile::pack`].
#[inline(always)]
unsafe fn pack_scales<F: Form>(rows: &[Row<'_>], panel: Panel) {
    let groups = rows[0].len().div_ceil(GROUP);
    for first in (0..groups).step_by(CHUNK_GROUPS) {
        let count = CHUNK_GROUPS.min(groups - first);
        // SAFETY: every row has the scales of these groups; the rest as in `pack_nibbles`.
        unsafe {
            let mut lines = [_mm512_setzero_si512(); ROWS];
            for (line, row) in lines.iter_mut().zip(rows) {
                let from = row
                    .scales()
                    .as_ptr()
                    .add(F::DTYPE.scales_bytes(first * GROUP));
                *line = _mm512_castps_si512(scales_of::<Avx512, F>(from, count));
            }
            for (i, &scales) in transpose(lines)[..count].iter().enumerate() {
                let to = panel.group(first + i).add(ROWS * GROUP);
                _mm512_store_si512(to.cast(), scales);
            }
        }
    }
}

/// The scales and minimums of q4k rows.
///
/// # Safety
/// The CPU has AVX-512; `rows` and `panel` are as for [`Tile::pack`], in q4k.
#[inline(always)]
unsafe fn pack_factors(rows: &[Row<'_>], panel: Panel) {
    let groups = rows[0].len().div_ceil(GROUP);
    for first in (0..groups).step_by(CHUNK_GROUPS) {
        let count = CHUNK_GROUPS.min(groups - first);
        // SAFETY: every row has the super-blocks of these groups; the rest as in `pack_nibbles`.
        unsafe {
            let mut lines = [[_mm512_setzero_si512(); ROWS]; 2];
            for (r, row) in rows.iter().enumerate() {
                let from = row
                    .scales()
                    .as_ptr()
                    .add(DType::Q4k.scales_bytes(first * GROUP));
                let [scales, mins] = factors::<Avx512>(from, count);
                (lines[0][r], lines[1][r]) =
                    (_mm512_castps_si512(scales), _mm512_castps_si512(mins));
            }
            for (part, lines) in lines.into_iter().enumerate() {
                for (i, &line) in transpose(lines)[..count].iter().enumerate() {
                    let to = panel.group(first + i).add(ROWS * GROUP + part * 4 * ROWS);
                    _mm512_store_si512(to.cast(), line);
                }
            }
        }
    }
}

/// Dword `c` of line `r` becomes dword `r` of line `c`.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn transpose(lines: [__m512i; ROWS]) -> [__m512i; ROWS] {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        let mut pairs = lines;
        for i in (0..ROWS).step_by(2) {
            pairs[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
        }
        // fours[4 q + k]: column k of each quarter, rows 4 q .. 4 q + 4.
        let mut fours = pairs;
        for i in (0..ROWS).step_by(4) {
            fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
            fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
            fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
            fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
        }
        let mut out = fours;
        for k in 0..4 {
            let a = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[k], fours[4 + k]);
            let b = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[k], fours[4 + k]);
            let c = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[8 + k], fours[12 + k]);
            let d = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[8 + k], fours[12 + k]);
            out[k] = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, c);
            out[4 + k] = _mm512_shuffle_i32x4::<0b10_00_10_00>(b, d);
            out[8 + k] = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, c);
            out[12 + k] = _mm512_shuffle_i32x4::<0b11_01_11_01>(b, d);
        }
        out
    }
}
