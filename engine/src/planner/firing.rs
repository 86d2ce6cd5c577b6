//! How often neurons fire, and what a cache of some size will hold of them.
//!
//! Hits of an LRU cache follow Che's approximation: a neuron is resident if it was used within the
//! last `T` tokens, and `T` is such that the expected number of resident neurons fills the cache.
//! Firing is a chain of two states with the measured frequency and the measured chance to fire
//! again for the next token; without the latter, reuse by neighbouring tokens would be missed.

/// Neighbours whose mean frequency stands for each of them.
pub const GROUP: usize = 16;

/// Share that is assumed without statistics: that of ReLU-fied models (ProSparse, TurboSparse) to
/// the safe side.
const UNKNOWN_SHARE: f64 = 0.2;

/// Exponent of the assumed skew: the hottest 35 % of neurons make 80 % of activations, between
/// what PowerInfer publishes for OPT-30B and LLaMA2-ReGLU-70B.
const UNKNOWN_SKEW: f64 = 2.74;

/// Assumed chance to fire for the next token too.
const UNKNOWN_PERSISTENCE: f64 = 0.6;

/// How often the neurons of a model fire.
#[derive(Debug, Clone, PartialEq)]
pub struct Firing {
    /// Share of tokens for which the neurons of each group of [`GROUP`] fire, by bank in packed
    /// order.
    pub banks: Vec<Vec<f32>>,
    /// Neurons per bank.
    pub neurons: usize,
    /// Chance that a neuron that fires for a token fires for the next one too.
    pub persistence: f64,
    /// Whether the frequencies were measured.
    pub measured: bool,
}

/// A number of neurons that fire alike.
#[derive(Debug, Clone, Copy)]
struct Alike {
    count: f64,
    /// Share of tokens they fire for.
    often: f64,
    /// Chance to begin to fire for a token.
    begin: f64,
}

impl Alike {
    /// Chance that such a neuron fired within the last `tokens` tokens.
    fn within(self, tokens: f64) -> f64 {
        1.0 - (1.0 - self.often) * (1.0 - self.begin).powf((tokens - 1.0).max(0.0))
    }

    /// Chance that it is still resident when it fires.
    fn hit(self, tokens: f64) -> f64 {
        // In balance as many begin as end: often × (1 - again) = (1 - often) × begin.
        let again = if self.often > 0.0 {
            1.0 - (1.0 - self.often) * self.begin / self.often
        } else {
            0.0
        };
        let gone = (1.0 - self.begin).powf((tokens - 1.0).max(0.0));
        again + (1.0 - again) * (1.0 - gone)
    }
}

impl Firing {
    /// From the share of tokens for which each neuron of each bank fires.
    pub fn from_rates<'a>(
        rates: impl Iterator<Item = &'a [f32]>,
        persistence: Option<f64>,
    ) -> Self {
        let mut neurons = 0;
        let banks = rates
            .map(|bank| {
                neurons = bank.len();
                let mean = |group: &[f32]| group.iter().sum::<f32>() / group.len() as f32;
                bank.chunks(GROUP).map(mean).collect()
            })
            .collect();
        Self {
            banks,
            neurons,
            persistence: persistence.unwrap_or(UNKNOWN_PERSISTENCE),
            measured: true,
        }
    }

    /// What is assumed of a model without statistics.
    pub fn unknown(banks: usize, neurons: usize) -> Self {
        let groups = neurons.div_ceil(GROUP);
        let often = |g: usize| {
            let place = (g as f64 + 0.5) / groups as f64;
            let often = UNKNOWN_SHARE * (1.0 + UNKNOWN_SKEW) * (1.0 - place).powf(UNKNOWN_SKEW);
            often.min(1.0) as f32
        };
        let bank: Vec<f32> = (0..groups).map(often).collect();
        Self {
            banks: vec![bank; banks],
            neurons,
            persistence: UNKNOWN_PERSISTENCE,
            measured: false,
        }
    }

    /// Every neuron fires for every token.
    pub fn always(banks: usize, neurons: usize) -> Self {
        Self {
            banks: vec![vec![1.0; neurons.div_ceil(GROUP)]; banks],
            neurons,
            persistence: 1.0,
            measured: true,
        }
    }

    fn group_len(&self, group: usize) -> usize {
        GROUP.min(self.neurons - group * GROUP)
    }

    /// Groups of a bank from neuron `first` on, with their lengths.
    fn groups(&self, bank: usize, first: usize) -> impl Iterator<Item = (f64, f64)> {
        let bank = self.banks.get(bank).map_or(&[][..], |b| b);
        (bank.iter().enumerate().skip(first / GROUP))
            .map(|(g, &often)| (self.group_len(g) as f64, f64::from(often)))
    }

    /// Share of the excess over independent firing: 0 where a neuron fires no more often after it
    /// has fired, 1 where it never stops.
    fn stickiness(&self) -> f64 {
        let all = || (0..self.banks.len()).flat_map(|b| self.groups(b, 0));
        let sum: f64 = all().map(|(n, p)| n * p).sum();
        let chance = all().map(|(n, p)| n * p * p).sum::<f64>() / sum.max(1e-9);
        ((self.persistence - chance) / (1.0 - chance).max(1e-9)).clamp(0.0, 0.999)
    }

    /// Expected neurons of a bank from neuron `first` on that fire for at least one of `tokens`
    /// consecutive tokens.
    pub fn fires(&self, bank: usize, first: usize, tokens: usize) -> f64 {
        let loose = 1.0 - self.stickiness();
        let alike = |(count, often)| Alike {
            count,
            often,
            begin: often * loose,
        };
        (self.groups(bank, first).map(alike))
            .map(|a| a.count * a.within(tokens as f64))
            .sum()
    }

    /// Mean share of neurons that fire for a token.
    pub fn share(&self) -> f64 {
        let all: f64 = (0..self.banks.len()).map(|b| self.fires(b, 0, 1)).sum();
        all / (self.banks.len() * self.neurons).max(1) as f64
    }

    /// Expected misses per token in each bank, of an LRU cache of `slots` neurons that serves the
    /// neurons from `first[bank]` on.
    pub fn misses(&self, slots: f64, first: &[usize]) -> Vec<f64> {
        let loose = 1.0 - self.stickiness();
        let bank = |b: usize| -> Vec<Alike> {
            let first = first.get(b).copied().unwrap_or_default();
            (self.groups(b, first))
                .map(|(count, often)| Alike {
                    count,
                    often,
                    begin: often * loose,
                })
                .collect()
        };
        let banks: Vec<Vec<Alike>> = (0..self.banks.len()).map(bank).collect();
        let bins = bins(banks.iter().flatten());
        let held = |time: f64| -> f64 { bins.iter().map(|a| a.count * a.within(time)).sum() };
        // Until the cache is full once nothing leaves, however rarely it fires.
        let (mut low, mut high) = (1.0f64, 1e9f64);
        for _ in 0..60 {
            let middle = (low * high).sqrt();
            if held(middle) < slots {
                low = middle;
            } else {
                high = middle;
            }
        }
        // Layers come in the same order for every token, so a neuron is used again after a whole
        // number of tokens, and only whole ones count; texts differ a little from token to token. A
        // cache smaller than what one token needs has pushed out what comes next.
        let one = held(1.0);
        let time = (low.floor() + (4.0 * low.fract() - 3.0).max(0.0)).max(1.0);
        let part = (slots / one.max(1e-9)).min(1.0).powi(8);
        let missing = |a: &Alike| a.count * a.often * (1.0 - part * a.hit(time));
        banks.iter().map(|b| b.iter().map(missing).sum()).collect()
    }
}

/// The same neurons in a few bins of similar frequency.
fn bins<'a>(all: impl Iterator<Item = &'a Alike>) -> Vec<Alike> {
    const BINS: usize = 256;
    let mut bins = vec![[0.0; 3]; BINS];
    for a in all {
        // Finer where neurons are rare: the square root spreads them.
        let bin = (a.often.sqrt() * (BINS - 1) as f64) as usize;
        if let Some([count, often, begin]) = bins.get_mut(bin) {
            *count += a.count;
            *often += a.count * a.often;
            *begin += a.count * a.begin;
        }
    }
    (bins.into_iter().filter(|b| b[0] > 0.0))
        .map(|[count, often, begin]| Alike {
            count,
            often: often / count,
            begin: begin / count,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skewed(persistence: f64) -> Firing {
        let rates: Vec<f32> = (0..512).map(|i| 0.9 * (512 - i) as f32 / 512.0).collect();
        let banks = [rates.clone(), rates];
        Firing::from_rates(banks.iter().map(Vec::as_slice), Some(persistence))
    }

    /// An LRU cache and chains of two states, step by step.
    fn simulate(f: &Firing, slots: usize) -> f64 {
        let mut state = 1u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let loose = 1.0 - f.stickiness();
        let neurons = f.neurons * f.banks.len();
        let often = |n: usize| f64::from(f.banks[n / f.neurons][n % f.neurons / GROUP]);
        let mut on: Vec<bool> = (0..neurons).map(|n| random() < often(n)).collect();
        let mut last = vec![0u64; neurons];
        let mut resident: std::collections::BTreeSet<(u64, usize)> = Default::default();
        let (mut now, mut misses) = (1, 0);
        let (warm, tokens) = (200, 600);
        for token in 0..warm + tokens {
            for n in 0..neurons {
                let p = often(n);
                let again = 1.0 - (1.0 - p) * loose;
                on[n] = random() < if on[n] { again } else { p * loose };
                if !on[n] {
                    continue;
                }
                if !resident.remove(&(last[n], n)) {
                    misses += usize::from(token >= warm);
                    if resident.len() == slots {
                        resident.pop_first();
                    }
                }
                (last[n], now) = (now, now + 1);
                resident.insert((last[n], n));
            }
        }
        misses as f64 / tokens as f64
    }

    #[test]
    fn misses_are_those_of_a_simulated_cache() {
        for persistence in [0.62, 0.85] {
            let f = skewed(persistence);
            for slots in [600, 700, 850] {
                let expected: f64 = f.misses(slots as f64, &[0, 0]).iter().sum();
                let found = simulate(&f, slots);
                assert!(
                    (expected - found).abs() < 0.12 * found + 1.0,
                    "{persistence} {slots}: {expected} expected, {found} found"
                );
            }
        }
    }

    #[test]
    fn more_memory_never_misses_more() {
        let f = Firing::unknown(3, 1000);
        let mut before = f64::INFINITY;
        for slots in (0..3000).step_by(100) {
            let misses: f64 = f.misses(f64::from(slots), &[0; 3]).iter().sum();
            assert!(
                misses <= before + 1e-9 && misses >= -1e-9,
                "{slots}: {misses}"
            );
            before = misses;
        }
        let none: f64 = f.misses(0.0, &[0; 3]).iter().sum();
        assert!((none - 3.0 * f.fires(0, 0, 1)).abs() < 1e-6);
        let all: f64 = f.misses(3000.0, &[0; 3]).iter().sum();
        assert!(all < 1.0, "{all}");
    }

    #[test]
    fn a_hot_region_takes_its_neurons_out() {
        let f = skewed(0.8);
        let without: f64 = f.misses(300.0, &[0, 0]).iter().sum();
        let beside: f64 = f.misses(300.0, &[256, 256]).iter().sum();
        assert!(beside < without);
        assert!(
            (f.fires(0, 256, 1) + f.fires(1, 0, 1) - f.fires(1, 256, 1) - f.fires(0, 0, 1)).abs()
                < 1e-9
        );
    }

    #[test]
    fn batches_touch_more_neurons() {
        let f = skewed(0.8);
        let by: Vec<f64> = [1, 2, 8, 1000].map(|b| f.fires(0, 0, b)).into();
        assert!(by.windows(2).all(|w| w[0] < w[1]), "{by:?}");
        assert!((f.share() - 0.45).abs() < 0.01, "{}", f.share());
        assert!(by[3] > 500.0);
        assert_eq!(Firing::always(2, 40).fires(1, 0, 1), 40.0);
    }

    #[test]
    fn an_unknown_model_has_the_assumed_share() {
        let share = Firing::unknown(2, 4096).share();
        assert!((share - UNKNOWN_SHARE).abs() < 0.02, "{share}");
    }
}
