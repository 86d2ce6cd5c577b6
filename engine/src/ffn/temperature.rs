//! Which clusters are hot, from the container's activation statistics.

use emberflow_predictor::stats::{ActivationStats, BATCHES};

use super::banks::Banks;
use super::regions::hot_prefix;
use crate::Error;

/// What the statistics say about a model.
pub(crate) struct Temperature {
    /// For batches of 1, 2, … sequences: the clusters at the start of each bank that are hot.
    pub hot_clusters: Vec<Vec<u32>>,
    /// By bank, share of tokens for which each neuron fires; empty without statistics.
    pub rates: Vec<Vec<f32>>,
    /// Chance that a neuron that fires for a token fires for the next one too, where it was
    /// measured.
    pub persistence: Option<f64>,
}

/// The largest batches of up to `batch` tokens that the statistics counted: in how many each
/// neuron of the bank fired, how many there were, and their tokens.
fn measured<'a>(
    stats: &'a ActivationStats,
    counts: &'a [u64],
    bank: usize,
    batch: usize,
) -> (&'a [u64], u64, usize) {
    let larger = stats.profile.iter().flat_map(|profile| {
        let sizes = BATCHES.iter().zip(profile.steps).enumerate();
        sizes.filter_map(move |(i, (&size, steps))| {
            let known = size <= batch && steps > 0;
            let counts = profile.union(counts, bank, i).filter(|_| known)?;
            Some((counts, steps, size))
        })
    });
    larger.last().unwrap_or((counts, stats.tokens, 1))
}

/// Firings that were followed by another one, among those that have a token behind them: of the
/// tokens, as many as there are pairs.
fn persistence(stats: &ActivationStats) -> Option<f64> {
    let profile = stats.profile.as_ref()?;
    let sum = |counts: &[u64]| counts.iter().map(|&c| c as f64).sum::<f64>();
    let stayed: f64 = profile.banks.iter().map(|b| sum(&b.stayed)).sum();
    let banks = 0..profile.banks.len() as u32;
    let fired: f64 = banks.filter_map(|b| stats.counts(b, 0)).map(sum).sum();
    let followed = fired * profile.pairs as f64 / stats.tokens.max(1) as f64;
    (followed > 0.0).then(|| (stayed / followed).clamp(0.0, 1.0))
}

impl Temperature {
    /// Reads the statistics section, for up to `batch` sequences at once. Without one no
    /// cluster is known to be hot.
    pub fn read(banks: &Banks, batch: usize) -> Result<Self, Error> {
        let bytes = banks.container.read_stats()?;
        if bytes.is_empty() {
            return Ok(Self {
                hot_clusters: vec![vec![0; banks.count]; batch],
                rates: Vec::new(),
                persistence: None,
            });
        }
        let stats = ActivationStats::parse(&bytes, banks.count, 1, banks.neurons).map_err(|e| {
            Error::Bundles {
                path: banks.container.path().to_path_buf(),
                reason: e.to_string(),
            }
        })?;
        let hot = |bank: usize, batch: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            let (counts, passes, tokens) = measured(&stats, counts, bank, batch);
            hot_prefix(counts, passes, batch as f64 / tokens as f64)
        };
        let rate = |count: &u64| (*count as f64 / stats.tokens.max(1) as f64) as f32;
        let rates = |bank: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            counts.iter().map(rate).collect()
        };
        let of_batch = |batch| (0..banks.count).map(|bank| hot(bank, batch)).collect();
        Ok(Self {
            hot_clusters: (1..=batch).map(of_batch).collect(),
            rates: (0..banks.count).map(rates).collect(),
            persistence: persistence(&stats),
        })
    }
}
