//! The predictors of a model at work: which neurons of a bank are worth looking at.
//!
//! A prediction is made per token. In a chunk of several tokens a neuron is computed for the tokens it
//! was predicted for and for no others, so that a prompt gives the same bits however it is cut.

use emberflow_kernels::{Compute, Cpu};
use emberflow_predictor::{Features, Predictor, Shared, keep_wanted};

/// The predictors of all banks.
pub(crate) struct Predictors {
    layers: Vec<Option<Box<dyn Predictor>>>,
    cuts: Vec<f32>,
    shared: Shared,
}

impl Predictors {
    /// By bank: the predictors, and the magnitudes below which a gate counts as zero. `shared` is the
    /// working memory of the largest.
    pub fn new(layers: Vec<Option<Box<dyn Predictor>>>, cuts: Vec<f32>, shared: Shared) -> Self {
        Self {
            layers,
            cuts,
            shared,
        }
    }

    /// Number of banks.
    pub fn banks(&self) -> usize {
        self.layers.len()
    }

    /// Smallest magnitude of an activated gate of `bank` that counts.
    pub fn cut(&self, bank: u32) -> f32 {
        self.cuts.get(bank as usize).copied().unwrap_or(0.0)
    }

    /// Bytes of the weights that name `bank`'s neurons, read once for all tokens.
    pub fn bytes(&self, bank: u32) -> u64 {
        match self.layers.get(bank as usize) {
            Some(Some(predictor)) => predictor.bytes(),
            _ => 0,
        }
    }

    /// Computes what all neurons of `bank` have in common. False where no predictor
    /// names its neurons.
    pub fn prepare(&mut self, on: &Compute, bank: u32, input: Features<'_>) -> bool {
        match self.layers.get(bank as usize) {
            Some(Some(predictor)) => {
                predictor.prepare(on, input, &mut self.shared);
                true
            }
            _ => false,
        }
    }

    /// After [`Predictors::prepare`]: how far above its threshold each pair of `margins
    /// [neurons × tokens]` is, neurons from `first` on. What is not negative is wanted.
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

    /// After [`Predictors::prepare`]: 1 or 0 for each pair of `wanted
    /// [neurons × tokens]`, neurons from `first` on.
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
