//! Matrix products with AVX2: eight rows per panel, four elements of each row per
//! register.

use std::arch::x86_64::*;

use super::{
    avx2::{Avx2, by_8, load, numbers, pairs},
    blocks::{BlockTile, chunk_of},
    dot::{factors, scales_of},
    form::{Form, Of, RAISED_BY},
    gemm::{self, Panel, Step, Tile, Tokens},
};
use crate::{
    Chunk, Row,
    activations::{CHUNK_GROUPS, SECOND_HALF, first_half},
    blocks::{Format, MAX_CHUNK_BYTES, Vector},
    dtype::{DType, GROUP},
    simd::avx2::load_16,
};

const ROWS: usize = 8;
/// Registers of a packed group.
const STEPS: usize = GROUP / 4;

impl<const VNNI: bool> Tile for Avx2<VNNI> {
    type Sums = __m256i;
    type Floats = __m256;

    const ROWS: usize = ROWS;
    const PACK_FROM: [usize; 2] = [16, 4];
    // 4 accumulators, 4 chains, weights, their magnitudes, ones and an activation of the 16
    // registers.
    const TOKENS: usize = 4;
    const PAIR_TOKENS: usize = 0;

    chains_of_floats!(
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_mul_ps,
        _mm256_add_ps,
        _mm256_fmadd_ps,
        _mm256_fnmadd_ps,
        _mm256_cvtepi32_ps,
        _mm256_add_epi32
    );

    #[inline(always)]
    unsafe fn pack<F: Form>(rows: &[Row<'_>], panel: Panel) {
        // SAFETY: the caller guarantees AVX2 and the memory of the panel.
        unsafe {
            if F::NIBBLES {
                pack_nibbles::<F, VNNI>(rows, panel);
            } else {
                pack_q8::<VNNI>(rows, panel);
            }
            if F::CHANNEL {
                return;
            }
            if F::MINS {
                pack_factors::<VNNI>(rows, panel);
            } else {
                pack_scales::<F, VNNI>(rows, panel);
            }
        }
    }

    #[inline(always)]
    unsafe fn sums<F: Form, const P: usize, const T: usize>(at: Step) -> [[__m256i; T]; P] {
        let Step { group, apart, x, m } = at;
        // SAFETY: the caller guarantees the ISA, `P` packed groups, and `T` tokens.
        unsafe {
            let mut sums = [[_mm256_setzero_si256(); T]; P];
            for p in 0..P {
                sums[p] = panel_sums::<F, VNNI, T>(group.add(p * apart), x, m);
            }
            sums
        }
    }
}

impl<const VNNI: bool> BlockTile for Avx2<VNNI> {
    type Few = Self;

    const FROM: usize = 12;

    #[inline(always)]
    unsafe fn pack_blocks<B: Format>(rows: &[Row<'_>], panel: Panel) {
        // What is added to unpacked weights: with VNNI they are unsigned, without it those with steps
        // or of floats are signed.
        let (add, flip) = match VNNI {
            _ if B::STEPS => (B::RAISED.wrapping_neg(), 0),
            true if Of::<B>::FLOATS => (RAISED_BY as u8, 0),
            true if B::SIGNED => (0, 128),
            _ => (0, 0),
        };
        let groups = rows[0].len().div_ceil(GROUP);
        let mut filled = [[0; MAX_CHUNK_BYTES]; ROWS];
        for (k, first) in (0..groups).step_by(CHUNK_GROUPS).enumerate() {
            let count = CHUNK_GROUPS.min(groups - first);
            let chunks = chunk_of::<B, ROWS>(rows, k, &mut filled);
            // SAFETY: only existing groups are stored; the caller guarantees AVX2 and the memory of the
            // panel.
            unsafe {
                let (add, flip) = (Self::splat(add), Self::splat(flip));
                for g in (0..count).step_by(2) {
                    let mut lines = [[_mm256_setzero_si256(); ROWS]; 2];
                    for r in 0..ROWS {
                        let mut halves = [_mm256_setzero_si256(); 2];
                        for half in 0..2 {
                            let weights = B::unpack::<Self>(chunks[r], g, half);
                            halves[half] = _mm256_xor_si256(_mm256_add_epi8(weights, add), flip);
                        }
                        lines[0][r] = _mm256_permute2x128_si256::<0x20>(halves[0], halves[1]);
                        lines[1][r] = _mm256_permute2x128_si256::<0x31>(halves[0], halves[1]);
                    }
                    for (g, lines) in (g..count).zip(lines) {
                        let to = panel.group(first + g);
                        for (step, line) in transpose(lines).into_iter().enumerate() {
                            _mm256_store_si256(to.add(32 * step).cast(), line);
                        }
                    }
                }
                let factor = |part: usize| (GROUP + part * size_of::<f32>()) * ROWS;
                // [scales, minimums][first eight groups, the others][row]
                let mut lines = [[[_mm256_setzero_si256(); ROWS]; 2]; 2];
                for r in 0..ROWS {
                    let factors = B::factors::<Self>(chunks[r]);
                    for part in 0..2 {
                        for half in 0..2 {
                            lines[part][half][r] = _mm256_castps_si256(factors[part][half]);
                        }
                    }
                    if B::STEPS {
                        let steps = B::steps(chunks[r]);
                        for g in 0..count {
                            for half in 0..2 {
                                let step = i16::from(steps[2 * g + half]);
                                let to = panel.group(first + g).add(factor(gemm::STEPS_AT + half));
                                to.cast::<[i16; 2]>().add(r).write([step; 2]);
                            }
                        }
                    }
                    if B::MIN_STEPS {
                        let steps = B::min_steps(chunks[r]);
                        for g in 0..count {
                            let these = [steps[2 * g], steps[2 * g + 1]].map(i16::from);
                            let to = panel
                                .group(first + g)
                                .add(factor(gemm::min_steps_at::<Of<B>>()));
                            to.cast::<[i16; 2]>().add(r).write(these);
                        }
                    }
                }
                for (part, halves) in lines.into_iter().take(1 + B::MINS as usize).enumerate() {
                    for (half, lines) in halves.into_iter().enumerate() {
                        let these = ROWS.min(count.saturating_sub(ROWS * half));
                        for (i, &line) in transpose(lines)[..these].iter().enumerate() {
                            let group = panel.group(first + ROWS * half + i);
                            let to = group.add(factor(part * gemm::mins_at::<Of<B>>()));
                            _mm256_store_si256(to.cast(), line);
                        }
                    }
                }
            }
        }
    }
}

/// The sums of one packed group and each of `T` tokens.
///
/// # Safety
/// As for [`Tile::sums`] of [`Avx2<VNNI>`](Avx2), with one panel.
#[inline(always)]
unsafe fn panel_sums<F: Form, const VNNI: bool, const T: usize>(
    group: *const u8,
    x: Tokens,
    m: usize,
) -> [__m256i; T] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut sums = [_mm256_setzero_si256(); T];
        let vnni = const { VNNI && !F::STEPS };
        let raised_by_128 = F::SIGNED && !F::FLOATS;
        let times = match raised_by_128 {
            _ if F::STEPS => 0,
            true => vnni as usize,
            false => by_8::<F, VNNI>(),
        };
        for t in 0..T {
            for _ in 0..times {
                let mut correction = splat(x.byte(t, std::mem::offset_of!(Chunk, by_8) + 4 * m));
                if raised_by_128 {
                    correction = _mm256_slli_epi32::<{ Chunk::BY_128 }>(correction);
                }
                sums[t] = _mm256_add_epi32(sums[t], correction);
            }
        }
        let steps = group.add(ROWS * GROUP + ROWS * size_of::<f32>());
        for first in (0..STEPS).step_by(F::RUN) {
            // Sums of a run, in 16 bits.
            let mut short = [_mm256_setzero_si256(); T];
            for step in first..first + F::RUN {
                let weights = _mm256_load_si256(group.add(32 * step).cast());
                let half = step / (STEPS / 2) * SECOND_HALF;
                let at = first_half(m) + half + step % (STEPS / 2) * 4;
                for t in 0..T {
                    let x = splat(x.byte(t, at));
                    if vnni {
                        sums[t] = _mm256_dpbusd_avx_epi32(sums[t], weights, x);
                    } else {
                        short[t] = _mm256_add_epi16(short[t], pairs::<F>(weights, x));
                    }
                }
            }
            if !vnni {
                // Twice the step in each four bytes.
                let by = match F::STEPS {
                    true => load(steps.add(first / (STEPS / 2) * 4 * ROWS)),
                    false => _mm256_set1_epi16(1),
                };
                for t in 0..T {
                    sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(short[t], by));
                }
            }
        }
        sums
    }
}

/// Four bytes in every lane.
///
/// # Safety
/// The CPU has AVX2, and `from` is valid for reads of 4 bytes; it need not be aligned.
#[inline(always)]
unsafe fn splat(from: *const u8) -> __m256i {
    // SAFETY: the caller guarantees 4 readable bytes.
    unsafe { _mm256_set1_epi32(from.cast::<i32>().read_unaligned()) }
}

/// What the nibbles of rows stand for, each in a byte.
///
/// # Safety
/// The CPU has AVX2; `rows` and `panel` are as for [`Tile::pack`], in nibbles.
#[inline(always)]
unsafe fn pack_nibbles<F: Form, const VNNI: bool>(rows: &[Row<'_>], panel: Panel) {
    const GROUP_BYTES: usize = DType::Q4.quants_bytes(GROUP);
    let groups = rows[0].len().div_ceil(GROUP);
    // SAFETY: only existing groups are read and stored; the caller guarantees AVX2.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        for first in (0..groups).step_by(2) {
            let mut lines = [_mm256_setzero_si256(); ROWS];
            for r in 0..ROWS {
                let from = rows[r].quants().as_ptr().add(first * GROUP_BYTES);
                lines[r] = if first + 1 < groups {
                    load(from)
                } else {
                    _mm256_zextsi128_si256(load_16(from))
                };
            }
            let columns = transpose(lines);
            for (g, columns) in (first..groups).zip(columns.chunks_exact(STEPS / 2)) {
                let to = panel.group(g);
                for (step, &bytes) in columns.iter().enumerate() {
                    let low = numbers::<F, VNNI>(_mm256_and_si256(bytes, mask));
                    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
                    let high = numbers::<F, VNNI>(high);
                    _mm256_store_si256(to.add(32 * step).cast(), low);
                    _mm256_store_si256(to.add(32 * (step + STEPS / 2)).cast(), high);
                }
            }
        }
    }
}

/// The bytes of q8 rows, raised by 128 if `VNNI`.
///
/// # Safety
/// The CPU has AVX2; `rows` and `panel` are as for [`Tile::pack`], in q8.
#[inline(always)]
unsafe fn pack_q8<const VNNI: bool>(rows: &[Row<'_>], panel: Panel) {
    // SAFETY: as in `pack_nibbles`.
    unsafe {
        let flip = _mm256_set1_epi8(if VNNI { i8::MIN } else { 0 });
        for g in 0..rows[0].len().div_ceil(GROUP) {
            let mut lines = [_mm256_setzero_si256(); ROWS];
            for r in 0..ROWS {
                lines[r] = load(rows[r].quants().as_ptr().add(g * GROUP));
            }
            let columns = transpose(lines);
            let to = panel.group(g);
            for (step, &bytes) in columns.iter().enumerate() {
                _mm256_store_si256(to.add(32 * step).cast(), _mm256_xor_si256(bytes, flip));
            }
        }
    }
}

/// The scales of rows without minimums, as f32.
///
/// # Safety
/// The CPU has AVX2; `rows` and `panel` are as for [`Tile::pack`].
#[inline(always)]
unsafe fn pack_scales<F: Form, const VNNI: bool>(rows: &[Row<'_>], panel: Panel) {
    let groups = rows[0].len().div_ceil(GROUP);
    for first in (0..groups).step_by(CHUNK_GROUPS) {
        let count = CHUNK_GROUPS.min(groups - first);
        // SAFETY: every row has the scales of these groups; the rest as in `pack_nibbles`.
        unsafe {
            let mut halves = [[_mm256_setzero_si256(); ROWS]; 2];
            for (r, row) in rows.iter().enumerate() {
                let from = row
                    .scales()
                    .as_ptr()
                    .add(F::DTYPE.scales_bytes(first * GROUP));
                let scales = scales_of::<Avx2<VNNI>, F>(from, count);
                for half in 0..2 {
                    halves[half][r] = _mm256_castps_si256(scales[half]);
                }
            }
            for (half, lines) in halves.into_iter().enumerate() {
                let these = ROWS.min(count.saturating_sub(ROWS * half));
                for (i, &line) in transpose(lines)[..these].iter().enumerate() {
                    let to = panel.group(first + ROWS * half + i).add(ROWS * GROUP);
                    _mm256_store_si256(to.cast(), line);
                }
            }
        }
    }
}

/// The scales and minimums of q4k rows.
///
/// # Safety
/// The CPU has AVX2; `rows` and `panel` are as for [`Tile::pack`], in q4k.
#[inline(always)]
unsafe fn pack_factors<const VNNI: bool>(rows: &[Row<'_>], panel: Panel) {
    let groups = rows[0].len().div_ceil(GROUP);
    for first in (0..groups).step_by(CHUNK_GROUPS) {
        let count = CHUNK_GROUPS.min(groups - first);
        // SAFETY: every row has the super-blocks of these groups; the rest as in `pack_nibbles`.
        unsafe {
            // [scales, minimums][first eight groups, the others][row]
            let mut lines = [[[_mm256_setzero_si256(); ROWS]; 2]; 2];
            for (r, row) in rows.iter().enumerate() {
                let from = row
                    .scales()
                    .as_ptr()
                    .add(DType::Q4k.scales_bytes(first * GROUP));
                let factors = factors::<Avx2<VNNI>>(from, count);
                for part in 0..2 {
                    for half in 0..2 {
                        lines[part][half][r] = _mm256_castps_si256(factors[part][half]);
                    }
                }
            }
            for (part, halves) in lines.into_iter().enumerate() {
                for (half, lines) in halves.into_iter().enumerate() {
                    let these = ROWS.min(count.saturating_sub(ROWS * half));
                    for (i, &line) in transpose(lines)[..these].iter().enumerate() {
                        let group = panel.group(first + ROWS * half + i);
                        let to = group.add(ROWS * GROUP + part * 4 * ROWS);
                        _mm256_store_si256(to.cast(), line);
                    }
                }
            }
        }
    }
}

/// Dword `c` of line `r` becomes dword `r` of line `c`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn transpose(lines: [__m256i; ROWS]) -> [__m256i; ROWS] {
    // SAFETY: the caller guarantees AVX2.
    unsafe {
        let [a, b, c, d, e, f, g, h] = lines;
        let pairs = [
            _mm256_unpacklo_epi32(a, b),
            _mm256_unpackhi_epi32(a, b),
            _mm256_unpacklo_epi32(c, d),
            _mm256_unpackhi_epi32(c, d),
            _mm256_unpacklo_epi32(e, f),
            _mm256_unpackhi_epi32(e, f),
            _mm256_unpacklo_epi32(g, h),
            _mm256_unpackhi_epi32(g, h),
        ];
        // Column k and k + 4 of four rows, one in each half.
        let fours = [
            _mm256_unpacklo_epi64(pairs[0], pairs[2]),
            _mm256_unpackhi_epi64(pairs[0], pairs[2]),
            _mm256_unpacklo_epi64(pairs[1], pairs[3]),
            _mm256_unpackhi_epi64(pairs[1], pairs[3]),
            _mm256_unpacklo_epi64(pairs[4], pairs[6]),
            _mm256_unpackhi_epi64(pairs[4], pairs[6]),
            _mm256_unpacklo_epi64(pairs[5], pairs[7]),
            _mm256_unpackhi_epi64(pairs[5], pairs[7]),
        ];
        let mut columns = lines;
        for c in 0..ROWS / 2 {
            let (upper, lower) = (fours[c], fours[4 + c]);
            columns[c] = _mm256_permute2x128_si256::<0x20>(upper, lower);
            columns[4 + c] = _mm256_permute2x128_si256::<0x31>(upper, lower);
        }
        columns
    }
}
