//! Which clusters are hot, from the container's activation statistics.

use emberflow_predictor::stats::ActivationStats;

use super::banks::Banks;
use super::regions::hot_prefix;
use crate::Error;

/// What the statistics say about a model.
pub(crate) struct Temperature {
    /// Clusters at the start of each bank that are hot.
    pub hot_clusters: Vec<u32>,
    /// By bank, share of tokens for which each neuron fires; empty without statistics.
    pub rates: Vec<Vec<f32>>,
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
                rates: Vec::new(),
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
        let rate = |count: &u64| (*count as f64 / stats.tokens.max(1) as f64) as f32;
        let rates = |bank: usize| {
            let counts = stats.counts(bank as u32, 0).unwrap_or_default();
            counts.iter().map(rate).collect()
        };
        let shares = stats.active_share();
        Ok(Self {
            hot_clusters: (0..banks.count).map(hot).collect(),
            rates: (0..banks.count).map(rates).collect(),
            fire_share: shares.iter().sum::<f64>() / shares.len().max(1) as f64,
        })
    }
}
