//! A measured miss curve: what a cache of neurons misses, by its size and by how often neurons fire.
//!
//! `emberflow profile` runs the cache of the engine over the firings that it saw (see
//! [`FiringTrace`](crate::FiringTrace)) once for each of [`SIZES`]. Misses of several texts add up.

/// Sizes of the cache, as shares of all neurons.
pub const SIZES: [f64; 9] = [0.04, 0.08, 0.14, 0.2, 0.3, 0.4, 0.52, 0.66, 0.82];

/// Classes of frequency; finer where neurons are rare.
pub const BINS: usize = 16;

/// The class, as a number from 0 to `BINS - 1`, of neurons that fire for a share `often` of tokens.
pub fn bin(often: f64) -> f64 {
    often.clamp(0.0, 1.0).sqrt() * (BINS - 1) as f64
}

/// Needed neurons, and how many of them a cache of each size did not hold.
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

    /// All numbers, in the order in which they are stored.
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
