//! Lower bounds of any schedule's time.

use super::graph::{Operation, followers};

/// Lower bounds of any schedule's time.
#[derive(Debug, Clone, PartialEq)]
pub struct Bounds {
    /// Seconds of each processor's pieces.
    pub sums: Vec<f64>,
    /// Seconds of the longest path.
    pub path: f64,
}

impl Bounds {
    /// The bounds of a graph.
    pub fn of(graph: &[Operation], processors: usize) -> Self {
        let mut sums = vec![0.0; processors];
        graph.iter().for_each(|work| sums[work.on] += work.seconds);
        let path = tails(graph).into_iter().fold(0.0, f64::max);
        Self { sums, path }
    }

    /// The largest of them.
    pub fn largest(&self) -> f64 {
        self.sums.iter().copied().fold(self.path, f64::max)
    }
}

/// Seconds of the longest path from the beginning of each piece.
pub(super) fn tails(graph: &[Operation]) -> Vec<f64> {
    let followers = followers(graph);
    let mut tails = vec![0.0f64; graph.len()];
    for i in (0..graph.len()).rev() {
        let after = followers[i].iter().map(|&next| tails[next]);
        tails[i] = graph[i].seconds + after.fold(0.0, f64::max);
    }
    tails
}
