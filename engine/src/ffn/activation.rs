//! The gate's non-linearity.

use emberflow_kernels::Cpu;
use emberflow_models::config::Activation;

use super::FfnShape;

/// Applies the activation in place; what is smaller than the shape's cut in magnitude
/// becomes zero. A result of exactly zero means: does not fire.
pub(super) fn apply(cpu: Cpu, shape: &FfnShape, values: &mut [f32]) {
    match shape.kind.activation {
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
    if shape.cut > 0.0 {
        for value in values {
            if value.abs() < shape.cut {
                *value = 0.0;
            }
        }
    }
}
