//! Measured times of processors.

use serde::{Deserialize, Serialize};

use crate::split::{Curve, Product};

/// Times of a processor for some number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Tokens.
    pub n: usize,
    /// Seconds for any product.
    pub launch: f64,
    /// Seconds for a weight.
    pub weight: f64,
}

/// Times by measurement, along straight lines between the numbers of tokens that were measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Samples(pub Vec<Sample>);

impl Sample {
    /// Seconds for the rows of a product.
    fn seconds(&self, of: Product) -> f64 {
        self.launch + self.weight * (of.rows * of.cols) as f64
    }
}

impl Curve for Samples {
    fn seconds(&self, of: Product) -> f64 {
        let Some(last) = self.0.last().filter(|_| of.rows > 0) else {
            return 0.0;
        };
        let time = |s: &Sample| s.seconds(of);
        let after = self.0.iter().position(|s| s.n >= of.n);
        match after {
            Some(0) => time(&self.0[0]),
            Some(i) => {
                let (a, b) = (&self.0[i - 1], &self.0[i]);
                let share = (of.n - a.n) as f64 / (b.n - a.n) as f64;
                time(a) + (time(b) - time(a)) * share
            }
            None => time(last) * of.n as f64 / last.n as f64,
        }
    }
}

/// Times of a processor that has static graphs for some of the numbers of tokens that were measured, or none.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GraphTimes {
    /// Where there are graphs, of these alone.
    samples: Samples,
    graphs: Vec<usize>,
}

impl GraphTimes {
    /// Of a processor with graphs for these numbers of tokens.
    pub fn new(mut samples: Samples, graphs: &[usize]) -> Self {
        let has = |s: &Sample| graphs.contains(&s.n);
        if samples.0.iter().any(has) {
            samples.0.retain(has);
        }
        let measured = samples.0.iter().filter(|s| has(s)).map(|s| s.n);
        Self {
            graphs: measured.collect(),
            samples,
        }
    }
}

impl Curve for GraphTimes {
    fn seconds(&self, of: Product) -> f64 {
        match self.graphs[..] {
            _ if of.rows == 0 => 0.0,
            [] => self.samples.seconds(of),
            _ => covering(&self.samples.0, of),
        }
    }

    fn graphs(&self) -> &[usize] {
        &self.graphs
    }
}

/// Seconds of the graphs that cover a product in the least time: the last one is padded, or smaller ones follow (HeteroInfer
/// §4.2, padding and pipe).
fn covering(graphs: &[Sample], of: Product) -> f64 {
    let Some((largest, smaller)) = graphs.split_last() else {
        return f64::INFINITY;
    };
    let rest = of.n % largest.n;
    let runs = |count: usize| count as f64 * largest.seconds(of);
    let padded = runs(of.n.div_ceil(largest.n));
    let followed = runs(of.n / largest.n) + covering(smaller, Product { n: rest, ..of });
    padded.min(followed).min(covering(smaller, of))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Graphs of these sizes, each with its seconds for any product.
    fn graphs(of: &[(usize, f64)]) -> GraphTimes {
        let sample = |&(n, launch)| Sample {
            n,
            launch,
            weight: 0.0,
        };
        let sizes: Vec<usize> = of.iter().map(|of| of.0).collect();
        GraphTimes::new(Samples(of.iter().map(sample).collect()), &sizes)
    }

    #[test]
    fn graphs_are_padded_or_smaller_ones_follow() {
        let of = |times: &GraphTimes, n| {
            let (rows, cols) = (2, 5);
            times.seconds(Product { rows, cols, n })
        };
        // A run takes as long as 32 tokens.
        let npu = graphs(&[(1, 33.0), (32, 64.0), (128, 160.0), (256, 288.0)]);
        assert_eq!(npu.graphs(), [1, 32, 128, 256]);
        let expected = [
            (1, 33.0),
            (2, 64.0),
            (33, 97.0),
            (40, 128.0),
            (100, 160.0),
            (256, 288.0),
            (300, 416.0),
            (512, 576.0),
        ];
        for (n, seconds) in expected {
            assert_eq!(of(&npu, n), seconds, "{n}");
        }
        // A slow size is left out.
        let slow = graphs(&[(32, 1.0), (256, 90.0)]);
        assert_eq!([256, 300, 33].map(|n| of(&slow, n)), [8.0, 10.0, 2.0]);
        // Other numbers say nothing about graphs, and without graphs all of them count.
        let samples = Samples(
            vec![1, 8, 32]
                .into_iter()
                .map(|n| Sample {
                    n,
                    launch: n as f64,
                    weight: 0.0,
                })
                .collect(),
        );
        let of_graphs = GraphTimes::new(samples.clone(), &[1, 32, 128]);
        assert_eq!(of_graphs.graphs(), [1, 32]);
        assert_eq!([8, 64].map(|n| of(&of_graphs, n)), [8.0, 64.0]);
        for none in [&[][..], &[128]] {
            let lines = GraphTimes::new(samples.clone(), none);
            assert_eq!(lines.graphs(), [0; 0]);
            assert_eq!(of(&lines, 20), 20.0);
        }
    }

    proptest! {
        /// Each number of graphs of two sizes: none that cover the tokens take less.
        #[test]
        fn no_other_graphs_that_cover_the_tokens_are_faster(
            small in 1..40usize,
            times in 1..9usize,
            seconds in [1e-6..1e-2, 1e-6..1e-2],
            n in 1..600usize,
        ) {
            let large = small * times;
            let of = match times {
                1 => graphs(&[(small, seconds[0])]),
                _ => graphs(&[(small, seconds[0]), (large, seconds[1])]),
            };
            let all = (0..=n.div_ceil(large)).map(|of_large| {
                let left = n.saturating_sub(of_large * large).div_ceil(small);
                let price = if times == 1 { f64::INFINITY } else { seconds[1] };
                let of_large = if of_large == 0 { 0.0 } else { of_large as f64 * price };
                of_large + left as f64 * seconds[0]
            });
            let least = all.fold(f64::INFINITY, f64::min);
            let found = of.seconds(Product { rows: 1, cols: 1, n });
            prop_assert!((found - least).abs() <= 1e-9 * least, "{} {}", found, least);
        }
    }

    #[test]
    fn times_lie_on_lines_between_samples() {
        let sample = |n, weight| Sample {
            n,
            launch: 1.0,
            weight,
        };
        let samples = Samples(vec![sample(1, 1.0), sample(5, 3.0)]);
        let of = |n| {
            let (rows, cols) = (2, 5);
            samples.seconds(Product { rows, cols, n })
        };
        assert_eq!([1, 3, 5, 10].map(of), [11.0, 21.0, 31.0, 62.0]);
        let (rows, cols, n) = (0, 5, 1);
        assert_eq!(samples.seconds(Product { rows, cols, n }), 0.0);
    }
}
