//! Hooks of benchmarks into an open engine.

use std::time::Duration;

use crate::engine::Engine;
use crate::error::Error;
use crate::ffn::Oracle;
use crate::planner::rates::Rates;
use crate::sequence::Sequence;

/// Measures an engine, or makes it compute under conditions that no user would.
pub struct Probe<'e> {
    engine: &'e mut Engine,
}

impl<'e> Probe<'e> {
    /// Of `engine`.
    pub fn new(engine: &'e mut Engine) -> Self {
        Self { engine }
    }

    /// From the next pass on keeps which neurons each layer needs, for [`Probe::replay_active`].
    pub fn record_active(&mut self) {
        self.engine.decoder.ffn.oracle = Oracle::Recording(Vec::new());
    }

    /// From the next pass on takes the recorded active sets for granted instead of finding them out:
    /// for the same tokens after the same context this is the time that a perfect predictor which
    /// costs nothing would give.
    pub fn replay_active(&mut self) {
        self.engine.decoder.ffn.oracle.replay();
    }

    /// Bytes per second at which the compute threads read the weights of attention and the FFN weights
    /// that are in the hot region, without computing anything: the bound of decoding from memory.
    pub fn read_bandwidth(&mut self, time: Duration) -> f64 {
        let decoder = &mut self.engine.decoder;
        let mut buffers = decoder.weights.attention_bytes();
        buffers.extend(decoder.ffn.store.hot_bytes());
        emberflow_kernels::read_bandwidth(&decoder.on, &buffers, time)
    }

    /// Bytes of weights outside the FFNs that every token is computed from: attention, norms and head.
    pub fn dense_bytes(&self) -> u64 {
        self.engine.decoder.weights.bytes_per_token()
    }

    /// Milliseconds in which a machine with these rates would compute a token with all of the memory
    /// that the engine has.
    ///
    /// # Errors
    /// Rates without any thread count.
    pub fn expected_with(&self, rates: &Rates) -> Result<f64, Error> {
        let planner = self.engine.planner().with_rates(rates.clone());
        let division = planner.divide(self.engine.memory().budget())?;
        let plan = planner.forecast(&division, self.engine.threads())?;
        Ok(plan.decode.compute_ms)
    }

    /// Starts `sequence` afresh with `count` positions of `token` that were never computed, so that
    /// the speed at a long context can be measured. Their keys and values are some constant.
    ///
    /// # Errors
    /// More positions than the sequence has room for.
    pub fn pretend(&self, sequence: &mut Sequence, token: u32, count: usize) -> Result<(), Error> {
        sequence.clear();
        self.engine.check_room(sequence, count)?;
        sequence.pretend(token, count);
        Ok(())
    }
}
