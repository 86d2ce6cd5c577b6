//! A measured miss curve: misses of a neuron cache by its size and by the frequency of neurons.
//!
//! `emberflow profile` runs the engine's cache on the recorded firings
//! ([`FiringTrace`](crate::FiringTrace)) once for each of [`SIZES`]. Misses of several texts add
//! up.

/// Sizes of the cache, as shares of all neurons.
pub const SIZES: [f64; 9] = [0.04, 0.08, 0.14, 0.2, 0.3, 0.4, 0.52, 0.66, 0.82];

/// Frequency classes; finer for rare neurons.
pub const BINS: usize = 16;

/// Class, 0 to `BINS - 1` as a fraction, of neurons that fire for a share `often` of the tokens.
pub fn bin(often: f64) -> f64 {
    often.clamp(0.0, 1.0).sqrt() * (BINS - 1) as f64
}

/// Needed neurons, and how many of them missed in a cache of each size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Misses {
    /// By class of frequency.
    pub needed: [u64; BINS],
    /// By size ([`SIZES`]) and class.
    pub missed: [[u64; BINS]; SIZES.len()],
}

impl Misses {
    /// Whether nothing was counted, as in statistics without a profile.
    pub fn is_empty(&self) -> bool {
        self.needed.iter().all(|&n| n == 0)
    }

    /// Share of all needed neurons that a cache of size `SIZES[size]` misses.
    pub fn rate(&self, size: usize) -> f64 {
        let sum = |counts: &[u64; BINS]| counts.iter().map(|&n| n as f64).sum::<f64>();
        sum(&self.missed[size]) / sum(&self.needed).max(1.0)
    }

    /// All numbers in storage order.
    pub(super) fn numbers_mut(&mut self) -> impl Iterator<Item = &mut u64> {
        self.needed.iter_mut().chain(self.missed.as_flattened_mut())
    }

    pub(super) fn merge(&mut self, mut other: Self) -> Option<()> {
        for (mine, theirs) in self.numbers_mut().zip(other.numbers_mut()) {
            *mine = mine.checked_add(*theirs)?;
        }
        Some(())
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let mut counts = self.missed.iter().flat_map(|m| m.iter().zip(&self.needed));
        match counts.find(|(missed, needed)| missed > needed) {
            Some((missed, needed)) => Err(format!("{missed} misses of {needed} needed neurons")),
            None => Ok(()),
        }
    }
}
