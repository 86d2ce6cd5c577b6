//! How processors share the rows of a product of matrices: HeteroInfer's partition by weights (§4.2) on the finest grid, for
//! any number of processors. Its other partitions, and the solver that chooses among them, are in
//! `benches/src/bench/split/solver.rs`.
//!
//! ```text
//! T(p₁ … pₖ, rows) = min over r of max(p₁(rows − r), T(p₂ … pₖ, r))      T(p₁, rows) = p₁(rows)
//! ```

mod curve;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;

pub use curve::{Curve, Linear, Product};

/// Most processors that share a product: a CPU, a GPU, an NPU and one more. Each one multiplies the evaluations of
/// [`shares`] by about 14, the steps of a bisection.
pub const MOST: usize = 4;

/// Rows of each processor, in their order.
pub type Shares = ArrayVec<usize, MOST>;

/// How many of a product's rows each processor takes so that the last one ends as early as it can, if any number may be
/// chosen. A processor that does not pay gets none.
///
/// # Panics
/// With more processors than [`MOST`].
pub fn shares(of: Product, all: &[&dyn Curve]) -> Shares {
    let (mut shares, mut left) = (Shares::new(), of.rows);
    for n in 0..all.len() {
        let others = rows_of_others(Product { rows: left, ..of }, &all[n..]);
        shares.push(left - others);
        left = others;
    }
    shares
}

/// Seconds until the last processor has ended, if they [share](shares) a product. Increasing in rows.
pub fn seconds(of: Product, all: &[&dyn Curve]) -> f64 {
    let rows = |rows| Product { rows, ..of };
    match all {
        [] => 0.0,
        [one] => one.seconds(of),
        [first, others @ ..] => {
            let theirs = rows_of_others(of, all);
            let own = first.seconds(rows(of.rows - theirs));
            own.max(seconds(rows(theirs), others))
        }
    }
}

/// How many of a product's rows all processors but the first take. The time of the first falls with this number and that
/// of the others rises; bisection finds where they meet.
fn rows_of_others(of: Product, all: &[&dyn Curve]) -> usize {
    let rows = |rows| Product { rows, ..of };
    match all {
        [] | [_] => 0,
        [first, others @ ..] => pieces_of_second(
            of.rows,
            |theirs| first.seconds(rows(of.rows - theirs)),
            |theirs| seconds(rows(theirs), others),
        ),
    }
}

/// Number of `all` pieces for the second processor such that both finish as early as possible.
/// `first`, `second`: time of each when the second takes that many. 0 if it does not pay off.
pub fn pieces_of_second(
    all: usize,
    first: impl Fn(usize) -> f64,
    second: impl Fn(usize) -> f64,
) -> usize {
    let time = |theirs: usize| match theirs {
        0 => first(0),
        _ => second(theirs).max(first(theirs)),
    };
    let (mut low, mut high) = (0, all);
    // The second finishes first with `low` pieces, and not with `high + 1`.
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if second(middle) <= first(middle) {
            low = middle
        } else {
            high = middle - 1
        }
    }
    let candidates = [0, low, (low + 1).min(all)];
    let faster = |a: &usize, b: &usize| time(*a).total_cmp(&time(*b));
    candidates.into_iter().min_by(faster).unwrap_or(0)
}
