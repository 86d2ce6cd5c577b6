//! What units are worth: their uses, each counting less with its age.

/// Units of a doubling of worth.
const DOUBLING: u32 = 128;

/// Worth is counted against a standard that grows by this much with every tick, instead
/// of letting everything shrink: by 2^(3/128), so that a use loses 1.6 %.
const TICK: u32 = 3;

/// Two worths whose logarithms differ by this or more add up to the larger one.
const REACH: u32 = 8 * DOUBLING;

/// Worth covered by one level.
const FINE: u32 = 2;

/// Levels of a doubling.
pub(super) const LEVELS: u32 = DOUBLING / FINE;

/// Doublings with levels of their own: so many below a single fresh use, and more above than uses
/// in every tick add up to.
const BELOW: u32 = 9;
const ABOVE: u32 = 7;

/// The highest level.
pub(super) const TOP: u32 = (BELOW + ABOVE) * LEVELS - 1;

/// A use in the last turn counts, beside all uses, as much as this many for each that is expected to
/// follow it turn by turn.
const FOLLOWING: f64 = 8.0;

/// The most that it counts for: 64 uses.
const MOST: u32 = 6 * DOUBLING;

/// The part of a tick's persistence that enters what is expected.
const NEW: f64 = 1.0 / 8.0;

/// The persistence expected before any was seen: that of large models published so far.
const USUAL: f64 = 0.8;

/// The standard that worth is counted against. A unit's worth is the logarithm of its uses, in
/// parts of a doubling, whether it is resident or not.
#[derive(Debug, Clone)]
pub(super) struct Worth {
    /// log2(1 + 2^x) for x from -REACH to REACH.
    sums: Vec<u16>,
    /// That of a use right now.
    now: u32,
    /// The chance that what was used in a tick is used in the next one.
    persistence: f64,
    /// Worth of a use in the last turn above that of a use.
    recent: u32,
}

impl Worth {
    pub fn new() -> Self {
        let unit = f64::from(DOUBLING);
        let sum = |i: u32| {
            let x = (f64::from(i) - f64::from(REACH)) / unit;
            ((1.0 + x.exp2()).log2() * unit).round() as u16
        };
        let mut worth = Self {
            sums: (0..2 * REACH).map(sum).collect(),
            now: 2 * REACH,
            persistence: USUAL,
            recent: 0,
        };
        worth.persist(0, 0);
        worth
    }

    /// Of `used` units that were used in a tick, `again` had been used in the one before. One
    /// that goes on with chance `p` goes on for `p / (1 - p)` ticks.
    pub fn persist(&mut self, again: u64, used: u64) {
        if used > 0 {
            self.persistence += NEW * (again as f64 / used as f64 - self.persistence);
        }
        let following = self.persistence / (1.0 - self.persistence);
        let log = (FOLLOWING * following).log2() * f64::from(DOUBLING);
        self.recent = log.clamp(0.0, f64::from(MOST)) as u32;
    }

    /// Bytes that it allocates.
    pub fn bytes() -> u64 {
        2 * 2 * u64::from(REACH)
    }

    /// The level of a worth, at most [`TOP`]. It falls with time.
    #[inline]
    pub fn level(&self, worth: u32) -> u32 {
        let bottom = self.now - BELOW * DOUBLING;
        (worth.saturating_sub(bottom) / FINE).min(TOP)
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
        *worth = self.sum(*worth, self.now);
    }

    /// The worth of a unit that was used in the last turn it had.
    #[inline]
    pub fn going_on(&self, worth: u32) -> u32 {
        self.sum(worth, self.now + self.recent)
    }

    /// The logarithm of the sum of two worths.
    #[inline]
    fn sum(&self, one: u32, other: u32) -> u32 {
        let x = one.wrapping_add(REACH).wrapping_sub(other);
        match self.sums.get(x as usize) {
            Some(&sum) => other + u32::from(sum),
            // one of the two is as good as nothing beside the other
            None => other.max(one),
        }
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
        let mut random = fastrand::Rng::with_seed(7);
        for tick in 0..3000 {
            for (unit, exact) in exact.iter_mut().enumerate() {
                *exact *= weight;
                if random.u32(..3 + 40 * unit as u32) == 0 {
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
    fn a_use_in_the_last_turn_counts_by_what_is_expected_to_follow() {
        let after = |again| {
            let mut worth = Worth::new();
            (0..200).for_each(|_| worth.persist(again, 1000));
            f64::from(worth.recent) / f64::from(DOUBLING)
        };
        assert!((after(500) - FOLLOWING.log2()).abs() < 0.02);
        assert!((after(750) - (3.0 * FOLLOWING).log2()).abs() < 0.02);
        assert_eq!([after(0), after(1000)], [0.0, 6.0]);
        // A tick without uses says nothing.
        let (usual, mut worth) = (Worth::new(), Worth::new());
        worth.persist(0, 0);
        assert_eq!(worth.recent, usual.recent);
        assert_eq!(worth.going_on(0), worth.now + worth.recent);
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
