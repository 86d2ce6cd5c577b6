//! Combined recency-frequency value (CRF) of a unit, the score of LRFU (Lee et al., 2001):
//!
//! C(t) = Σ_i 2^(−λ·(t − t_i)) over its uses at passes t_i, with λ = 3/128 per pass.
//!
//! A use loses half its weight in about 43 passes. The CRF is stored as its base-2 logarithm in
//! fixed point. Instead of decaying every unit in every pass, the value of a fresh use grows by λ.

/// Fixed-point steps per doubling of the CRF.
const STEPS_PER_DOUBLING: u32 = 128;

/// Growth of a fresh use per pass: λ = 3/128, so older uses lose 1.6 %.
const DECAY_STEPS: u32 = 3;

/// Two values that differ by this much or more add up to the larger one.
const SUM_RANGE: u32 = 8 * STEPS_PER_DOUBLING;

/// Steps per level.
const STEPS_PER_LEVEL: u32 = 2;

/// Levels per doubling.
pub(super) const LEVELS_PER_DOUBLING: u32 = STEPS_PER_DOUBLING / STEPS_PER_LEVEL;

/// Doublings with their own levels: below one fresh use, and above it. A use in every pass adds up
/// to less than 2^7.
const DOUBLINGS_BELOW: u32 = 9;
const DOUBLINGS_ABOVE: u32 = 7;

/// The highest level.
pub(super) const TOP_LEVEL: u32 = (DOUBLINGS_BELOW + DOUBLINGS_ABOVE) * LEVELS_PER_DOUBLING - 1;

/// Last-use bonus in uses, per further pass in which the unit is expected to be used.
const BONUS_USES: f64 = 8.0;

/// Upper bound of the bonus: 64 uses.
const MAX_BONUS: u32 = 6 * STEPS_PER_DOUBLING;

/// Weight of a pass in the moving average of the reuse probability.
const SMOOTHING: f64 = 1.0 / 8.0;

/// Initial reuse probability: that of the large models published so far.
const DEFAULT_REUSE: f64 = 0.8;

/// The clock that CRF values are stored against, and the last-use bonus.
#[derive(Debug, Clone)]
pub(super) struct Crf {
    /// log2(1 + 2^x) for x from -SUM_RANGE to SUM_RANGE.
    sums: Vec<u16>,
    /// Value of a fresh use.
    fresh: u32,
    /// Probability p that a unit used in one pass is used in the next.
    reuse: f64,
    /// log2 of the last-use bonus: 8·p/(1 − p) uses.
    bonus: u32,
}

impl Crf {
    pub fn new() -> Self {
        let unit = f64::from(STEPS_PER_DOUBLING);
        let sum = |i: u32| {
            let x = (f64::from(i) - f64::from(SUM_RANGE)) / unit;
            ((1.0 + x.exp2()).log2() * unit).round() as u16
        };
        let mut crf = Self {
            sums: (0..2 * SUM_RANGE).map(sum).collect(),
            fresh: 2 * SUM_RANGE,
            reuse: DEFAULT_REUSE,
            bonus: 0,
        };
        crf.observe_reuse(0, 0);
        crf
    }

    /// Updates p: of `used` units used in a pass, `again` were used in the previous one too. With
    /// probability `p` of reuse, a unit is expected to be used in `p / (1 - p)` more passes.
    pub fn observe_reuse(&mut self, again: u64, used: u64) {
        if used > 0 {
            self.reuse += SMOOTHING * (again as f64 / used as f64 - self.reuse);
        }
        let passes = self.reuse / (1.0 - self.reuse);
        let log = (BONUS_USES * passes).log2() * f64::from(STEPS_PER_DOUBLING);
        self.bonus = log.clamp(0.0, f64::from(MAX_BONUS)) as u32;
    }

    /// Bytes it allocates.
    pub fn bytes() -> u64 {
        2 * 2 * u64::from(SUM_RANGE)
    }

    /// Level of a value, at most [`TOP_LEVEL`]. It falls with time.
    #[inline]
    pub fn level(&self, crf: u32) -> u32 {
        let bottom = self.fresh - DOUBLINGS_BELOW * STEPS_PER_DOUBLING;
        (crf.saturating_sub(bottom) / STEPS_PER_LEVEL).min(TOP_LEVEL)
    }

    /// Advances the clock by one pass.
    pub fn begin_pass(&mut self) {
        self.fresh = self.fresh.saturating_add(DECAY_STEPS);
    }

    /// CRF of a unit used `uses` times per pass so far.
    pub fn prior(&self, uses: f64) -> u32 {
        let parts = f64::from(STEPS_PER_DOUBLING);
        let decay = 1.0 - (-f64::from(DECAY_STEPS) / parts).exp2();
        let log = (uses / decay).max(1e-9).log2() * parts;
        let log = log.clamp(-f64::from(SUM_RANGE), f64::from(SUM_RANGE));
        (f64::from(self.fresh) + log) as u32
    }

    /// Adds a use.
    #[inline]
    pub fn add_use(&self, crf: &mut u32) {
        *crf = self.sum(*crf, self.fresh);
    }

    /// CRF plus the last-use bonus.
    #[inline]
    pub fn with_bonus(&self, crf: u32) -> u32 {
        self.sum(crf, self.fresh + self.bonus)
    }

    /// Base-2 logarithm of the sum of two values.
    #[inline]
    fn sum(&self, one: u32, other: u32) -> u32 {
        let x = one.wrapping_add(SUM_RANGE).wrapping_sub(other);
        match self.sums.get(x as usize) {
            Some(&sum) => other + u32::from(sum),
            // the smaller one is negligible
            None => other.max(one),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the definition: the sum of all uses, each decayed by its age.
    #[test]
    fn crf_is_the_sum_of_decayed_uses() {
        let (mut crf, mut of) = (Crf::new(), [0; 3]);
        let mut exact = [0f64; 3];
        let weight = (-f64::from(DECAY_STEPS) / f64::from(STEPS_PER_DOUBLING)).exp2();
        let log = |w: &Crf, of: u32| (f64::from(of) - f64::from(w.fresh)) / 128.0;
        let mut random = fastrand::Rng::with_seed(7);
        for pass in 0..3000 {
            for (unit, exact) in exact.iter_mut().enumerate() {
                *exact *= weight;
                if random.u32(..3 + 40 * unit as u32) == 0 {
                    *exact += 1.0;
                    crf.add_use(&mut of[unit]);
                }
                let log = log(&crf, of[unit]);
                if *exact > 0.01 && pass > 200 {
                    assert!((log - exact.log2()).abs() < 0.15, "{pass}: {log} {exact}");
                }
            }
            crf.begin_pass();
        }
        let expected = (0.25 / (1.0 - weight)).log2();
        assert!((log(&crf, crf.prior(0.25)) - expected).abs() < 0.02);
    }

    #[test]
    fn the_last_use_bonus_follows_the_reuse_probability() {
        let after = |again| {
            let mut crf = Crf::new();
            (0..200).for_each(|_| crf.observe_reuse(again, 1000));
            f64::from(crf.bonus) / f64::from(STEPS_PER_DOUBLING)
        };
        assert!((after(500) - BONUS_USES.log2()).abs() < 0.02);
        assert!((after(750) - (3.0 * BONUS_USES).log2()).abs() < 0.02);
        assert_eq!([after(0), after(1000)], [0.0, 6.0]);
        // A pass without uses does not change p.
        let (default, mut crf) = (Crf::new(), Crf::new());
        crf.observe_reuse(0, 0);
        assert_eq!(crf.bonus, default.bonus);
        assert_eq!(crf.with_bonus(0), crf.fresh + crf.bonus);
    }

    #[test]
    fn values_far_apart_add_up_to_the_larger_one() {
        let (mut crf, mut of) = (Crf::new(), 0);
        for _ in 0..2000 {
            crf.begin_pass();
        }
        crf.add_use(&mut of);
        assert_eq!(of, crf.fresh);
        of = crf.fresh + SUM_RANGE;
        crf.add_use(&mut of);
        assert_eq!(of, crf.fresh + SUM_RANGE);
    }
}
