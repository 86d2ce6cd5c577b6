//! The profile that version 2 adds to activation counts.

use super::routing::Routing;
use super::sample::words;
use super::{ActivationStats, ExpertStats, Magnitudes, Misses, Sample};

/// Batch sizes for which activity is counted.
pub const BATCHES: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Distances in tokens, beyond the next token, at which repeated firing is counted.
pub const LAGS: [usize; 3] = [8, 32, 128];

/// How often a firing neuron fires again some tokens later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Later {
    /// Firings that have a token at this distance in their window.
    pub fired: u64,
    /// Those whose neuron fires for that token too.
    pub again: u64,
}

impl Later {
    /// `again / fired`; `None` if nothing was counted, as in older files.
    pub fn share(self) -> Option<f64> {
        (self.fired > 0).then(|| self.again as f64 / self.fired as f64)
    }
}

/// How a model's neurons fire over a text, in addition to counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Model and checkpoint, as named by the container.
    pub model: String,
    /// Hashes of the texts, ascending.
    pub texts: Vec<u64>,
    /// Tokens per window; windows are independent.
    pub window: u32,
    /// Consecutive token pairs inside windows.
    pub pairs: u64,
    /// Number of batches by size ([`BATCHES`]). The tokens of a batch come from that many windows,
    /// at the same position; the first entry is the number of tokens.
    pub steps: [u64; BATCHES.len()],
    /// One entry per FFN, by layer, then expert.
    pub banks: Vec<BankProfile>,
    /// Sampled tokens; empty inside a container.
    pub sample: Sample,
    /// Misses of a cache; empty in older files.
    pub misses: Misses,
    /// Routing, in a model with experts.
    pub routing: Option<Routing>,
}

/// Profile of one FFN.
#[derive(Debug, Clone, PartialEq)]
pub struct BankProfile {
    /// For each batch size above 1, number of batches in which each neuron fired for at least one
    /// token: `[sizes][neurons]`.
    pub unions: Vec<Vec<u64>>,
    /// Tokens for which each neuron fired and also fired for the previous one.
    pub stayed: Vec<u64>,
    /// Repeated firing of all neurons together at larger distances, [`LAGS`].
    pub later: [Later; LAGS.len()],
    /// Tokens for which each neuron's hidden value was nonzero; less than its count if Up has its
    /// own ReLU.
    pub contributed: Vec<u64>,
    /// Nonzero activated gates.
    pub gates: Magnitudes,
    /// Nonzero hidden values.
    pub hidden: Magnitudes,
}

impl BankProfile {
    /// An empty profile.
    pub fn new(neurons: usize) -> Self {
        Self {
            unions: vec![vec![0; neurons]; BATCHES.len() - 1],
            stayed: vec![0; neurons],
            later: Default::default(),
            contributed: vec![0; neurons],
            gates: Magnitudes::default(),
            hidden: Magnitudes::default(),
        }
    }

    fn merge(&mut self, other: &Self) -> Option<()> {
        let lists = self.unions.iter_mut().zip(&other.unions);
        let lists = lists.chain([
            (&mut self.stayed, &other.stayed),
            (&mut self.contributed, &other.contributed),
        ]);
        for (mine, theirs) in lists {
            for (a, &b) in mine.iter_mut().zip(theirs) {
                *a = a.checked_add(b)?;
            }
        }
        for (a, b) in self.later.iter_mut().zip(other.later) {
            a.fired = a.fired.checked_add(b.fired)?;
            a.again = a.again.checked_add(b.again)?;
        }
        self.gates.merge(&other.gates)?;
        self.hidden.merge(&other.hidden)
    }

    fn lists_mut(&mut self) -> impl Iterator<Item = &mut Vec<u64>> {
        let own = [&mut self.stayed, &mut self.contributed];
        self.unions.iter_mut().chain(own)
    }
}

impl Profile {
    /// Number of batches of size `BATCHES[size]` in which each neuron of a bank fired.
    pub fn union<'a>(&'a self, counts: &'a [u64], bank: usize, size: usize) -> Option<&'a [u64]> {
        match size {
            0 => Some(counts),
            _ => Some(self.banks.get(bank)?.unions.get(size - 1)?),
        }
    }

    /// The neurons of bank `bank`, of which there are `neurons`, as bit rows, one bit per sampled token:
    /// `[neurons × words(tokens)]`.
    pub fn sampled(&self, bank: usize, neurons: usize) -> Vec<u64> {
        self.sample.transposed(bank, self.banks.len(), neurons)
    }

    pub(super) fn merge(&mut self, other: &Self) -> Result<(), String> {
        if self.model != other.model {
            return Err(format!(
                "one is of {:?}, the other of {:?}",
                self.model, other.model
            ));
        }
        if self.window != other.window {
            return Err(format!(
                "windows of {} and of {} tokens",
                self.window, other.window
            ));
        }
        if let Some(twice) = other.texts.iter().find(|t| self.texts.contains(t)) {
            return Err(format!("both hold the text with hash {twice:016x}"));
        }
        let overflow = || "a count overflows".to_owned();
        self.texts.extend_from_slice(&other.texts);
        self.texts.sort_unstable();
        self.pairs = self.pairs.checked_add(other.pairs).ok_or_else(overflow)?;
        for (a, &b) in self.steps.iter_mut().zip(&other.steps) {
            *a = a.checked_add(b).ok_or_else(overflow)?;
        }
        for (a, b) in self.banks.iter_mut().zip(&other.banks) {
            a.merge(b).ok_or_else(overflow)?;
        }
        self.misses.merge(other.misses).ok_or_else(overflow)?;
        self.sample.merge(&other.sample);
        match (&mut self.routing, &other.routing) {
            (None, None) => Ok(()),
            (Some(mine), Some(theirs)) => mine.merge(theirs),
            _ => Err("one is of a model with experts".into()),
        }
    }

    pub(super) fn permute(&mut self, order: &[Vec<u32>]) {
        for (bank, order) in self.banks.iter_mut().zip(order) {
            for list in bank.lists_mut() {
                *list = order.iter().map(|&i| list[i as usize]).collect();
            }
        }
        self.sample.permute(order);
    }

    /// Checks that the numbers are consistent; returns the inconsistency.
    pub(super) fn check(&self, stats: &ActivationStats) -> Result<(), String> {
        let [layers, experts, _] = stats.sizes();
        let same = |what: &str, found: usize, expected: usize| {
            if found == expected {
                return Ok(());
            }
            Err(format!("{what}: {found}, expected {expected}"))
        };
        self.misses.check()?;
        if let Some(routing) = &self.routing {
            routing.check(stats.tokens)?;
        }
        same("banks", self.banks.len(), layers.saturating_mul(experts))?;
        if self.steps[0] != stats.tokens {
            return Err(format!(
                "{} steps of one token in {} tokens",
                self.steps[0], stats.tokens
            ));
        }
        if self.pairs > stats.tokens {
            return Err(format!("{} pairs in {} tokens", self.pairs, stats.tokens));
        }
        let experts = stats.layers.iter().flat_map(|l| &l.experts);
        for (b, (bank, expert)) in self.banks.iter().zip(experts).enumerate() {
            let neurons = expert.counts.len();
            same("batch sizes", bank.unions.len(), BATCHES.len() - 1)?;
            let limits = self.steps[1..].iter();
            for (list, &limit) in bank.unions.iter().zip(limits) {
                same("union counts", list.len(), neurons)?;
                within(list, |_| limit).map_err(|e| format!("bank {b}: {e} batches"))?;
            }
            let fired = super::total(&expert.counts);
            if let Some(l) =
                (bank.later.iter()).find(|l| l.again > l.fired || u128::from(l.fired) > fired)
            {
                return Err(format!(
                    "bank {b}: {} of {} firings are followed by another, of {fired} in all",
                    l.again, l.fired
                ));
            }
            for list in [&bank.stayed, &bank.contributed] {
                same("counts", list.len(), neurons)?;
                within(list, |n| expert.counts.get(n).copied().unwrap_or(0))
                    .map_err(|e| format!("bank {b}: {e} activations"))?;
            }
        }
        self.check_sample(stats)
    }

    /// The same of the sampled tokens.
    fn check_sample(&self, stats: &ActivationStats) -> Result<(), String> {
        let width = words(stats.sizes()[2]);
        let bits = self.banks.len().saturating_mul(width);
        let tokens = self.sample.tokens();
        if tokens.len() > self.sample.capacity {
            return Err("more sampled tokens than the sample holds".into());
        }
        if tokens.windows(2).any(|w| w[0].priority >= w[1].priority) {
            return Err("sampled tokens are not in order".into());
        }
        for token in tokens {
            if token.bits.len() != bits {
                return Err(format!(
                    "{} words of a sampled token, expected {bits}",
                    token.bits.len()
                ));
            }
            let experts = stats.layers.iter().flat_map(|l| &l.experts);
            let banks = token.bits.chunks(width.max(1)).zip(experts);
            let past = |(bits, expert): (&[u64], &ExpertStats)| {
                let (whole, last) = (expert.counts.len() / 64, expert.counts.len() % 64);
                let mut bits = bits.iter().skip(whole);
                // the word that is partly theirs, then the others
                let partly = bits.next().is_some_and(|w| w >> last != 0);
                partly || bits.any(|&w| w != 0)
            };
            if banks.into_iter().any(past) {
                return Err("a sampled token fires neurons that do not exist".into());
            }
        }
        Ok(())
    }
}

fn within(list: &[u64], limit: impl Fn(usize) -> u64) -> Result<(), String> {
    match list.iter().enumerate().find(|&(n, &c)| c > limit(n)) {
        Some((n, c)) => Err(format!("neuron {n} has {c} of {}", limit(n))),
        None => Ok(()),
    }
}
