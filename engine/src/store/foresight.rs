//! When reading the next layer's experts ahead pays.
//!
//! Such reads use time in which the device idles; where it is never idle, they take their place from
//! reads that are certain, and wrong ones make it worse. Passes of one token therefore alternate: a
//! few without reading ahead, which show for how long the device idles and how long a pass takes,
//! then some with it, as long as those are no slower and most guesses are right.

use std::time::{Duration, Instant};

use crate::options::ReadAhead;

/// Passes of a block without reading ahead, and of the first block with it; each further block that
/// pays is twice as long, up to the longest.
const WITHOUT: u32 = 8;
const WITH: u32 = 24;
const LONGEST: u32 = 192;

/// Passes without reading ahead after it did not pay.
const REST: u32 = 128;

/// Least share of a pass in which the device idles.
const IDLE: f64 = 0.08;

/// Least share of guessed experts that are visited.
const RIGHT: f64 = 0.5;

/// Passes with reading ahead may take so many times as long as those without before it stops: means
/// of so few differ by that much.
const SLOWER: f64 = 1.02;

/// Weight of a new value in a mean.
const NEW: f64 = 1.0 / 4.0;

/// A mean of the last few values.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    value: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.count = self.count.saturating_add(1);
        let new = NEW.max(1.0 / f64::from(self.count));
        self.value += new * (value - self.value);
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
    /// How much faster passes with reading ahead are than those before and after them, 0.1 for a
    /// tenth; `None` before the first comparison.
    pub gain: Option<f64>,
}

/// Passes of one kind that follow each other.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    passes: u32,
    /// Sum of the times in milliseconds, without that of the first pass, whose cache is that of the
    /// other kind.
    ms: f64,
}

impl Block {
    fn add(&mut self, ms: f64) {
        if self.passes > 0 {
            self.ms += ms;
        }
        self.passes += 1;
    }

    fn mean(self) -> f64 {
        self.ms / f64::from(self.passes.max(2) - 1)
    }
}

/// State of the decision.
#[derive(Debug)]
pub(super) struct Foresight {
    mode: ReadAhead,
    /// Whether this pass reads ahead.
    on: bool,
    /// Passes left of the block, and the length of the next one with reading ahead.
    left: u32,
    length: u32,
    /// This block, and mean times of the one before it and of the one before that.
    block: Block,
    before: Option<f64>,
    with: Option<f64>,
    /// Beginning of the pass, and the device's busy time then; `None` with several tokens.
    started: Option<(Instant, u64)>,
    idle: Mean,
    /// Time without reading ahead as a multiple of that with it.
    ratio: Mean,
    /// Experts guessed, and visited, at the last decision.
    judged: [u64; 2],
    pub seen: Foreseen,
}

impl Foresight {
    pub fn new(mode: ReadAhead) -> Self {
        Self {
            mode,
            on: mode == ReadAhead::On,
            left: WITHOUT,
            length: WITH,
            block: Block::default(),
            before: None,
            with: None,
            started: None,
            idle: Mean::default(),
            ratio: Mean::default(),
            judged: [0; 2],
            seen: Foreseen::default(),
        }
    }

    /// Whether this pass reads ahead.
    pub fn pays(&self) -> bool {
        self.on && self.started.is_some()
    }

    /// Begins a pass, of one token or several; `busy_ns` is the device's busy time so far.
    pub fn begin_pass(&mut self, single: bool, busy_ns: u64) {
        self.started = single.then(|| (Instant::now(), busy_ns));
    }

    /// Ends the pass through the layers.
    pub fn end_pass(&mut self, busy_ns: u64) {
        if let Some((start, busy)) = self.started.take() {
            let busy = Duration::from_nanos(busy_ns.saturating_sub(busy));
            self.count(start.elapsed(), busy);
        }
    }

    /// Counts a pass that took so long, during which the device was busy for `busy`, and decides
    /// about the next.
    fn count(&mut self, took: Duration, busy: Duration) {
        self.seen.passes += 1;
        self.seen.ahead += u64::from(self.on);
        self.block.add(took.as_secs_f64() * 1e3);
        if !self.on {
            let share = busy.as_secs_f64() / took.as_secs_f64().max(1e-9);
            self.idle.add((1.0 - share).max(0.0));
            self.seen.idle = Some(self.idle.value);
        }
        self.left = self.left.saturating_sub(1);
        if self.mode == ReadAhead::Auto && self.left == 0 {
            self.turn();
        }
    }

    /// Decides about the next block of passes.
    fn turn(&mut self) {
        let mean = std::mem::take(&mut self.block).mean();
        if self.on {
            (self.on, self.left, self.with) = (false, WITHOUT, Some(mean));
            return;
        }
        let mut pays = true;
        if let (Some(before), Some(with)) = (self.before, self.with.take()) {
            // What changes slowly, as the cache warms, changes both alike.
            self.ratio.add((before + mean) / 2.0 / with.max(1e-9));
            self.seen.gain = Some(self.ratio.value - 1.0);
            let judged = [self.seen.guessed, self.seen.right];
            let [guessed, right] = [0, 1].map(|i| (judged[i] - self.judged[i]) as f64);
            self.judged = judged;
            pays = right >= RIGHT * guessed && self.ratio.value * SLOWER >= 1.0;
            self.length = match pays {
                true => (2 * self.length).min(LONGEST),
                false => WITH,
            };
        }
        self.before = Some(mean);
        self.on = pays && self.idle.value >= IDLE;
        self.left = match self.on {
            true => self.length,
            false => REST,
        };
        if !self.on {
            // It is tried anew later, whatever it was like now.
            self.ratio = Mean::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes that take `times` ms without and with reading ahead, the device busy for `busy` of
    /// them. Returns how many of the last 1000 of 2000 read ahead.
    fn run(times: [f64; 2], busy: f64, right: u64, mode: ReadAhead) -> u64 {
        let mut foresight = Foresight::new(mode);
        let mut ahead = 0;
        for pass in 0..2000 {
            foresight.begin_pass(true, 0);
            let on = foresight.pays();
            ahead += u64::from(on && pass >= 1000);
            if on {
                foresight.seen.guessed += 10;
                foresight.seen.right += right;
            }
            let ms = times[usize::from(on)];
            let took = Duration::from_secs_f64(ms / 1e3);
            foresight.started = None;
            foresight.count(took, took.mul_f64(busy));
        }
        ahead
    }

    #[test]
    fn it_goes_on_where_it_pays_and_rests_where_it_does_not() {
        let auto = ReadAhead::Auto;
        assert!(run([10.0, 9.0], 0.6, 9, auto) > 900);
        // slower, wrong, or never idle
        assert!(run([10.0, 11.0], 0.6, 9, auto) < 200);
        assert!(run([10.0, 9.0], 0.6, 3, auto) < 200);
        assert_eq!(run([10.0, 9.0], 0.97, 9, auto), 0);
        assert_eq!(run([10.0, 9.0], 0.6, 9, ReadAhead::Off), 0);
        assert_eq!(run([10.0, 20.0], 1.0, 0, ReadAhead::On), 1000);
    }

    #[test]
    fn several_tokens_do_not_count() {
        let mut foresight = Foresight::new(ReadAhead::On);
        foresight.begin_pass(false, 0);
        assert!(!foresight.pays());
        foresight.end_pass(5);
        assert_eq!(foresight.seen.passes, 0);
    }
}
