//! Sign-bit predictor, without training (SparseInfer, arXiv 2411.12692): if few products of a gate
//! row and the input are negative, the gate is likely positive.

use emberflow_kernels::{Compute, Cpu, sign_bytes};

use crate::bytes::SharedBytes;
use crate::predict::{Features, Predictor, RANGE, Reads, Shared, SharedShape, blocks};

/// Signs of all gate rows of a layer, and the largest number of negative products of a selected
/// neuron.
pub struct SignBit {
    bytes: SharedBytes,
    d: usize,
    limit: u32,
}

impl SignBit {
    /// `bytes` holds the signs of each gate row, [`sign_bytes`] of `d` each.
    pub fn new(bytes: SharedBytes, d: usize, limit: u32) -> Self {
        Self { bytes, d, limit }
    }

    /// Time to score `neurons` neurons for a token with `d` elements, in 4-bit × 8-bit products: a
    /// register counts eight times as many signs.
    pub(crate) fn products(d: usize, neurons: usize) -> f64 {
        d as f64 * neurons as f64 / 8.0
    }

    /// Per-token memory.
    pub fn shared_shape(d: usize) -> SharedShape {
        SharedShape {
            signs: sign_bytes(d),
            ..SharedShape::default()
        }
    }
}

impl Predictor for SignBit {
    fn shape(&self) -> SharedShape {
        Self::shared_shape(self.d)
    }

    fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn prepare(&self, on: &Compute, input: Features<'_>, shared: &mut Shared) {
        let cpu = on.cpu;
        let row = sign_bytes(self.d);
        for (t, signs) in (0..input.tokens()).zip(shared.signs.chunks_exact_mut(row)) {
            cpu.sign_bits(input.token(Reads::Normed, t), signs);
        }
    }

    fn scores(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        scores: &mut [f32],
    ) {
        let (tokens, row) = (input.tokens(), sign_bytes(self.d));
        for (first, scores) in blocks(first, scores, tokens) {
            let neurons = scores.len() / tokens;
            let rows = &self.bytes.as_slice()[first * row..(first + neurons) * row];
            let mut counts = [0; RANGE];
            let counts = &mut counts[..neurons];
            for (t, signs) in (0..tokens).zip(shared.signs.chunks_exact(row)) {
                cpu.sign_differences(rows, row, signs, counts);
                for (i, &count) in counts.iter().enumerate() {
                    scores[i * tokens + t] = -(count as f32);
                }
            }
        }
    }

    fn thresholds(&self, _: Cpu, _: usize, thresholds: &mut [f32]) {
        thresholds.fill(-(self.limit as f32));
    }
}
