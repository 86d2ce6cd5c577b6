//! How two processors share a product of matrices: HeteroInfer's partitions and its solver (§4.2, §4.4).
//!
//! ```text
//! all on one   first(rows, n)                            second(rows, pad n) + sync
//! weights      rows a : b          max(first(a, n),      second(b, pad n)) + sync
//! activations  s of n tokens       max(first(rows, n−s), second(rows, s)) + sync
//! ```
//!
//! The first processor (a GPU, or the CPU's threads) takes any number of tokens; the second (an NPU, or
//! a device whose launch costs) takes the numbers that it has graphs for, so that others are padded. A
//! *hybrid* partition is one by weights of a number that is padded. [`Solver::solve`] takes the fastest.

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
    /// The first processor alone.
    First,
    /// The second alone, with as many tokens as it has a graph for.
    Second {
        /// Tokens with padding.
        padded: usize,
    },
    /// By rows of weights, `first : second`.
    Weights {
        /// Parts of the first.
        first: usize,
        /// Parts of the second.
        second: usize,
        /// Tokens of the second with padding; a *hybrid* partition where they are more than there are.
        padded: usize,
    },
    /// By tokens: the second takes so many, the first those that are left.
    Activations {
        /// Tokens of the second.
        second: usize,
    },
}

/// A partition and the seconds that it takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Solution {
    /// Who computes what.
    pub partition: Partition,
    /// Time from start to the joined result.
    pub seconds: f64,
}

/// What may be chosen among.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid<'a> {
    /// Parts of the weights, `[first, second]`.
    pub ratios: &'a [[usize; 2]],
    /// Numbers of tokens that the second has graphs for, ascending. Longer inputs take several graphs, one
    /// after the other, each of them one of these.
    pub graphs: &'a [usize],
}

impl Grid<'_> {
    /// Graphs for at least `n` tokens: as few tokens as possible. `None` without graphs.
    pub fn padded(&self, n: usize) -> Option<usize> {
        let last = *self.graphs.last()?;
        let whole = n.saturating_sub(1) / last * last;
        let rest = n - whole;
        let graph = self.graphs.iter().find(|&&graph| graph >= rest)?;
        Some(whole + graph)
    }

    /// Numbers of tokens, fewer than `n`, that fill graphs.
    fn filled(&self, n: usize) -> impl Iterator<Item = usize> + '_ {
        let last = self.graphs.last().copied().unwrap_or(usize::MAX);
        let whole = n.saturating_sub(1) / last * last;
        let graphs = self.graphs.iter().map(move |&graph| whole + graph);
        let filled = std::iter::once(whole).chain(graphs);
        filled.filter(move |&tokens| (1..n).contains(&tokens))
    }
}

/// Partitions between two processors, the first of which takes any number of tokens, and the second those of a grid.
pub trait Solver {
    /// Seconds of a partition. `None` if it leaves nothing for one of them.
    fn seconds(&self, of: Product, partition: Partition) -> Option<f64>;

    /// The fastest partition of the grid; the simpler one of two that are as fast.
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
