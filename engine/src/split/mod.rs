//! How two processors share the rows of a product of matrices: HeteroInfer's partition by weights (§4.2) on the finest grid.
//! Its other partitions, and the solver that chooses among them, are in `benches/src/bench/split/solver.rs`.

mod curve;
#[cfg(test)]
mod tests;

pub use curve::{Curve, Linear, Product};

/// Two processors.
pub struct Pair<'a> {
    /// The one that has all rows but those of the other.
    pub first: &'a dyn Curve,
    /// The one that takes the last rows, if it is worth it.
    pub second: &'a dyn Curve,
    /// Seconds to synchronise and copy whenever the second takes part: `T_sync + T_copy`.
    pub sync: f64,
}

impl Pair<'_> {
    /// How many of a product's rows the second takes so that both end as early as they can, if any number
    /// may be chosen: the partition by weights on the finest grid. 0 if it does not pay.
    ///
    /// The time of the first falls with this number and that of the second rises; bisection finds
    /// where they meet.
    pub fn rows_of_second(&self, of: Product) -> usize {
        let rows = |rows| Product { rows, ..of };
        pieces_of_second(
            of.rows,
            |theirs| self.first.seconds(rows(of.rows - theirs)),
            |theirs| self.second.seconds(rows(theirs)) + self.sync,
        )
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
