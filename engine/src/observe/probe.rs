//! Benchmark hooks into an open engine.

use std::time::Duration;

use emberflow_kernels::{Activations, Cpu};

use crate::decoder::{AttentionSeen, StreamRows};
use crate::engine::Engine;
use crate::error::Error;
use crate::ffn::{FfnSeen, Oracle};
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
        buffers.extend(decoder.ffn.store.residency.hot_bytes());
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
        let division = planner.divide(self.engine.memory().budget())?;
        let plan = planner.forecast(&division, self.engine.threads())?;
        Ok(plan.decode.compute_ms)
    }

    /// Prunes the outliers of the inputs of the layers for which `prunes` is true, from the next pass on, and of no others.
    /// Changes nothing in models whose activations have a scale for each group.
    pub fn set_pruned(&mut self, prunes: impl Fn(usize) -> bool) {
        let layers = self.engine.decoder.weights.layers.iter_mut();
        (layers.enumerate()).for_each(|(number, layer)| layer.pruned = prunes(number));
    }

    /// Passes up to [`Engine::chunk`] `tokens` through the layers as the next of `sequence`, and raises `most`, one value per
    /// layer, to the [importance](emberflow_kernels::ActivationsRef::importance) of the outliers of these tokens: of the inputs of the
    /// mixer's first and last projections and of the FFN.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn importance(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        most: &mut [f32],
    ) -> Result<(), Error> {
        let (c, cpu) = (self.engine.config().clone(), self.engine.decoder.on.cpu);
        let (mut of_mixers, mut of_ffns) = (vec![1.0; most.len()], vec![1.0; most.len()]);
        let mut quantized = Activations::default();
        let mut attention = |seen: &AttentionSeen<'_>| {
            for x in [seen.x, seen.mixed] {
                raise(
                    &mut of_mixers[seen.layer],
                    cpu,
                    x,
                    seen.tokens,
                    &mut quantized,
                );
            }
        };
        let (layers, mut quantized) = (c.ffn_layers().collect::<Vec<_>>(), Activations::default());
        let mut ffn = |seen: &FfnSeen<'_>| {
            let most = &mut of_ffns[layers[seen.layer] as usize];
            raise(most, cpu, seen.x, seen.tokens, &mut quantized);
        };
        let rows = StreamRows {
            tokens,
            x: &mut Vec::new(),
            stored: None,
        };
        let engine = &mut *self.engine;
        engine.forward_residual(sequence, rows, &mut attention, &mut ffn)?;
        for (most, (mixer, ffn)) in most.iter_mut().zip(of_mixers.iter().zip(&of_ffns)) {
            *most = most.max(*mixer).max(*ffn);
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

/// Raises `most` to the importance of the outliers of `tokens` tokens.
fn raise(most: &mut f32, cpu: Cpu, x: &[f32], tokens: usize, quantized: &mut Activations) {
    cpu.quantize_activations(x, tokens, quantized);
    let all = quantized.all();
    *most = (0..tokens).fold(*most, |most, token| most.max(all.importance(token)));
}
