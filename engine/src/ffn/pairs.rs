//! The units of a layer during its computation: inputs, and the state of each (neuron, row) pair.

use emberflow_kernels::{Activations, Cpu};

use super::activation::Gating;
use super::mask;
use super::units::{LayerInput, Rows};
use crate::input::Input;
use crate::store::regions::CLUSTER;

/// A unit of work during its layer's computation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub bank: u32,
    pub rows: usize,
    pub neurons: usize,
    /// Its clusters as items of the layer: first, and one past the last.
    pub first: usize,
    pub end: usize,
    /// Offset of its first pair among the layer's pairs.
    pub pairs: usize,
    /// Whether a mask restricts its pairs.
    pub named: bool,
    pub gating: Gating,
}

impl Unit {
    /// Its part of the layer's gates, `[clusters × CLUSTER × rows]`.
    pub fn gates<'a>(&self, gates: &'a [f32]) -> &'a [f32] {
        &gates[self.pairs..][..(self.end - self.first) * CLUSTER * self.rows]
    }

    /// Its part of the layer's mask.
    pub fn wanted<'a>(&self, wanted: &'a [u64]) -> Option<&'a [u64]> {
        let words = (self.end - self.first) * mask::words(self.rows);
        self.named.then(|| &wanted[self.pairs / 64..][..words])
    }
}

/// State of the (neuron, row) pairs, unit by unit.
pub(super) struct Pairs {
    /// Activated gates, where known before the sums.
    pub gates: Vec<f32>,
    /// Mask of the pairs that a predictor wants.
    pub wanted: Vec<u64>,
    /// Predictor margins (score minus threshold), for passes of one row.
    pub margins: Vec<f32>,
}

/// Gathered rows of a unit that takes only some rows of a pass.
#[derive(Default)]
pub(super) struct Gathered {
    x: Vec<f32>,
    residual: Vec<f32>,
    quantized: Activations,
}

/// The input of a unit.
#[derive(Clone, Copy)]
pub(super) struct UnitInput<'a> {
    pub input: Input<'a>,
    pub residual: &'a [f32],
}

/// The inputs of all units of a layer.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub at: &'a LayerInput<'a>,
    pub gathered: &'a [Gathered],
}

impl<'a> Inputs<'a> {
    pub fn of(&self, unit: usize) -> UnitInput<'a> {
        match self.at.units[unit].rows {
            Rows::All(_) => UnitInput {
                input: self.at.input,
                residual: self.at.residual,
            },
            Rows::Some(_) => {
                let own = &self.gathered[unit];
                UnitInput {
                    input: Input {
                        x: &own.x,
                        quantized: own.quantized.all(),
                    },
                    residual: &own.residual,
                }
            }
        }
    }
}

/// Gathers the input of each unit that takes only some rows.
pub(super) fn gather(cpu: Cpu, at: &LayerInput<'_>, gathered: &mut Vec<Gathered>) {
    let d = at.input.n();
    for (unit, work) in at.units.iter().enumerate() {
        let Rows::Some(rows) = work.rows else {
            continue;
        };
        if gathered.len() <= unit {
            gathered.resize_with(unit + 1, Gathered::default);
        }
        let own = &mut gathered[unit];
        for (from, to) in [(at.input.x, &mut own.x), (at.residual, &mut own.residual)] {
            to.clear();
            for &row in rows {
                to.extend_from_slice(&from[row as usize * d..][..d]);
            }
        }
        cpu.quantize_activations(&own.x, rows.len(), &mut own.quantized);
    }
}
