//! The units of a layer during its computation: inputs, and the state of each (neuron, row) pair.

use std::ops::Range;

use emberflow_kernels::{Activations, Cpu};

use super::mask;
use super::units::{BankWork, Bias, LayerInput, Rows};
use crate::activation::Gating;
use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::lane::{Experts, HiddenRows, UnitRows};

/// What a lane computes of a layer beside the CPU's units.
#[derive(Clone, Copy, Default)]
pub(super) struct Beside<'a> {
    /// Input of further rows, which it computes with all clusters, and most clusters of a group then.
    pub rows: Option<(UnitInput<'a>, usize)>,
    /// Experts of the layer of which it computes hidden values.
    pub experts: Option<Experts<'a>>,
}

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
    /// The rows, all of them, whose hidden values a lane computes.
    pub hidden: Option<HiddenRows>,
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

    /// Rows of the unit with inputs `from`, restricted to the pairs in `wanted`.
    pub fn rows_of<'a>(&self, from: UnitInput<'a>, wanted: Option<&'a [u64]>) -> UnitRows<'a> {
        UnitRows {
            bank: self.bank,
            neurons: self.neurons,
            input: from.input,
            wanted,
            cut: self.gating.cut,
            bias: [from.bias.gate, from.bias.up],
        }
    }

    /// Whether it has one row, of which each gate is activated alone.
    pub fn is_single(&self) -> bool {
        self.rows == 1 && self.gating.top.is_none()
    }

    /// The first word of the mask that belongs to rows other than its own.
    pub fn words_end(&self) -> usize {
        self.pairs / 64 + (self.end - self.first) * mask::words(self.rows)
    }
}

/// State of the (neuron, row) pairs, unit by unit.
pub(super) struct Pairs {
    /// Activated gates, where known before the sums.
    pub gates: Vec<f32>,
    /// Mask of the pairs that a predictor wants. The CPU's pairs come first, then those of rows that a lane
    /// computes with all clusters.
    pub wanted: Vec<u64>,
    /// Number of the latter, if a predictor selected them.
    pub wanted_beside: Option<u64>,
    /// Predictor margins (score minus threshold), for passes of one row; empty without predictors and
    /// for experts.
    pub margins: Vec<f32>,
}

/// Gathered rows of the units that use only some rows of a pass, or scale them, unit after unit.
#[derive(Default)]
pub(super) struct Gathered {
    x: Vec<f32>,
    /// Residual rows; empty unless the predictors read them.
    residual: Vec<f32>,
    quantized: Activations,
    /// By unit: its first gathered row.
    first: Vec<usize>,
}

impl Gathered {
    /// For up to `rows` rows of `d` elements, gathered for all units of a layer together.
    pub fn new(rows: usize, d: usize, residual: bool) -> Self {
        Self {
            x: Vec::with_capacity(rows * d),
            residual: Vec::with_capacity(if residual { rows * d } else { 0 }),
            quantized: Activations::with_capacity(d, rows),
            first: Vec::with_capacity(16),
        }
    }

    /// Bytes that [`Gathered::new`] allocates.
    pub fn bytes_for(rows: usize, d: usize, residual: bool) -> usize {
        4 * rows * d * (1 + usize::from(residual)) + Activations::bytes(d, rows)
    }

    /// Gathers the rows of the units of `at`.
    pub fn fill(&mut self, cpu: Cpu, at: &LayerInput<'_>, residual: bool) {
        let d = at.input.n();
        self.first.clear();
        self.x.clear();
        self.residual.clear();
        self.quantized.clear(d);
        let mut gathered = 0;
        for work in at.units {
            self.first.push(gathered);
            if is_gathered(work) {
                gathered += work.rows.len();
                self.add(at, work, residual);
            }
        }
        if at.units.iter().any(|work| work.scales.is_some()) {
            cpu.quantize_activations(&self.x, gathered, &mut self.quantized);
        }
    }

    /// Gathers the rows of a unit, and quantises them unless they are scaled.
    fn add(&mut self, at: &LayerInput<'_>, work: &BankWork<'_>, residual: bool) {
        let d = at.input.n();
        for place in 0..work.rows.len() {
            let row = work.rows.row(place);
            let x = &at.input.x[row * d..][..d];
            match work.scales {
                None => {
                    self.x.extend_from_slice(x);
                    self.quantized.push(at.input.quantized, row);
                }
                Some(scales) => self.x.extend(x.iter().map(|x| x * scales[place])),
            }
            if residual {
                self.residual
                    .extend_from_slice(&at.residual[row * d..][..d]);
            }
        }
    }

    /// The gathered input of unit `unit`, of `rows` rows of `d` elements.
    fn of(&self, unit: usize, rows: usize, d: usize) -> UnitInput<'_> {
        let first = self.first[unit];
        let part = |values| -> &[f32] { slice_or_empty(values, first * d..(first + rows) * d) };
        UnitInput {
            input: Input {
                x: part(&self.x),
                quantized: self.quantized.all().range(first, rows),
            },
            residual: part(&self.residual),
            bias: Bias::NONE,
        }
    }
}

/// Whether a unit has its own gathered rows instead of those of the layer.
fn is_gathered(work: &BankWork<'_>) -> bool {
    !matches!(work.rows, Rows::All(_)) || work.scales.is_some()
}

/// The values of `range`, or none if the list is empty.
fn slice_or_empty(values: &[f32], range: Range<usize>) -> &[f32] {
    values.get(range).unwrap_or(&[])
}

/// The input of a unit.
#[derive(Clone, Copy)]
pub(super) struct UnitInput<'a> {
    pub input: Input<'a>,
    pub residual: &'a [f32],
    pub bias: Bias<'a>,
}

/// The inputs of all units of a layer.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub at: &'a LayerInput<'a>,
    pub gathered: &'a Gathered,
    /// What a lane computes.
    pub beside: Beside<'a>,
}

impl<'a> Inputs<'a> {
    pub fn of(&self, unit: usize) -> UnitInput<'a> {
        let work = &self.at.units[unit];
        if is_gathered(work) {
            UnitInput {
                bias: work.bias,
                ..(self.gathered).of(unit, work.rows.len(), self.at.input.n())
            }
        } else {
            UnitInput {
                input: self.at.input,
                residual: self.at.residual,
                bias: work.bias,
            }
        }
    }
}
