//! Matrix products with AVX-512 VNNI: sixteen rows per panel, four elements of each row
//! per register.

use std::arch::x86_64::*;

use super::{
    avx512::{Avx512, load, numbers},
    avx512_few,
    dot::{self, factors, scales_of},
    form::Form,
    gemm::{Panel, Step, Tile},
};
use crate::{
    ActivationsRef, Chunk, Row,
    activations::{CHUNK_GROUPS, SECOND_HALF, first_half},
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
            if F::CENTRED || F::FLOATS || !F::NIBBLES {
                for t in 0..T {
                    let mut start = splat(x.byte(t, correction + 4 * m));
                    if F::FLOATS {
                        start = _mm512_add_epi32(start, start);
                    }
                    if !F::NIBBLES {
                        start = _mm512_slli_epi32::<{ Chunk::BY_128 as u32 }>(start);
                    }
                    for p in 0..P {
                        sums[p][t] = start;
                    }
                }
            }
            for step in 0..STEPS {
                let mut weights = [_mm512_setzero_si512(); P];
                for p in 0..P {
                    weights[p] = _mm512_load_si512(group.add(p * apart + 64 * step).cast());
                }
                let half = step / (STEPS / 2) * SECOND_HALF;
                let at = first_half(m) + half + step % (STEPS / 2) * 4;
                for t in 0..T {
                    let x = splat(x.byte(t, at));
                    for p in 0..P {
                        sums[p][t] = _mm512_dpbusd_epi32(sums[p][t], weights[p], x);
                    }
                }
            }
            sums
        }
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
