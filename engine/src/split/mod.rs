//! How two processors share a matrix product: HeteroInfer's partitions and solver (§4.2, §4.4).
//!
//! ```text
//! all on one   first(rows, n)                            second(rows, pad n) + sync
//! weights      rows a : b          max(first(a, n),      second(b, pad n)) + sync
//! activations  s of n tokens       max(first(rows, n−s), second(rows, s)) + sync
//! ```
//!
//! The first processor (a GPU, or the CPU's threads) takes any number of tokens. The second (an
//! NPU, or a device with a launch cost) takes the token counts it has graphs for; others are
//! padded. A *hybrid* partition divides weights with a padded token count. [`Pair::solve`] returns
//! the fastest.

mod curve;
#[cfg(test)]
mod tests;

pub use curve::{Curve, Linear, Product};

/// A partition of a product between two processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "partition", rename_all = "kebab-case")]
pub enum Partition {
    /// The first processor alone.
    First,
    /// The second alone, with a token count it has a graph for.
    Second {
        /// Tokens with padding.
        padded: usize,
    },
    /// Divides the rows of the weights, `first : second`.
    Weights {
        /// Parts of the first.
        first: usize,
        /// Parts of the second.
        second: usize,
        /// Padded tokens of the second; more than the tokens of the product in a *hybrid*
        /// partition.
        padded: usize,
    },
    /// Divides the tokens: the second takes this many, the first the rest.
    Activations {
        /// Tokens of the second.
        second: usize,
    },
}

/// A partition and its time in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Solution {
    /// Which processor computes what.
    pub partition: Partition,
    /// Time from start to the joined result.
    pub seconds: f64,
}

/// The search space.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid<'a> {
    /// Ratios of weights, `[first, second]`.
    pub ratios: &'a [[usize; 2]],
    /// Token counts for which the second has graphs, ascending. Longer inputs run several graphs in
    /// sequence.
    pub graphs: &'a [usize],
}

/// Two processors.
pub struct Pair<'a> {
    /// Takes any number of tokens.
    pub first: &'a dyn Curve,
    /// Takes the token counts of the grid.
    pub second: &'a dyn Curve,
    /// Seconds to synchronise and copy whenever the second takes part: `T_sync + T_copy`.
    pub sync: f64,
}

impl Grid<'_> {
    /// The fewest tokens, at least `n`, that graphs cover. `None` without graphs.
    pub fn padded(&self, n: usize) -> Option<usize> {
        let last = *self.graphs.last()?;
        let whole = n.saturating_sub(1) / last * last;
        let rest = n - whole;
        let graph = self.graphs.iter().find(|&&graph| graph >= rest)?;
        Some(whole + graph)
    }

    /// Token counts below `n` that fill graphs.
    fn filled(&self, n: usize) -> impl Iterator<Item = usize> + '_ {
        let last = self.graphs.last().copied().unwrap_or(usize::MAX);
        let whole = n.saturating_sub(1) / last * last;
        let graphs = self.graphs.iter().map(move |&graph| whole + graph);
        let filled = std::iter::once(whole).chain(graphs);
        filled.filter(move |&tokens| (1..n).contains(&tokens))
    }
}

impl Pair<'_> {
    /// Seconds of a partition. `None` if one of the two gets nothing.
    pub fn seconds(&self, of: Product, partition: Partition) -> Option<f64> {
        let both = |first: f64, second: f64| first.max(second) + self.sync;
        Some(match partition {
            Partition::First => self.first.seconds(of),
            Partition::Second { padded } => {
                self.second.seconds(Product { n: padded, ..of }) + self.sync
            }
            Partition::Weights {
                first,
                second,
                padded,
            } => {
                let rows = |part: usize| of.rows * part / (first + second).max(1);
                let mine = rows(first);
                let theirs = of.rows - mine;
                if mine == 0 || theirs == 0 {
                    return None;
                }
                let second = Product {
                    rows: theirs,
                    n: padded,
                    ..of
                };
                both(
                    self.first.seconds(Product { rows: mine, ..of }),
                    self.second.seconds(second),
                )
            }
            Partition::Activations { second } => {
                let left = of.n.checked_sub(second).filter(|&left| left > 0)?;
                both(
                    self.first.seconds(Product { n: left, ..of }),
                    self.second.seconds(Product { n: second, ..of }),
                )
            }
        })
    }

    /// The fastest partition of the grid; the simpler one of equals.
    pub fn solve(&self, of: Product, grid: &Grid<'_>) -> Solution {
        let mut best = Solution {
            partition: Partition::First,
            seconds: self.first.seconds(of),
        };
        let padded = grid.padded(of.n);
        let alone = padded.map(|padded| Partition::Second { padded });
        let weights = grid.ratios.iter().filter_map(|&[first, second]| {
            Some(Partition::Weights {
                first,
                second,
                padded: padded?,
            })
        });
        let tokens = grid
            .filled(of.n)
            .map(|second| Partition::Activations { second });
        for partition in alone.into_iter().chain(tokens).chain(weights) {
            match self.seconds(of, partition) {
                Some(seconds) if seconds < best.seconds => best = Solution { partition, seconds },
                _ => {}
            }
        }
        best
    }

    /// Rows of a product for the second processor such that both finish as early as possible, if
    /// any number may be chosen: the partition by weights on the finest grid. 0 if it does not pay
    /// off.
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
