//! What units are worth: their uses, each counting less with its age.

/// Units of a doubling of worth.
const DOUBLING: u32 = 128;

/// Worth is counted against a standard that grows by this much with every tick, instead
/// of letting everything shrink: by 2^(3/128), so that a use loses 1.6 %.
const TICK: u32 = 3;

/// Two worths whose logarithms differ by this or more add up to the larger one.
const REACH: u32 = 8 * DOUBLING;

/// Worth covered by one bucket: an eighth of a doubling.
const BUCKET: u32 = DOUBLING / 8;

/// Buckets: from 9 doublings below a single fresh use to 7 above, more than uses in
/// every tick add up to.
pub(super) const BUCKETS: u32 = 128;

/// Worth covered by one level.
const FINE: u32 = 2;

/// Levels of a bucket.
pub(super) const LEVELS: u32 = BUCKET / FINE;

/// The highest level.
pub(super) const TOP: u32 = BUCKETS * LEVELS - 1;

/// Buckets below that of a fresh use.
const BELOW: u32 = 72;

/// The standard that worth is counted against. A unit's worth is the logarithm of its uses, in
/// parts of a doubling, whether it is resident or not.
#[derive(Debug, Clone)]
pub(super) struct Worth {
    /// log2(1 + 2^x) for x from -REACH to REACH.
    sums: Vec<u16>,
    /// That of a use right now.
    now: u32,
}

impl Worth {
    pub fn new() -> Self {
        let unit = f64::from(DOUBLING);
        let sum = |i: u32| {
            let x = (f64::from(i) - f64::from(REACH)) / unit;
            ((1.0 + x.exp2()).log2() * unit).round() as u16
        };
        Self {
            sums: (0..2 * REACH).map(sum).collect(),
            now: 2 * REACH,
        }
    }

    /// Bytes that it allocates.
    pub fn bytes() -> u64 {
        2 * 2 * u64::from(REACH)
    }

    /// The lowest of the [`BUCKETS`] buckets, of the least worth and everything below. It
    /// rises with time; a bucket is stored at its number modulo [`BUCKETS`].
    #[inline]
    pub fn lowest(&self) -> u32 {
        self.now / BUCKET - BELOW
    }

    /// The bucket of a worth.
    #[inline]
    pub fn bucket(&self, worth: u32) -> u32 {
        let lowest = self.lowest();
        (worth / BUCKET).clamp(lowest, lowest + BUCKETS - 1)
    }

    /// The level of a worth, at most [`TOP`]: finer than buckets.
    #[inline]
    pub fn level(&self, worth: u32) -> u32 {
        let bottom = self.lowest() * BUCKET;
        worth.saturating_sub(bottom).min(BUCKETS * BUCKET - 1) / FINE
    }

    /// Time passes.
    pub fn tick(&mut self) {
        self.now = self.now.saturating_add(TICK);
    }

    /// The worth of a unit that is used so often per tick.
    pub fn expected(&self, uses: f64) -> u32 {
        let parts = f64::from(DOUBLING);
        let decay = 1.0 - (-f64::from(TICK) / parts).exp2();
        let log = (uses / decay).max(1e-9).log2() * parts;
        let log = log.clamp(-f64::from(REACH), f64::from(REACH));
        (f64::from(self.now) + log) as u32
    }

    /// Counts a use towards a worth.
    #[inline]
    pub fn used(&self, worth: &mut u32) {
        let x = worth.wrapping_add(REACH).wrapping_sub(self.now);
        *worth = match self.sums.get(x as usize) {
            Some(&sum) => self.now + u32::from(sum),
            // one of the two is as good as nothing beside the other
            None => self.now.max(*worth),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worth as it is defined: the sum of all uses, each weighted by its age.
    #[test]
    fn worth_is_the_sum_of_aged_uses() {
        let (mut worth, mut of) = (Worth::new(), [0; 3]);
        let mut exact = [0f64; 3];
        let weight = (-f64::from(TICK) / f64::from(DOUBLING)).exp2();
        let log = |w: &Worth, of: u32| (f64::from(of) - f64::from(w.now)) / 128.0;
        let mut seed = 7u32;
        for tick in 0..3000 {
            for (unit, exact) in exact.iter_mut().enumerate() {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                *exact *= weight;
                if (seed >> 16).is_multiple_of(3 + 40 * unit as u32) {
                    *exact += 1.0;
                    worth.used(&mut of[unit]);
                }
                let log = log(&worth, of[unit]);
                if *exact > 0.01 && tick > 200 {
                    assert!((log - exact.log2()).abs() < 0.15, "{tick}: {log} {exact}");
                }
            }
            worth.tick();
        }
        let expected = (0.25 / (1.0 - weight)).log2();
        assert!((log(&worth, worth.expected(0.25)) - expected).abs() < 0.02);
    }

    #[test]
    fn worths_far_apart_add_up_to_the_larger_one() {
        let (mut worth, mut of) = (Worth::new(), 0);
        for _ in 0..2000 {
            worth.tick();
        }
        worth.used(&mut of);
        assert_eq!(of, worth.now);
        of = worth.now + REACH;
        worth.used(&mut of);
        assert_eq!(of, worth.now + REACH);
    }
}
