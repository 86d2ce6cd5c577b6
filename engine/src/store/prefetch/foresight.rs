//! Guesses at the next layer's experts: whether they are made, and what became of them.
//!
//! A guess is a prefetch: it waits behind what this layer needs, takes a stream buffer that is free, evicts nothing, and is
//! cancelled when the router has chosen other experts. Guesses that are mostly wrong take time of the disk from reads that
//! are needed, so they pause for some passes.

/// Experts that are guessed before their precision counts.
const FEWEST: u64 = 64;

/// Passes without guesses after most of so many were wrong.
const PAUSE: u32 = 64;

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
}

/// Whether experts are guessed.
#[derive(Debug)]
pub(crate) struct Foresight {
    wanted: bool,
    /// The pass has one token.
    single: bool,
    /// Passes of one token that are left without guesses.
    paused: u32,
    /// Experts guessed, and visited, since their precision was last judged.
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

    /// Begins a pass, of one token or several.
    pub fn begin_pass(&mut self, single: bool) {
        self.single = single;
        if single {
            self.paused = self.paused.saturating_sub(1);
            self.seen.passes += 1;
            self.seen.ahead += u64::from(self.pays());
        }
    }

    /// Whether this pass reads ahead.
    pub fn pays(&self) -> bool {
        self.wanted && self.single && self.paused == 0
    }

    /// Counts the experts that were guessed for a layer, and those of them that it visits.
    pub fn judge(&mut self, guessed: u64, right: u64) {
        self.seen.guessed += guessed;
        self.seen.right += right;
        let [all, good] = &mut self.recent;
        (*all, *good) = (*all + guessed, *good + right);
        if *all >= FEWEST {
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

    /// The share of 6400 passes with four guesses each that read ahead, so many of them right.
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
