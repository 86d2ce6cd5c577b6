//! Routing statistics of a mixture of experts: popularity, reuse between tokens, co-selection; and
//! how often neurons inside experts fire.

use super::{ExpertStats, is_permutation};

/// Number of cache sizes for which misses are counted, in 16ths of all experts.
pub const SIXTEENTHS: usize = 15;

/// Routing of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// Experts per layer, without a shared one.
    pub experts: u32,
    /// Experts per token and layer.
    pub chosen: u32,
    /// One entry per layer of the model.
    pub layers: Vec<RoutedLayer>,
    /// Misses of the engine's cache of experts, by its size.
    pub misses: ExpertMisses,
}

/// Routes of one layer. All lists are empty for a dense FFN.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoutedLayer {
    /// Tokens that visit each expert.
    pub visits: Vec<u64>,
    /// Visits that follow a visit of the preceding token in the window.
    pub again: Vec<u64>,
    /// Tokens that visit both experts of a pair: (0, 1), (0, 2), …, (1, 2), ….
    pub together: Vec<u64>,
    /// How often each expert's neurons fire; empty if not counted.
    pub neurons: Vec<ExpertStats>,
}

/// Visits, and how many of them missed in a cache of each size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpertMisses {
    /// Visits counted; 0 if the text is too short to fill a cache.
    pub needed: u64,
    /// By size: 1/16 of all experts, 2/16, ….
    pub missed: [u64; SIXTEENTHS],
}

impl ExpertMisses {
    /// Share of the visits that miss in a cache holding the share `held` of all experts,
    /// interpolated linearly between measured sizes; `None` if nothing was counted.
    pub fn rate(&self, held: f64) -> Option<f64> {
        if self.needed == 0 {
            return None;
        }
        let at = held.clamp(0.0, 1.0) * (SIXTEENTHS + 1) as f64;
        let rate = |size: usize| match size {
            0 => 1.0,
            _ => match self.missed.get(size - 1) {
                Some(missed) => *missed as f64 / self.needed as f64,
                None => 0.0,
            },
        };
        let (below, part) = (at.floor() as usize, at.fract());
        Some(rate(below) * (1.0 - part) + rate(below + 1) * part)
    }

    fn merge(&mut self, other: Self) -> Option<()> {
        self.needed = self.needed.checked_add(other.needed)?;
        for (mine, theirs) in self.missed.iter_mut().zip(other.missed) {
            *mine = mine.checked_add(theirs)?;
        }
        Some(())
    }
}

impl RoutedLayer {
    /// An empty layer of `experts` experts; 0 for a dense one.
    pub fn new(experts: usize) -> Self {
        Self {
            visits: vec![0; experts],
            again: vec![0; experts],
            together: vec![0; pairs(experts)],
            neurons: Vec::new(),
        }
    }

    /// For each neuron index, how often it fires for tokens that visit its expert, averaged over
    /// experts by visits; `None` if not counted.
    pub fn firing(&self) -> Option<Vec<f32>> {
        let mut fired = vec![0u128; self.neurons.first()?.counts.len()];
        for expert in &self.neurons {
            for (sum, &count) in fired.iter_mut().zip(&expert.counts) {
                *sum += u128::from(count);
            }
        }
        let visits: u128 = self.visits.iter().map(|&n| u128::from(n)).sum();
        let share = |sum: u128| (sum as f64 / (visits as f64).max(1.0)) as f32;
        Some(fired.into_iter().map(share).collect())
    }

    /// Index in `together` of the experts `a < b`.
    pub fn pair(&self, a: usize, b: usize) -> usize {
        a * (2 * self.visits.len() - a - 1) / 2 + b - a - 1
    }

    /// Share of the tokens that visit each expert.
    pub fn popularity(&self, tokens: u64) -> impl Iterator<Item = f64> {
        let tokens = tokens.max(1) as f64;
        self.visits.iter().map(move |&n| n as f64 / tokens)
    }

    /// Share of the experts that receives `share` of the routes, with a fraction of the last
    /// expert; 0 without routes.
    pub fn covering(&self, share: f64) -> f64 {
        let mut falling = self.visits.clone();
        falling.sort_unstable_by(|a, b| b.cmp(a));
        let wanted = share * falling.iter().map(|&n| n as f64).sum::<f64>();
        let mut sum = 0.0;
        for (i, &n) in falling.iter().enumerate() {
            if n > 0 && sum + n as f64 >= wanted {
                return (i as f64 + (wanted - sum) / n as f64) / falling.len() as f64;
            }
            sum += n as f64;
        }
        0.0
    }

    /// Share of a token's experts that the preceding token visited too. `followed`: number of pairs
    /// of consecutive tokens; each token visits `chosen` experts.
    pub fn reuse(&self, followed: u64, chosen: u32) -> f64 {
        let again = self.again.iter().map(|&n| n as f64).sum::<f64>();
        again / (followed as f64 * f64::from(chosen)).max(1.0)
    }

    /// The two experts with the largest lift: how many times as often they are chosen together as
    /// if chosen independently. `None` if no two are ever chosen together.
    pub fn closest(&self, tokens: u64) -> Option<Together> {
        let mut best: Option<Together> = None;
        for a in 0..self.visits.len() {
            for b in a + 1..self.visits.len() {
                let count = self.together[self.pair(a, b)];
                let expected = self.visits[a] as f64 * self.visits[b] as f64 / tokens.max(1) as f64;
                let lift = count as f64 / expected.max(1e-9);
                // Few tokens prove nothing.
                if count >= tokens / 100 && count > 0 && best.is_none_or(|best| lift > best.lift) {
                    best = Some(Together {
                        experts: [a as u32, b as u32],
                        tokens: count,
                        lift,
                    });
                }
            }
        }
        best
    }

    fn lists_mut(&mut self) -> [&mut Vec<u64>; 3] {
        [&mut self.visits, &mut self.again, &mut self.together]
    }
}

/// Two experts that a router chooses together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Together {
    /// The experts.
    pub experts: [u32; 2],
    /// Tokens that visit both.
    pub tokens: u64,
    /// Observed tokens relative to independent choice.
    pub lift: f64,
}

/// Number of pairs of `experts` experts.
pub(super) fn pairs(experts: usize) -> usize {
    experts * experts.saturating_sub(1) / 2
}

impl Routing {
    pub(super) fn merge(&mut self, other: &Self) -> Result<(), String> {
        let sizes = |r: &Self| {
            let experts = r.layers.iter().map(|l| l.visits.len()).collect::<Vec<_>>();
            (r.experts, r.chosen, experts)
        };
        if sizes(self) != sizes(other) {
            return Err("their models have other experts".into());
        }
        let neurons = |r: &Self| -> Vec<(usize, Vec<u32>)> {
            let experts = r.layers.iter().flat_map(|l| &l.neurons);
            experts
                .map(|e| (e.counts.len(), e.original.clone()))
                .collect()
        };
        if neurons(self) != neurons(other) {
            return Err("they count other neurons, or in another order".into());
        }
        let overflow = || "a count overflows".to_owned();
        for (mine, theirs) in self.layers.iter_mut().zip(&other.layers) {
            let theirs = [&theirs.visits, &theirs.again, &theirs.together];
            for (mine, theirs) in mine.lists_mut().into_iter().zip(theirs) {
                for (a, &b) in mine.iter_mut().zip(theirs) {
                    *a = a.checked_add(b).ok_or_else(overflow)?;
                }
            }
        }
        let mine = self.layers.iter_mut().flat_map(|l| &mut l.neurons);
        let theirs = other.layers.iter().flat_map(|l| &l.neurons);
        for (mine, theirs) in mine.zip(theirs) {
            for (a, &b) in mine.counts.iter_mut().zip(&theirs.counts) {
                *a = a.checked_add(b).ok_or_else(overflow)?;
            }
        }
        self.misses.merge(other.misses).ok_or_else(overflow)
    }

    /// Whether neurons inside experts are counted.
    pub fn counts_neurons(&self) -> bool {
        self.layers.iter().any(|layer| !layer.neurons.is_empty())
    }

    /// Reorders the neurons inside experts: `order(layer, expert)` is the original id of every
    /// packed neuron, or empty to keep the order.
    pub fn permute<'o>(&mut self, order: impl Fn(u32, u32) -> &'o [u32]) {
        for (layer, routed) in (0..).zip(&mut self.layers) {
            for expert in &mut routed.neurons {
                let order = order(layer, expert.expert);
                if order.len() == expert.counts.len() {
                    expert.counts = order.iter().map(|&i| expert.counts[i as usize]).collect();
                    expert.original = order.to_vec();
                }
            }
        }
    }

    /// Checks the counts of neurons inside experts; returns the inconsistency.
    fn check_neurons(&self) -> Result<(), String> {
        let counted = self.layers.iter().flat_map(|l| l.neurons.first());
        let len = counted.map(|e| e.counts.len()).next().unwrap_or(0);
        for (number, layer) in self.layers.iter().enumerate() {
            let bad = |what: &str| Err(format!("layer {number}: {what}"));
            if !(layer.neurons.is_empty() || layer.neurons.len() == layer.visits.len()) {
                return bad("neurons of some experts are counted only");
            }
            for ((e, expert), &visits) in (0..).zip(&layer.neurons).zip(&layer.visits) {
                if expert.expert != e || expert.counts.len() != len {
                    return bad("experts of other numbers or sizes");
                }
                if expert.counts.iter().any(|&count| count > visits) {
                    return bad("a neuron fires more often than its expert is visited");
                }
                let original = &expert.original;
                if !(original.is_empty() || is_permutation(original, len)) {
                    return bad("the original ids are not a permutation");
                }
            }
        }
        Ok(())
    }

    /// Checks that the numbers are consistent with `tokens` tokens; returns the inconsistency.
    pub(super) fn check(&self, tokens: u64) -> Result<(), String> {
        let experts = self.experts as usize;
        if self.chosen == 0 || self.chosen > self.experts {
            return Err(format!("{} of {experts} experts chosen", self.chosen));
        }
        for (number, layer) in self.layers.iter().enumerate() {
            let of = layer.visits.len();
            let lists = [of, layer.again.len(), layer.together.len()];
            if !(of == 0 || of == experts) || lists != [of, of, pairs(of)] {
                return Err(format!("layer {number}: lists of {lists:?} entries"));
            }
            let bad = |what: &str| Err(format!("layer {number}: {what}"));
            let sum = |list: &[u64]| list.iter().map(|&n| u128::from(n)).sum::<u128>();
            let chosen = u128::from(self.chosen);
            let each = u128::from(tokens);
            if of > 0 && sum(&layer.visits) != each * chosen {
                return bad("visits are not as many as tokens choose");
            }
            if of > 0 && sum(&layer.together) != each * (chosen * (chosen - 1) / 2) {
                return bad("pairs are not as many as tokens choose");
            }
            if layer.visits.iter().any(|&n| n > tokens) {
                return bad("an expert has more visits than tokens");
            }
            if layer.again.iter().zip(&layer.visits).any(|(a, v)| a > v) {
                return bad("an expert is visited again more often than visited");
            }
            for a in 0..of {
                for b in a + 1..of {
                    let most = layer.visits[a].min(layer.visits[b]);
                    if layer.together[layer.pair(a, b)] > most {
                        return bad("two experts are chosen together more often than one of them");
                    }
                }
            }
        }
        self.check_neurons()?;
        if self.misses.missed.iter().any(|&n| n > self.misses.needed) {
            Err("more misses than visits".into())
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_have_places() {
        let layer = RoutedLayer::new(5);
        let mut next = 0;
        for a in 0..5 {
            for b in a + 1..5 {
                assert_eq!(layer.pair(a, b), next);
                next += 1;
            }
        }
        assert_eq!(next, layer.together.len());
    }

    #[test]
    fn misses_are_interpolated() {
        let mut misses = ExpertMisses::default();
        assert_eq!(misses.rate(0.5), None);
        misses.needed = 100;
        misses.missed = std::array::from_fn(|i| 90 - 5 * i as u64);
        let rate = |held| (misses.rate(held).unwrap() * 1000.0).round() / 1000.0;
        assert_eq!([0.0, 1.0, 2.0].map(rate), [1.0, 0.0, 0.0]);
        assert_eq!([1.0, 1.5, 2.0].map(|n| rate(n / 16.0)), [0.9, 0.875, 0.85]);
        assert_eq!(rate(15.5 / 16.0), 0.1);
    }

    #[test]
    fn close_experts_are_found() {
        let mut layer = RoutedLayer::new(4);
        layer.visits = vec![50, 50, 60, 40];
        let at = layer.pair(0, 1);
        layer.together[at] = 40;
        let at = layer.pair(2, 3);
        layer.together[at] = 30;
        let best = layer.closest(100).unwrap();
        assert_eq!((best.experts, best.tokens), ([0, 1], 40));
        assert!((best.lift - 1.6).abs() < 1e-9);
        assert!((layer.covering(0.8) - 0.75).abs() < 1e-9);
    }
}
