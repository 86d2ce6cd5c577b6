//! A processor by the times that its authors published.

use emberflow_engine::split::{Curve, Product};

/// A time that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Tokens.
    pub n: usize,
    /// Microseconds.
    pub us: f64,
}

/// Measured times of one shape of weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// By tokens, ascending; one at least.
    pub points: &'static [Point],
}

/// Times by measurement, along straight lines between the numbers of tokens and of rows that were measured
/// and in proportion beyond, for the number of columns nearest to those asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// What was measured, by rows, ascending.
    pub shapes: &'static [Shape],
    /// Several tokens count in whole steps (1 for none): an array of processing elements takes as long
    /// when it is filled in part (*stage performance*).
    pub step: usize,
}

/// The value at `x` of the line through points, ascending in their first, from the origin on.
fn on_line(points: impl Iterator<Item = [f64; 2]> + Clone, x: f64) -> f64 {
    let before = points.clone().take_while(|&[at, _]| at <= x).last();
    let mut after = points.clone().skip_while(|&[at, _]| at <= x);
    let [from, to] = match (before, after.next()) {
        (Some(before), Some(after)) => [before, after],
        (None, Some(first)) => [[0.0; 2], first],
        // Beyond the last: the slope between the last two, or of the only one.
        (Some(last), None) => {
            let earlier = points.take_while(|&[at, _]| at < last[0]).last();
            [earlier.unwrap_or([0.0; 2]), last]
        }
        (None, None) => return 0.0,
    };
    from[1] + (to[1] - from[1]) * (x - from[0]) / (to[0] - from[0])
}

impl Shape {
    /// Microseconds for `n` tokens.
    fn us(&self, n: usize) -> f64 {
        match self.points {
            // One token alone says nothing of fewer, and a matrix of activations is no faster.
            [only] if only.n >= n => only.us,
            [first, ..] if n <= first.n => first.us,
            points => on_line(points.iter().map(|p| [p.n as f64, p.us]), n as f64),
        }
    }

    fn knows(&self, n: usize) -> bool {
        self.points.len() > 1 || self.points.iter().any(|p| p.n == n)
    }
}

impl Curve for Measured {
    fn seconds(&self, of: Product) -> f64 {
        if of.rows == 0 || of.n == 0 {
            return 0.0;
        }
        let n = match of.n {
            1 => 1,
            n => n.next_multiple_of(self.step.max(1)),
        };
        let far = |shape: &&Shape| shape.cols.abs_diff(of.cols);
        let Some(cols) = self.shapes.iter().min_by_key(far).map(|shape| shape.cols) else {
            return 0.0;
        };
        let alike = self.shapes.iter().filter(|shape| shape.cols == cols);
        let known = alike.clone().any(|shape| shape.knows(n));
        let points = alike
            .filter(|shape| !known || shape.knows(n))
            .map(|shape| [shape.rows as f64, shape.us(n)]);
        on_line(points, of.rows as f64) * of.cols as f64 / cols as f64 / 1e6
    }
}
