//! Processors described by published times.

use emberflow_devices::split::{Curve, Product};

/// One published time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Tokens.
    pub n: usize,
    /// Microseconds.
    pub us: f64,
}

/// Published times for one shape of weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightShape {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// By tokens, ascending; at least one.
    pub points: &'static [Point],
}

/// Published times, interpolated linearly in tokens and rows, extrapolated proportionally; for
/// columns the nearest published number is used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredCurve {
    /// Shapes by rows, ascending.
    pub shapes: &'static [WeightShape],
    /// Token counts are rounded up to this step (1 = none): an array of processing elements takes
    /// as long when partly filled (*stage performance*).
    pub step: usize,
}

/// A processor that has graphs for some numbers of tokens only: others are padded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Padded {
    /// Its times.
    pub of: &'static MeasuredCurve,
    /// Token counts with a graph, ascending. Longer inputs use several of these graphs in sequence.
    pub graphs: &'static [usize],
}

impl Padded {
    /// Graphs for at least `n` tokens, with minimal padding. `None` without graphs.
    pub fn padded(&self, n: usize) -> Option<usize> {
        let last = *self.graphs.last()?;
        let whole = n.saturating_sub(1) / last * last;
        let rest = n - whole;
        let graph = self.graphs.iter().find(|&&graph| graph >= rest)?;
        Some(whole + graph)
    }
}

impl Curve for Padded {
    fn seconds(&self, of: Product) -> f64 {
        let Some(n) = self.padded(of.n) else {
            return f64::INFINITY;
        };
        self.of.seconds(Product { n, ..of })
    }

    fn graphs(&self) -> &[usize] {
        self.graphs
    }
}

/// Value at `x` of the polyline from the origin through `points`, ascending in their first element.
fn on_line(points: impl Iterator<Item = [f64; 2]> + Clone, x: f64) -> f64 {
    let before = points.clone().take_while(|&[at, _]| at <= x).last();
    let mut after = points.clone().skip_while(|&[at, _]| at <= x);
    let [from, to] = match (before, after.next()) {
        (Some(before), Some(after)) => [before, after],
        (None, Some(first)) => [[0.0; 2], first],
        // Beyond the last point: the slope of the last two, or of the only one.
        (Some(last), None) => {
            let earlier = points.take_while(|&[at, _]| at < last[0]).last();
            [earlier.unwrap_or([0.0; 2]), last]
        }
        (None, None) => return 0.0,
    };
    from[1] + (to[1] - from[1]) * (x - from[0]) / (to[0] - from[0])
}

impl WeightShape {
    /// Microseconds for `n` tokens.
    fn us(&self, n: usize) -> f64 {
        match self.points {
            // A single time says nothing about fewer tokens; a matrix product is no faster.
            [only] if only.n >= n => only.us,
            [first, ..] if n <= first.n => first.us,
            points => on_line(points.iter().map(|p| [p.n as f64, p.us]), n as f64),
        }
    }

    fn knows(&self, n: usize) -> bool {
        self.points.len() > 1 || self.points.iter().any(|p| p.n == n)
    }
}

impl Curve for MeasuredCurve {
    fn seconds(&self, of: Product) -> f64 {
        if of.rows == 0 || of.n == 0 {
            return 0.0;
        }
        let n = match of.n {
            1 => 1,
            n => n.next_multiple_of(self.step.max(1)),
        };
        let far = |shape: &&WeightShape| shape.cols.abs_diff(of.cols);
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
