//! Norms of rows of the residual stream, and soft caps of scores.

use emberflow_kernels::{Compute, Cpu, soft_cap};

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

/// Logits that one thread scales at once: 16 KiB, which stay in its cache.
const LOGITS_PER_CHUNK: usize = 4096;

/// `logit · scale`, then the soft cap if there is one.
pub(crate) fn scale_logits(on: &Compute, logits: &mut [f32], scale: f32, cap: Option<f32>) {
    if scale == 1.0 && cap.is_none() {
        return;
    }
    let scaled = |_: usize, _: usize, logits: &mut [f32]| {
        logits.iter_mut().for_each(|logit| *logit *= scale);
        if let Some(cap) = cap {
            soft_cap(on.cpu, logits, cap);
        }
    };
    (on.workers).for_each_chunk_mut(logits, LOGITS_PER_CHUNK, &scaled);
}

/// `1 / (1 + e^−x)`.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + emberflow_kernels::math::exp(-x))
}

/// `ln(1 + e^x)`, and `x` where they are equal in f32, as in PyTorch.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 {
        x
    } else {
        libm::log1pf(emberflow_kernels::math::exp(x))
    }
}

/// `x += scale × norm(y)`; overwrites `y`.
pub(crate) fn add_output(cpu: Cpu, norm: Option<&Norm>, scale: f32, y: &mut [f32], x: &mut [f32]) {
    if let Some(norm) = norm {
        norm.rows_inplace(cpu, y);
    }
    if scale != 1.0 {
        y.iter_mut().for_each(|y| *y *= scale);
    }
    add_rows(x, y, y.len());
}

/// `x += y` over the first `len` elements.
pub(crate) fn add_rows(x: &mut [f32], y: &[f32], len: usize) {
    for (x, y) in x[..len].iter_mut().zip(y) {
        *x += y;
    }
}
