//! Time, counters and energy of a generation.

use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::drafts::DraftTotals;
use crate::energy::Meter;
use crate::engine::Engine;

/// Metrics of the pass that produced one token.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Its counters.
    pub counters: Counters,
    /// Hash over the logits of all tokens up to this one, to compare runs of different lengths; 0
    /// in batches.
    pub logits_hash: u64,
}

/// Energy used by the machine, in joules.
#[derive(Debug, Clone, PartialEq)]
pub struct Energy {
    /// The meter: `rapl` or `battery`, and its name.
    pub source: String,
    /// From the start to the first generated token.
    pub prefill_joules: f64,
    /// From the first to the last generated token.
    pub decode_joules: f64,
}

/// Measures a generation.
pub(super) struct Clock {
    start: Instant,
    last: Instant,
    before: Counters,
    counted: Counters,
    meter: Option<Meter>,
    joules: [Option<f64>; 2],
    first_token: Option<Duration>,
    latencies: Vec<Duration>,
    /// Latencies of the tokens of the last pass; more than one if it took drafts.
    of_pass: usize,
    /// Passes that produced a token.
    passes: usize,
    drafted: DraftTotals,
    steps: Option<Vec<Step>>,
    half: Option<(usize, Counters)>,
    /// Counters at the first token; counts of the next [`EARLY`] passes.
    first_counted: Counters,
    early: Option<Counters>,
}

/// Passes after the first token that measure the machine's current speed.
const EARLY: usize = 8;

/// Measurements of a [`Clock`].
pub(super) struct ClockTimes {
    /// From the start to the first token, or to the end without one.
    pub first_token: Duration,
    /// By further token; those of one pass have equal shares of its time.
    pub latencies: Vec<Duration>,
    /// Drafts.
    pub drafts: DraftTotals,
    /// Totals.
    pub counters: Counters,
    pub steps: Vec<Step>,
    pub energy: Option<Energy>,
    /// Counters since [`Clock::half`], and the number of passes before it.
    pub settled: Option<(usize, Counters)>,
    /// Number of early passes and their counters; `None` if there were fewer.
    pub early: Option<(usize, Counters)>,
}

impl Clock {
    /// Starts the clock. `tokens`: expected number of passes.
    pub fn start(engine: &Engine, tokens: usize, keep_steps: bool) -> Self {
        let mut meter = Meter::find(&engine.options().lab.sysfs);
        let before = engine.counters();
        Self {
            joules: [meter.as_mut().and_then(Meter::joules), None],
            meter,
            before,
            counted: before,
            first_token: None,
            latencies: Vec::with_capacity(tokens),
            of_pass: 0,
            passes: 0,
            drafted: engine.draft_totals(),
            steps: keep_steps.then(Vec::new),
            half: None,
            first_counted: before,
            early: None,
            start: Instant::now(),
            last: Instant::now(),
        }
    }

    /// Records a token, or those of a batch. `rows`: of the pass that produced it; 0 if the pass before did. `hash`: see
    /// [`Step::logits_hash`].
    pub fn token(&mut self, engine: &Engine, rows: usize, hash: impl FnOnce() -> u64) {
        let first = self.first_token.is_none();
        self.passes += usize::from(rows > 0);
        if first {
            self.first_token = Some(self.start.elapsed());
            self.joules[1] = self.meter.as_mut().and_then(Meter::joules);
            self.first_counted = engine.counters();
        } else {
            self.add_latency(rows > 0);
            let one_each = self.latencies.len() + 1 == self.passes;
            if self.latencies.len() == EARLY && one_each {
                self.early = Some(engine.counters().since(self.first_counted));
            }
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

    fn add_latency(&mut self, new_pass: bool) {
        self.latencies.push(self.last.elapsed());
        self.of_pass = if new_pass { 1 } else { self.of_pass + 1 };
        let first = self.latencies.len().saturating_sub(self.of_pass);
        let tokens = &mut self.latencies[first..];
        let each = tokens.iter().sum::<Duration>() / tokens.len() as u32;
        tokens.fill(each);
    }

    /// Reads the meter, whose counters wrap.
    pub fn look(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.look();
        }
    }

    /// Marks the point where half of the requested tokens exist.
    pub fn half(&mut self, engine: &Engine) {
        self.half = Some((self.latencies.len(), engine.counters()));
    }

    /// Stops the clock.
    pub fn stop(mut self, engine: &Engine) -> ClockTimes {
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
        ClockTimes {
            first_token: self.first_token.unwrap_or_else(|| self.start.elapsed()),
            energy: energy(),
            latencies: self.latencies,
            drafts: engine.draft_totals().since(self.drafted),
            counters: counters.since(self.before),
            steps: self.steps.unwrap_or_default(),
            early: self.early.map(|counted| (EARLY, counted)),
            settled: (self.half).map(|(passes, counted)| (passes, counters.since(counted))),
        }
    }
}
