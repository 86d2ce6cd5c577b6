//! Coarse-gate predictor: a copy of the gate rows in two or three bits. It is too coarse to compute
//! with, but predicts well which gates are positive.
//!
//! The quants minimise the change of the *products* with a text's inputs (`train/coarse.rs`), and
//! each neuron has its own threshold.

use emberflow_kernels::{Compute, Cpu, DType, Narrow};

use crate::bytes::SharedBytes;
use crate::predict::{Features, Predictor, Shared, SharedShape};
use crate::products::{Inputs, ROWS, with_rows};
use crate::thresholds::Thresholds;

/// Rows widened together for one token, so that they stay in the L1 cache.
const FEW_ROWS: usize = 8;

/// The predictor of one layer.
pub struct CoarseGate {
    narrow: Narrow,
    d: usize,
    rows: SharedBytes,
    thresholds: Thresholds,
}

impl CoarseGate {
    /// `rows` holds rows of `d` elements.
    pub fn new(narrow: Narrow, rows: SharedBytes, d: usize, thresholds: Thresholds) -> Self {
        Self {
            narrow,
            d,
            rows,
            thresholds,
        }
    }
}

impl CoarseGate {
    /// Per-token memory for inputs of `d` elements.
    pub(crate) fn shared_shape(d: usize) -> SharedShape {
        SharedShape {
            row: d,
            ..SharedShape::default()
        }
    }
}

impl Predictor for CoarseGate {
    fn shape(&self) -> SharedShape {
        Self::shared_shape(self.d)
    }

    fn bytes(&self) -> u64 {
        self.rows.len() as u64 + self.thresholds.bytes()
    }

    fn prepare(&self, _: &Compute, _: Features<'_>, _: &mut Shared) {}

    fn scores(&self, cpu: Cpu, input: Features<'_>, _: &Shared, first: usize, scores: &mut [f32]) {
        self.products(cpu, input, first, scores);
    }

    fn thresholds(&self, cpu: Cpu, first: usize, thresholds: &mut [f32]) {
        self.thresholds.get(cpu, first, thresholds);
    }
}

impl CoarseGate {
    /// Products of the rows of the neurons from `first` on with each token's input: `scores
    /// [neurons × tokens]`.
    pub(crate) fn products(&self, cpu: Cpu, input: Features<'_>, first: usize, scores: &mut [f32]) {
        let (tokens, d) = (input.tokens(), self.d);
        let (narrow, wide) = (self.narrow.row_bytes(d), DType::Q4.row_bytes(d));
        let end = first + scores.len() / tokens;
        let rows = &self.rows.as_slice()[first * narrow..end * narrow];
        let together = if tokens == 1 { FEW_ROWS } else { ROWS };
        with_rows(together * wide, |memory, multiplier| {
            let blocks = rows.chunks(together * narrow);
            for (rows, scores) in blocks.zip(scores.chunks_mut(together * tokens)) {
                let memory = &mut memory[..rows.len() / narrow * wide];
                cpu.widen(self.narrow, rows, d, memory);
                let input = Inputs::Quantized(input.quantized);
                multiplier.by_row(cpu, DType::Q4, memory, input, scores);
            }
        });
    }
}
