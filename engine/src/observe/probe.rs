//! Benchmark hooks into an open engine.

use std::time::Duration;

use crate::engine::Engine;
use crate::error::Error;
use crate::ffn::Oracle;
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
