//! Sums of scaled rows for many tokens, `yₜ += Σ aᵢₜ · rowᵢ`: the down projection of prefill.
//!
//! Rows are decoded once, a block of columns at a time, into the L1 cache. Then each token adds
//! those it has a nonzero factor for, with its accumulators in registers. If no factor is zero,
//! tiles of several tokens share each loaded weight instead. A few tokens without zero factors do not
//! come here: each adds the rows as one token does, see `few` in `simd/mod.rs`. Every element adds its products in the
//! order of the rows, as in [`axpy_rows`](super::axpy).

use std::cell::RefCell;

use super::{
    lanes::{Lanes, Register},
    stored::{
        BF16, F16, F32, GROUPS, LINE, Mxfp4, Q4, Q4c, Q4k, Q8, Q8c, Stored, factors_of, last_group,
        prefetch,
    },
    strided::Strided,
};
use crate::{
    channel::Outliers,
    dtype::{DType, GROUP},
    row::Row,
};

/// Rows decoded together.
const ROWS: usize = 64;

/// Tokens that share decoded rows.
const TOKENS: usize = 64;

/// Groups of each row decoded together: 32 KiB in all.
const DECODED: usize = 4;

/// Working memory of one call. Aligned so that no register of decoded weights spans two cache
/// lines.
#[repr(align(64))]
pub(super) struct Scratch {
    /// Decoded groups, `rows × groups × 32`.
    weights: [f32; ROWS * DECODED * GROUP],
    /// Factors times scales: of one token `rows × groups`, or of a tile `rows × tokens`.
    scaled: [f32; ROWS * TOKENS],
    scales: [[f32; GROUPS]; ROWS],
    mins: [[f32; GROUPS]; ROWS],
    taken: Taken,
}

thread_local! {
    /// Too large to zero on every call.
    pub(super) static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch {
        weights: [0.0; ROWS * DECODED * GROUP],
        scaled: [0.0; ROWS * TOKENS],
        scales: [[0.0; GROUPS]; ROWS],
        mins: [[0.0; GROUPS]; ROWS],
        taken: Taken {
            rows: [[0; ROWS]; TOKENS],
            factors: [[0.0; ROWS]; TOKENS],
            counts: [0; TOKENS],
        },
    }) };
}

/// The rows each token uses, out of at most [`ROWS`].
struct Taken {
    /// Rows with a nonzero factor, and their number.
    rows: [[u8; ROWS]; TOKENS],
    factors: [[f32; ROWS]; TOKENS],
    counts: [usize; TOKENS],
}

impl Taken {
    /// Collects the rows of a part's tokens.
    fn fill(&mut self, part: Part<'_>) {
        for t in 0..part.tokens {
            let (rows, factors) = (&mut self.rows[t], &mut self.factors[t]);
            let mut count = 0;
            for (i, factors_of_row) in (0u8..).zip(part.factors.chunks(part.stride)) {
                // Branch-free: zero factors are unpredictable.
                let a = factors_of_row[t];
                rows[count % ROWS] = i;
                factors[count % ROWS] = a;
                count += usize::from(a != 0.0);
            }
            self.counts[t] = count;
        }
    }
}

/// At most [`ROWS`] rows times at most [`TOKENS`] tokens.
#[derive(Clone, Copy)]
struct Part<'a> {
    rows: &'a [Row<'a>],
    /// Factors of the first row from the first token on; those of each next row follow `stride`
    /// elements later.
    factors: &'a [f32],
    stride: usize,
    tokens: usize,
    /// Sums begin from zero instead of what is there.
    new: bool,
}

impl<'a> Part<'a> {
    /// The factors of each row.
    fn factors(self) -> impl Iterator<Item = &'a [f32]> {
        let rows = self.factors.chunks(self.stride);
        rows.map(move |row| &row[..self.tokens])
    }
}

/// Row `t` of `ys` becomes the result of [`axpy_rows`](super::axpy) with the factors `factors[i *
/// tokens + t]`, without the rows whose factor is zero; if `new`, as though it had been zero.
///
/// # Safety
/// The CPU has the instruction set of `L`; `factors` is `rows × tokens`, `ys` is
/// `tokens × n`, and all rows have the same format and length `n`.
#[inline(always)]
pub(super) unsafe fn axpy_rows_tokens<L: Lanes, const G: usize, const T: usize>(
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    new: bool,
    ys: &mut [f32],
    scratch: &mut Scratch,
) {
    let Some(first) = rows.first() else {
        return;
    };
    // SAFETY: passed on from the caller.
    unsafe {
        match first.dtype() {
            DType::F32 => all_rows::<L, F32, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::F16 => all_rows::<L, F16, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::BF16 => all_rows::<L, BF16, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Q8 => all_rows::<L, Q8, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Q4 => all_rows::<L, Q4, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Q4k => all_rows::<L, Q4k, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Q8c => all_rows::<L, Q8c, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Q4c => all_rows::<L, Q4c, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Mxfp4 => all_rows::<L, Mxfp4, G, T>(factors, rows, tokens, new, ys, scratch),
            DType::Block(_) => unreachable!("checked by the dispatcher"),
        }
    }
}

/// [`axpy_rows_tokens`] of at least one row in the format `S`.
///
/// # Safety
/// As for [`axpy_rows_tokens`].
#[inline(always)]
unsafe fn all_rows<L: Lanes, S: Stored, const G: usize, const T: usize>(
    factors: &[f32],
    rows: &[Row<'_>],
    tokens: usize,
    new: bool,
    ys: &mut [f32],
    scratch: &mut Scratch,
) {
    let n = rows[0].len();
    if n == 0 || tokens == 0 {
        return;
    }
    let parts = factors.chunks(ROWS * tokens).zip(rows.chunks(ROWS));
    for (number, (factors, rows)) in parts.enumerate() {
        for (span, ys) in ys.chunks_mut(TOKENS * n).enumerate() {
            let part = Part {
                rows,
                factors: &factors[span * TOKENS..],
                stride: tokens,
                tokens: ys.len() / n,
                new: new && number == 0,
            };
            let full = part.factors().all(|a| !a.contains(&0.0));
            if !full {
                scratch.taken.fill(part);
            }
            // SAFETY: `taken` names rows of `rows` only, for the tokens of `ys`; the
            // caller guarantees the instruction set.
            unsafe { some_rows::<L, S, G, T>(part, full, ys, scratch) }
        }
    }
}

/// Adds the rows of a part to its tokens: all to all if `full`, otherwise by the plan.
///
/// # Safety
/// The CPU has the instruction set of `L`. The part has at most [`ROWS`] rows, in the format
/// `S`, and from 1 to [`TOKENS`] tokens; `ys` is `tokens × n` for the length `n` of every
/// row; every row has a factor for each token. Unless `full`, the plan is that of the part.
#[inline(always)]
unsafe fn some_rows<L: Lanes, S: Stored, const G: usize, const T: usize>(
    part: Part<'_>,
    full: bool,
    ys: &mut [f32],
    scratch: &mut Scratch,
) {
    let n = ys.len() / part.tokens;
    let groups = n / GROUP;
    let mut first = 0;
    while first < groups {
        let count = GROUPS.min(groups - first);
        // SAFETY: groups `first..first + count` of all rows and tokens are full; the
        // caller guarantees the instruction set.
        unsafe {
            if S::SCALED || S::MINS {
                let of_rows = scratch.scales.iter_mut().zip(&mut scratch.mins);
                for ((scales, mins), row) in of_rows.zip(part.rows) {
                    (*scales, *mins) = factors_of::<L>(*row, first, count);
                }
            }
            let mut k = 0;
            while k < count {
                if full {
                    let width = DECODED.min(count - k);
                    decode::<L, S>(part.rows, first, k, width, scratch);
                    for slot in 0..width {
                        let at = Decoded {
                            group: first + k + slot,
                            scale: k + slot,
                            slot,
                            width,
                        };
                        tiles::<L, S, T>(part, at, ys, scratch);
                    }
                    k += width;
                } else if k + G <= count {
                    decode::<L, S>(part.rows, first, k, G, scratch);
                    each_token::<L, S, G>(part, first, k, ys, scratch);
                    k += G;
                } else {
                    decode::<L, S>(part.rows, first, k, 1, scratch);
                    each_token::<L, S, 1>(part, first, k, ys, scratch);
                    k += 1;
                }
            }
        }
        first += count;
    }
    if !n.is_multiple_of(GROUP) {
        if part.new {
            for y in ys.chunks_exact_mut(n) {
                y[groups * GROUP..].fill(0.0);
            }
        }
        for (row, factors) in part.rows.iter().zip(part.factors()) {
            for (y, &a) in ys.chunks_exact_mut(n).zip(factors) {
                if a != 0.0 {
                    // SAFETY: as above; the end of `y` is an incomplete group.
                    unsafe { last_group::<L, S>(a, *row, &mut y[groups * GROUP..]) }
                }
            }
        }
    }
}

/// Decodes `count <= DECODED` groups of each row, from `first + k` on, without scales that go to the
/// factors.
///
/// # Safety
/// The CPU has the instruction set of `L`. The rows have the format `S`, and these groups of
/// each of them are full; the scratch memory has their scales and minimums from `k` on, at most
/// [`GROUPS`] in all.
#[inline(always)]
unsafe fn decode<L: Lanes, S: Stored>(
    rows: &[Row<'_>],
    first: usize,
    k: usize,
    count: usize,
    scratch: &mut Scratch,
) {
    let factors = scratch.scales.iter().zip(&scratch.mins);
    let weights = scratch.weights.chunks_exact_mut(count * GROUP);
    for ((weights, (scales, mins)), row) in weights.zip(factors).zip(rows) {
        let from = row.quants().as_ptr().wrapping_add((first + k) * S::BYTES);
        for at in (0..count * S::BYTES).step_by(LINE) {
            prefetch(from.wrapping_add(count * S::BYTES + at));
        }
        for g in 0..count {
            // SAFETY: the row has these groups, and `weights` takes `count` of them; the
            // caller guarantees the instruction set and the factors.
            unsafe {
                let (scale, min) = (*scales.get_unchecked(k + g), *mins.get_unchecked(k + g));
                let lanes = S::load::<L>(from.add(g * S::BYTES), scale, min);
                lanes.store_f32(weights.as_mut_ptr().add(g * GROUP).cast());
            }
        }
        if S::OUTLIERS {
            Outliers::of(*row).patch((first + k) * GROUP, weights);
        }
    }
}

/// Adds decoded rows to the `G` groups from `first + k` on of every token, each with its own
/// selection of rows.
///
/// # Safety
/// The CPU has the instruction set of `L`, and `G <= DECODED`. The plan names rows below
/// [`ROWS`] only, `part` and `ys` are as for [`some_rows`], and these groups of every token are full.
#[inline(always)]
unsafe fn each_token<L: Lanes, S: Stored, const G: usize>(
    part: Part<'_>,
    first: usize,
    k: usize,
    ys: &mut [f32],
    scratch: &mut Scratch,
) {
    let n = ys.len() / part.tokens;
    let (weights, taken) = (scratch.weights.as_ptr(), &scratch.taken);
    for (t, y) in ys.chunks_exact_mut(n).enumerate() {
        let count = taken.counts[t];
        let (used, factors) = (&taken.rows[t][..count], &taken.factors[t][..count]);
        if S::SCALED {
            // In a separate pass: its results are read back one lane at a time.
            let scaled = scratch.scaled.chunks_exact_mut(G);
            for ((scaled, &i), &a) in scaled.zip(used).zip(factors) {
                let scales = &scratch.scales[usize::from(i)][k..k + G];
                for (scaled, scale) in scaled.iter_mut().zip(scales) {
                    *scaled = a * scale;
                }
            }
        }
        // SAFETY: every row in `taken` is decoded, and `y` has these groups; the caller
        // guarantees the instruction set.
        unsafe {
            let y = y.as_mut_ptr().add((first + k) * GROUP).cast::<u8>();
            let mut sums = [L::zero(); G];
            if !part.new {
                for (g, sum) in sums.iter_mut().enumerate() {
                    *sum = L::load_f32(y.add(4 * GROUP * g));
                }
            }
            for (j, (&i, &a)) in used.iter().zip(factors).enumerate() {
                let weights = weights.add(usize::from(i) * G * GROUP);
                for (g, sum) in sums.iter_mut().enumerate() {
                    let a = if S::SCALED {
                        *scratch.scaled.get_unchecked(j * G + g)
                    } else {
                        a
                    };
                    let weights = L::load_f32(weights.add(g * GROUP).cast());
                    *sum = L::splat(a).mul_add(weights, *sum);
                }
            }
            for (g, sum) in sums.into_iter().enumerate() {
                sum.store_f32(y.add(4 * GROUP * g));
            }
        }
    }
}

/// Adds all rows to all tokens in one group.
///
/// # Safety
/// The CPU has the instruction set of `L`. `part` and `ys` are as for [`some_rows`], the group
/// of every token is full, and it is decoded: `slot < width <= DECODED`.
#[inline(always)]
unsafe fn tiles<L: Lanes, S: Stored, const T: usize>(
    part: Part<'_>,
    at: Decoded,
    ys: &mut [f32],
    scratch: &mut Scratch,
) {
    let n = ys.len() / part.tokens;
    let (factors, stride) = if S::SCALED {
        let scaled = scratch.scaled.chunks_exact_mut(TOKENS);
        for ((scaled, factors), scales) in scaled.zip(part.factors()).zip(&scratch.scales) {
            let scale = scales[at.scale];
            for (scaled, a) in scaled.iter_mut().zip(factors) {
                *scaled = a * scale;
            }
        }
        (scratch.scaled.as_ptr(), TOKENS)
    } else {
        (part.factors.as_ptr(), part.stride)
    };
    let weights = Strided {
        base: scratch.weights[at.slot * GROUP..].as_ptr(),
        stride: at.width * GROUP,
    };
    let y = ys[at.group * GROUP..].as_mut_ptr();
    let rows = part.rows.len();
    // SAFETY: `rows` rows are decoded and have factors for all tokens, and every token has
    // this group; the caller guarantees the instruction set.
    unsafe {
        let mut t = 0;
        while t < part.tokens {
            let factors = Strided {
                base: factors.add(t),
                stride,
            };
            let y = Sums {
                base: y.add(t * n),
                stride: n,
                new: part.new,
            };
            t += match part.tokens - t {
                left if left >= T => tile::<L::Register, T>(weights, factors, rows, y),
                8.. if T > 8 => tile::<L::Register, 8>(weights, factors, rows, y),
                4.. => tile::<L::Register, 4>(weights, factors, rows, y),
                // Two sums alone would wait for each other's multiplications.
                3 => tile::<L::Register, 3>(weights, factors, rows, y),
                2 => tile::<L::Register, 2>(weights, factors, rows, y),
                _ => tile::<L::Register, 1>(weights, factors, rows, y),
            };
        }
    }
}

/// One of the groups that are decoded together.
#[derive(Clone, Copy)]
struct Decoded {
    /// Its number in the rows.
    group: usize,
    /// Its number among the groups whose scales are known.
    scale: usize,
    /// Its number among those decoded, of which there are `width`.
    slot: usize,
    width: usize,
}

/// Where a tile of tokens is summed.
#[derive(Clone, Copy)]
struct Sums {
    base: *mut f32,
    /// Elements from one token to the next.
    stride: usize,
    /// As in [`Part`].
    new: bool,
}

/// Adds `rows` rows to one group of `T` tokens, two registers at a time. Returns `T`.
///
/// # Safety
/// The CPU has the instruction set of `R`. `weights` leads to `rows` vectors of 32 elements,
/// `factors` to as many of `T` elements, all valid for reads.
/// `y` is valid for reads and writes of 32 elements for each of `T` tokens, and nothing else
/// refers to them.
#[inline(always)]
unsafe fn tile<R: Register, const T: usize>(
    weights: Strided<*const f32>,
    factors: Strided<*const f32>,
    rows: usize,
    y: Sums,
) -> usize {
    for column in (0..GROUP).step_by(2 * R::WIDTH) {
        // SAFETY: two registers from `column` on stay in the group; the caller guarantees
        // the rows, the tokens and the instruction set.
        unsafe {
            let (low, high) = (column, column + R::WIDTH);
            let mut sums = [[R::zero(); 2]; T];
            if !y.new {
                for (t, sums) in sums.iter_mut().enumerate() {
                    *sums = [low, high].map(|at| R::load(y.base.add(t * y.stride + at)));
                }
            }
            for i in 0..rows {
                let weights = weights.base.add(i * weights.stride);
                let weights = [low, high].map(|at| R::load(weights.add(at)));
                let factors = factors.base.add(i * factors.stride);
                for (t, [low, high]) in sums.iter_mut().enumerate() {
                    let a = R::splat(*factors.add(t));
                    *low = a.mul_add(weights[0], *low);
                    *high = a.mul_add(weights[1], *high);
                }
            }
            for (t, sums) in sums.into_iter().enumerate() {
                sums[0].store(y.base.add(t * y.stride + low));
                sums[1].store(y.base.add(t * y.stride + high));
            }
        }
    }
    T
}
