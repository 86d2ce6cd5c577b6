//! Norms of rows of the residual stream, and soft caps of scores.

use emberflow_kernels::Cpu;

/// A norm and its weights, each of a row's length.
#[derive(Debug)]
pub(crate) struct Norm {
    pub weight: Vec<f32>,
    /// Biases of a LayerNorm (zeros if the model has none); `None` for RMSNorm.
    pub bias: Option<Vec<f32>>,
    pub eps: f32,
}

impl Norm {
    /// `out = norm(x)`, row by row.
    pub fn rows(&self, cpu: Cpu, x: &[f32], out: &mut [f32]) {
        let d = self.weight.len();
        for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
            match &self.bias {
                None => cpu.rmsnorm(x, &self.weight, self.eps, out),
                Some(bias) => {
                    out.copy_from_slice(x);
                    cpu.layernorm_inplace(out, &self.weight, bias, self.eps);
                }
            }
        }
    }

    /// `x = norm(x)`, row by row.
    pub fn rows_inplace(&self, cpu: Cpu, x: &mut [f32]) {
        for x in x.chunks_exact_mut(self.weight.len()) {
            match &self.bias {
                None => cpu.rmsnorm_inplace(x, &self.weight, self.eps),
                Some(bias) => cpu.layernorm_inplace(x, &self.weight, bias, self.eps),
            }
        }
    }
}

/// `out = norm(x)`, or `x` without a norm.
pub(crate) fn rows_or_copy(norm: Option<&Norm>, cpu: Cpu, x: &[f32], out: &mut [f32]) {
    match norm {
        Some(norm) => norm.rows(cpu, x, out),
        None => out[..x.len()].copy_from_slice(x),
    }
}

/// `s = cap · tanh(s / cap)`.
pub(crate) fn soft_cap(scores: &mut [f32], cap: f32) {
    for score in scores {
        *score = cap * libm::tanhf(*score / cap);
    }
}
