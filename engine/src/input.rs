//! Inputs of matrix products.

use emberflow_kernels::{Activations, ActivationsRef, Cpu};
use emberflow_predictor::Features;

/// Activations of several tokens, as f32 and as 8-bit integers for q4, q4k, q8 and mxfp4 rows.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// `[tokens × n]`.
    pub x: &'a [f32],
    /// See `x`.
    pub quantized: ActivationsRef<'a>,
}

impl<'a> Input<'a> {
    /// Quantises `x` into `memory`.
    pub fn new(cpu: Cpu, x: &'a [f32], tokens: usize, memory: &'a mut Activations) -> Self {
        cpu.quantize_activations(x, tokens, memory);
        Self {
            x,
            quantized: memory.all(),
        }
    }

    /// `count` tokens from token `first` on.
    pub fn range(self, first: usize, count: usize) -> Self {
        let n = self.n();
        Self {
            x: &self.x[first * n..(first + count) * n],
            quantized: self.quantized.range(first, count),
        }
    }

    /// Predictor features; `residual` is the residual stream before the norm.
    pub fn features(self, residual: &'a [f32]) -> Features<'a> {
        Features {
            normed: self.x,
            quantized: self.quantized,
            residual,
        }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.quantized.tokens()
    }

    /// Elements per token.
    pub fn n(&self) -> usize {
        self.quantized.n()
    }
}
