//! The gate's non-linearity.

use emberflow_kernels::Cpu;
use emberflow_models::config::Activation;

/// Applies `activation` in place. A result of exactly zero means: does not fire.
pub(super) fn apply(cpu: Cpu, activation: Activation, values: &mut [f32]) {
    match activation {
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
    }
}
