//! What a generation took: time, counters, energy.

use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::engine::Engine;
use crate::observe::energy::Meter;

/// What the pass that gave one token did.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Its counters.
    pub counters: Counters,
    /// Hash over the logits of every token up to this one, so that runs of different lengths can be
    /// compared; 0 where sequences run together.
    pub logits_hash: u64,
}

/// Joules that the machine used.
#[derive(Debug, Clone, PartialEq)]
pub struct Energy {
    /// What told them: `rapl` or `battery`, and which.
    pub source: String,
    /// From the start to the first generated token.
    pub prefill_joules: f64,
    /// From then to the last one.
    pub decode_joules: f64,
}

/// Measures a generation from its start on.
pub(super) struct Clock {
    start: Instant,
    last: Instant,
    before: Counters,
    counted: Counters,
    meter: Option<Meter>,
    joules: [Option<f64>; 2],
    first_token: Option<Duration>,
    latencies: Vec<Duration>,
    steps: Option<Vec<Step>>,
    half: Option<(usize, Counters)>,
}

/// What a [`Clock`] found.
pub(super) struct Times {
    /// From the start to the first token, or to the end where there was none.
    pub first_token: Duration,
    /// Of each further pass.
    pub latencies: Vec<Duration>,
    /// What was done.
    pub counters: Counters,
    pub steps: Vec<Step>,
    pub energy: Option<Energy>,
    /// What of it was done after [`Clock::half`], and the number of passes before.
    pub settled: Option<(usize, Counters)>,
}

impl Clock {
    /// Starts. `tokens`: about as many passes will follow.
    pub fn start(engine: &Engine, tokens: usize, keep_steps: bool) -> Self {
        let mut meter = Meter::find(&engine.options().sysfs);
        let before = engine.counters();
        Self {
            joules: [meter.as_mut().and_then(Meter::joules), None],
            meter,
            before,
            counted: before,
            first_token: None,
            latencies: Vec::with_capacity(tokens),
            steps: keep_steps.then(Vec::new),
            half: None,
            start: Instant::now(),
            last: Instant::now(),
        }
    }

    /// A pass gave a token to somebody. `hash`: see [`Step::logits_hash`].
    pub fn token(&mut self, engine: &Engine, hash: impl FnOnce() -> u64) {
        let first = self.first_token.is_none();
        if first {
            self.first_token = Some(self.start.elapsed());
            self.joules[1] = self.meter.as_mut().and_then(Meter::joules);
        } else {
            self.latencies.push(self.last.elapsed());
        }
        if let Some(steps) = &mut self.steps {
            let counters = engine.counters();
            if !first {
                steps.push(Step {
                    counters: counters.since(self.counted),
                    logits_hash: hash(),
                });
            }
            self.counted = counters;
        }
        self.look();
        self.last = Instant::now();
    }

    /// Follows the meter: its counters start over now and then.
    pub fn look(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.look();
        }
    }

    /// Half of the tokens that were asked for are there.
    pub fn half(&mut self, engine: &Engine) {
        self.half = Some((self.latencies.len(), engine.counters()));
    }

    /// Stops.
    pub fn stop(mut self, engine: &Engine) -> Times {
        let counters = engine.counters();
        let end = self.meter.as_mut().and_then(Meter::joules);
        let energy = || {
            let [start, first] = self.joules;
            Some(Energy {
                source: self.meter.as_ref()?.name().to_owned(),
                prefill_joules: first? - start?,
                decode_joules: end? - first?,
            })
        };
        Times {
            first_token: self.first_token.unwrap_or_else(|| self.start.elapsed()),
            energy: energy(),
            latencies: self.latencies,
            counters: counters.since(self.before),
            steps: self.steps.unwrap_or_default(),
            settled: (self.half).map(|(passes, counted)| (passes, counters.since(counted))),
        }
    }
}
