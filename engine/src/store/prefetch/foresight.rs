//! Guesses of the next layer's experts: when they are made, and how many were right.
//!
//! A guess is a prefetch: it follows the reads of this layer, uses a free stream buffer, evicts
//! nothing, and is cancelled when the router chooses other experts. Wrong guesses take device time
//! from needed reads, so guessing pauses while most are wrong.

/// Fewest guessed experts from which precision is computed.
const MIN_GUESSES: u64 = 64;

/// Number of passes without guesses after most guesses were wrong.
const PAUSE: u32 = 64;

/// Counts of expert prefetches.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Foreseen {
    /// Passes of one token; those with guesses (`ahead`).
    pub passes: u64,
    /// See `passes`.
    pub ahead: u64,
    /// Experts guessed; those that were visited (`right`).
    pub guessed: u64,
    /// See `guessed`.
    pub right: u64,
    /// Clusters prefetched; those that were used (`used`).
    pub clusters: u64,
    /// See `clusters`.
    pub used: u64,
}

/// Decides whether experts are guessed.
#[derive(Debug)]
pub(crate) struct Foresight {
    wanted: bool,
    /// The pass has one token.
    single: bool,
    /// Remaining passes of one token without guesses.
    paused: u32,
    /// [guessed, visited] experts since precision was last computed.
    recent: [u64; 2],
    pub seen: Foreseen,
}

impl Foresight {
    pub fn new(wanted: bool) -> Self {
        Self {
            wanted,
            single: false,
            paused: 0,
            recent: [0; 2],
            seen: Foreseen::default(),
        }
    }

    /// Begins a pass. `single`: it has one token.
    pub fn begin_pass(&mut self, single: bool) {
        self.single = single;
        if single {
            self.paused = self.paused.saturating_sub(1);
            self.seen.passes += 1;
            self.seen.ahead += u64::from(self.pays());
        }
    }

    /// Whether this pass guesses experts.
    pub fn pays(&self) -> bool {
        self.wanted && self.single && self.paused == 0
    }

    /// Counts the experts guessed for a layer, and those of them that were visited.
    pub fn judge(&mut self, guessed: u64, right: u64) {
        self.seen.guessed += guessed;
        self.seen.right += right;
        let [all, good] = &mut self.recent;
        (*all, *good) = (*all + guessed, *good + right);
        if *all >= MIN_GUESSES {
            if 2 * *good < *all {
                self.paused = PAUSE;
            }
            self.recent = [0; 2];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of 6400 passes that guess, with `right` of 4 guesses visited in each.
    fn share(wanted: bool, right: u64) -> f64 {
        let mut foresight = Foresight::new(wanted);
        for _ in 0..6400 {
            foresight.begin_pass(true);
            if foresight.pays() {
                foresight.judge(4, right);
            }
        }
        foresight.seen.ahead as f64 / foresight.seen.passes as f64
    }

    #[test]
    fn wrong_guesses_pause() {
        assert_eq!([share(true, 4), share(true, 2)], [1.0; 2]);
        let tried = share(true, 1);
        assert!((0.1..0.3).contains(&tried), "{tried}");
        assert_eq!(share(false, 4), 0.0);
    }

    #[test]
    fn several_tokens_do_not_count() {
        let mut foresight = Foresight::new(true);
        foresight.begin_pass(false);
        assert!(!foresight.pays());
        assert_eq!(foresight.seen.passes, 0);
        foresight.begin_pass(true);
        assert!(foresight.pays());
    }
}
