//! Evaluates a container's predictors against the true gates of a text.

use emberflow_kernels::{Activations, Compute};
use emberflow_predictor::{Features, Quality};

use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::ffn::{FfnSeen, Predictors, StoredPredictors};
use crate::model::Model;
use crate::open::compute;

/// True and false positives of a container's predictors, counted while a model runs without them.
/// The observed engine must record its gates ([`Lab::observe`](crate::Lab::observe)) and must not
/// use the predictors itself.
pub struct Judge {
    on: Compute,
    predictors: Predictors,
    quantized: Activations,
    /// By layer with an FFN: outliers of its input are pruned.
    pruned: Vec<bool>,
    /// Predictions, 1 or 0, `[neurons × tokens]`.
    wanted: Vec<f32>,
    neurons: usize,
    bytes: u64,
    layers: Vec<Quality>,
}

impl Judge {
    /// Loads the predictors of `model` for chunks of up to `chunk` tokens; `None` if it has none.
    ///
    /// # Errors
    /// Damaged or invalid predictors.
    pub fn open(model: &Model, chunk: usize, threads: usize) -> Result<Option<Self>, Error> {
        let (container, c) = (model.container(), model.text().config());
        let Some(stored) = StoredPredictors::look(container, c)? else {
            return Ok(None);
        };
        let (bytes, meta) = (stored.bytes, model.text().meta());
        Ok(Some(Self {
            on: compute(container, c, threads, None),
            predictors: stored.load(container, c, chunk)?,
            quantized: Activations::default(),
            pruned: c.ffn_layers().map(|layer| meta.prunes(layer)).collect(),
            wanted: vec![0.0; chunk * c.ffn as usize],
            neurons: c.ffn as usize,
            bytes,
            layers: vec![Quality::default(); c.ffn_layers().count()],
        }))
    }

    /// Bytes of the predictors' weights.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Evaluates the predictor of one FFN.
    pub fn see(&mut self, seen: &FfnSeen<'_>) {
        let (cpu, tokens, bank) = (self.on.cpu, seen.tokens, seen.layer as u32);
        let pairs = self.neurons * tokens;
        if seen.gates.len() != pairs || self.wanted.len() < pairs {
            return;
        }
        let pruning = cpu.pruning(self.pruned[seen.layer]);
        pruning.quantize_activations(seen.x, tokens, &mut self.quantized);
        let features = Features {
            normed: seen.x,
            quantized: self.quantized.all(),
            residual: seen.residual,
        };
        let named = (self.predictors).prepare(&self.on, bank, features);
        let cut = self.predictors.cut(bank);
        let wanted = &mut self.wanted[..pairs];
        if named {
            let predictors = &self.predictors;
            let name = |_, c: usize, wanted: &mut [f32]| {
                predictors.predict(cpu, bank, features, c * CLUSTER, wanted);
            };
            (self.on.workers).for_each_part_mut(wanted, CLUSTER * tokens, &name);
        }
        let quality = &mut self.layers[seen.layer];
        for (&gate, &wanted) in seen.gates.iter().zip(&*wanted) {
            let predicted = if named {
                wanted != 0.0
            } else {
                gate.abs() >= cut
            };
            quality.count(gate != 0.0, predicted);
        }
    }

    /// Counts by layer. In a layer without a predictor every neuron counts as predicted; in one
    /// with a cutoff only, every neuron above it.
    pub fn layers(&self) -> &[Quality] {
        &self.layers
    }
}
