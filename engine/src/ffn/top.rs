//! Gaussian top-k: keeps a token's gates above a cutoff that depends on all of them.
//!
//! The cutoff is the mean plus a multiple of the standard deviation, so that the given share of
//! normally distributed gates is zero. With resident Gate rows it is computed from the gates
//! themselves, with a predictor from the scores of all neurons.

use emberflow_models::config::ModelConfig;
use emberflow_predictor::{Sums, top_multiple};

/// Cutoffs of the rows of a unit.
#[derive(Debug, Default)]
pub(super) struct Tops {
    /// By layer: the multiple of the deviation, or `None` if all gates of the layer are used.
    multiples: Vec<Option<f32>>,
    sums: Sums,
    cutoffs: Vec<f32>,
}

impl Tops {
    /// For passes of up to `rows` rows.
    pub fn new(c: &ModelConfig, rows: usize) -> Self {
        let multiple = |&share: &f32| (share > 0.0).then(|| top_multiple(share));
        let room = if c.form.has_gate_top() { rows } else { 0 };
        Self {
            multiples: c.form.gate_top.iter().map(multiple).collect(),
            sums: Sums::with_capacity(room),
            cutoffs: Vec::with_capacity(room),
        }
    }

    /// The multiple of layer `layer`, if it has one.
    pub fn of(&self, layer: usize) -> Option<f32> {
        self.multiples.get(layer).copied().flatten()
    }

    /// The cutoffs of `rows` rows with `gates`, `[neurons × rows]`.
    pub fn find(&mut self, multiple: f32, gates: &[f32], rows: usize) -> &[f32] {
        self.cutoffs.clear();
        let moments = self.sums.moments(gates, rows);
        self.cutoffs.extend(moments.map(|of| of.above(multiple)));
        &self.cutoffs
    }
}
