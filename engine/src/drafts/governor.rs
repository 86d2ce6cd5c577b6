//! Chooses how many drafts a pass checks.
//!
//! A pass over the last token and `d` drafts yields `1 + t` tokens, where `t` drafts are taken. With the rate at which the
//! draft at each place is taken, if all before it are:
//!
//! ```text
//! tokens(d)  = 1 + Σ j ≤ d  Π i ≤ j  rate(i)
//! seconds(d) = time of a pass of that many rows + time to make d drafts
//! d          = argmax tokens(d) / seconds(d),  0 unless that is GAIN times as fast as no drafts
//! ```
//!
//! A source that knows how sure it is stops as soon as a further draft costs more time than it saves.
//!
//! Times are measured. Before that they lie on the line through the nearest two that are, or grow from the only one as the
//! plan's forecast does. Rates are measured too, also those of drafts that were made and not checked. Now and then a pass
//! without drafts, or one with two of them, measures what would be out of date otherwise.

use std::time::Duration;

/// Most drafts of a pass.
pub const MOST_DRAFTS: usize = 8;

/// Most rows of a text that decodes: a recurrent state goes back to before the pass, so all but the last of its rows may
/// have to be computed again before the next drafts.
pub(crate) const MOST_ROWS: usize = 2 * MOST_DRAFTS + 1;

/// Minimum expected speedup for checking drafts: smaller ones are within the noise.
const GAIN: f64 = 1.05;

/// Share of the last pass in the mean time of its number of rows.
const NEW: f64 = 0.25;

/// Factor of the counts after each pass with drafts: the last twenty or so count.
const FADING: f64 = 0.95;

/// Factor of a source's counts after each pass without its drafts: a hundred such passes leave a seventh.
const UNUSED: f64 = 0.98;

/// Weight of the previous place's rate as a prior, in counted drafts.
const PRIOR: f64 = 2.0;

/// The rate at which a draft is taken before any was counted: with n-grams 0.12 to 0.23, with a model of a third of the
/// size 0.85 (Qwen2.5-Coder, prompts of code and prose).
pub(super) const NGRAM_RATE: f64 = 0.2;
/// See [`NGRAM_RATE`].
pub(super) const MODEL_RATE: f64 = 0.7;

/// Passes with drafts after which one without is measured again, at first and at most: the number doubles. The first such pass
/// of a text has a cold cache, and drafts that seem to pay beside it may not.
const PLAIN_AGAIN: [usize; 2] = [4, 64];
/// At first, passes after which drafts are tried that are not expected to pay. Their number doubles while they do not, so they
/// take less than 3 % of the time.
const TRY_AGAIN: usize = 32;

/// Drafts of a trial.
const TRIAL: usize = 2;

/// Drafts that were taken and tried at a place.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    taken: f64,
    tried: f64,
}

/// How often the drafts of a source are taken, by place.
#[derive(Debug, Clone)]
pub(super) struct Rates {
    first: f64,
    places: [Count; MOST_DRAFTS],
}

impl Rates {
    /// Nothing is counted; drafts are assumed to be taken at the rate `first`.
    pub fn new(first: f64) -> Self {
        Self {
            first,
            places: Default::default(),
        }
    }

    /// Counts drafts of which the first `taken` were right, and the next one, if it was `tried`, was not.
    pub fn count(&mut self, taken: usize, tried: usize) {
        for (place, count) in self.places.iter_mut().enumerate().take(tried) {
            count.taken = FADING * count.taken + f64::from(u8::from(place < taken));
            count.tried = FADING * count.tried + 1.0;
        }
    }

    /// Decays the counts after a pass without drafts of this source, so that it is eventually tried again.
    pub fn fade(&mut self) {
        for count in &mut self.places {
            count.taken *= UNUSED;
            count.tried *= UNUSED;
        }
    }

    /// Expected tokens of passes with 0, 1, … drafts.
    fn tokens(&self) -> [f64; MOST_DRAFTS + 1] {
        let (mut rate, mut all, mut sum) = (self.first, 1.0, 1.0);
        let mut tokens = [1.0; MOST_DRAFTS + 1];
        for (tokens, count) in tokens[1..].iter_mut().zip(&self.places) {
            rate = (count.taken + PRIOR * rate) / (count.tried + PRIOR);
            all *= rate;
            sum += all;
            *tokens = sum;
        }
        tokens
    }
}

/// Drafts that a source could make.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer<'a> {
    pub rates: &'a Rates,
    /// Most drafts.
    pub most: usize,
    /// Seconds to make one.
    pub seconds: f64,
}

/// The offer and the number of drafts that were chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Choice {
    pub offer: usize,
    pub depth: usize,
    /// A further draft pays only if it is right with at least this probability.
    pub least: f64,
}

/// Chooses the number of drafts of each pass.
#[derive(Debug)]
pub(super) struct Governor {
    /// Mean seconds of a pass by number of rows; 0 if unknown.
    seconds: [f64; MOST_ROWS + 1],
    /// Forecast of the same, in any unit.
    forecast: [f64; MOST_ROWS + 1],
    /// Numbers of rows that were measured once, with a cold cache: the next time replaces that.
    once: [bool; MOST_ROWS + 1],
    /// Passes since the last one without drafts, and since the last one with drafts.
    with: usize,
    without: usize,
    /// Passes with drafts before one without.
    until: usize,
    /// Passes without drafts before the next trial.
    wait: usize,
}

impl Governor {
    /// Nothing is measured yet. `forecast`: expected time of a pass by number of rows, in any unit.
    pub fn new(forecast: impl Fn(usize) -> f64) -> Self {
        let mut all = [1.0; MOST_ROWS + 1];
        for (rows, time) in all.iter_mut().enumerate().skip(1) {
            *time = forecast(rows);
        }
        Self {
            seconds: [0.0; MOST_ROWS + 1],
            forecast: all,
            once: [false; MOST_ROWS + 1],
            with: 0,
            without: 0,
            until: PLAIN_AGAIN[0],
            wait: TRY_AGAIN,
        }
    }

    /// Records a pass of `rows` rows.
    pub fn passed(&mut self, rows: usize, drafts: usize, time: Duration) {
        let Some(mean) = self.seconds.get_mut(rows) else {
            return;
        };
        let time = time.as_secs_f64();
        let first = *mean == 0.0;
        *mean = match first || self.once[rows] {
            true => time,
            false => *mean + NEW * (time - *mean),
        };
        self.once[rows] = first;
        if drafts > 0 {
            (self.with, self.without) = (self.with + 1, 0);
        } else {
            if self.with >= self.until {
                self.until = PLAIN_AGAIN[1].min(2 * self.until);
            }
            (self.with, self.without) = (0, self.without + 1);
        }
    }

    /// Seconds of a pass of `rows` rows: measured, or on the line through the nearest two measured numbers; with one, as the
    /// forecast grows from there.
    fn time(&self, rows: usize) -> f64 {
        let rows = rows.min(MOST_ROWS);
        let measured = |rows: &usize| self.seconds[*rows] > 0.0;
        let mut below = (1..=rows).rev().filter(measured);
        let mut above = (rows + 1..=MOST_ROWS).filter(measured);
        let near = [below.next(), above.next().or_else(|| below.next())];
        let scaled = |from: usize| self.seconds[from] * self.forecast[rows] / self.forecast[from];
        match near {
            [Some(one), _] if one == rows => self.seconds[rows],
            [Some(one), Some(other)] => {
                let [low, high] = [one.min(other), one.max(other)];
                let rise = (self.seconds[high] - self.seconds[low]) / (high - low) as f64;
                self.seconds[one] + rise.max(0.0) * (rows - one) as f64
            }
            [Some(from), None] | [None, Some(from)] => scaled(from),
            [None, None] => self.forecast[rows],
        }
    }

    /// Chooses among `offers` for a pass that computes `pending` rows in any case; `None` for no drafts. `again`: rejected
    /// drafts make the next pass compute the rows before them again.
    pub fn choose(&mut self, pending: usize, offers: &[Offer<'_>], again: bool) -> Option<Choice> {
        // The first pass is measured without.
        if self.seconds[1..].iter().all(|&seconds| seconds == 0.0) || self.with >= self.until {
            return None;
        }
        let row = (self.time(pending + 1) - self.time(pending)).max(0.0);
        let plain = 1.0 / self.time(pending);
        let mut best = (plain * GAIN, None);
        let mut trial = None;
        for (at, offer) in offers.iter().enumerate() {
            let tokens = offer.rates.tokens();
            for depth in 1..=offer.most.min(MOST_DRAFTS) {
                let mut seconds = self.time(pending + depth) + depth as f64 * offer.seconds;
                if again {
                    let all = tokens[depth] - tokens[depth - 1];
                    seconds += (1.0 - all) * ((pending - 1) as f64 + tokens[depth]) * row;
                }
                let speed = tokens[depth] / seconds;
                let choice = Choice {
                    offer: at,
                    depth,
                    least: (offer.seconds + row) * speed,
                };
                if speed > best.0 {
                    best = (speed, Some(choice));
                }
                // An upper bound: as if its rows took no time.
                let hoped = tokens[depth] / (self.time(pending) + depth as f64 * offer.seconds);
                if depth <= TRIAL && hoped > plain * GAIN {
                    trial = Some(choice);
                }
            }
        }
        if best.1.is_some() {
            self.wait = TRY_AGAIN;
            return best.1;
        }
        if trial.is_some() && self.without >= self.wait {
            self.wait *= 2;
            return trial;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A simulated text: passes of `rows` rows take `time(rows)`, a draft is right with the probability `right`. Returns
    /// the seconds of `tokens` tokens, and those without drafts.
    fn simulate(
        tokens: usize,
        right: impl Fn(usize) -> f64,
        draft: f64,
        again: bool,
        forecast: fn(usize) -> f64,
        time: fn(usize) -> f64,
    ) -> [f64; 2] {
        let mut random = fastrand::Rng::with_seed(7);
        let mut governor = Governor::new(forecast);
        let (mut rates, mut made, mut seconds) = (Rates::new(0.5), 0, 0.0);
        let mut pending = 1;
        while made < tokens {
            let offer = Offer {
                rates: &rates,
                most: MOST_DRAFTS.min(MOST_ROWS.saturating_sub(pending)),
                seconds: draft,
            };
            let chosen = governor.choose(pending, &[offer], again);
            let depth = chosen.map_or(0, |choice| choice.depth);
            let mut guess = |_: &usize| random.f64() < right(made);
            let taken = (0..depth).take_while(&mut guess).count();
            match depth {
                // It is known whether the first one would have been right, as with n-grams.
                0 if draft == 0.0 => rates.count(usize::from(guess(&0)), 1),
                0 => rates.fade(),
                _ => rates.count(taken, depth.min(taken + 1)),
            }
            let rows = pending + depth;
            governor.passed(rows, depth, Duration::from_secs_f64(time(rows)));
            seconds += time(rows) + depth as f64 * draft;
            made += 1 + taken;
            pending = if again && taken < depth {
                pending + taken + 1
            } else {
                1
            };
        }
        [seconds, made as f64 * time(1)]
    }

    fn reads(rows: usize) -> f64 {
        0.2 + 0.002 * rows as f64
    }

    fn computes(rows: usize) -> f64 {
        0.05 * rows as f64
    }

    #[test]
    fn right_drafts_of_cheap_rows_are_taken() {
        for forecast in [reads as fn(usize) -> f64, computes] {
            for draft in [0.0, 0.01] {
                let [seconds, plain] = simulate(2000, |_| 0.85, draft, false, forecast, reads);
                // At best 0.22 and 0.33.
                let most = if draft == 0.0 { 0.32 } else { 0.43 };
                assert!(seconds < most * plain, "{seconds} of {plain}, {draft}");
            }
        }
    }

    #[test]
    fn wrong_drafts_and_slow_rows_cost_less_than_three_percent() {
        for (right, draft, time) in [
            (0.05, 0.0, reads as fn(usize) -> f64),
            (0.0, 0.02, reads),
            (0.5, 0.0, computes),
            (0.8, 0.01, computes),
            (0.0, 0.0, computes),
        ] {
            for forecast in [reads as fn(usize) -> f64, computes] {
                let [seconds, plain] = simulate(2000, |_| right, draft, false, forecast, time);
                assert!(
                    seconds < 1.03 * plain,
                    "{right} {draft}: {seconds} of {plain}"
                );
            }
        }
    }

    #[test]
    fn rows_that_are_computed_again_count() {
        fn both(rows: usize) -> f64 {
            0.2 + 0.02 * rows as f64
        }
        for (time, right, least) in [
            (both as fn(usize) -> f64, 0.5, 1.0),
            (both, 0.1, 0.97),
            (both, 0.9, 1.8),
            (reads, 0.8, 1.8),
            (computes, 0.5, 0.97),
        ] {
            let [seconds, plain] = simulate(2000, |_| right, 0.0, true, time, time);
            assert!(plain > least * seconds, "{right}: {seconds} of {plain}");
        }
    }

    #[test]
    fn a_source_that_was_wrong_is_tried_again() {
        let later = |made: usize| if made < 300 { 0.0 } else { 0.9 };
        let [seconds, plain] = simulate(3000, later, 0.03, false, reads, reads);
        assert!(plain > 1.7 * seconds, "{seconds} of {plain}");
    }

    #[test]
    fn the_depth_follows_the_rates() {
        let choose = |taken: usize, tried: usize| {
            let mut governor = Governor::new(reads);
            governor.passed(1, 0, Duration::from_millis(200));
            let mut rates = Rates::new(0.5);
            (0..30).for_each(|_| rates.count(taken, tried));
            let offer = Offer {
                rates: &rates,
                most: MOST_DRAFTS,
                seconds: 0.02,
            };
            (governor.choose(1, &[offer], false)).map_or(0, |choice| choice.depth)
        };
        assert_eq!(choose(8, 8), 8);
        assert_eq!(choose(3, 4), 3);
        assert_eq!(choose(0, 1), 0);
    }

    #[test]
    fn the_better_source_is_chosen() {
        let mut governor = Governor::new(reads);
        governor.passed(1, 0, Duration::from_millis(200));
        let [mut good, mut bad] = [Rates::new(0.5), Rates::new(0.5)];
        (0..30).for_each(|_| good.count(3, 4));
        (0..30).for_each(|_| bad.count(0, 1));
        let offer = |rates, seconds| Offer {
            rates,
            most: 4,
            seconds,
        };
        let chosen = governor.choose(1, &[offer(&bad, 0.0), offer(&good, 0.01)], false);
        assert_eq!(
            chosen.map(|chosen| (chosen.offer, chosen.depth)),
            Some((1, 3))
        );
        let slow = governor.choose(1, &[offer(&bad, 0.0), offer(&good, 10.0)], false);
        assert_eq!(slow, None);
    }
}
