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
    /// Clusters at the start of each bank that are hot.
    pub hot_clusters: Vec<u32>,
    /// Mean share of neurons that fire.
    pub fire_share: f64,
}

/// Share that is assumed without statistics: that of ReLU-fied models (ProSparse,
/// TurboSparse) to the safe side.
const UNKNOWN_SHARE: f64 = 0.2;

impl Temperature {
    /// Reads the statistics section. Without one no cluster is known to be hot.
    pub fn read(banks: &Banks) -> Result<Self, Error> {
        let bytes = banks.container.read_stats()?;
        if bytes.is_empty() {
            return Ok(Self {
                hot_clusters: vec![0; banks.count],
                fire_share: UNKNOWN_SHARE,
            });
        }
        let stats = ActivationStats::parse(&bytes, banks.count, 1, banks.neurons).map_err(|e| {
            Error::Bundles {
                path: banks.container.path().to_path_buf(),
                reason: e.to_string(),
            }
        })?;
        let hot = |bank: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            hot_prefix(counts, stats.tokens)
        };
        let shares = stats.active_share();
        Ok(Self {
            hot_clusters: (0..banks.count).map(hot).collect(),
            fire_share: shares.iter().sum::<f64>() / shares.len().max(1) as f64,
        })
    }
}

/// Leading clusters whose mean count is at least [`HOT`] of `tokens`.
fn hot_prefix(counts: &[u64], tokens: u64) -> u32 {
    let is_hot = |cluster: &&[u64]| {
        let fired: f64 = cluster.iter().map(|&c| c as f64).sum();
        tokens > 0 && fired >= HOT * tokens as f64 * cluster.len() as f64
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
        assert_eq!(hot_prefix(&counts, 100), 2);
        assert_eq!(hot_prefix(&counts[..100], 100), 1);
        assert_eq!(hot_prefix(&counts, 1000), 0);
        assert_eq!(hot_prefix(&[], 10), 0);
        assert_eq!(hot_prefix(&[0; 10], 0), 0);
    }
}
