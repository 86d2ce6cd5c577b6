//! A copy of the gate rows in two bits: too coarse to compute with, good enough to tell
//! which gates will be positive.
//!
//! The quants are chosen so that the *products* with the inputs of a text change least
//! (`train/coarse.rs`), and each neuron has a threshold of its own.

use std::cell::RefCell;

use emberflow_kernels::{ActivationsRef, Cpu, DType, Workers, two_bit_row_bytes};

use crate::bytes::SharedBytes;
use crate::predict::{Features, Predictor, RANGE, Shared};
use crate::thresholds::Thresholds;

/// Rows that are widened together: they stay in the first-level cache while the tokens
/// pass.
const ROWS: usize = 8;

thread_local! {
    static WIDE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The predictor of one layer.
pub struct CoarseGate {
    d: usize,
    rows: SharedBytes,
    thresholds: Thresholds,
}

impl CoarseGate {
    /// `rows` holds two-bit rows of `d` elements.
    pub fn new(rows: SharedBytes, d: usize, thresholds: Thresholds) -> Self {
        Self {
            d,
            rows,
            thresholds,
        }
    }

    /// `scores[i × tokens + t]` of neuron `first + i` for token `t`.
    pub fn scores(&self, cpu: Cpu, input: ActivationsRef<'_>, first: usize, scores: &mut [f32]) {
        let (tokens, d) = (input.tokens(), self.d);
        let (narrow, wide) = (two_bit_row_bytes(d), DType::Q4.row_bytes(d));
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
                let memory = &mut memory[..count * wide];
                cpu.widen_two_bit(rows, d, memory);
                for t in 0..tokens {
                    let block = &mut block[..count];
                    let x = input.range(t, 1);
                    cpu.matvec_q(DType::Q4, memory, wide, x, block);
                    for (i, &score) in block.iter().enumerate() {
                        scores[i * tokens + t] = score;
                    }
                }
            }
        });
    }
}

impl Predictor for CoarseGate {
    fn bytes(&self) -> u64 {
        self.rows.len() as u64 + self.thresholds.bytes()
    }

    fn prepare(&self, _: Cpu, _: &Workers, _: Features<'_>, _: &mut Shared) {}

    fn predict(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        _: &Shared,
        first: usize,
        wanted: &mut [f32],
    ) {
        let tokens = input.tokens();
        self.scores(cpu, input.quantized, first, wanted);
        let mut thresholds = [0.0; RANGE];
        let thresholds = &mut thresholds[..wanted.len() / tokens];
        self.thresholds.get(cpu, first, thresholds);
        for (wanted, threshold) in wanted.chunks_exact_mut(tokens).zip(thresholds) {
            for score in wanted {
                *score = f32::from(u8::from(*score >= *threshold));
            }
        }
    }
}
