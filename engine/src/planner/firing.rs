//! Activation frequencies, and miss rates of the cold region.
//!
//! Miss rates come from the curve that `emberflow profile` measures by running the cache code on
//! the activation trace of a text at several cache sizes. They depend on cache size and activation
//! frequency; one text's curve predicts a similar text within a few percent.

use emberflow_models::config::ModelConfig;
use emberflow_predictor::stats::Misses;
use emberflow_predictor::stats::misses::{BINS, SIZES, bin};

/// Adjacent neurons per mean frequency.
pub const GROUP: usize = 16;

/// Assumed share of firing neurons without statistics: conservative for ReLU-fied models
/// (ProSparse, TurboSparse).
const UNKNOWN_SHARE: f64 = 0.2;

/// Exponent of the assumed skew: 35 % of the neurons make 80 % of activations, between PowerInfer's
/// numbers for OPT-30B and LLaMA2-ReGLU-70B.
const UNKNOWN_SKEW: f64 = 2.74;

/// Assumed probability that a firing neuron fires again for the next token.
const UNKNOWN_PERSISTENCE: f64 = 0.6;

/// Range of corrections; a few tokens are not enough evidence for more.
const MISS_TIMES: (f64, f64) = (0.1, 2.0);

/// Activation statistics of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Firing {
    /// Activation frequency of each group of 16 neurons, by bank in packed order.
    pub banks: Vec<Vec<f32>>,
    /// Neurons per bank.
    pub neurons: usize,
    /// `(persistence − chance) / (1 − chance)`: 0 for independent tokens, 1 for a neuron that never
    /// stops firing.
    stickiness: f64,
    /// Measured miss curve, if any.
    misses: Option<Misses>,
    /// Whether the frequencies were measured.
    pub measured: bool,
    /// By layer: every token needs all neurons, while other layers are sparse. The cold region
    /// holds no neurons of such layers.
    pub always: Vec<bool>,
    /// Misses of a cold region, relative to those assumed without a measured curve; `None` before the first
    /// tokens.
    pub miss_times: Option<f64>,
    /// Whether the first tokens of a run correct these assumptions.
    pub assumed: bool,
}

impl Firing {
    /// From measured activation frequencies per neuron, by bank. `persistence`: probability that a
    /// firing neuron fires again for the next token. `misses`: the miss curve, if measured.
    pub(crate) fn measured<'a>(
        frequencies: impl Iterator<Item = &'a [f32]>,
        persistence: Option<f64>,
        misses: Option<Misses>,
    ) -> Self {
        let mut neurons = 0;
        let banks = frequencies
            .map(|bank| {
                neurons = bank.len();
                let mean = |group: &[f32]| group.iter().sum::<f32>() / group.len() as f32;
                bank.chunks(GROUP).map(mean).collect()
            })
            .collect();
        Self {
            misses,
            measured: true,
            ..Self::new(banks, neurons, persistence)
        }
    }

    fn new(banks: Vec<Vec<f32>>, neurons: usize, persistence: Option<f64>) -> Self {
        let mut new = Self {
            banks,
            neurons,
            stickiness: 0.0,
            misses: None,
            measured: false,
            always: Vec::new(),
            miss_times: None,
            assumed: false,
        };
        let chance = new.chance();
        let persistence = persistence.unwrap_or(UNKNOWN_PERSISTENCE);
        let excess = (persistence - chance) / (1.0 - chance).max(1e-9);
        new.stickiness = excess.clamp(0.0, 0.999);
        new
    }

    /// Assumptions for a model without statistics.
    pub fn unknown(banks: usize, neurons: usize) -> Self {
        Self::skewed(banks, neurons, UNKNOWN_SHARE)
    }

    /// Assumptions for a model with `share` of the neurons firing.
    fn skewed(banks: usize, neurons: usize, share: f64) -> Self {
        let groups = neurons.div_ceil(GROUP);
        let often = |g: usize| {
            let place = (g as f64 + 0.5) / groups as f64;
            let often = share * (1.0 + UNKNOWN_SKEW) * (1.0 - place).powf(UNKNOWN_SKEW);
            often.min(1.0) as f32
        };
        let bank: Vec<f32> = (0..groups).map(often).collect();
        Self {
            assumed: true,
            ..Self::new(vec![bank; banks], neurons, None)
        }
    }

    /// These assumptions, corrected: `share` of the neurons fire, and `missed` (0 to 1, if known) of the needed
    /// neurons missed in a cold region as in [`absent`](Self::absent).
    pub fn corrected(&self, share: f64, missed: Option<f64>, slots: u64, first: &[usize]) -> Self {
        let new = Self {
            always: self.always.clone(),
            miss_times: Some(self.miss_times.unwrap_or(1.0)),
            ..Self::skewed(self.banks.len(), self.neurons, share)
        };
        let Some(missed) = missed else { return new };
        let plain = Self {
            miss_times: None,
            ..new.clone()
        };
        let absent = plain.absent(slots, first);
        let served = (0..first.len()).filter(|&bank| !self.is_always(bank));
        let groups = served.flat_map(|bank| plain.groups(bank, first[bank]));
        let (mut needed, mut misses) = (0.0, 0.0);
        for (neurons, often) in groups {
            needed += neurons * often;
            misses += neurons * often * absent.at(often);
        }
        let (low, high) = MISS_TIMES;
        Self {
            miss_times: Some((missed * needed / f64::max(misses, 1e-9)).clamp(low, high)),
            ..new
        }
    }

    /// Whether frequencies were measured, or corrected by this run's tokens.
    pub fn known(&self) -> bool {
        self.measured || self.miss_times.is_some()
    }

    /// Assumptions for the neurons of experts: `share` of them fire, all equally often. Since the
    /// visited experts change, a cache profits less from frequent neurons.
    pub fn even(banks: usize, neurons: usize, share: Option<f64>) -> Self {
        let bank = vec![share.unwrap_or(UNKNOWN_SHARE) as f32; neurons.div_ceil(GROUP)];
        Self::new(vec![bank; banks], neurons, None)
    }

    /// Uniform frequencies, by each layer's configured share of active gates; 1 for layers without
    /// one.
    pub fn by_layer(c: &ModelConfig) -> Self {
        let neurons = c.ffn as usize;
        let bank = |&share: &f32| vec![1.0 - share; neurons.div_ceil(GROUP)];
        Self::new(c.form.gate_top.iter().map(bank).collect(), neurons, None)
    }

    /// A model whose neurons all fire for every token.
    pub fn always(banks: usize, neurons: usize) -> Self {
        let bank = vec![1.0; neurons.div_ceil(GROUP)];
        Self {
            measured: true,
            ..Self::new(vec![bank; banks], neurons, Some(1.0))
        }
    }

    /// The same with a measured miss curve.
    pub fn with_misses(self, misses: Misses) -> Self {
        Self {
            misses: Some(misses),
            ..self
        }
    }

    /// How often each neuron of a bank fires.
    pub fn each(&self, bank: usize) -> impl Iterator<Item = f64> {
        let groups = self.groups(bank, 0);
        groups.flat_map(|(n, often)| std::iter::repeat_n(often, n as usize))
    }

    /// Probability that a firing neuron fires again for the next token.
    pub fn persistence(&self) -> f64 {
        let chance = self.chance();
        chance + self.stickiness * (1.0 - chance)
    }

    /// The same probability of independent tokens.
    fn chance(&self) -> f64 {
        let all = || (0..self.banks.len()).flat_map(|bank| self.groups(bank, 0));
        let sum: f64 = all().map(|(n, p)| n * p).sum();
        all().map(|(n, p)| n * p * p).sum::<f64>() / sum.max(1e-9)
    }

    /// Marks layers whose neurons are all needed for every token.
    pub fn with_always(mut self, always: Vec<bool>) -> Self {
        for (bank, _) in self.banks.iter_mut().zip(&always).filter(|(_, a)| **a) {
            bank.fill(1.0);
        }
        self.always = always;
        self
    }

    /// Whether all neurons of a layer are needed for every token.
    pub fn is_always(&self, layer: usize) -> bool {
        self.always.get(layer) == Some(&true)
    }

    fn group_len(&self, group: usize) -> usize {
        GROUP.min(self.neurons - group * GROUP)
    }

    /// Groups of a bank from neuron `first` on: size and activation frequency.
    pub fn groups(&self, bank: usize, first: usize) -> impl Iterator<Item = (f64, f64)> {
        let bank = self.banks.get(bank).map_or(&[][..], |b| b);
        (bank.iter().enumerate().skip(first / GROUP))
            .map(|(g, &often)| (self.group_len(g) as f64, f64::from(often)))
    }

    /// Expected number of neurons of a bank, from neuron `first` on, that fire for any of `tokens`
    /// consecutive tokens.
    pub fn fires(&self, bank: usize, first: usize, tokens: usize) -> f64 {
        (self.groups(bank, first))
            .map(|(count, often)| count * self.touched(often, tokens))
            .sum()
    }

    /// `1 − (1 − p)(1 − p(1 − s))^(tokens−1)`: probability that a neuron of frequency `p` fires for
    /// any of `tokens` consecutive tokens, with stickiness `s`.
    pub fn touched(&self, often: f64, tokens: usize) -> f64 {
        if tokens <= 1 {
            return often;
        }
        let begin = often * (1.0 - self.stickiness);
        1.0 - (1.0 - often) * (1.0 - begin).powf(tokens as f64 - 1.0)
    }

    /// Mean share of neurons that fire for a token.
    pub fn share(&self) -> f64 {
        let all: f64 = (0..self.banks.len()).map(|b| self.fires(b, 0, 1)).sum();
        all / (self.banks.len() * self.neurons).max(1) as f64
    }

    /// Miss rates of a cold region with `slots` neurons. It serves the first `first.len()` banks,
    /// each from neuron `first[bank]` on; earlier neurons are resident. Layers that need all
    /// neurons are excluded.
    ///
    /// Modelled as one cache of the combined size: a frequency-aware policy keeps the hot neurons
    /// in it.
    pub fn absent(&self, slots: u64, first: &[usize]) -> Absent {
        let served = (0..first.len()).filter(|&bank| !self.is_always(bank));
        let hot: usize = served
            .clone()
            .map(|bank| first[bank].min(self.neurons))
            .sum();
        let all = served.count() * self.neurons;
        if slots == 0 || slots >= (all - hot) as u64 {
            return Absent([if slots == 0 { 1.0 } else { 0.0 }; BINS]);
        }
        let share = (hot as u64 + slots) as f64 / all as f64;
        match &self.misses {
            Some(misses) => Absent::counted(misses, share),
            None => Absent::by_frequency(self, share),
        }
    }

    /// The same where `fixed` of the resident neurons are a device's. It holds those that fire most often, and no others
    /// that recur for some tokens, as a cache of their size would: this part of the memory has the misses of neurons in the
    /// order of their frequency.
    pub fn absent_beside(&self, fixed: u64, slots: u64, first: &[usize]) -> Absent {
        let all = self.absent(slots, first);
        let served = (0..first.len()).filter(|&bank| !self.is_always(bank));
        let (mut hot, mut neurons) = (0, 0);
        for bank in served {
            hot += first[bank].min(self.neurons) as u64;
            neurons += self.neurons as u64;
        }
        if fixed == 0 || slots == 0 || hot + slots >= neurons {
            return all;
        }
        let there = (hot + slots) as f64;
        let most_frequent = Absent::most_frequent(self, there / neurons as f64, 1.0);
        all.mixed(&most_frequent, fixed.min(hot) as f64 / there)
    }
}

/// Fewest samples for which a frequency class is trusted.
const MIN_SAMPLES: u64 = 50;

/// Miss probability of a needed neuron, by activation frequency.
#[derive(Debug, Clone)]
pub struct Absent([f64; BINS]);

impl Absent {
    /// Miss probability at frequency `often`, by linear interpolation.
    pub fn at(&self, often: f64) -> f64 {
        let at = bin(often);
        let low = (at as usize).min(BINS - 2);
        let share = at - low as f64;
        self.0[low] * (1.0 - share) + self.0[low + 1] * share
    }

    /// From a measured curve, for a cache that holds `share` of all neurons; linear between the
    /// measured sizes, 0 and 1.
    fn counted(misses: &Misses, share: f64) -> Self {
        // Classes with few samples use the nearest trusted class.
        let nearest = |class: usize| {
            let known = (0..BINS).filter(|&other| misses.needed[other] >= MIN_SAMPLES);
            known
                .min_by_key(|other| other.abs_diff(class))
                .unwrap_or(class)
        };
        let above = SIZES.partition_point(|&size| size < share);
        let size = |i: usize| match i {
            0 => 0.0,
            i => SIZES.get(i - 1).copied().unwrap_or(1.0),
        };
        let chance = |i: usize, class: usize| match i {
            0 => 1.0,
            i => misses.missed.get(i - 1).map_or(0.0, |missed| {
                missed[class] as f64 / misses.needed[class].max(1) as f64
            }),
        };
        let part = (share - size(above)) / (size(above + 1) - size(above));
        Self(std::array::from_fn(|class| {
            let class = nearest(class);
            chance(above, class) * (1.0 - part) + chance(above + 1, class) * part
        }))
    }

    /// Without a curve: the most frequent neurons are resident, which is optimal for independent
    /// tokens. A real cache exploits locality and misses less; the factor is that of the bundled
    /// model.
    fn by_frequency(firing: &Firing, share: f64) -> Self {
        let locality = (1.08 - 0.66 * share).clamp(0.77, 1.0);
        // Recurring neurons hit as far as the cache holds those of two tokens.
        let recurring = (share / (2.0 * firing.share())).min(1.0);
        let locality =
            (locality * (1.0 - recurring * (1.0 - firing.miss_times.unwrap_or(1.0)))).min(1.0);
        Self::most_frequent(firing, share, locality)
    }

    /// The most frequent neurons are resident, `share` of all; each other one misses with probability `locality`.
    fn most_frequent(firing: &Firing, share: f64, locality: f64) -> Self {
        let mut classes = [0.0; BINS];
        let served = (0..firing.banks.len()).filter(|&bank| !firing.is_always(bank));
        for (neurons, often) in served.flat_map(|b| firing.groups(b, 0)) {
            classes[bin(often).round() as usize] += neurons;
        }
        let mut left = share * classes.iter().sum::<f64>();
        let mut absent = [1.0; BINS];
        for (absent, &neurons) in absent.iter_mut().zip(&classes).rev() {
            let there = left.min(neurons);
            left -= there;
            *absent = if neurons > 0.0 {
                locality * (1.0 - there / neurons)
            } else if left > 0.0 {
                0.0
            } else {
                locality
            };
        }
        Self(absent)
    }

    /// These probabilities, with `part` (0 to 1) of the others.
    fn mixed(&self, others: &Self, part: f64) -> Self {
        let both = |class: usize| self.0[class] * (1.0 - part) + others.0[class] * part;
        Self(std::array::from_fn(both))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skewed() -> Firing {
        let rates: Vec<f32> = (0..512).map(|i| 0.9 * (512 - i) as f32 / 512.0).collect();
        let banks = [rates.clone(), rates];
        Firing::measured(banks.iter().map(Vec::as_slice), Some(0.8), None)
    }

    /// Expected misses per token.
    fn misses(f: &Firing, slots: u64, first: &[usize]) -> f64 {
        let absent = f.absent(slots, first);
        (0..f.banks.len())
            .flat_map(|b| f.groups(b, first[b]))
            .map(|(n, p)| n * p * absent.at(p))
            .sum()
    }

    /// A curve whose misses fall with size and with frequency; no samples in the rarest classes.
    fn curve() -> Misses {
        let mut misses = Misses::default();
        for class in 2..BINS {
            misses.needed[class] = 10_000;
            for (missed, size) in misses.missed.iter_mut().zip(SIZES) {
                missed[class] = (1e4 * (1.0 - size) * (1.0 - class as f64 / 40.0)) as u64;
            }
        }
        misses
    }

    #[test]
    fn what_a_device_holds_does_not_follow_the_text() {
        let f = Firing {
            misses: Some(curve()),
            ..skewed()
        };
        let first = [128, 64];
        let at = |fixed: u64, often: f64| f.absent_beside(fixed, 96, &first).at(often);
        for often in [0.2, 0.4] {
            let cached = f.absent(96, &first).at(often);
            let all = [0, 64, 128, 192, 10_000].map(|fixed| at(fixed, often));
            assert_eq!(all[0], cached);
            assert!(all.windows(2).all(|two| two[0] <= two[1]), "{all:?}");
            // All of the hot neurons, of 288 that are resident, miss as in the order of frequency.
            assert!((all[3] - (cached + 2.0) / 3.0).abs() < 1e-9, "{all:?}");
            assert_eq!(all[3], all[4]);
        }
        // Nothing is missing beside it, or everything that it does not hold.
        assert_eq!(f.absent_beside(192, 1024 - 192, &first).at(0.2), 0.0);
        assert_eq!(f.absent_beside(192, 0, &first).at(0.2), 1.0);
    }

    #[test]
    fn a_measured_curve_is_interpolated() {
        let f = Firing {
            misses: Some(curve()),
            ..skewed()
        };
        let at = |share: f64, class: usize, first: &[usize]| {
            let hot: usize = first.iter().sum();
            let slots = (share * 1024.0).round() as u64 - hot as u64;
            let often = (class as f64 / (BINS - 1) as f64).powi(2);
            f.absent(slots, first).at(often)
        };
        for (i, size) in SIZES.into_iter().enumerate() {
            for class in [2, 9, 15] {
                let counted = f.misses.unwrap().missed[i][class] as f64 / 1e4;
                assert!((at(size, class, &[0, 0]) - counted).abs() < 2e-3);
                // Neurons that are resident outside the cold region count as cached.
                if size > 0.3 {
                    assert_eq!(at(size, class, &[0, 0]), at(size, class, &[128, 64]));
                }
            }
        }
        // Between sizes, below the first and above the last.
        let middle = |a, b| 0.5 * (at(a, 5, &[0, 0]) + at(b, 5, &[0, 0]));
        assert!((at(0.46, 5, &[0, 0]) - middle(0.4, 0.52)).abs() < 2e-3);
        assert!(at(0.01, 5, &[0, 0]) > at(SIZES[0], 5, &[0, 0]));
        assert!(at(0.95, 5, &[0, 0]) < at(0.82, 5, &[0, 0]));
        // The rarest classes use the nearest class with samples.
        assert_eq!(at(0.4, 0, &[0, 0]), at(0.4, 2, &[0, 0]));
    }

    #[test]
    fn more_memory_never_misses_more() {
        let f = Firing::unknown(3, 1000);
        let mut before = f64::INFINITY;
        for slots in (0..=3000).step_by(300) {
            let misses = misses(&f, slots, &[0; 3]);
            assert!(misses <= 1.02 * before + 0.5, "{slots}: {misses}");
            before = misses;
        }
        let none = misses(&f, 0, &[0; 3]);
        assert!((none - 3.0 * f.fires(0, 0, 1)).abs() < 1e-6);
        assert_eq!(misses(&f, 3000, &[0; 3]), 0.0);
    }

    #[test]
    fn hot_neurons_do_not_count_as_misses() {
        let f = skewed();
        assert!(misses(&f, 300, &[256, 256]) < misses(&f, 300, &[0, 0]));
        assert!(
            (f.fires(0, 256, 1) + f.fires(1, 0, 1) - f.fires(1, 256, 1) - f.fires(0, 0, 1)).abs()
                < 1e-9
        );
    }

    #[test]
    fn batches_touch_more_neurons() {
        let f = skewed();
        let by: Vec<f64> = [1, 2, 8, 1000].map(|b| f.fires(0, 0, b)).into();
        assert!(by.windows(2).all(|w| w[0] < w[1]), "{by:?}");
        assert!((f.share() - 0.45).abs() < 0.01, "{}", f.share());
        assert!(by[3] > 500.0);
        assert_eq!(Firing::always(2, 40).fires(1, 0, 1), 40.0);
    }

    #[test]
    fn an_unknown_model_has_the_assumed_share() {
        for firing in [Firing::unknown(2, 4096), Firing::even(2, 4096, None)] {
            let share = firing.share();
            assert!((share - UNKNOWN_SHARE).abs() < 0.02, "{share}");
        }
    }
}
