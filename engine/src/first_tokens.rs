//! Corrects assumptions about a model without activation statistics from the first tokens of a run.
//!
//! Without statistics the plan assumes [`Firing::unknown`]: a fifth of the neurons fire, with the skew of
//! ReLU-fied models. If more or fewer fire, or the same ones for longer, another way of loading neurons may be
//! faster. After some tokens memory is divided again with the measured values:
//!
//! ```text
//! share of neurons that fire = fired / possible
//! misses of the cold region  = assumed misses × (seen / assumed with this division)
//! ```
//!
//! The budget stays the same, and no result depends on the division.
//!
//! [`Firing::unknown`]: crate::planner::Firing::unknown

use crate::counters::Counters;
use crate::planner::Planner;

/// Tokens that fill the cache before counting, then counted tokens. Eight tokens of a 1B model with a tenth of its
/// neurons firing are 100,000 samples of the share, and as many looked-up neurons.
const FILLING: usize = 8;
const COUNTED: usize = 8;

/// Number of corrections: hits are known only after Gate rows were resident.
const ROUNDS: usize = 3;

/// The first decoded tokens of a run.
#[derive(Debug, Default)]
pub(crate) struct FirstTokens {
    tokens: usize,
    rounds: usize,
    from: Counters,
}

impl FirstTokens {
    /// Whether further tokens correct assumptions of `planner` about neurons.
    pub fn corrects(&self, planner: &Planner) -> bool {
        let assumed = planner.firing.assumed && planner.compares() && planner.needs.neurons > 0;
        assumed && self.rounds < ROUNDS
    }

    /// Discards a window that is interrupted by anything other than decoding.
    pub fn restart(&mut self) {
        self.tokens = 0;
    }

    /// Counts a token, after which the counters are `now`. Returns the measured values once the window is
    /// complete.
    pub fn count(&mut self, now: Counters) -> Option<Counters> {
        if self.rounds == ROUNDS {
            return None;
        }
        self.tokens += 1;
        match self.tokens {
            FILLING => self.from = now,
            n if n >= FILLING + COUNTED => {
                self.tokens = 0;
                self.rounds += 1;
                return Some(now.since(self.from));
            }
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_fill_the_cache_are_not_counted() {
        let mut first = FirstTokens::default();
        let at = |fired| Counters {
            fired,
            ..Counters::default()
        };
        for round in 0..2 {
            for token in 1..FILLING + COUNTED {
                assert!(first.count(at(100 * round + token as u64)).is_none());
            }
            let seen = first.count(at(100 * round + (FILLING + COUNTED) as u64));
            assert_eq!(seen.unwrap().fired, COUNTED as u64);
        }
        assert_eq!(first.rounds, 2);
        // A prompt interrupts: its tokens are not counted, and the window begins again.
        for token in 1..=FILLING as u64 {
            assert!(first.count(at(1000 + token)).is_none());
        }
        first.restart();
        for token in 1..(FILLING + COUNTED) as u64 {
            assert!(first.count(at(5000 + token)).is_none());
        }
        let seen = first.count(at(5000 + (FILLING + COUNTED) as u64));
        assert_eq!(seen.unwrap().fired, COUNTED as u64);
        assert_eq!(first.rounds, ROUNDS);
        assert!(first.count(at(6000)).is_none());
    }
}
