//! Which clusters are hot, from the container's activation statistics.

use emberflow_predictor::stats::{ActivationStats, BATCHES};

use super::drift::Again;
use crate::error::Error;
use crate::store::Layout;
use crate::store::regions::hot_prefix;

/// What the statistics say about a model.
pub(crate) struct Temperature {
    /// For batches of 1, 2, … sequences: the clusters at the start of each bank that are hot.
    pub hot_clusters: Vec<Vec<u32>>,
    /// By bank, share of tokens for which each neuron fires; empty without statistics.
    pub frequencies: Vec<Vec<f32>>,
    /// By bank, how often a neuron that fires for a token fires again; empty where it was not counted.
    pub again: Vec<Again>,
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

/// How often a neuron that fires fires again, by bank; that of all banks where one fired too seldom to
/// tell. Of the firings as many have a token behind them as there are pairs of tokens.
fn again(stats: &ActivationStats) -> Vec<Again> {
    const ENOUGH: f64 = 1000.0;
    let Some(profile) = stats.profile.as_ref() else {
        return Vec::new();
    };
    let sum = |counts: &[u64]| counts.iter().map(|&c| c as f64).sum::<f64>();
    let pairs = profile.pairs as f64 / stats.tokens.max(1) as f64;
    // Firings with a token 1, 8, 32 and 128 behind them, and those after which that fires too.
    let counted = profile.banks.iter().enumerate().map(|(bank, b)| {
        let fired = sum(stats.counts(bank as u32, 0).unwrap_or_default());
        let later = b.later.map(|l| [l.fired as f64, l.again as f64]);
        [
            [fired * pairs, sum(&b.stayed)],
            later[0],
            later[1],
            later[2],
        ]
    });
    let counted: Vec<[[f64; 2]; 4]> = counted.collect();
    let all = |i: usize, j: usize| counted.iter().map(|c| c[i][j]).sum::<f64>();
    if all(0, 0) <= 0.0 {
        return Vec::new();
    }
    let share = |counts: &[[f64; 2]; 4], i: usize| {
        let [fired, again] = match counts[i][0] >= ENOUGH {
            true => counts[i],
            false => [all(i, 0), all(i, 1)],
        };
        (fired > 0.0).then(|| (again / fired).clamp(0.0, 1.0))
    };
    let of = |counts: &[[f64; 2]; 4]| Again {
        next: share(counts, 0).unwrap_or_default(),
        later: (share(counts, 1).zip(share(counts, 2)).zip(share(counts, 3)))
            .map(|((a, b), c)| [a, b, c]),
    };
    counted.iter().map(of).collect()
}

impl Temperature {
    /// Reads the statistics section, for up to `batch` sequences at once. Without one no
    /// cluster is known to be hot.
    pub fn read(layout: &Layout, batch: usize) -> Result<Self, Error> {
        let banks = layout.banks();
        let bytes = layout.container.read_stats()?;
        if bytes.is_empty() {
            return Ok(Self {
                hot_clusters: vec![vec![0; banks]; batch],
                frequencies: Vec::new(),
                again: Vec::new(),
            });
        }
        let stats =
            ActivationStats::parse(&bytes, banks, 1, layout.most_neurons()).map_err(|e| {
                Error::Bundles {
                    path: layout.container.path().to_path_buf(),
                    reason: e.to_string(),
                }
            })?;
        let hot = |bank: usize, batch: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            let (counts, passes, tokens) = measured(&stats, counts, bank, batch);
            hot_prefix(counts, passes, batch as f64 / tokens as f64)
        };
        let often = |count: &u64| (*count as f64 / stats.tokens.max(1) as f64) as f32;
        let frequencies = |bank: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            counts.iter().map(often).collect()
        };
        let of_batch = |batch| (0..banks).map(|bank| hot(bank, batch)).collect();
        Ok(Self {
            hot_clusters: (1..=batch).map(of_batch).collect(),
            frequencies: (0..banks).map(frequencies).collect(),
            again: again(&stats),
        })
    }
}
