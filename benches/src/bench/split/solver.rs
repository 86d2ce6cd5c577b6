//! Partition of a matrix product between two processors: HeteroInfer's partitions and its solver (§4.2,
//! §4.4).
//!
//! ```text
//! all on one   first(rows, n)                            second(rows, pad n) + sync
//! weights      rows a : b          max(first(a, n),      second(b, pad n)) + sync
//! activations  s of n tokens       max(first(rows, n−s), second(rows, s)) + sync
//! ```
//!
//! The first processor (a GPU, or the CPU's threads) accepts any number of tokens; the second (an NPU,
//! or a device with launch costs) only the numbers for which it has graphs, so others are padded. A
//! *hybrid* partition is a partition by weights with a padded number of tokens. [`Solver::solve`]
//! returns the fastest.

use emberflow_engine::split::{Curve, Product};

/// Two processors.
pub struct Pair<'a> {
    /// The one that has all rows but those of the other.
    pub first: &'a dyn Curve,
    /// The one that takes the last rows, if that is faster.
    pub second: &'a dyn Curve,
    /// Seconds to synchronise and copy whenever the second takes part: `T_sync + T_copy`.
    pub sync: f64,
}

/// A partition of a product between two processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "partition", rename_all = "kebab-case")]
pub enum Partition {
    /// The first processor only.
    First,
    /// The second only, with the token count of one of its graphs.
    Second {
        /// Tokens with padding.
        padded: usize,
    },
    /// By rows of weights, `first : second`.
    Weights {
        /// Share of the first.
        first: usize,
        /// Share of the second.
        second: usize,
        /// Tokens of the second with padding; a *hybrid* partition if that exceeds the actual number.
        padded: usize,
    },
    /// By tokens: this many for the second, the others for the first.
    Activations {
        /// Tokens of the second.
        second: usize,
    },
}

/// A partition and its time in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Solution {
    /// The partition.
    pub partition: Partition,
    /// Time from start to the joined result.
    pub seconds: f64,
}

/// Search space.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid<'a> {
    /// Shares of the weights, `[first, second]`.
    pub ratios: &'a [[usize; 2]],
    /// Token counts for which the second has graphs, ascending. Longer inputs use several of these graphs
    /// in sequence.
    pub graphs: &'a [usize],
}

impl Grid<'_> {
    /// Graphs for at least `n` tokens, with minimal padding. `None` without graphs.
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

/// Partitions between two processors; the first accepts any number of tokens, the second those of a grid.
pub trait Solver {
    /// Seconds of a partition. `None` if one of them would have no work.
    fn seconds(&self, of: Product, partition: Partition) -> Option<f64>;

    /// The fastest partition of the grid; of two equally fast ones the simpler.
    fn solve(&self, of: Product, grid: &Grid<'_>) -> Solution;
}

impl Solver for Pair<'_> {
    fn seconds(&self, of: Product, partition: Partition) -> Option<f64> {
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

    fn solve(&self, of: Product, grid: &Grid<'_>) -> Solution {
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
}
