//! The gate's activation function.

use emberflow_kernels::Cpu;
use emberflow_kernels::math::Xielu;
use emberflow_models::config::{Activation, FfnKind};

/// Activation function and threshold of a bank's gates.
#[derive(Debug, Clone, Copy)]
pub struct Gating {
    /// Activation function.
    pub activation: Activation,
    /// Threshold on the magnitude of activated gates: smaller ones become zero. 0 for none.
    pub cut: f32,
    /// Gaussian top-k: the cutoff is the mean plus this multiple of the deviation of a row's gates.
    /// Gates are activated once the cutoffs are known (`top.rs`).
    pub top: Option<f32>,
}

impl Gating {
    /// Applies function and threshold in place to `values [neurons × rows]`. With Gaussian top-k,
    /// only to values above the rows' `cutoffs`; if these are not known yet, nothing happens. Zero
    /// means that the neuron does not fire.
    pub fn apply(self, cpu: Cpu, cutoffs: &[f32], values: &mut [f32]) {
        match self.top {
            None => self.activate(cpu, values),
            Some(_) if cutoffs.is_empty() => {}
            Some(_) => self.activate_above(cpu, cutoffs, values),
        }
    }

    /// Activates those of `gates [neurons × rows]` that are above the rows' `cutoffs`; sets the
    /// others to zero.
    fn activate_above(self, cpu: Cpu, cutoffs: &[f32], gates: &mut [f32]) {
        for gates in gates.chunks_exact_mut(cutoffs.len().max(1)) {
            for (gate, &cutoff) in gates.iter_mut().zip(cutoffs) {
                let above = *gate - cutoff;
                *gate = above.max(0.0);
                if above > 0.0 {
                    self.activate(cpu, std::slice::from_mut(gate));
                }
            }
        }
    }

    /// Applies function and threshold in place.
    pub fn activate(self, cpu: Cpu, values: &mut [f32]) {
        match self.activation {
            Activation::Relu => values.iter_mut().for_each(|v| *v = v.max(0.0)),
            Activation::FatRelu { threshold } => values
                .iter_mut()
                .for_each(|v| *v = if *v > threshold { *v } else { 0.0 }),
            Activation::Relu2 => values.iter_mut().for_each(|v| {
                let r = v.max(0.0);
                *v = r * r;
            }),
            Activation::Silu => cpu.silu(values),
            Activation::Gelu => cpu.gelu(values),
            Activation::GeluTanh => cpu.gelu_tanh(values),
            Activation::ClampedSwiglu { limit, alpha } => {
                values.iter_mut().for_each(|v| *v = v.min(limit) * alpha);
                cpu.silu(values);
                values.iter_mut().for_each(|v| *v /= alpha);
            }
            Activation::Xielu {
                positive,
                negative,
                beta,
                eps,
            } => {
                let of = Xielu {
                    positive,
                    negative,
                    beta,
                    eps,
                };
                cpu.xielu(values, of);
            }
            Activation::ClampedSilu { limit } => {
                values.iter_mut().for_each(|v| *v = v.min(limit));
                cpu.silu(values);
            }
        }
        if self.cut > 0.0 {
            for value in values {
                if value.abs() < self.cut {
                    *value = 0.0;
                }
            }
        }
    }
}

/// Applies an activation function in place.
pub(crate) fn activate(activation: Activation, cpu: Cpu, values: &mut [f32]) {
    let gating = Gating {
        activation,
        cut: 0.0,
        top: None,
    };
    gating.activate(cpu, values);
}

/// Hidden values of an FFN, the input of Down: in place of `gates` (products of Gate), with `ups`
/// (products of Up). For callers that compute parts of a model themselves.
pub fn hidden(kind: FfnKind, cpu: Cpu, gates: &mut [f32], ups: &[f32]) {
    activate(kind.activation, cpu, gates);
    for (gate, up) in gates.iter_mut().zip(ups) {
        *gate *= of_up(kind, *up);
    }
}

/// The factor that an Up product applies to its gate.
pub fn of_up(kind: FfnKind, up: f32) -> f32 {
    match kind.activation {
        Activation::ClampedSwiglu { limit, .. } => up.clamp(-limit, limit) + 1.0,
        Activation::ClampedSilu { limit } => up.clamp(-limit, limit),
        _ if kind.relu_on_up => up.max(0.0),
        _ => up,
    }
}
