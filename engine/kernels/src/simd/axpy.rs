//! Sums of scaled rows, `y += Σ aᵢ · rowᵢ`: the down projection of a sparse FFN.
//!
//! A block of columns stays in registers while all rows are added to it, so `y` is read and written
//! once for many rows instead of once per row. Every element adds its products in the order of the
//! rows, so splitting the rows into several calls changes no bit.

use super::{
    axpy_q4,
    lanes::Lanes,
    stored::{
        BF16, F16, F32, GROUPS, LINE, Mxfp4, Q4, Q4c, Q4k, Q8, Q8c, Stored, factors_of, last_group,
        prefetch, scales,
    },
};
use crate::{
    channel::{Outliers, scale_of},
    dtype::{DType, GROUP},
    row::Row,
};

/// Maximum rows added to a block of columns before the next block.
const ROWS: usize = 16;

/// The entry points of one instruction set. In its registers fit the sums of `$groups`
/// groups beside weights that are being decoded, of `$token_groups` beside decoded ones, or
/// two registers of sums for each of `$tile` tokens.
macro_rules! entry_points {
    ([$($feature:tt)*] $lanes:ty, $groups:literal, $token_groups:literal, $tile:literal) => {
        use crate::{Row, simd::axpy_tokens};

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn axpy_rows(factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
            // SAFETY: the features are enabled here; the dispatcher checked the rows.
            unsafe { super::axpy_rows::<$lanes, $groups, false>(factors, rows, y) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn sum_rows(factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
            // SAFETY: as above.
            unsafe { super::axpy_rows::<$lanes, $groups, true>(factors, rows, y) }
        }

        $(#[target_feature(enable = $feature)])*
        pub(in crate::simd) fn axpy_rows_tokens(
            factors: &[f32],
            rows: &[Row<'_>],
            tokens: usize,
            new: bool,
            ys: &mut [f32],
            scratch: &mut axpy_tokens::Scratch,
        ) {
            // SAFETY: as above.
            unsafe {
                axpy_tokens::axpy_rows_tokens::<$lanes, $token_groups, $tile>(
                    factors, rows, tokens, new, ys, scratch,
                )
            }
        }
    };
}

// avx2: 8 sums, 4 weights and 1 factor of the 16 registers; avx512: 16 sums, 2 weights and 1
// factor of the 32; neon: 16 sums, 8 weights and 1 factor.
super::per_instruction_set!(entry_points, portable: 1, 1, 2; avx2: 2, 2, 6; avx512: 8, 4, 12; neon: 2, 2, 12);

/// `y[j] = fma(factors[i] * scale, q, y[j])` for every row `i` in order, where row `i` holds `scale
/// · q` at `j`. With `NEW`, starts from zero and
/// ignores the contents of `y`.
///
/// # Safety
/// The CPU has the instruction set of `L`; there are as many factors as rows, and all rows
/// have the same format and the length of `y`.
#[inline(always)]
unsafe fn axpy_rows<L: Lanes, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    y: &mut [f32],
) {
    let Some(first) = rows.first() else {
        if NEW {
            y.fill(0.0);
        }
        return;
    };
    // SAFETY: passed on from the caller.
    unsafe {
        match first.dtype() {
            DType::F32 => axpy_rows_as::<L, F32, G, NEW>(factors, rows, y),
            DType::F16 => axpy_rows_as::<L, F16, G, NEW>(factors, rows, y),
            DType::BF16 => axpy_rows_as::<L, BF16, G, NEW>(factors, rows, y),
            DType::Q8 => axpy_rows_as::<L, Q8, G, NEW>(factors, rows, y),
            DType::Q4 if NEW && L::FOUR && y.len().is_multiple_of(axpy_q4::COLUMNS) => {
                axpy_q4::sum_rows::<L>(factors, rows, y);
            }
            DType::Q4 => axpy_rows_as::<L, Q4, G, NEW>(factors, rows, y),
            DType::Q4k => axpy_rows_as::<L, Q4k, G, NEW>(factors, rows, y),
            DType::Q8c => axpy_rows_as::<L, Q8c, G, NEW>(factors, rows, y),
            DType::Q4c => axpy_decoded::<L, G, NEW>(factors, rows, y),
            DType::Mxfp4 => axpy_rows_as::<L, Mxfp4, G, NEW>(factors, rows, y),
            DType::Block(_) => unreachable!("checked by the dispatcher"),
        }
    }
}

/// Rows that are decoded together, 16 KiB of them.
const DECODED_ROWS: usize = 8;
const DECODED: usize = GROUPS * GROUP;

/// [`axpy_rows`] of rows with outliers: of some rows a block of columns is decoded and added, then that
/// of the next ones.
///
/// # Safety
/// As for [`axpy_rows`].
#[inline(always)]
unsafe fn axpy_decoded<L: Lanes, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    y: &mut [f32],
) {
    let mut decoded = [[0.0f32; DECODED]; DECODED_ROWS];
    for (block, y) in y.chunks_mut(DECODED).enumerate() {
        let some = factors.chunks(DECODED_ROWS).zip(rows.chunks(DECODED_ROWS));
        for (part, (factors, rows)) in some.enumerate() {
            for (decoded, row) in decoded.iter_mut().zip(rows) {
                let weights = &mut decoded[..y.len()];
                // SAFETY: the rows have these columns; the caller guarantees the rest.
                unsafe { decode::<L>(*row, block * GROUPS, weights) }
            }
            let list: [Row<'_>; DECODED_ROWS] =
                std::array::from_fn(|i| Row::f32(&decoded[i][..y.len()]));
            let list = &list[..rows.len()];
            // SAFETY: as above.
            unsafe {
                match NEW && part == 0 {
                    true => axpy_rows_as::<L, F32, G, true>(factors, list, y),
                    false => axpy_rows_as::<L, F32, G, false>(factors, list, y),
                }
            }
        }
    }
}

/// The elements of a q4c row from a group on.
///
/// # Safety
/// The CPU has the instruction set of `L`, and the row has these elements.
#[inline(always)]
unsafe fn decode<L: Lanes>(row: Row<'_>, first: usize, weights: &mut [f32]) {
    let scale = scale_of(row);
    let quants = row.quants().as_ptr();
    for (g, weights) in weights.chunks_mut(GROUP).enumerate() {
        let mut group = [0.0f32; GROUP];
        // SAFETY: the row has this group, whole as it is stored; the caller guarantees the rest.
        unsafe {
            let lanes = Q4c::load::<L>(quants.add((first + g) * Q4c::BYTES), scale, 0.0);
            lanes.store_f32(group.as_mut_ptr().cast());
        }
        weights.copy_from_slice(&group[..weights.len()]);
    }
    Outliers::of(row).patch(first * GROUP, weights);
}

/// [`axpy_rows`] of rows in the format `S`.
///
/// # Safety
/// As for [`axpy_rows`].
#[inline(always)]
unsafe fn axpy_rows_as<L: Lanes, S: Stored, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    y: &mut [f32],
) {
    let groups = y.len() / GROUP;
    for row in rows.iter().take(S::ROWS) {
        let (from, bytes) = (row.quants().as_ptr(), GROUPS * S::BYTES);
        (0..bytes)
            .step_by(LINE)
            .for_each(|at| prefetch(from.wrapping_add(at)));
    }
    let mut done = 0;
    while done < rows.len() {
        let end = rows.len().min(done + S::ROWS);
        let (factors, here, next) = (&factors[done..end], &rows[done..end], &rows[end..]);
        let mut group = 0;
        while group < groups {
            let count = GROUPS.min(groups - group);
            // SAFETY: groups `group..group + count` of all rows and of `y` are full; the
            // caller guarantees the rest.
            unsafe {
                if NEW && done == 0 {
                    block::<L, S, G, true>(factors, here, next, group, count, y);
                } else {
                    block::<L, S, G, false>(factors, here, next, group, count, y);
                }
            }
            group += count;
        }
        if !y.len().is_multiple_of(GROUP) {
            if NEW && done == 0 {
                y[groups * GROUP..].fill(0.0);
            }
            for (&a, row) in factors.iter().zip(here) {
                // SAFETY: as above.
                unsafe { last_group::<L, S>(a, *row, &mut y[groups * GROUP..]) }
            }
        }
        done = end;
    }
}

/// Adds at most [`ROWS`] rows to `count <= GROUPS` groups of `y`, and prefetches what follows: the
/// same rows further on, or the starts of the rows in `next`.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `count <= GROUPS`. The rows have the format
/// `S`, and the groups `first..first + count` of each of them and of `y` are full. `next` is
/// not read.
#[inline(always)]
unsafe fn block<L: Lanes, S: Stored, const G: usize, const NEW: bool>(
    factors: &[f32],
    rows: &[Row<'_>],
    next: &[Row<'_>],
    first: usize,
    count: usize,
    y: &mut [f32],
) {
    let mut scaled = [[0.0f32; GROUPS]; ROWS];
    // scales and minimums that elements are loaded with
    let mut loaded = [([0.0f32; GROUPS], [0.0f32; GROUPS]); ROWS];
    let mut ahead = [std::ptr::null(); ROWS];
    let end = first + count;
    for (i, (&a, row)) in factors.iter().zip(rows).enumerate() {
        let (row_ahead, group) = if end < y.len() / GROUP {
            (*row, end)
        } else {
            (*next.get(i).unwrap_or(row), 0)
        };
        ahead[i] = row_ahead.quants().as_ptr().wrapping_add(group * S::BYTES);
        scaled[i] = if S::SCALED {
            prefetch(row_ahead.scales().as_ptr().wrapping_add(2 * group));
            // SAFETY: the row has the scales of these groups; the caller guarantees the
            // instruction set.
            unsafe { scales::<L>(*row, first, count) }.map(|scale| a * scale)
        } else {
            [a; GROUPS]
        };
        if S::MINS {
            prefetch(row_ahead.scales().as_ptr().wrapping_add(2 * group));
            // SAFETY: as above.
            loaded[i] = unsafe { factors_of::<L>(*row, first, count) };
        }
    }
    let mut k = 0;
    // SAFETY: all rows and `y` have the groups `first..first + count`.
    unsafe {
        while k + G <= count {
            tile::<L, S, G, NEW>(&scaled, &loaded, rows, &ahead, first, k, y);
            k += G;
        }
        while k < count {
            tile::<L, S, 1, NEW>(&scaled, &loaded, rows, &ahead, first, k, y);
            k += 1;
        }
    }
}

/// Adds the rows to the `G` groups of `y` from `first + k` on.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `k + G <= GROUPS`. The rows have the format
/// `S`, and these groups of each of them and of `y` are full. `ahead` may be anything.
#[inline(always)]
unsafe fn tile<L: Lanes, S: Stored, const G: usize, const NEW: bool>(
    scaled: &[[f32; GROUPS]; ROWS],
    loaded: &[([f32; GROUPS], [f32; GROUPS]); ROWS],
    rows: &[Row<'_>],
    ahead: &[*const u8; ROWS],
    first: usize,
    k: usize,
    y: &mut [f32],
) {
    let group = first + k;
    // SAFETY: the caller guarantees the instruction set and these groups, and
    // `k + G <= GROUPS`.
    unsafe {
        let y = y.as_mut_ptr().add(group * GROUP).cast::<u8>();
        let mut sums = [L::zero(); G];
        if !NEW {
            for (g, sum) in sums.iter_mut().enumerate() {
                *sum = L::load_f32(y.add(4 * GROUP * g));
            }
        }
        let factors = scaled.iter().zip(loaded);
        for (((scaled, loaded), row), ahead) in factors.zip(rows).zip(ahead) {
            // A few at a time: a burst of prefetches would stall the additions behind it.
            for at in (0..G * S::BYTES).step_by(LINE) {
                prefetch(ahead.wrapping_add(k * S::BYTES + at));
            }
            let from = row.quants().as_ptr().add(group * S::BYTES);
            for (g, sum) in sums.iter_mut().enumerate() {
                let a = L::splat(*scaled.get_unchecked(k + g));
                let (scales, mins) = loaded;
                let (scale, min) = (*scales.get_unchecked(k + g), *mins.get_unchecked(k + g));
                *sum = a.mul_add(S::load::<L>(from.add(g * S::BYTES), scale, min), *sum);
            }
        }
        for (g, sum) in sums.into_iter().enumerate() {
            sum.store_f32(y.add(4 * GROUP * g));
        }
    }
}
