//! Matrices that devices and the CPU multiply together, and the measured times of processors.

use emberflow_kernels::DType;
use serde::{Deserialize, Serialize};

use super::HostBytes;
use crate::split::{Curve, Product};

/// A matrix that the host holds too: rows of `cols` elements, each with its scales behind it.
#[derive(Clone)]
pub struct SharedMatrix {
    /// Format.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// The rows.
    pub bytes: HostBytes,
}

/// The largest products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProductRoom {
    /// Bytes of all tokens' input.
    pub input: usize,
    /// Results.
    pub results: usize,
}

impl ProductRoom {
    /// Bytes of host memory for it: the input and results, and on a device with the machine's memory
    /// as many again.
    pub fn bytes(&self, unified: bool) -> u64 {
        let once = self.input + 2 * 4 * self.results;
        (once
            + if unified {
                self.input + 4 * self.results
            } else {
                0
            }) as u64
    }
}

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

impl Curve for Samples {
    fn seconds(&self, of: Product) -> f64 {
        let Some(last) = self.0.last().filter(|_| of.rows > 0) else {
            return 0.0;
        };
        let time = |s: &Sample| s.launch + s.weight * (of.rows * of.cols) as f64;
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

#[cfg(test)]
mod tests {
    use super::*;

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
