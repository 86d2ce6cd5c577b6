//! Measured time of a decode pass by the number of sequences in it.
//!
//! If a pass is bound by memory or I/O, a second sequence is nearly free; if it is bound by compute, two take twice
//! as long. This depends on the model, the budget and the machine, so it is measured while the server runs.

use std::time::Duration;

/// Maximum number of sequences that are distinguished.
const MOST: usize = 64;
/// Passes after which a mean is trusted.
const TRUSTED: u32 = 6;
/// Weight of the last pass in the moving average.
const LAST: f64 = 0.1;
/// Age after which a mean is measured again.
const STALE: Duration = Duration::from_secs(300);
/// More sequences run together if the time per token falls to at most this share.
const GAIN: f64 = 0.93;
/// Maximum slowdown of interactive sequences by background ones.
const SLOWER: f64 = 1.2;

#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Mean seconds per token.
    token: f64,
    passes: u32,
    /// Time of the last measurement.
    at: Duration,
}

impl Cost {
    fn is_stale(&self, now: Duration) -> bool {
        now.saturating_sub(self.at) >= STALE
    }
}

/// Mean costs by number of sequences.
#[derive(Debug)]
pub struct Costs {
    by_texts: [Option<Cost>; MOST],
}

impl Costs {
    pub fn new() -> Self {
        Self {
            by_texts: [None; MOST],
        }
    }

    /// Records a pass with `texts` sequences that generated `tokens` tokens.
    pub fn add(&mut self, now: Duration, texts: usize, tokens: usize, time: Duration) {
        let Some(cost) = texts
            .checked_sub(1)
            .and_then(|at| self.by_texts.get_mut(at))
        else {
            return;
        };
        let token = time.as_secs_f64() / tokens.max(1) as f64;
        let at = now;
        let before = cost.filter(|cost| !cost.is_stale(now));
        *cost = Some(match before {
            None => Cost {
                token,
                passes: 1,
                at,
            },
            Some(Cost {
                token: mean,
                passes,
                ..
            }) => Cost {
                token: mean + (token - mean) * LAST.max(1.0 / f64::from(passes + 1)),
                passes: passes.saturating_add(1),
                at,
            },
        });
    }

    /// Seconds per token with `texts` sequences, if known.
    fn token(&self, now: Duration, texts: usize) -> Option<f64> {
        let cost = (*self.by_texts.get(texts.checked_sub(1)?)?)?;
        (cost.passes >= TRUSTED && !cost.is_stale(now)).then_some(cost.token)
    }

    /// The number of sequences, among powers of two, with the highest throughput. Unknown numbers are tried, up to
    /// four times the best: two sequences may not be faster although four are.
    pub fn best_batch(&self, now: Duration) -> usize {
        let (mut best, mut least) = (1, f64::INFINITY);
        let mut texts = 1;
        while texts <= MOST.min(4 * best) {
            let Some(token) = self.token(now, texts) else {
                return texts;
            };
            if token < GAIN * least {
                (best, least) = (texts, token);
            }
            texts *= 2;
        }
        best
    }

    /// How many background sequences, at most `most`, may run along with `texts` interactive ones without slowing
    /// them down by more than [`SLOWER`]. Unknown numbers are tried.
    pub fn background_limit(&self, now: Duration, texts: usize, most: usize) -> usize {
        let Some(alone) = self.token(now, texts).map(|token| token * texts as f64) else {
            return 0;
        };
        let slows = |more: usize| {
            let all = texts + more;
            (self.token(now, all)).is_some_and(|token| token * all as f64 > SLOWER * alone)
        };
        (1..=most).take_while(|&more| !slows(more)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    /// Costs after passes of up to `known` sequences that take `ms(sequences)`.
    fn costs(known: usize, ms: impl Fn(usize) -> u64) -> Costs {
        let mut costs = Costs::new();
        for texts in 1..=known {
            for _ in 0..TRUSTED {
                costs.add(NOW, texts, texts, Duration::from_millis(ms(texts)));
            }
        }
        costs
    }

    #[test]
    fn as_many_run_together_as_are_faster() {
        let free = costs(8, |_| 10);
        assert_eq!(free.best_batch(NOW), 16, "to be tried");
        assert_eq!(costs(8, |n| 10 * n as u64).best_batch(NOW), 1, "no gain");
        let eight = |n: usize| [10, 20, 0, 24, 0, 0, 0, 60][n - 1];
        assert_eq!(
            costs(8, eight).best_batch(NOW),
            16,
            "two gain nothing, four do"
        );
        let all = costs(16, |n| if n > 8 { 120 } else { eight(n) });
        assert_eq!(all.best_batch(NOW), 4);
        assert_eq!(Costs::new().best_batch(NOW), 1, "one is measured first");
        assert_eq!(costs(1, |_| 10).best_batch(NOW), 2, "then two");
    }

    #[test]
    fn background_work_slows_interactive_texts_by_a_fifth_at_most() {
        assert_eq!(costs(8, |_| 10).background_limit(NOW, 1, 2), 2, "free");
        assert_eq!(
            costs(8, |n| 10 * n as u64).background_limit(NOW, 1, 2),
            0,
            "not free"
        );
        assert_eq!(costs(8, |n| 10 + n as u64).background_limit(NOW, 1, 2), 2);
        assert_eq!(
            costs(8, |n| 10 + 2 * n as u64).background_limit(NOW, 1, 2),
            1
        );
        assert_eq!(costs(1, |_| 10).background_limit(NOW, 1, 2), 2, "tried");
        assert_eq!(
            Costs::new().background_limit(NOW, 1, 2),
            0,
            "alone is measured first"
        );
    }

    #[test]
    fn a_mean_follows_what_changes() {
        let mut costs = costs(4, |n| 10 * n as u64);
        assert_eq!(costs.best_batch(NOW), 1);
        for _ in 0..100 {
            costs.add(NOW, 2, 2, Duration::from_millis(11));
        }
        assert_eq!(costs.best_batch(NOW), 8, "to be tried");
    }
}
