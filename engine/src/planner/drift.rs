//! How near a neuron is to firing, from token to token.
//!
//! Nearness is a random walk of three parts: one that changes with the subject of a text, one that
//! changes within some tokens, and one that is new for every token. A neuron fires where it is above
//! a threshold. How often firing is followed by firing 1, 8, 32 and 128 tokens later, which a
//! profile counts, gives the parts their shares. (Chains of two states, which remember only whether
//! the last token fired, let neurons that went out come back too soon: caches would miss up to
//! twice of what they do.)

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_PI_2, PI};

use emberflow_predictor::stats::LAGS;

/// A part of nearness: its share of the variance, and what is left of it after a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Part {
    share: f64,
    stays: f64,
}

impl Part {
    /// What correlates by this part after some tokens.
    fn after(self, tokens: usize) -> f64 {
        self.share * self.stays.powi(tokens as i32)
    }
}

/// The slow and the middle part; the rest of the variance is new for every token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Drift {
    slow: Part,
    middle: Part,
    /// Whether the middle part drifts smoothly, what comes to it passing through three stages that
    /// fade, each into the next, instead of one.
    smooth: bool,
}

/// How often firing is followed by firing: for the next token, and [`LAGS`] tokens later.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Again {
    /// For the next token.
    pub next: f64,
    /// Later, where that was counted.
    pub later: Option<[f64; LAGS.len()]>,
}

/// Shares of the excess over chance for the next token that are assumed to be left later: those of
/// the bundled model on text that it wrote, in the middle of its layers.
const LEFT: [f64; LAGS.len()] = [0.6, 0.37, 0.1];

/// What stays of the slow part for the next token, at least.
const SLOW: f64 = 0.97;

/// Steps in which correlations are looked up, and frequencies between which they are not told apart.
const STEPS: usize = 128;
const FREQUENCIES: usize = 48;

/// How often neurons fire for both of two tokens, by the correlation of their nearness there.
struct Pairs {
    /// Expected neurons that fire for both, for correlations of sin(i · step).
    both: [f64; STEPS + 1],
    /// Expected neurons that fire for one.
    fires: f64,
}

impl Pairs {
    const STEP: f64 = FRAC_PI_2 / STEPS as f64;

    /// Of neurons in groups that fire for shares of the tokens.
    fn of(groups: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut alike = [(0.0, 0.0); FREQUENCIES];
        for (neurons, often) in groups.filter(|g| g.1 > 0.0) {
            let of = (often.sqrt() * FREQUENCIES as f64) as usize;
            let (all, fire) = &mut alike[of.min(FREQUENCIES - 1)];
            (*all, *fire) = (*all + neurons, *fire + neurons * often);
        }
        let (mut both, mut fires) = ([0.0; STEPS + 1], 0.0);
        for (neurons, fire) in alike.into_iter().filter(|a| a.0 > 0.0) {
            // The chance that two normal numbers of correlation sin φ are both above t grows with φ
            // by exp(-t² / (1 + sin φ)) / 2π (Plackett's identity).
            let (often, t) = (fire / neurons, threshold(fire / neurons));
            let mut chance = often * often;
            for (i, both) in both.iter_mut().enumerate() {
                *both += neurons * chance;
                let middle = (i as f64 + 0.5) * Self::STEP;
                chance += Self::STEP / (2.0 * PI) * (-t * t / (1.0 + middle.sin())).exp();
            }
            fires += fire;
        }
        let fires = fires.max(1e-9);
        Self { both, fires }
    }

    /// Share of the neurons that fire that do so for an unrelated token, too.
    fn by_chance(&self) -> f64 {
        self.both[0] / self.fires
    }

    /// The correlation with which a share of the neurons that fire for a token fires for the other.
    fn correlation(&self, share: f64) -> f64 {
        let wanted = share * self.fires;
        match self.both.partition_point(|b| *b < wanted) {
            0 => 0.0,
            at if at > STEPS => 1.0,
            at => {
                let (low, high) = (self.both[at - 1], self.both[at]);
                let part = (wanted - low) / (high - low).max(1e-12);
                ((at as f64 - 1.0 + part) * Self::STEP).sin()
            }
        }
    }
}

impl Drift {
    /// Of neurons in groups that fire for shares of the tokens, as counted.
    pub fn new(groups: impl Iterator<Item = (f64, f64)>, again: Again) -> Self {
        let pairs = Pairs::of(groups);
        let by_chance = pairs.by_chance();
        let later = again.later.unwrap_or_else(|| {
            LEFT.map(|left| by_chance + left * (again.next - by_chance).max(0.0))
        });
        let next = pairs.correlation(again.next).min(0.9999);
        let mut last = next;
        let later = later.map(|share| {
            last = pairs.correlation(share).min(last);
            last
        });
        // The middle part is taken to be gone where the slow one is told by the two last ones.
        let [near, far] = [LAGS[1], LAGS[2]];
        let fades = later[2] / later[1].max(1e-9);
        let stays = fades.powf(1.0 / (far - near) as f64).clamp(SLOW, 1.0);
        let share = |lag: usize, all: f64| all / stays.powi(lag as i32);
        let share = share(near, later[1]).min(share(LAGS[0], later[0]));
        let slow = Part {
            share: share.min(next / stays),
            stays,
        };
        let [first, then] =
            [(1, next), (LAGS[0], later[0])].map(|(n, all)| (all - slow.after(n)).max(0.0));
        if first <= 1e-6 {
            return Self {
                slow,
                middle: Part::default(),
                smooth: false,
            };
        }
        let stays = (then / first).powf(1.0 / (LAGS[0] as f64 - 1.0)).min(0.999);
        let left = 1.0 - slow.share;
        if first <= left * stays {
            let share = first / stays;
            return Self {
                slow,
                middle: Part { share, stays },
                smooth: false,
            };
        }
        // It lasts longer at first than what fades evenly could.
        Self {
            slow,
            middle: Part {
                share: left,
                stays: stages((first / left.max(1e-9)).min(0.999)),
            },
            smooth: true,
        }
    }
}

/// Of three stages of which `stays` is left after a token: the last one's variance, if what comes to
/// the first has a variance of 1, and its covariance with itself a token later.
fn moments(stays: f64) -> (f64, f64) {
    // What comes is weighted (k + 1)(k + 2) / 2 · stays^k after k tokens.
    let (mut power, mut before, mut sums) = (1.0, 0.0, (0.0, 0.0));
    for k in 0..2000 {
        let weight = 0.5 * f64::from((k + 1) * (k + 2)) * power;
        sums = (sums.0 + weight * weight, sums.1 + weight * before);
        (before, power) = (weight, power * stays);
        if weight < 1e-6 {
            break;
        }
    }
    sums
}

/// What stays of each of three stages if the last one is to correlate by `next` with itself a token
/// later.
fn stages(next: f64) -> f64 {
    let (mut low, mut high) = (0.0, 0.98);
    for _ in 0..30 {
        let stays = 0.5 * (low + high);
        let (all, shifted) = moments(stays);
        match shifted < next * all {
            true => low = stays,
            false => high = stays,
        }
    }
    low
}

/// What a neuron that fires for a share `often` of the tokens must exceed, in standard deviations.
pub(super) fn threshold(often: f64) -> f64 {
    let above = |x: f64| 0.5 * libm::erfc(x * FRAC_1_SQRT_2);
    let (mut low, mut high) = (-6.0, 6.0);
    for _ in 0..40 {
        let middle = 0.5 * (low + high);
        match above(middle) > often {
            true => low = middle,
            false => high = middle,
        }
    }
    0.5 * (low + high)
}

/// Numbers that are distributed normally, or nearly so, always the same ones.
pub(super) struct Normal(u64);

impl Normal {
    pub fn new(seed: u64) -> Self {
        Self(0x9E37_79B9_7F4A_7C15 ^ seed.wrapping_mul(0xD134_2543_DE82_EF95))
    }

    /// The next one: the sum of eight that are distributed evenly.
    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let sum: u32 = self.0.to_le_bytes().into_iter().map(u32::from).sum();
        // Each has a variance of (256² - 1) / 12.
        (sum as f32 - 1020.0) * (12.0f32 / 8.0 / 65535.0).sqrt()
    }
}

/// A neuron's nearness.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Walk {
    slow: f32,
    middle: [f32; 3],
}

/// How walks of one bank go on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gait {
    /// What is left of each part, and the size of what comes to it.
    slow: [f32; 2],
    middle: [f32; 2],
    new: f32,
    smooth: bool,
}

impl Gait {
    pub fn new(drift: Drift) -> Self {
        let part = |part: Part| {
            let comes = (part.share * (1.0 - part.stays * part.stays)).max(0.0);
            [part.stays as f32, comes.sqrt() as f32]
        };
        let new = 1.0 - drift.slow.share - drift.middle.share;
        let mut middle = part(drift.middle);
        if drift.smooth {
            let (variance, _) = moments(drift.middle.stays);
            middle[1] = (drift.middle.share / variance).sqrt() as f32;
        }
        Self {
            slow: part(drift.slow),
            middle,
            new: new.max(0.0).sqrt() as f32,
            smooth: drift.smooth,
        }
    }

    /// Where a walk begins.
    pub fn start(&self, drift: Drift, normal: &mut Normal) -> Walk {
        let mut walk = Walk {
            slow: drift.slow.share.sqrt() as f32 * normal.next(),
            middle: [drift.middle.share.sqrt() as f32 * normal.next(), 0.0, 0.0],
        };
        if self.smooth {
            walk.middle = [0.0; 3];
            (0..64).for_each(|_| {
                let _ = self.middle(&mut walk, normal);
            });
        }
        walk
    }

    fn middle(&self, walk: &mut Walk, normal: &mut Normal) -> f32 {
        let [stays, comes] = self.middle;
        let [first, second, third] = &mut walk.middle;
        *first = stays * *first + comes * normal.next();
        if !self.smooth {
            return *first;
        }
        *second = stays * *second + *first;
        *third = stays * *third + *second;
        *third
    }

    /// Nearness for the next token, of variance 1.
    pub fn step(&self, walk: &mut Walk, normal: &mut Normal) -> f32 {
        walk.slow = self.slow[0] * walk.slow + self.slow[1] * normal.next();
        walk.slow + self.middle(walk, normal) + self.new * normal.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_those_of_the_normal_distribution() {
        for (often, expected) in [
            (0.5, 0.0),
            (0.158_655, 1.0),
            (0.022_75, 2.0),
            (0.99, -2.326_35),
        ] {
            assert!((threshold(often) - expected).abs() < 1e-3, "{often}");
        }
        assert!(threshold(0.0) > 5.9 && threshold(1.0) < -5.9);
    }

    /// Walks fire as often, and again as often after 1, 8 and 32 tokens, as was counted.
    #[test]
    fn walks_fire_as_was_counted() {
        let counted = [
            (0.1, [0.55, 0.45, 0.35, 0.3]),
            (0.1, [0.6, 0.3, 0.15, 0.12]),
            (0.3, [0.5, 0.42, 0.38, 0.36]),
            (0.05, [0.2, 0.06, 0.05, 0.05]),
            (0.15, [0.836, 0.243, 0.153, 0.15]),
        ];
        for (often, counts) in counted {
            let [next, later @ ..] = counts;
            let again = Again {
                next,
                later: Some(later),
            };
            let drift = Drift::new([(1000.0, often)].into_iter(), again);
            let (gait, mut normal) = (Gait::new(drift), Normal::new(7));
            let above = threshold(often) as f32;
            let (mut fired, mut tokens, mut followed) = (0, 0, [(0, 0); 4]);
            for _ in 0..10_000 {
                let mut walk = gait.start(drift, &mut normal);
                let fires: Vec<bool> = (0..160)
                    .map(|_| gait.step(&mut walk, &mut normal) > above)
                    .collect();
                tokens += fires.len();
                fired += fires.iter().filter(|f| **f).count();
                for (followed, lag) in followed.iter_mut().zip([1, LAGS[0], LAGS[1], LAGS[2]]) {
                    let pairs = fires.iter().zip(&fires[lag..]);
                    followed.0 += pairs.clone().filter(|p| *p.0).count();
                    followed.1 += pairs.filter(|p| *p.0 && *p.1).count();
                }
            }
            let share = fired as f64 / tokens as f64;
            assert!((share / often - 1.0).abs() < 0.06, "{share} of {often}");
            for ((all, again), expected) in followed.into_iter().zip(counts) {
                let share = again as f64 / all as f64;
                assert!(
                    (share - expected).abs() < 0.03,
                    "{drift:?}: {share}, {expected} counted"
                );
            }
        }
    }

    #[test]
    fn impossible_counts_give_walks_all_the_same() {
        for next in [-1.0, 0.0, 0.05, 1.0, 2.0, f64::NAN] {
            for later in [
                None,
                Some([0.0, 1.0, 0.5]),
                Some([1.0; 3]),
                Some([0.2, 0.0, 0.0]),
                Some([f64::NAN; 3]),
            ] {
                let drift = Drift::new(
                    [(5.0, 0.1), (5.0, 1.0), (9.0, 0.0)].into_iter(),
                    Again { next, later },
                );
                let parts = [drift.slow, drift.middle];
                let all = parts.iter().flat_map(|p| [p.share, p.stays]);
                assert!(
                    all.into_iter().all(|s| (0.0..=1.0).contains(&s)),
                    "{drift:?}"
                );
                assert!(
                    drift.slow.share + drift.middle.share <= 1.0 + 1e-9,
                    "{drift:?}"
                );
            }
        }
        let none = Drift::new(
            std::iter::empty(),
            Again {
                next: 0.5,
                later: None,
            },
        );
        assert!(none.slow.share.is_finite() && none.middle.share.is_finite());
    }
}
