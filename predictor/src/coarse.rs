//! Coarse-gate predictor: a copy of the gate rows in two or three bits, too coarse to compute with, but good
//! enough to predict which gates are positive.
//!
//! The quants minimise the change of the *products* with a text's inputs (`train/coarse.rs`), and
//! each neuron has its own threshold.

use std::cell::RefCell;

use emberflow_kernels::{Compute, Cpu, DType, Narrow};

use crate::bytes::SharedBytes;
use crate::predict::{Features, Predictor, Shared, SharedShape};
use crate::thresholds::Thresholds;

/// Rows widened together: they stay in the L1 cache while the tokens pass.
const ROWS: usize = 8;

thread_local! {
    static WIDE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

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

impl Predictor for CoarseGate {
    fn shape(&self) -> SharedShape {
        SharedShape::default()
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
        WIDE.with_borrow_mut(|memory| {
            memory.resize(memory.len().max(ROWS * wide), 0);
            let mut block = [0.0; ROWS];
            for (rows, scores) in rows
                .chunks(ROWS * narrow)
                .zip(scores.chunks_mut(ROWS * tokens))
            {
                let count = rows.len() / narrow;
                let (memory, block) = (&mut memory[..count * wide], &mut block[..count]);
                cpu.widen(self.narrow, rows, d, memory);
                for t in 0..tokens {
                    let x = input.quantized.range(t, 1);
                    cpu.matvec_q(DType::Q4, memory, wide, x, block);
                    for (i, &score) in block.iter().enumerate() {
                        scores[i * tokens + t] = score;
                    }
                }
            }
        });
    }
}
