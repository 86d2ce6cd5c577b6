//! Activation statistics: how often each neuron fires over a text.
//!
//! The file format (`emberflow-stats-v1`) is JSON with one count per neuron, in
//! the checkpoint's original neuron order. The packer sorts by it, stores it in
//! the container in packed order, and `inspect` draws the temperature curve.

use serde::{Deserialize, Serialize};

/// The only accepted value of [`ActivationStats::format`].
pub const FORMAT: &str = "emberflow-stats-v1";

/// Counts for a whole model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivationStats {
    /// Format name and version.
    pub format: String,
    /// Tokens that were run to collect the counts.
    pub tokens: u64,
    /// One entry per layer, ascending.
    pub layers: Vec<LayerStats>,
}

/// Counts of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerStats {
    /// Layer number.
    pub layer: u32,
    /// One entry per expert, ascending; a dense FFN is expert 0.
    pub experts: Vec<ExpertStats>,
}

/// Counts of one FFN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertStats {
    /// Expert number.
    pub expert: u32,
    /// Tokens for which each neuron fired.
    pub counts: Vec<u64>,
    /// Original id of each neuron, where they are not in the original order
    /// (inside a container); else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub original: Vec<u32>,
}

/// Why a statistics file does not fit.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// Not JSON, or not of this shape.
    #[error("statistics are not valid {FORMAT} JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Another format or version.
    #[error("statistics have format {found:?}, expected {FORMAT:?}; profile the model again")]
    Format {
        /// What the file says.
        found: String,
    },
    /// Layers, experts or neurons differ from the model's.
    #[error("statistics are of another model: {what} is {found}, the model has {expected}")]
    Shape {
        /// Which size differs.
        what: String,
        /// Size in the file.
        found: usize,
        /// Size in the model.
        expected: usize,
    },
    /// Original ids that are not each neuron once.
    #[error("statistics of layer {layer} expert {expert}: the original ids are not a permutation")]
    Order {
        /// Layer number.
        layer: u32,
        /// Expert number.
        expert: u32,
    },
    /// A count larger than the number of tokens.
    #[error(
        "statistics are inconsistent: layer {layer} expert {expert} neuron {neuron} fired {count} times in {tokens} tokens"
    )]
    Count {
        /// Layer number.
        layer: u32,
        /// Expert number.
        expert: u32,
        /// Original neuron id.
        neuron: usize,
        /// The count.
        count: u64,
        /// Tokens profiled.
        tokens: u64,
    },
}

impl ActivationStats {
    /// Parses a statistics file and checks it against the model's sizes.
    pub fn parse(
        bytes: &[u8],
        layers: usize,
        experts: usize,
        neurons: usize,
    ) -> Result<Self, StatsError> {
        let stats: Self = serde_json::from_slice(bytes)?;
        stats.check(layers, experts, neurons)?;
        Ok(stats)
    }

    fn check(&self, layers: usize, experts: usize, neurons: usize) -> Result<(), StatsError> {
        if self.format != FORMAT {
            return Err(StatsError::Format {
                found: self.format.clone(),
            });
        }
        let same = |what: String, found: usize, expected: usize| {
            if found == expected {
                Ok(())
            } else {
                Err(StatsError::Shape {
                    what,
                    found,
                    expected,
                })
            }
        };
        same("number of layers".into(), self.layers.len(), layers)?;
        for (l, layer) in self.layers.iter().enumerate() {
            same(format!("layer at place {l}"), layer.layer as usize, l)?;
            same(
                format!("number of experts of layer {l}"),
                layer.experts.len(),
                experts,
            )?;
            for (e, expert) in layer.experts.iter().enumerate() {
                same(format!("expert at place {e}"), expert.expert as usize, e)?;
                same(
                    format!("number of neurons of layer {l} expert {e}"),
                    expert.counts.len(),
                    neurons,
                )?;
                if !expert.original.is_empty() && !is_permutation(&expert.original, neurons) {
                    return Err(StatsError::Order {
                        layer: layer.layer,
                        expert: expert.expert,
                    });
                }
                if let Some((neuron, &count)) = expert
                    .counts
                    .iter()
                    .enumerate()
                    .find(|&(_, &c)| c > self.tokens)
                {
                    return Err(StatsError::Count {
                        layer: layer.layer,
                        expert: expert.expert,
                        neuron,
                        count,
                        tokens: self.tokens,
                    });
                }
            }
        }
        Ok(())
    }

    /// The statistics with neurons in another order: `order` gives, for each FFN
    /// in file order, the original id of every packed neuron.
    pub fn permuted(mut self, order: &[Vec<u32>]) -> Self {
        let experts = self.layers.iter_mut().flat_map(|l| &mut l.experts);
        for (expert, order) in experts.zip(order) {
            expert.counts = order.iter().map(|&i| expert.counts[i as usize]).collect();
            expert.original = order.clone();
        }
        self
    }

    /// Mean share of neurons that fire per token, for each layer (over all its
    /// experts).
    pub fn active_share(&self) -> Vec<f64> {
        let share = |layer: &LayerStats| {
            let counts = || layer.experts.iter().flat_map(|e| &e.counts);
            let possible = counts().count() as f64 * self.tokens as f64;
            total(counts()) as f64 / possible.max(1.0)
        };
        self.layers.iter().map(share).collect()
    }

    /// The counts of one FFN, if it is covered.
    pub fn counts(&self, layer: u32, expert: u32) -> Option<&[u64]> {
        let e = self
            .layers
            .get(layer as usize)?
            .experts
            .get(expert as usize)?;
        Some(&e.counts)
    }
}

fn is_permutation(ids: &[u32], n: usize) -> bool {
    let mut seen = vec![false; n];
    ids.len() == n
        && ids.iter().all(|&i| {
            seen.get_mut(i as usize)
                .is_some_and(|s| !std::mem::replace(s, true))
        })
}

/// Sum of counts. A file may hold any counts, and 2^64 of the largest fit.
fn total<'a>(counts: impl IntoIterator<Item = &'a u64>) -> u128 {
    counts.into_iter().map(|&c| u128::from(c)).sum()
}

/// Share of the neurons that gives `share` of all activations; `counts` in any
/// order. 0 when nothing ever fired. (PowerInfer's measure of skew: for
/// `share` = 0.8 a small value means few hot neurons do most of the work.)
pub fn hot_share(counts: &[u64], share: f64) -> f64 {
    let total = total(counts);
    if total == 0 {
        return 0.0;
    }
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0u128;
    for (i, &c) in sorted.iter().enumerate() {
        sum += u128::from(c);
        if sum as f64 >= share * total as f64 {
            return (i + 1) as f64 / counts.len() as f64;
        }
    }
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(counts: Vec<u64>) -> ActivationStats {
        ActivationStats {
            format: FORMAT.into(),
            tokens: 10,
            layers: vec![LayerStats {
                layer: 0,
                experts: vec![ExpertStats {
                    expert: 0,
                    counts,
                    original: Vec::new(),
                }],
            }],
        }
    }

    #[test]
    fn round_trips_and_checks_shape() {
        let s = stats(vec![1, 2, 3]);
        let json = serde_json::to_vec(&s).unwrap();
        assert_eq!(ActivationStats::parse(&json, 1, 1, 3).unwrap(), s);
        assert!(matches!(
            ActivationStats::parse(&json, 1, 1, 4),
            Err(StatsError::Shape { .. })
        ));
        assert!(matches!(
            ActivationStats::parse(&json, 2, 1, 3),
            Err(StatsError::Shape { .. })
        ));
        assert!(matches!(
            ActivationStats::parse(b"{}", 1, 1, 3),
            Err(StatsError::Json(_))
        ));
    }

    #[test]
    fn refuses_impossible_counts_and_other_formats() {
        let json = serde_json::to_vec(&stats(vec![1, 11, 0])).unwrap();
        assert!(matches!(
            ActivationStats::parse(&json, 1, 1, 3),
            Err(StatsError::Count { neuron: 1, .. })
        ));
        let mut s = stats(vec![0]);
        s.format = "v0".into();
        let json = serde_json::to_vec(&s).unwrap();
        assert!(matches!(
            ActivationStats::parse(&json, 1, 1, 1),
            Err(StatsError::Format { .. })
        ));
    }

    #[test]
    fn permuted_statistics_remember_the_original_ids() {
        let s = stats(vec![1, 5, 3]).permuted(&[vec![1, 2, 0]]);
        let e = &s.layers[0].experts[0];
        assert_eq!(
            (&e.counts[..], &e.original[..]),
            (&[5, 3, 1][..], &[1, 2, 0][..])
        );
        let mut json = serde_json::to_value(&s).unwrap();
        json["layers"][0]["experts"][0]["original"] = serde_json::json!([1, 1, 0]);
        let bytes = serde_json::to_vec(&json).unwrap();
        assert!(matches!(
            ActivationStats::parse(&bytes, 1, 1, 3),
            Err(StatsError::Order { .. })
        ));
    }

    #[test]
    fn the_largest_counts_do_not_overflow() {
        let mut s = stats(vec![u64::MAX, u64::MAX, 0, 0]);
        s.tokens = u64::MAX;
        let json = serde_json::to_vec(&s).unwrap();
        let s = ActivationStats::parse(&json, 1, 1, 4).unwrap();
        assert_eq!(s.active_share(), [0.5]);
        assert_eq!(hot_share(s.counts(0, 0).unwrap(), 0.8), 0.5);
    }

    #[test]
    fn hot_share_of_known_curves() {
        assert_eq!(hot_share(&[8, 1, 1, 0, 0], 0.8), 0.2);
        assert_eq!(hot_share(&[1, 1, 1, 1], 0.5), 0.5);
        assert_eq!(hot_share(&[0, 0], 0.8), 0.0);
    }
}
