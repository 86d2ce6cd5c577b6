//! Score thresholds: a neuron is selected if its score reaches its threshold.

use emberflow_kernels::{Cpu, DType, Row};

use crate::bytes::SharedBytes;

/// Thresholds of a layer's neurons.
pub enum Thresholds {
    /// One for all neurons.
    One(f32),
    /// An f16 per neuron.
    Each(SharedBytes),
}

impl Thresholds {
    /// Bytes in memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::One(_) => 4,
            Self::Each(bytes) => bytes.len() as u64,
        }
    }

    /// Thresholds of the neurons from `first` on.
    pub(crate) fn get(&self, cpu: Cpu, first: usize, out: &mut [f32]) {
        match self {
            Self::One(threshold) => out.fill(*threshold),
            Self::Each(bytes) => {
                let bytes = &bytes.as_slice()[2 * first..2 * (first + out.len())];
                cpu.dequantize(Row::inline(DType::F16, out.len(), bytes), out);
            }
        }
    }
}
