//! Several processors that share a product, each with a rectangle of it.

use std::ops::Range;

use arrayvec::ArrayVec;

use super::curve::{Curve, Product};
use super::solver::{Forms, Pair, Partition, Solution, Space};

/// Most processors that share a product: a CPU, a GPU, an NPU and one more. Each one multiplies the evaluations of
/// [`shares`] by about 28, two for each step of a bisection.
pub const MOST: usize = 4;

/// Rows of each processor, in their order.
pub type Shares = ArrayVec<usize, MOST>;

/// A processor's part of a product; empty where it does not pay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rectangle {
    /// Rows of the weights.
    pub rows: Range<usize>,
    /// Tokens.
    pub tokens: Range<usize>,
}

/// What each processor computes, in their order.
pub type Rectangles = ArrayVec<Rectangle, MOST>;

/// How many of a product's rows each processor takes so that the last one ends as early as it can, if any number may be
/// chosen. A processor that does not pay gets none.
///
/// # Panics
/// With more processors than [`MOST`].
pub fn shares(of: Product, all: &[&dyn Curve]) -> Shares {
    let rectangles = Together::by(Forms::Weights, all).rectangles(of);
    rectangles.iter().map(|its| its.rows.len()).collect()
}

/// Seconds until the last processor has ended, if they [share](shares) a product. Increasing in rows.
pub fn seconds(of: Product, all: &[&dyn Curve]) -> f64 {
    Together::by(Forms::Weights, all).seconds(of)
}

/// Processors that compute a product together, each a rectangle of it, as one processor.
#[derive(Clone, Copy)]
pub struct Together<'a> {
    /// The processors. Those with static graphs come last, so that others take the tokens that fill none.
    all: &'a [&'a dyn Curve],
    space: Space<'a>,
}

impl<'a> Together<'a> {
    /// Processors of which each computes one rectangle: some rows, or some tokens too unless it is by weights only.
    pub fn by(forms: Forms, all: &'a [&'a dyn Curve]) -> Self {
        let forms = match forms {
            Forms::Weights => Forms::Weights,
            Forms::Rectangles | Forms::Corners => Forms::Rectangles,
        };
        let space = Space {
            forms,
            ratios: None,
        };
        Self { all, space }
    }

    /// What each of them computes so that the last one ends as early as it can.
    ///
    /// # Panics
    /// With more processors than [`MOST`].
    pub fn rectangles(&self, of: Product) -> Rectangles {
        let (mut found, mut left) = (Rectangles::new(), of);
        for n in 0..self.all.len() {
            let some = Self {
                all: &self.all[n..],
                ..*self
            };
            let others = some.solve(left).map(|found| found.partition);
            let Partition { rows, tokens } = others.unwrap_or_default();
            let first = of.rows - left.rows;
            let by_tokens = rows > 0 && tokens < left.n;
            let [until, from] = if by_tokens {
                [of.rows, tokens]
            } else {
                [of.rows - rows, 0]
            };
            found.push(Rectangle {
                rows: first..until,
                tokens: from..left.n,
            });
            (left.rows, left.n) = (rows, if by_tokens { tokens } else { left.n });
        }
        found
    }

    /// What all but the first take. `None` of one alone.
    fn solve(&self, of: Product) -> Option<Solution> {
        let [first, others @ ..] = self.all else {
            return None;
        };
        let second = Self {
            all: others,
            ..*self
        };
        let pair = Pair {
            first: *first,
            second: &second,
            sync: 0.0,
        };
        (!others.is_empty()).then(|| pair.solve(of, self.space))
    }
}

impl Curve for Together<'_> {
    fn seconds(&self, of: Product) -> f64 {
        match *self.all {
            [] => 0.0,
            [one] => one.seconds(of),
            _ => self.solve(of).map_or(0.0, |found| found.seconds),
        }
    }

    fn graphs(&self) -> &[usize] {
        self.all.last().map_or(&[], |last| last.graphs())
    }
}
