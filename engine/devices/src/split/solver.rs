//! Partitions of a product between two processors, and the solver that chooses one (HeteroInfer §4.2, §4.4).
//!
//! ```text
//!             s tokens   n − s
//!           ┌──────────┬───────┐    all on one    r = 0, or r = rows and s = n
//! rows − r  │ first    │ first │    weights       s = n, also padded: hybrid in the paper
//!           ├──────────┼───────┤    activations   r = rows
//! r         │ second   │ first │    corner        neither
//!           └──────────┴───────┘
//! seconds = max(first(rows − r, n) + first(r, n − s), second(r, s)) + sync
//! ```
//!
//! The first processor (a GPU, or the CPU's threads) takes any number of tokens. The second (an NPU, or several devices) may have
//! static graphs: its curve has the time of padding, or of smaller graphs that follow, and [`Curve::graphs`] where to cut.

use super::curve::{Curve, Product};

/// Two processors.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// The one that has all but the part of the other.
    pub first: &'a dyn Curve,
    /// The one that takes the last rows, for the first tokens, if that is faster.
    pub second: &'a dyn Curve,
    /// Seconds to synchronise and copy whenever the second takes part: `T_sync + T_copy`.
    pub sync: f64,
}

/// What the second processor takes of a product; the first takes the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Partition {
    /// The last rows of the weights.
    pub rows: usize,
    /// The first tokens.
    pub tokens: usize,
}

/// Partitions to try, in addition to each processor alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forms {
    /// By weights: all tokens.
    Weights,
    /// By weights or by activations: each processor computes one rectangle.
    Rectangles,
    /// Also some rows for some tokens: the first computes the other rows, and these for the other tokens.
    Corners,
}

/// Search space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space<'a> {
    /// Partitions.
    pub forms: Forms,
    /// Divisions of the rows, `[first, second]`; `None` for any.
    pub ratios: Option<&'a [[usize; 2]]>,
}

/// A partition and its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Solution {
    /// The partition.
    pub partition: Partition,
    /// Seconds from start to the joined result.
    pub seconds: f64,
}

/// Numbers of tokens below `n` that fill graphs: the largest ones, and behind them one of a size or as many as there are tokens for.
fn cuts(graphs: &[usize], n: usize) -> impl Iterator<Item = usize> + '_ {
    let largest = graphs.last().map_or(n, |&largest| largest.max(1));
    let rest = n.saturating_sub(1) % largest.max(1);
    let whole = n.saturating_sub(1) - rest;
    let of = move |&graph: &usize| [graph, rest - rest % graph.max(1)];
    let behind = std::iter::once(0).chain(graphs.iter().flat_map(of));
    let filled = behind.map(move |tokens| whole + tokens);
    filled.filter(move |tokens| (1..n).contains(tokens))
}

impl Pair<'_> {
    /// Seconds of the first, which has all but the partition's part.
    fn first(&self, of: Product, Partition { rows, tokens }: Partition) -> f64 {
        let seconds = |rows: usize, n: usize| match rows.min(n) {
            0 => 0.0,
            _ => self.first.seconds(Product { rows, n, ..of }),
        };
        seconds(of.rows - rows, of.n) + seconds(rows, of.n - tokens)
    }

    /// Seconds of the second.
    fn second(&self, of: Product, Partition { rows, tokens }: Partition) -> f64 {
        self.second.seconds(Product {
            rows,
            n: tokens,
            ..of
        })
    }

    /// Seconds of a partition.
    pub fn seconds(&self, of: Product, partition: Partition) -> f64 {
        let first = self.first(of, partition);
        match partition.rows.min(partition.tokens) {
            0 => first,
            _ => first.max(self.second(of, partition)) + self.sync,
        }
    }

    /// The fastest partition of a search space. Never slower than the first alone, nor than a partition by weights only.
    pub fn solve(&self, of: Product, space: Space<'_>) -> Solution {
        let mut best = Solution {
            partition: Partition::default(),
            seconds: self.first(of, Partition::default()),
        };
        let mut consider = |rows: usize, tokens: usize| {
            let partition = Partition { rows, tokens };
            let seconds = self.seconds(of, partition);
            if rows > 0 && seconds < best.seconds {
                best = Solution { partition, seconds };
            }
        };
        let graphs = match space.forms {
            Forms::Weights => &[],
            Forms::Rectangles | Forms::Corners => self.second.graphs(),
        };
        for tokens in std::iter::once(of.n).chain(cuts(graphs, of.n)) {
            let some_rows = tokens == of.n || space.forms == Forms::Corners;
            // On the finest grid of two equally fast ones that with both at work.
            if some_rows && space.ratios.is_none() {
                consider(self.rows_of_second(of, tokens), tokens);
            }
            consider(of.rows, tokens);
            for [first, second] in space.ratios.filter(|_| some_rows).unwrap_or_default() {
                let rows = of.rows - of.rows * first / (first + second).max(1);
                if rows < of.rows {
                    consider(rows, tokens);
                }
            }
        }
        best
    }

    /// Rows of the second, for `tokens` tokens, with which both end at the same time. With more rows the first takes less time and
    /// the second more.
    fn rows_of_second(&self, of: Product, tokens: usize) -> usize {
        let part = |rows| Partition { rows, tokens };
        let first = |rows| self.first(of, part(rows));
        pieces_of_second(of.rows, first, |rows| self.second(of, part(rows)))
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::split::{Rectangle, Together};

    /// A constant, and steps of tokens, as graphs of one size have.
    #[derive(Debug, Clone)]
    struct Stepped {
        launch: f64,
        each: f64,
        graphs: Vec<usize>,
    }

    impl Curve for Stepped {
        fn seconds(&self, of: Product) -> f64 {
            let step = self.graphs.first().map_or(1, |&step| step);
            match of.rows * of.n {
                0 => 0.0,
                _ => self.launch + (of.rows * of.n.next_multiple_of(step)) as f64 * self.each,
            }
        }

        fn graphs(&self) -> &[usize] {
            &self.graphs
        }
    }

    fn stepped() -> impl Strategy<Value = Stepped> {
        (
            0.0..1e-3,
            1e-9..1e-6,
            prop::collection::vec(1..300usize, 0..4),
        )
            .prop_map(|(launch, each, mut graphs)| {
                graphs.sort_unstable();
                Stepped {
                    launch,
                    each,
                    graphs,
                }
            })
    }

    #[test]
    fn cuts_fill_graphs() {
        let of = |graphs: &[usize], n| {
            let mut all: Vec<usize> = cuts(graphs, n).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        let npu = [1, 32, 128, 256];
        assert_eq!(of(&npu, 300), [256, 257, 288, 299]);
        assert_eq!(of(&npu, 200), [1, 32, 128, 192, 199]);
        assert_eq!(of(&npu, 257), [256]);
        assert_eq!(of(&npu, 1), [0; 0]);
        assert_eq!(of(&[], 300), [0; 0]);
        assert_eq!(of(&[32], 33), [32]);
        assert_eq!(of(&[32], 32), [0; 0]);
    }

    proptest! {
        /// The solver's choice is the fastest of all enumerated partitions.
        #[test]
        fn the_solver_equals_counting_out(
            first in stepped(),
            second in stepped(),
            sync in 0.0..1e-3,
            rows in 1..5000usize,
            n in 1..700usize,
            ratios in prop::collection::vec([1..5usize, 1..5usize], 0..5),
        ) {
            let pair = Pair { first: &first, second: &second, sync };
            let of = Product { rows, cols: 64, n };
            let mut before = f64::INFINITY;
            for forms in [Forms::Weights, Forms::Rectangles, Forms::Corners] {
                let found = pair.solve(of, Space { forms, ratios: Some(&ratios) });
                let mut best = first.seconds(of);
                for tokens in std::iter::once(n).chain(cuts(&second.graphs, n)) {
                    if tokens < n && forms == Forms::Weights {
                        continue;
                    }
                    let mut mine = vec![0];
                    if tokens == n || forms == Forms::Corners {
                        mine.extend(ratios.iter().map(|[a, b]| rows * a / (a + b)));
                    }
                    for mine in mine.into_iter().filter(|&mine| mine < rows) {
                        let partition = Partition { rows: rows - mine, tokens };
                        let corner = Product { rows: rows - mine, n: n - tokens, ..of };
                        let own = first.seconds(Product { rows: mine, ..of }) + first.seconds(corner);
                        let its = second.seconds(Product { rows: rows - mine, n: tokens, ..of });
                        prop_assert_eq!(pair.seconds(of, partition), own.max(its) + sync);
                        best = best.min(own.max(its) + sync);
                    }
                }
                prop_assert_eq!(found.seconds, best);
                prop_assert_eq!(pair.seconds(of, found.partition), found.seconds);
                prop_assert!(found.seconds <= before);
                before = found.seconds;
            }
        }

        /// Of three processors: each weight meets each token once, and it takes what the solver says: no longer than by weights
        /// only, than one alone, or than any number of rows for any cut.
        #[test]
        fn rectangles_cover_a_product_and_are_never_slower(
            all in [stepped(), stepped(), stepped()],
            [rows, n] in [1..40usize, 1..70usize],
        ) {
            let of = Product { rows, cols: 64, n };
            let [first, others @ ..] = &all;
            let others = [&others[0] as &dyn Curve, &others[1]];
            let devices = Together::by(Forms::Corners, &others);
            let pair = Pair { first, second: &devices, sync: 0.0 };
            let space = |forms| Space { forms, ratios: None };
            let Solution { partition, seconds } = pair.solve(of, space(Forms::Corners));
            let its = Product { rows: partition.rows, n: partition.tokens, ..of };
            let rectangles = devices.rectangles(its);

            let mut covered = vec![0; its.rows * its.n];
            let mut last = pair.first(of, partition);
            for (Rectangle { rows, tokens }, curve) in rectangles.iter().zip(others) {
                for token in tokens.clone() {
                    rows.clone().for_each(|row| covered[row * its.n + token] += 1);
                }
                let product = Product { rows: rows.len(), n: tokens.len(), ..of };
                if rows.len() * tokens.len() > 0 {
                    last = last.max(curve.seconds(product));
                }
            }
            prop_assert!(covered.iter().all(|&times| times == 1), "{:?}", rectangles);
            prop_assert_eq!(last, seconds);

            prop_assert!(seconds <= pair.solve(of, space(Forms::Weights)).seconds);
            let weights = Together::by(Forms::Weights, &others);
            let by_weights = Pair { second: &weights, ..pair };
            prop_assert!(seconds <= by_weights.solve(of, space(Forms::Weights)).seconds);
            for curve in &all {
                prop_assert!(seconds <= curve.seconds(of));
            }
            for tokens in std::iter::once(n).chain(cuts(devices.graphs(), n)) {
                let of_rows = |rows| pair.seconds(of, Partition { rows, tokens });
                prop_assert!((1..=rows).all(|rows| seconds <= of_rows(rows) * (1.0 + 1e-12)));
            }
        }
    }
}
