//! The predictors of a model at run time.
//!
//! Predictions are per token. In a chunk a neuron is computed only for the tokens for which it was
//! predicted, so the result does not depend on how a prompt is chunked.

use emberflow_kernels::{Compute, Cpu};
use emberflow_predictor::{Features, Predictor, Shared, SharedShape, keep_wanted};

/// The predictors of all banks.
pub(crate) struct Predictors {
    layers: Vec<Option<Box<dyn Predictor>>>,
    cuts: Vec<f32>,
    shape: SharedShape,
    shared: Shared,
}

impl Predictors {
    /// By bank: predictors, and thresholds on the magnitude of an activated gate. `shape`: the
    /// largest buffers of a predictor for up to `rows` tokens.
    pub fn new(
        layers: Vec<Option<Box<dyn Predictor>>>,
        cuts: Vec<f32>,
        shape: SharedShape,
        rows: usize,
    ) -> Self {
        Self {
            layers,
            cuts,
            shape,
            shared: Shared::new(shape, rows),
        }
    }

    /// Memory for passes of up to `rows` tokens.
    pub fn set_rows(&mut self, rows: usize) {
        self.shared = Shared::default();
        self.shared = Shared::new(self.shape, rows);
    }

    /// Number of banks.
    pub fn banks(&self) -> usize {
        self.layers.len()
    }

    /// Threshold on the magnitude of `bank`'s activated gates.
    pub fn cut(&self, bank: u32) -> f32 {
        self.cuts.get(bank as usize).copied().unwrap_or(0.0)
    }

    /// Bytes of `bank`'s predictor weights, read once for all tokens.
    pub fn bytes(&self, bank: u32) -> u64 {
        match self.layers.get(bank as usize) {
            Some(Some(predictor)) => predictor.bytes(),
            _ => 0,
        }
    }

    /// Computes the part shared by all neurons of `bank`. False if the bank has no predictor.
    pub fn prepare(&mut self, on: &Compute, bank: u32, input: Features<'_>) -> bool {
        match self.layers.get(bank as usize) {
            Some(Some(predictor)) => {
                predictor.prepare(on, input, &mut self.shared);
                true
            }
            _ => false,
        }
    }

    /// After [`Predictors::prepare`]: by token, the cutoff that a gate must exceed to fire; empty if
    /// it does not depend on the token.
    pub fn cutoffs(&self, bank: u32) -> &[f32] {
        match self.layers.get(bank as usize) {
            Some(Some(predictor)) => predictor.cutoffs(&self.shared),
            _ => &[],
        }
    }

    /// After [`Predictors::prepare`]: `margins [neurons × tokens]`, score minus threshold, for
    /// neurons from `first` on. Wanted where ≥ 0.
    pub fn margins(
        &self,
        cpu: Cpu,
        bank: u32,
        input: Features<'_>,
        first: usize,
        margins: &mut [f32],
    ) {
        if let Some(Some(predictor)) = self.layers.get(bank as usize) {
            predictor.margins(cpu, input, &self.shared, first, margins);
        }
    }

    /// After [`Predictors::prepare`]: `wanted [neurons × tokens]`, 1 or 0, for neurons from `first`
    /// on.
    pub fn predict(
        &self,
        cpu: Cpu,
        bank: u32,
        input: Features<'_>,
        first: usize,
        wanted: &mut [f32],
    ) {
        self.margins(cpu, bank, input, first, wanted);
        keep_wanted(wanted);
    }
}
