//! How often neurons fire, and what the cold region will hold of them.
//!
//! Hits come from a small simulation: a sample of the neurons fires by chance, each with the measured
//! frequency and the measured chances to fire again some tokens later (`drift.rs`), and the cold
//! region's own code, with as many slots as its share of the sample, says what it finds. No formula
//! would follow its policy, which weighs uses by age, spares the latest ones and, where a predictor
//! tells, those that are near to firing.

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Key, SlotCache};

use super::drift::{Again, Drift, Gait, Normal, Walk, threshold};
use crate::error::Error;
use crate::store::{COLD, MARGIN_STEPS};

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
    /// Share of the excess over independent firing: 0 where a neuron fires no more often after it
    /// has fired, 1 where it never stops.
    stickiness: f64,
    /// By bank, how long neurons stay near to firing.
    drifts: Vec<Drift>,
    /// Whether the frequencies were measured.
    pub measured: bool,
}

impl Firing {
    /// From the share of tokens for which each neuron of each bank fires, and how often each bank's
    /// fire again, where that was counted.
    pub(crate) fn measured<'a>(
        frequencies: impl Iterator<Item = &'a [f32]>,
        again: &[Again],
    ) -> Self {
        let mut neurons = 0;
        let banks = frequencies
            .map(|bank| {
                neurons = bank.len();
                let mean = |group: &[f32]| group.iter().sum::<f32>() / group.len() as f32;
                bank.chunks(GROUP).map(mean).collect()
            })
            .collect();
        Self::new(banks, neurons, again, true)
    }

    fn new(banks: Vec<Vec<f32>>, neurons: usize, again: &[Again], measured: bool) -> Self {
        let mut new = Self {
            banks,
            neurons,
            stickiness: 0.0,
            drifts: Vec::new(),
            measured,
        };
        let unknown = Again {
            next: UNKNOWN_PERSISTENCE,
            later: None,
        };
        let again = |bank: usize| again.get(bank).copied().unwrap_or(unknown);
        let drift = |bank: usize| Drift::new(new.groups(bank, 0), again(bank));
        new.drifts = (0..new.banks.len()).map(drift).collect();
        let all = || (0..new.banks.len()).flat_map(|b| new.groups(b, 0));
        let sum: f64 = all().map(|(n, p)| n * p).sum();
        let chance = all().map(|(n, p)| n * p * p).sum::<f64>() / sum.max(1e-9);
        let stay = |bank: usize| again(bank).next * new.fires(bank, 0, 1);
        let persistence = (0..new.banks.len()).map(stay).sum::<f64>() / sum.max(1e-9);
        let excess = (persistence - chance) / (1.0 - chance).max(1e-9);
        new.stickiness = excess.clamp(0.0, 0.999);
        new
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
        Self::new(vec![bank; banks], neurons, &[], false)
    }

    /// Every neuron fires for every token.
    pub fn always(banks: usize, neurons: usize) -> Self {
        Self::new(
            vec![vec![1.0; neurons.div_ceil(GROUP)]; banks],
            neurons,
            &[Again {
                next: 1.0,
                later: None,
            }],
            true,
        )
    }

    fn group_len(&self, group: usize) -> usize {
        GROUP.min(self.neurons - group * GROUP)
    }

    /// Groups of a bank from neuron `first` on: neurons, and the share of tokens they fire for.
    pub fn groups(&self, bank: usize, first: usize) -> impl Iterator<Item = (f64, f64)> {
        let bank = self.banks.get(bank).map_or(&[][..], |b| b);
        (bank.iter().enumerate().skip(first / GROUP))
            .map(|(g, &often)| (self.group_len(g) as f64, f64::from(often)))
    }

    /// Expected neurons of a bank from neuron `first` on that fire for at least one of `tokens`
    /// consecutive tokens.
    pub fn fires(&self, bank: usize, first: usize, tokens: usize) -> f64 {
        (self.groups(bank, first))
            .map(|(count, often)| count * self.touched(often, tokens))
            .sum()
    }

    /// Chance that a neuron that fires for a share `often` of tokens fires for one of `tokens`
    /// consecutive ones.
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

    /// Chance that a needed neuron is not in a cold region of `slots` neurons, which serves those
    /// from `first[bank]` on. `named`: neurons that a predictor wants for each that fires, where there
    /// is one, which tells the cold region besides how near all of them are.
    ///
    /// # Errors
    /// No memory for the sample.
    pub fn absent(&self, slots: u64, first: &[usize], named: Option<f64>) -> Result<Absent, Error> {
        let from = |b: usize| first.get(b).copied().unwrap_or_default();
        let behind = |b: usize| self.neurons.saturating_sub(from(b));
        let all: usize = (0..self.banks.len()).map(behind).sum();
        if slots == 0 || all == 0 || slots >= all as u64 {
            let chance = if slots == 0 { 1.0 } else { 0.0 };
            return Ok(Absent([chance; BINS]));
        }
        // Neurons of all banks at even distances in packed order: hot and cold ones of each layer.
        let step = (all as f64 / SAMPLE as f64).max(1.0);
        let (mut next, mut before) = (step / 2.0, 0.0);
        let mut normal = Normal::new(0);
        let mut banks = Vec::with_capacity(self.banks.len());
        for (b, (bank, &drift)) in self.banks.iter().zip(&self.drifts).enumerate() {
            let gait = Gait::new(drift);
            let mut sampled = Vec::new();
            while next < before + behind(b) as f64 {
                let neuron = from(b) + (next - before) as usize;
                let often = bank.get(neuron / GROUP).map_or(0.0, |&p| f64::from(p));
                sampled.push(Neuron {
                    often,
                    above: threshold((often * named.unwrap_or(1.0)).min(1.0)) as f32,
                    walk: gait.start(drift, &mut normal),
                });
                next += step;
            }
            before += behind(b) as f64;
            banks.push((gait, sampled));
        }
        let count: usize = banks.iter().map(|b| b.1.len()).sum();
        let slots = (slots as f64 / all as f64 * count as f64).round() as u32;
        Absent::simulate(&mut banks, slots.max(1), named.is_some(), &mut normal)
    }
}

/// Neurons that are simulated, at most.
const SAMPLE: usize = 2048;

/// Tokens that are simulated before misses are counted, and while they are.
const WARM_UP: usize = 120;
const COUNTED: usize = 280;

/// Frequencies between which chances are told apart; finer where neurons are rare.
const BINS: usize = 16;

fn bin(often: f64) -> f64 {
    often.clamp(0.0, 1.0).sqrt() * (BINS - 1) as f64
}

/// A neuron that fires by chance.
struct Neuron {
    often: f64,
    /// It is needed where it is nearer than this.
    above: f32,
    walk: Walk,
}

/// Chance that a needed neuron is not in memory, by how often it fires.
#[derive(Debug, Clone)]
pub struct Absent([f64; BINS]);

impl Absent {
    /// That of a neuron that fires for a share `often` of tokens.
    pub fn at(&self, often: f64) -> f64 {
        let at = bin(often);
        let low = (at as usize).min(BINS - 2);
        let share = at - low as f64;
        self.0[low] * (1.0 - share) + self.0[low + 1] * share
    }

    /// Lets the neurons of the banks fire, one bank after the other for each token, over a cold region
    /// of `slots` neurons, which is told how near they are if it `leans` on that.
    fn simulate(
        banks: &mut [(Gait, Vec<Neuron>)],
        slots: u32,
        leans: bool,
        normal: &mut Normal,
    ) -> Result<Self, Error> {
        let storage = emberflow_storage::Error::from;
        let sizes: Vec<u32> = banks.iter().map(|b| b.1.len() as u32).collect();
        let arena = Arena::new(slots, 1, 1, ArenaOptions::default()).map_err(storage)?;
        let Some(mut cold) = SlotCache::with_eviction(arena, &sizes, COLD) else {
            return Ok(Self([1.0; BINS]));
        };
        let each = slots.div_ceil(sizes.len() as u32);
        for (bank, (_, neurons)) in (0..).zip(banks.iter()) {
            for (neuron, it) in (0..).zip(neurons) {
                let key = Key { bank, neuron };
                cold.set_prior(key, it.often);
                // The front of every bank, as a region is filled.
                if let Some(slot) = (neuron < each).then(|| cold.reserve_if_free(key)).flatten() {
                    cold.admit(key, slot);
                    cold.unpin(key);
                }
            }
        }
        let mut counts = [[0.0f64; 2]; BINS];
        let (mut missing, mut pinned, mut margins) = (Vec::new(), Vec::new(), Vec::new());
        for token in 0..WARM_UP + COUNTED {
            cold.begin_pass();
            for (bank, (gait, neurons)) in (0..).zip(banks.iter_mut()) {
                cold.begin_layer(bank);
                margins.clear();
                let margin = |n: &mut Neuron| gait.step(&mut n.walk, normal) - n.above;
                margins.extend(neurons.iter_mut().map(margin));
                if leans && !margins.is_empty() {
                    let squares: f32 = margins.iter().map(|m| m * m).sum();
                    let scale = MARGIN_STEPS / (squares / margins.len() as f32).sqrt();
                    let near = margins.iter().map(|m| (m * scale) as i8);
                    cold.set_margins(Key { bank, neuron: 0 }, near, token > 0);
                }
                let needed = (0..).zip(neurons.iter()).zip(&margins);
                for ((neuron, it), _) in needed.filter(|n| *n.1 > 0.0) {
                    let key = Key { bank, neuron };
                    let found = cold.get_pin(key);
                    match found {
                        Some(_) => pinned.push(key),
                        None => missing.push(key),
                    }
                    if token >= WARM_UP {
                        let count = &mut counts[bin(it.often).round() as usize];
                        count[0] += 1.0;
                        count[1] += f64::from(u8::from(found.is_none()));
                    }
                }
                for key in missing.drain(..) {
                    let mut slot = cold.reserve(key);
                    if slot.is_none() {
                        // What was needed before it is done with.
                        pinned.drain(..).for_each(|key| cold.unpin(key));
                        slot = cold.reserve(key);
                    }
                    if let Some(slot) = slot {
                        cold.admit(key, slot);
                        pinned.push(key);
                    }
                }
                pinned.drain(..).for_each(|key| cold.unpin(key));
            }
        }
        // Where hardly any fired, a neighbour in frequency tells more.
        let known = |c: &[f64; 2]| c[0] >= 50.0;
        let nearest = |i: usize| {
            let by_distance = |j: &usize| j.abs_diff(i);
            let all = (0..BINS).filter(|&j| known(&counts[j]));
            all.min_by_key(by_distance).map_or(counts[i], |j| counts[j])
        };
        Ok(Self(std::array::from_fn(|i| {
            let [needed, missed] = nearest(i);
            if needed > 0.0 { missed / needed } else { 1.0 }
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skewed(persistence: f64) -> Firing {
        up_to(0.9, persistence)
    }

    fn up_to(most: f32, persistence: f64) -> Firing {
        let rates: Vec<f32> = (0..512).map(|i| most * (512 - i) as f32 / 512.0).collect();
        let banks = [rates.clone(), rates];
        Firing::measured(banks.iter().map(Vec::as_slice), &again(persistence))
    }

    fn again(next: f64) -> [Again; 4] {
        [Again { next, later: None }; 4]
    }

    /// Expected misses of a token.
    fn misses(f: &Firing, slots: u64, first: &[usize]) -> f64 {
        let absent = f.absent(slots, first, None).unwrap();
        (0..f.banks.len())
            .flat_map(|b| f.groups(b, first[b]))
            .map(|(n, p)| n * p * absent.at(p))
            .sum()
    }

    /// All neurons, one by one, and a list in the order that the policy defines: uses that halve
    /// in 43 tokens, those of this token and the last one after all others.
    fn simulate(f: &Firing, slots: usize) -> f64 {
        let mut normal = Normal::new(1);
        let neurons = f.neurons * f.banks.len();
        let often = |n: usize| f64::from(f.banks[n / f.neurons][n % f.neurons / GROUP]);
        let gait = Gait::new(f.drifts[0]);
        let mut walks: Vec<(Walk, f32)> = (0..neurons)
            .map(|n| {
                (
                    gait.start(f.drifts[0], &mut normal),
                    threshold(often(n)) as f32,
                )
            })
            .collect();
        let fade = 0.5f64.powf(1.0 / 43.0);
        let mut worth: Vec<f64> = (0..neurons).map(|n| often(n) / (1.0 - fade)).collect();
        let mut last = vec![-9i32; neurons];
        let mut resident = vec![false; neurons];
        (0..slots).for_each(|n| resident[n] = true);
        let (warm, tokens, mut misses) = (200, 300, 0);
        for token in 0..warm + tokens {
            worth.iter_mut().for_each(|w| *w *= fade);
            for bank in 0..f.banks.len() {
                let mut missing = 0;
                for n in bank * f.neurons..(bank + 1) * f.neurons {
                    let (walk, above) = &mut walks[n];
                    if gait.step(walk, &mut normal) > *above {
                        missing += usize::from(!resident[n]);
                        (resident[n], worth[n], last[n]) = (true, worth[n] + 1.0, token);
                    }
                }
                misses += if token >= warm { missing } else { 0 };
                let this_bank = bank * f.neurons..(bank + 1) * f.neurons;
                let mut leave: Vec<usize> = (0..neurons)
                    .filter(|&n| resident[n] && !(last[n] == token && this_bank.contains(&n)))
                    .collect();
                leave.sort_by(|&a, &b| {
                    let of = |n: usize| (last[n].max(token - 2), worth[n]);
                    of(a).partial_cmp(&of(b)).unwrap()
                });
                leave
                    .iter()
                    .take(missing)
                    .for_each(|&n| resident[n] = false);
            }
        }
        misses as f64 / tokens as f64
    }

    #[test]
    fn misses_are_those_of_all_neurons_one_by_one() {
        for persistence in [0.62, 0.85] {
            let f = up_to(0.3, persistence);
            for slots in [400, 550, 750] {
                let expected = misses(&f, slots, &[0, 0]);
                let found = simulate(&f, slots as usize);
                assert!(
                    (expected - found).abs() < 0.15 * found + 1.0,
                    "{persistence} {slots}: {expected} expected, {found} found"
                );
            }
        }
    }

    #[test]
    fn what_lasts_saves_misses() {
        let rates: Vec<f32> = (0..1024)
            .map(|i| 0.3 * (1024 - i) as f32 / 1024.0)
            .collect();
        let at = |later: [f64; 3], named| {
            let again = Again {
                next: 0.84,
                later: Some(later),
            };
            let f = Firing::measured([&rates[..], &rates[..]].into_iter(), &[again; 2]);
            f.absent(1000, &[0, 0], named).unwrap().at(0.1)
        };
        // Drifting smoothly, gone after some tokens: how synthetic weights fire.
        let smooth = [0.27, 0.2, 0.2];
        let (told, untold) = (at(smooth, Some(1.0)), at(smooth, None));
        assert!(told < 0.9 * untold, "{told} with margins, {untold} without");
        // What lasts for a text is found where it was needed before.
        let text = at([0.7, 0.6, 0.55], None);
        assert!(text < untold, "{text} with a subject, {untold} without");
    }

    #[test]
    fn a_sample_stands_for_a_large_model() {
        let rates: Vec<f32> = (0..8192)
            .map(|i| 0.5 * (8192 - i) as f32 / 8192.0)
            .collect();
        let large = Firing::measured((0..4).map(|_| rates.as_slice()), &again(0.6));
        let part: Vec<f32> = rates.iter().step_by(16).copied().collect();
        let small = Firing::measured((0..4).map(|_| part.as_slice()), &again(0.6));
        let of = |f: &Firing| misses(f, (f.neurons * 2) as u64, &[0; 4]) / f.neurons as f64;
        assert!((of(&large) / of(&small) - 1.0).abs() < 0.1);
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
    fn a_hot_region_takes_its_neurons_out() {
        let f = skewed(0.8);
        assert!(misses(&f, 300, &[256, 256]) < misses(&f, 300, &[0, 0]));
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
