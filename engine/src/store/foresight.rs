//! When reading the next layer's experts ahead pays.
//!
//! Such reads use time in which the device idles; where it is never idle, they take their place from
//! reads that are certain, and wrong ones make it worse. Passes of one token therefore try both, four
//! at a time: one without reading ahead, two with it, one without, so that what changes slowly, as
//! the cache warms, changes both alike. The logarithm of their times' ratio is one trial. Reading
//! ahead goes on once the mean of the trials is above 0 by more than its error, and is tried again
//! now and then; it rests where it is below, or not clearly above after a few more trials, and for
//! longer each time.

use std::time::{Duration, Instant};

use crate::options::ReadAhead;

/// Passes without reading ahead before the first trial: they show for how long the device idles.
const FIRST: u32 = 8;

/// Passes of a trial, and whether each reads ahead.
const TRIAL: [bool; 4] = [false, true, true, false];

/// Fewest trials of a decision.
const FEWEST: u32 = 4;

/// Fewest trials whose mean is told: of the few by which it was decided, chance had its part.
const TOLD: u32 = 16;

/// Most trials before the first rest, and between two rests.
const FIRST_TRIALS: u32 = 16;
/// See [`FIRST_TRIALS`].
const MORE_TRIALS: u32 = 8;

/// Errors of the mean by which it has to be above 0, or below.
const SURE: f64 = 1.5;

/// Passes with reading ahead after the first decision for it; twice as many after each further one,
/// up to the longest.
const WITH: u32 = 28;
/// See [`WITH`].
const LONGEST: u32 = 224;

/// Passes without reading ahead after a decision against it, and the most after several.
const REST: u32 = 128;
/// See [`REST`].
const LONGEST_REST: u32 = 2048;

/// Least share of a pass in which the device idles.
const IDLE: f64 = 0.08;

/// Least share of guessed experts that are visited.
const RIGHT: f64 = 0.5;

/// Times through the layers after which what follows is a pause.
const PAUSE: u32 = 3;

/// Trials that a mean remembers: what was long ago may have changed.
const REMEMBERED: u32 = 64;

/// A mean of values, the later ones weighing more once there are many, and their variance.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    value: f64,
    variance: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.count = (self.count + 1).min(REMEMBERED);
        let (new, from) = (1.0 / f64::from(self.count), value - self.value);
        self.value += new * from;
        self.variance += new * (from * (value - self.value) - self.variance);
    }

    /// Standard error of the mean.
    fn error(&self) -> f64 {
        match self.count {
            0 | 1 => f64::INFINITY,
            n => (self.variance / f64::from(n - 1)).sqrt(),
        }
    }
}

/// What reading ahead has done.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Foreseen {
    /// Passes of one token, and those with reading ahead.
    pub passes: u64,
    /// See `passes`.
    pub ahead: u64,
    /// Experts guessed, and those that were visited.
    pub guessed: u64,
    /// See `guessed`.
    pub right: u64,
    /// Clusters read ahead, and those that were used.
    pub clusters: u64,
    /// See `clusters`.
    pub used: u64,
    /// Share of a pass without reading ahead in which the device idles; `None` before the first.
    pub idle: Option<f64>,
    /// How much faster passes with reading ahead are than those beside them, 0.1 for a tenth; `None`
    /// before enough trials.
    pub gain: Option<f64>,
}

/// What the passes to come are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The trial's pass of this number.
    Trial(usize),
    /// So many passes with reading ahead.
    With(u32),
    /// So many without.
    Rest(u32),
}

/// State of the decision.
#[derive(Debug)]
pub(super) struct Foresight {
    mode: ReadAhead,
    phase: Phase,
    /// Length of the next phase with reading ahead, and of the next rest.
    with: u32,
    rest: u32,
    /// Logarithms of the times of the running trial: those without less those with.
    trial: f64,
    trials: Mean,
    /// Trials left before a rest.
    left: u32,
    /// Beginning of the pass, and the device's busy time then; `None` with several tokens.
    started: Option<(Instant, u64)>,
    /// The same of the pass before, and the time it took through the layers.
    ended: Option<(Instant, u64, Duration)>,
    idle: Mean,
    /// Experts guessed, and visited, when the trials began.
    judged: [u64; 2],
    pub seen: Foreseen,
}

impl Foresight {
    pub fn new(mode: ReadAhead) -> Self {
        Self {
            mode,
            phase: Phase::Rest(FIRST),
            with: WITH,
            rest: REST,
            trial: 0.0,
            trials: Mean::default(),
            left: FIRST_TRIALS,
            started: None,
            ended: None,
            idle: Mean::default(),
            judged: [0; 2],
            seen: Foreseen::default(),
        }
    }

    /// Whether this pass reads ahead.
    pub fn pays(&self) -> bool {
        self.started.is_some() && self.is_on()
    }

    fn is_on(&self) -> bool {
        match (self.mode, self.phase) {
            (ReadAhead::On, _) => true,
            (ReadAhead::Off, _) => false,
            (ReadAhead::Auto, Phase::Trial(pass)) => TRIAL[pass],
            (ReadAhead::Auto, Phase::With(_)) => true,
            (ReadAhead::Auto, Phase::Rest(_)) => false,
        }
    }

    /// Begins a pass, of one token or several; `busy_ns` is the device's busy time so far. The pass
    /// before took until now, the head with it, which late reads slow down; or through the layers,
    /// where it was followed by a pause.
    pub fn begin_pass(&mut self, single: bool, busy_ns: u64) {
        let now = Instant::now();
        if let Some((start, busy, layers)) = self.ended.take() {
            let whole = now - start;
            let took = match single && whole <= PAUSE * layers {
                true => whole,
                false => layers,
            };
            let busy = Duration::from_nanos(busy_ns.saturating_sub(busy));
            self.count(took, busy);
        }
        self.started = single.then_some((now, busy_ns));
    }

    /// Ends the pass through the layers.
    pub fn end_pass(&mut self) {
        if let Some((start, busy)) = self.started.take() {
            self.ended = Some((start, busy, start.elapsed()));
        }
    }

    /// Counts a pass that took so long, during which the device was busy for `busy`, and decides
    /// about the next.
    fn count(&mut self, took: Duration, busy: Duration) {
        let on = self.is_on();
        self.seen.passes += 1;
        self.seen.ahead += u64::from(on);
        let took = took.as_secs_f64().max(1e-9);
        if !on {
            self.idle.add((1.0 - busy.as_secs_f64() / took).max(0.0));
            self.seen.idle = Some(self.idle.value);
        }
        if self.mode != ReadAhead::Auto {
            return;
        }
        self.phase = match self.phase {
            Phase::Trial(pass) => {
                self.trial += if on { -took.ln() } else { took.ln() };
                match pass + 1 < TRIAL.len() {
                    true => Phase::Trial(pass + 1),
                    false => self.decide(),
                }
            }
            Phase::With(left @ 2..) => Phase::With(left - 1),
            Phase::Rest(left @ 2..) => Phase::Rest(left - 1),
            Phase::With(_) | Phase::Rest(_) => self.next_trial(),
        };
    }

    /// What follows a trial.
    fn decide(&mut self) -> Phase {
        self.trials.add(std::mem::take(&mut self.trial) / 2.0);
        self.left = self.left.saturating_sub(1);
        let Mean { value, count, .. } = self.trials;
        if count < FEWEST {
            return self.next_trial();
        }
        if count >= TOLD {
            self.seen.gain = Some(value.exp() - 1.0);
        }
        let [guessed, right] = self.judged_since();
        let sure = SURE * self.trials.error();
        let pays = value > sure;
        if right < RIGHT * guessed || value + sure < 0.0 || !pays && self.left == 0 {
            return self.take_rest();
        }
        if !pays {
            return self.next_trial();
        }
        let passes = self.with;
        self.with = (2 * self.with).min(LONGEST);
        self.rest = REST;
        Phase::With(passes)
    }

    /// A trial, unless there is no time to gain.
    fn next_trial(&mut self) -> Phase {
        self.trial = 0.0;
        match self.idle.value >= IDLE {
            true => Phase::Trial(0),
            false => self.take_rest(),
        }
    }

    /// No reading ahead for a while.
    fn take_rest(&mut self) -> Phase {
        let passes = self.rest;
        self.rest = (2 * self.rest).min(LONGEST_REST);
        (self.with, self.left) = (WITH, MORE_TRIALS);
        self.judged = [self.seen.guessed, self.seen.right];
        Phase::Rest(passes)
    }

    /// Experts guessed since the trials began, and those that were visited.
    fn judged_since(&self) -> [f64; 2] {
        let now = [self.seen.guessed, self.seen.right];
        [0, 1].map(|i| now[i].saturating_sub(self.judged[i]) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes of 10 ms that differ by chance by up to half of it either way, `factor` times as long
    /// with reading ahead, the device busy for `busy` of them. Returns the share of the last 4000 of
    /// 6000 that read ahead, and the time of all as a multiple of that without.
    fn run(factor: f64, busy: f64, right: u64, mode: ReadAhead) -> (f64, f64) {
        let mut foresight = Foresight::new(mode);
        let mut random = 7u64;
        let (mut ahead, mut sum, mut plain) = (0u32, 0.0, 0.0);
        for pass in 0..6000 {
            foresight.begin_pass(true, 0);
            let on = foresight.pays();
            ahead += u32::from(on && pass >= 2000);
            if on {
                foresight.seen.guessed += 10;
                foresight.seen.right += right;
            }
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let without = 5.0 + 10.0 * (random >> 40) as f64 / f64::from(1 << 24);
            let ms = if on { without * factor } else { without };
            (sum, plain) = (sum + ms, plain + without);
            let took = Duration::from_secs_f64(ms / 1e3);
            foresight.started = None;
            foresight.count(took, took.mul_f64(busy));
        }
        (f64::from(ahead) / 4000.0, sum / plain)
    }

    #[test]
    fn it_goes_on_where_it_pays_and_rests_where_it_does_not() {
        let auto = ReadAhead::Auto;
        let (ahead, time) = run(0.9, 0.6, 9, auto);
        assert!(ahead > 0.8 && time < 0.95, "{ahead} {time}");
        for factor in [1.02, 1.1, 1.5] {
            let (ahead, time) = run(factor, 0.6, 9, auto);
            assert!(ahead < 0.1 && time < 1.01, "{factor}: {ahead} {time}");
        }
        // most guesses wrong, or the device never idle
        assert!(run(0.9, 0.6, 3, auto).0 < 0.05);
        assert_eq!(run(0.9, 0.97, 9, auto), (0.0, 1.0));
        assert_eq!(run(0.9, 0.6, 9, ReadAhead::Off), (0.0, 1.0));
        assert_eq!(run(2.0, 1.0, 0, ReadAhead::On).0, 1.0);
    }

    #[test]
    fn several_tokens_do_not_count() {
        let mut foresight = Foresight::new(ReadAhead::On);
        foresight.begin_pass(false, 0);
        assert!(!foresight.pays());
        foresight.end_pass();
        foresight.begin_pass(true, 5);
        assert_eq!(foresight.seen.passes, 0);
    }
}
