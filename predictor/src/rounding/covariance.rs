//! Covariance of inputs, accumulated block by block.

use emberflow_kernels::Compute;

use super::gemm::{Gemm, transpose};

/// Tokens per block: few partial sums keep f32 accurate.
const BLOCK: usize = 4096;

/// Rows of the sum that are computed together.
const PANEL: usize = 128;

/// Sum of the outer products of inputs. The same blocks in the same order give the same bits for
/// any number of threads.
#[derive(Debug)]
pub struct Covariance {
    size: usize,
    tokens: usize,
    /// `[size × size]`; entries more than a panel below the diagonal are not updated.
    sum: Vec<f32>,
}

impl Covariance {
    /// For inputs of `size` elements, initially zero.
    pub fn new(size: usize) -> Self {
        Self {
            size,
            tokens: 0,
            sum: vec![0.0; size * size],
        }
    }

    /// Bytes for inputs of `size` elements.
    pub fn bytes_for(size: usize) -> u64 {
        4 * (size as u64).saturating_mul(size as u64)
    }

    /// Adds `inputs`, `[tokens × size]`.
    pub fn add(&mut self, on: &Compute, inputs: &[f32]) {
        let mut turned = Vec::new();
        for block in inputs.chunks(BLOCK * self.size) {
            turned.clear();
            transpose(block, self.size, &mut turned);
            self.add_turned(on, &turned);
        }
    }

    /// Adds transposed inputs, `[size × tokens]`.
    pub fn add_turned(&mut self, on: &Compute, inputs: &[f32]) {
        let tokens = inputs.len() / self.size;
        if tokens == 0 {
            return;
        }
        let n = self.size;
        let mut gemm = Gemm::new(on);
        let mut part = Vec::new();
        for first in (0..n).step_by(PANEL) {
            let (rows, width) = (PANEL.min(n - first), n - first);
            part.resize(rows * width, 0.0);
            let later = &inputs[first * tokens..];
            gemm.product(tokens, &later[..rows * tokens], later, &mut part);
            for (r, part) in part.chunks_exact(width).enumerate() {
                let sum = &mut self.sum[(first + r) * n + first..][..width];
                sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
            }
        }
        self.tokens += tokens;
    }

    /// Elements of an input.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The mean outer product, `[size × size]`, not centred; zero without inputs.
    pub fn mean(mut self) -> Vec<f32> {
        let tokens = self.tokens.max(1) as f32;
        let n = self.size;
        for i in 0..n {
            for j in i..n {
                let mean = self.sum[i * n + j] / tokens;
                (self.sum[i * n + j], self.sum[j * n + i]) = (mean, mean);
            }
        }
        self.sum
    }
}
