//! Which clusters are hot, from the container's activation statistics.

use emberflow_predictor::stats::ActivationStats;

use super::CLUSTER;
use super::banks::Banks;
use crate::Error;

/// A cluster is hot when its neurons fire for at least this share of tokens. An LRU
/// cache would keep such neurons anyway; here they cost no look-up each, and a
/// miss costs one sequential read instead of many.
const HOT: f64 = 0.5;

/// What the statistics say about a model.
pub(crate) struct Temperature {
    /// For batches of 1, 2, … sequences: the clusters at the start of each bank that are hot.
    pub hot_clusters: Vec<Vec<u32>>,
    /// Mean share of neurons that fire.
    pub fire_share: f64,
}

/// Share that is assumed without statistics: that of ReLU-fied models (ProSparse,
/// TurboSparse) to the safe side.
const UNKNOWN_SHARE: f64 = 0.2;

impl Temperature {
    /// Reads the statistics section, for up to `batch` sequences at once. Without one no
    /// cluster is known to be hot.
    pub fn read(banks: &Banks, batch: usize) -> Result<Self, Error> {
        let bytes = banks.container.read_stats()?;
        if bytes.is_empty() {
            return Ok(Self {
                hot_clusters: vec![vec![0; banks.count]; batch],
                fire_share: UNKNOWN_SHARE,
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
            hot_prefix(counts, stats.tokens, batch)
        };
        let of_batch = |batch| (0..banks.count).map(|bank| hot(bank, batch)).collect();
        let shares = stats.active_share();
        Ok(Self {
            hot_clusters: (1..=batch).map(of_batch).collect(),
            fire_share: shares.iter().sum::<f64>() / shares.len().max(1) as f64,
        })
    }
}

/// Leading clusters whose neurons fire on average for at least [`HOT`] of the passes over
/// `batch` tokens of different sequences, which know nothing of each other.
fn hot_prefix(counts: &[u64], tokens: u64, batch: usize) -> u32 {
    let rests = |count: u64| (1.0 - count as f64 / tokens as f64).powi(batch as i32);
    let is_hot = |cluster: &&[u64]| {
        let rest: f64 = cluster.iter().map(|&c| rests(c)).sum();
        tokens > 0 && rest <= (1.0 - HOT) * cluster.len() as f64
    };
    counts.chunks(CLUSTER).take_while(is_hot).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_is_the_leading_run_of_clusters_that_fire_half_the_time() {
        let mut counts = vec![90; CLUSTER];
        counts.extend(vec![50; CLUSTER]);
        counts.extend(vec![49; CLUSTER]);
        counts.extend(vec![80; 10]);
        assert_eq!(hot_prefix(&counts, 100, 1), 2);
        assert_eq!(hot_prefix(&counts[..100], 100, 1), 1);
        assert_eq!(hot_prefix(&counts, 1000, 1), 0);
        assert_eq!(hot_prefix(&[], 10, 1), 0);
        assert_eq!(hot_prefix(&[0; 10], 0, 1), 0);
        // 49 % of one is 74 % of two; 9 % of one is 47 % of seven and 53 % of eight.
        assert_eq!(hot_prefix(&counts, 100, 2), 4);
        assert_eq!(hot_prefix(&counts, 1000, 7), 0);
        assert_eq!(hot_prefix(&counts, 1000, 8), 1);
        assert_eq!(hot_prefix(&[90; 10], 1000, 7), 0);
        assert_eq!(hot_prefix(&[90; 10], 1000, 8), 1);
    }
}
