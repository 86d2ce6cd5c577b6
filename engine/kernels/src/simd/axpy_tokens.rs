//! Sums of scaled rows for many tokens, `yₜ += Σ aᵢₜ · rowᵢ`: the down direction of
//! prefill.
//!
//! Rows are decoded once, a block of columns at a time, into memory of the first-level
//! cache; then each token passes over those that it has a factor for, with its sums in
//! registers. Every element takes its products in the order of the rows, as in
//! [`axpy_rows`](super::axpy).

use super::{
    axpy::{BF16, F16, F32, GROUPS, LINE, Q4, Q8, Stored, last_group, prefetch, scales},
    lanes::Lanes,
};
use crate::{
    dtype::{DType, GROUP},
    row::Row,
};

/// Rows that are decoded together.
const ROWS: usize = 64;

/// Tokens that share decoded rows.
const TOKENS: usize = 64;

/// What each token takes from at most [`ROWS`] rows.
struct Plan {
    /// Rows with a factor other than zero, and how many of them there are.
    rows: [[u8; ROWS]; TOKENS],
    factors: [[f32; ROWS]; TOKENS],
    counts: [usize; TOKENS],
}

impl Plan {
    const EMPTY: Plan = Plan {
        rows: [[0; ROWS]; TOKENS],
        factors: [[0.0; ROWS]; TOKENS],
        counts: [0; TOKENS],
    };

    /// For `tokens` tokens from `first` on; `factors` is `rows × all`.
    fn fill(&mut self, factors: &[f32], all: usize, first: usize, tokens: usize) {
        self.counts = [0; TOKENS];
        for (i, factors) in (0u8..).zip(factors.chunks_exact(all)) {
            for (t, &a) in factors[first..first + tokens].iter().enumerate() {
                // Without a branch: which factors are zero cannot be foreseen.
                let count = self.counts[t];
                self.rows[t][count] = i;
                self.factors[t][count] = a;
                self.counts[t] = count + usize::from(a != 0.0);
            }
        }
    }
}

/// Row `t` of `ys` becomes what [`axpy_rows`](super::axpy) makes of it with the factors
/// `factors[i * tokens + t]`, those that are zero left out together with their rows.
///
/// # Safety
/// The CPU has the instruction set of `L`; `factors` is `rows × tokens`, `ys` is
/// `tokens × n`, and all rows have the same format and length `n`.
#[inline(always)]
pub(super) unsafe fn axpy_rows_tokens<L: Lanes, const G: usize>(
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    ys: &mut [f32],
) {
    let Some(first) = rows.first() else {
        return;
    };
    // SAFETY: passed on from the caller.
    unsafe {
        match first.dtype() {
            DType::F32 => all_rows::<L, F32, G>(factors, rows, tokens, ys),
            DType::F16 => all_rows::<L, F16, G>(factors, rows, tokens, ys),
            DType::BF16 => all_rows::<L, BF16, G>(factors, rows, tokens, ys),
            DType::Q8 => all_rows::<L, Q8, G>(factors, rows, tokens, ys),
            DType::Q4 => all_rows::<L, Q4, G>(factors, rows, tokens, ys),
        }
    }
}

#[inline(always)]
unsafe fn all_rows<L: Lanes, S: Stored, const G: usize>(
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    ys: &mut [f32],
) {
    let n = rows[0].len();
    if n == 0 || tokens == 0 {
        return;
    }
    let mut plan = Plan::EMPTY;
    for (factors, rows) in factors.chunks(ROWS * tokens).zip(rows.chunks(ROWS)) {
        for (span, ys) in ys.chunks_mut(TOKENS * n).enumerate() {
            plan.fill(factors, tokens, span * TOKENS, ys.len() / n);
            // SAFETY: the plan names rows of `rows` only, for the tokens of `ys`; the
            // caller guarantees the instruction set.
            unsafe { some_rows::<L, S, G>(&plan, rows, ys, n) }
        }
    }
}

/// Adds at most [`ROWS`] rows to at most [`TOKENS`] tokens.
#[inline(always)]
unsafe fn some_rows<L: Lanes, S: Stored, const G: usize>(
    plan: &Plan,
    rows: &[Row<'_>],
    ys: &mut [f32],
    n: usize,
) {
    let groups = n / GROUP;
    let mut first = 0;
    while first < groups {
        let count = GROUPS.min(groups - first);
        let mut row_scales = [[1.0f32; GROUPS]; ROWS];
        // SAFETY: groups `first..first + count` of all rows and tokens are full; the
        // caller guarantees the instruction set.
        unsafe {
            if S::SCALED {
                for (scale, row) in row_scales.iter_mut().zip(rows) {
                    *scale = scales::<L>(*row, first, count);
                }
            }
            let mut k = 0;
            while k + G <= count {
                block::<L, S, G>(plan, rows, &row_scales, first, k, ys, n);
                k += G;
            }
            while k < count {
                block::<L, S, 1>(plan, rows, &row_scales, first, k, ys, n);
                k += 1;
            }
        }
        first += count;
    }
    if !n.is_multiple_of(GROUP) {
        for (t, y) in ys.chunks_exact_mut(n).enumerate() {
            let used = &plan.rows[t][..plan.counts[t]];
            for (&i, &a) in used.iter().zip(&plan.factors[t]) {
                // SAFETY: as above; `y` ends with an incomplete group.
                unsafe { last_group::<L, S>(a, rows[usize::from(i)], &mut y[groups * GROUP..]) }
            }
        }
    }
}

/// Adds the rows to the `G` groups from `first + k` on of all tokens.
#[inline(always)]
unsafe fn block<L: Lanes, S: Stored, const G: usize>(
    plan: &Plan,
    rows: &[Row<'_>],
    scales: &[[f32; GROUPS]; ROWS],
    first: usize,
    k: usize,
    ys: &mut [f32],
    n: usize,
) {
    let group = first + k;
    let mut weights = [[[0.0f32; GROUP]; G]; ROWS];
    for (weights, row) in weights.iter_mut().zip(rows) {
        let from = row.quants().as_ptr().wrapping_add(group * S::BYTES);
        for at in (0..G * S::BYTES).step_by(LINE) {
            prefetch(from.wrapping_add(G * S::BYTES + at));
        }
        for (g, weights) in weights.iter_mut().enumerate() {
            // SAFETY: the row has these groups, and `weights` takes one.
            unsafe {
                S::load::<L>(from.add(g * S::BYTES)).store_f32(weights.as_mut_ptr().cast());
            }
        }
    }
    let mut scaled = [[0.0f32; G]; ROWS];
    for (t, y) in ys.chunks_exact_mut(n).enumerate() {
        let count = plan.counts[t];
        let (used, factors) = (&plan.rows[t][..count], &plan.factors[t][..count]);
        if S::SCALED {
            // In a pass of its own: its results are read back one lane at a time.
            for ((scaled, &i), &a) in scaled.iter_mut().zip(used).zip(factors) {
                let scales = &scales[usize::from(i)][k..k + G];
                for (scaled, scale) in scaled.iter_mut().zip(scales) {
                    *scaled = a * scale;
                }
            }
        }
        // SAFETY: every row of the plan is one of `rows`, and `y` has these groups; the
        // caller guarantees the instruction set.
        unsafe {
            let y = y.as_mut_ptr().add(group * GROUP).cast::<u8>();
            let mut sums = [L::zero(); G];
            for (g, sum) in sums.iter_mut().enumerate() {
                *sum = L::load_f32(y.add(4 * GROUP * g));
            }
            for ((&i, &a), scaled) in used.iter().zip(factors).zip(&scaled) {
                let weights = weights.get_unchecked(usize::from(i));
                for ((sum, weights), &scaled) in sums.iter_mut().zip(weights).zip(scaled) {
                    let a = L::splat(if S::SCALED { scaled } else { a });
                    *sum = a.mul_add(L::load_f32(weights.as_ptr().cast()), *sum);
                }
            }
            for (g, sum) in sums.into_iter().enumerate() {
                sum.store_f32(y.add(4 * GROUP * g));
            }
        }
    }
}
