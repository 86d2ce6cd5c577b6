//! Sums of scaled q4 rows, four groups at a time: the Down columns of a token.
//!
//! One register holds the nibbles of four groups, so that nothing has to be spread before it is looked
//! up. The columns of a sum then stand in another order than in the row, which changes no bit, as each
//! has a sum of its own; they are put in order at the end.

use super::{
    lanes::Lanes,
    stored::{GROUPS, LINE, prefetch, scales},
};
use crate::{
    dtype::{DType, GROUP},
    row::Row,
};

/// Groups that are read together, and the columns and bytes of them.
const FOUR: usize = 4;
pub(super) const COLUMNS: usize = FOUR * GROUP;
const BYTES: usize = DType::Q4.quants_bytes(COLUMNS);

/// Rows that pass over a block of columns together: the blocks of these and of the next ones stay in
/// the first-level cache, and are enough bytes to keep the memory busy.
const ROWS: usize = 16;

/// `y[j] = Σ fma(factors[i] * scale, q, …)` over the rows `i` in order, where row `i` holds `scale ·
/// q` at `j`.
///
/// # Safety
/// The CPU has the instruction set of `L`; there are as many factors as rows, all rows are q4 and have
/// the length of `y`, a multiple of [`COLUMNS`].
#[inline(always)]
pub(super) unsafe fn sum_rows<L: Lanes>(factors: &[f32], rows: &[Row<'_>], y: &mut [f32]) {
    for row in rows.iter().take(ROWS) {
        let lines = (0..BYTES * GROUPS / FOUR).step_by(LINE);
        lines.for_each(|at| prefetch(row.quants().as_ptr().wrapping_add(at)));
    }
    let mut done = 0;
    while done < rows.len() {
        let end = rows.len().min(done + ROWS);
        let (factors, here, next) = (&factors[done..end], &rows[done..end], &rows[end..]);
        for (block, y) in y.chunks_mut(GROUPS * GROUP).enumerate() {
            let last = (block + 1) * GROUPS * GROUP >= here[0].len();
            let ahead = match last {
                true => Ahead {
                    rows: next,
                    block: 0,
                },
                false => Ahead {
                    rows: here,
                    block: block + 1,
                },
            };
            // SAFETY: the rows have these groups; the caller guarantees the rest.
            unsafe { add_block::<L>(factors, here, ahead, block, done == 0, y) }
        }
        done = end;
    }
    for y in y.chunks_exact_mut(COLUMNS) {
        // SAFETY: a chunk has four groups; the caller guarantees the instruction set.
        unsafe { store(y.as_mut_ptr(), L::in_order(load::<L>(y.as_ptr()))) }
    }
}

/// What is read after a block: the same block of some rows.
#[derive(Clone, Copy)]
struct Ahead<'a> {
    rows: &'a [Row<'a>],
    block: usize,
}

/// Adds up to [`ROWS`] rows to `y`, their groups from the `block`-th [`GROUPS`] on, or starts with
/// them if they are the `first` ones. Prefetches what comes `then`.
///
/// # Safety
/// As for [`sum_rows`]; `y` is at most [`GROUPS`] groups long, which the rows have. What comes `then` is
/// not read.
#[inline(always)]
unsafe fn add_block<L: Lanes>(
    factors: &[f32],
    rows: &[Row<'_>],
    then: Ahead<'_>,
    block: usize,
    first: bool,
    y: &mut [f32],
) {
    let mut scaled = [[0.0f32; GROUPS]; ROWS];
    let mut ahead = [std::ptr::null(); ROWS];
    let group = block * GROUPS;
    let rows = &rows[..rows.len().min(ROWS)];
    for (i, (&a, row)) in factors.iter().zip(rows).enumerate() {
        if let Some(row) = then.rows.get(i) {
            prefetch(row.scales().as_ptr().wrapping_add(2 * then.block * GROUPS));
            let from = row.quants().as_ptr();
            ahead[i] = from.wrapping_add(then.block * BYTES * GROUPS / FOUR);
        }
        // SAFETY: the row has these groups; the caller guarantees the instruction set.
        scaled[i] = unsafe { scales::<L>(*row, group, y.len() / GROUP) }.map(|scale| a * scale);
    }
    for (four, y) in y.chunks_exact_mut(COLUMNS).enumerate() {
        // SAFETY: these four groups of all rows are full, and of `y`; `scaled` has sixteen factors for
        // each row, four for each turn. The caller guarantees the instruction set.
        unsafe {
            let mut sums = match first {
                true => [L::zero(); FOUR],
                false => load(y.as_ptr()),
            };
            for ((row, scaled), ahead) in rows.iter().zip(&scaled).zip(&ahead) {
                prefetch(ahead.wrapping_add(four * BYTES));
                let at = DType::Q4.quants_bytes(group * GROUP) + four * BYTES;
                let factors = L::of_four(scaled, FOUR * four);
                let weights = L::load_four_q4(row.quants().as_ptr().add(at));
                for g in 0..FOUR {
                    sums[g] = factors[g].mul_add(weights[g], sums[g]);
                }
            }
            store(y.as_mut_ptr(), sums);
        }
    }
}

/// The sums of four groups.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `from` is valid for reads of [`COLUMNS`] values.
#[inline(always)]
unsafe fn load<L: Lanes>(from: *const f32) -> [L; FOUR] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut sums = [L::zero(); FOUR];
        for (g, sum) in sums.iter_mut().enumerate() {
            *sum = L::load_f32(from.wrapping_add(g * GROUP).cast());
        }
        sums
    }
}

/// Writes the sums of four groups.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `to` is valid for writes of [`COLUMNS`] values.
#[inline(always)]
unsafe fn store<L: Lanes>(to: *mut f32, sums: [L; FOUR]) {
    for (g, sum) in sums.into_iter().enumerate() {
        // SAFETY: passed on from the caller.
        unsafe { sum.store_f32(to.wrapping_add(g * GROUP).cast()) }
    }
}
