//! Benchmark hooks into an open engine.

use std::time::Duration;

use emberflow_kernels::{Activations, Cpu};

use crate::engine::Engine;
use crate::error::Error;
use crate::ffn::{FfnSeen, Oracle};
use crate::forward::{AttentionSeen, StreamRows};
use crate::planner::Candidates;
use crate::planner::rates::Rates;
use crate::state::Sequence;

/// Measures an engine, or runs it under artificial conditions.
pub struct Probe<'e> {
    engine: &'e mut Engine,
}

impl<'e> Probe<'e> {
    /// A probe of `engine`.
    pub fn new(engine: &'e mut Engine) -> Self {
        Self { engine }
    }

    /// Records each layer's active set from the next pass on, for [`Probe::replay_active`].
    pub fn record_active(&mut self) {
        self.engine.decoder.ffn.oracle = Oracle::Recording(Vec::new());
    }

    /// Replays the recorded active sets from the next pass on. With the same tokens and context
    /// this gives the speed of a perfect predictor that costs nothing.
    pub fn replay_active(&mut self) {
        self.engine.decoder.ffn.oracle.replay();
    }

    /// Bandwidth in bytes per second at which the compute threads read attention weights and the
    /// hot region without computing: the upper bound of decode from memory.
    pub fn read_bandwidth(&mut self, time: Duration) -> f64 {
        let decoder = &mut self.engine.decoder;
        let mut buffers = decoder.weights.attention_bytes();
        buffers.extend(decoder.ffn.store.hot_bytes());
        emberflow_kernels::read_bandwidth(&decoder.on, &buffers, time)
    }

    /// Bytes of weights outside the FFNs read per token: attention, norms, head.
    pub fn dense_bytes(&self) -> u64 {
        self.engine.decoder.bytes_per_token()
    }

    /// Expected milliseconds of computation per token at these rates and the engine's budget.
    ///
    /// # Errors
    /// Rates without any thread count.
    pub fn expected_with(&self, rates: &Rates) -> Result<f64, Error> {
        let planner = self.engine.planner().with_rates(rates.clone());
        let (settled, budget) = (self.engine.settled(), self.engine.memory().budget());
        let division = planner.divide_again(settled, budget, settled.batch, Candidates::Current)?;
        let plan = planner.forecast(&division, self.engine.threads())?;
        Ok(plan.decode.compute_ms)
    }

    /// Prunes the outliers of the inputs of the layers for which `prunes` is true, from the next pass on, and of no others.
    /// Changes nothing in models whose activations have a scale for each group.
    pub fn set_pruned(&mut self, prunes: impl Fn(usize) -> bool) {
        let layers = self.engine.decoder.weights.layers.iter_mut();
        (layers.enumerate()).for_each(|(number, layer)| layer.pruned = prunes(number));
    }

    /// Passes up to [`Engine::chunk`] `tokens` through the layers as the next of `sequence`, and adds the importance of their
    /// outliers to `layers`, one for each layer: of the inputs of the mixer's first and last projections and of the FFNs. Of
    /// narrow experts that is the narrow input.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn importance(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        layers: &mut [Importance],
    ) -> Result<(), Error> {
        let (c, cpu) = (self.engine.config().clone(), self.engine.decoder.on.cpu);
        let mut of_mixers = layers.to_vec();
        let mut quantized = Activations::default();
        let mut attention = |seen: &AttentionSeen<'_>| {
            for x in [seen.x, seen.mixed] {
                of_mixers[seen.layer].add(cpu, x, seen.tokens, &mut quantized);
            }
        };
        let numbers: Vec<u32> = c.ffn_layers().collect();
        let mut of_ffns = vec![Importance::default(); layers.len()];
        let mut quantized = Activations::default();
        let mut ffn = |seen: &FfnSeen<'_>| {
            let of = &mut of_ffns[numbers[seen.layer] as usize];
            of.add(cpu, seen.x, seen.tokens, &mut quantized);
            if !seen.dense.is_empty() {
                of.add(cpu, seen.dense, seen.tokens, &mut quantized);
            }
        };
        let rows = StreamRows {
            tokens,
            x: &mut Vec::new(),
            stored: None,
        };
        let engine = &mut *self.engine;
        engine.forward_residual(sequence, rows, &mut attention, &mut ffn)?;
        for (layer, (mixer, ffn)) in layers.iter_mut().zip(of_mixers.iter().zip(of_ffns)) {
            *layer = Importance {
                sum: mixer.sum + ffn.sum,
                count: mixer.count + ffn.count,
            };
        }
        Ok(())
    }

    /// Sets `sequence` to `count` positions of `token` with constant keys and values, without
    /// computing them, to measure long contexts.
    ///
    /// More positions than the sequence can hold.
    /// More positions than the sequence has room for.
    pub fn pretend(&self, sequence: &mut Sequence, token: u32, count: usize) -> Result<(), Error> {
        sequence.clear();
        sequence.check_room(count, self.engine.config())?;
        sequence.pretend(token, count);
        Ok(())
    }
}

/// Importance of the outliers of a layer's inputs (llm.npu, §3.3, which takes the largest of all tokens; the mean orders
/// layers better).
#[derive(Debug, Clone, Copy, Default)]
pub struct Importance {
    /// Sum of the logarithms of the [importance](emberflow_kernels::ActivationsRef::importance) of each token in each input.
    sum: f64,
    count: u64,
}

impl Importance {
    /// The geometric mean over tokens and inputs: how many times the limit of its scale a token's largest element is. At
    /// least 1.
    pub fn mean(&self) -> f64 {
        (self.sum / self.count.max(1) as f64).exp()
    }

    /// Adds an input `x`, `[tokens × n]`.
    fn add(&mut self, cpu: Cpu, x: &[f32], tokens: usize, quantized: &mut Activations) {
        cpu.quantize_activations(x, tokens, quantized);
        let all = quantized.all();
        self.sum += (0..tokens)
            .map(|token| f64::from(all.importance(token)).ln())
            .sum::<f64>();
        self.count += tokens as u64;
    }
}
