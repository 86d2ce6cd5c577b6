//! Activation statistics: how often each neuron fires over a text.
//!
//! There are two file formats. `emberflow-stats-v1` is JSON with one count per neuron.
//! `emberflow-stats-v2` (`codec.rs`) is binary and adds a [`Profile`]: activity by batch size,
//! persistence, magnitudes, and a sample of whole tokens that shows which neurons fire together;
//! for a model with experts, how its router chooses and how neurons inside experts fire
//! (`routing.rs`). Both use the checkpoint's original neuron order. The packer derives the neuron
//! order from them and stores them in the container in packed order.

mod codec;
mod magnitudes;
pub mod misses;
mod profile;
pub mod routing;
mod sample;

use serde::{Deserialize, Serialize};

pub use magnitudes::Magnitudes;
pub use misses::Misses;
pub use profile::{BATCHES, BankProfile, LAGS, Later, Profile};
pub(crate) use sample::words;
pub use sample::{Sample, Sampled};

/// The value of [`ActivationStats::format`] of JSON statistics.
pub const FORMAT: &str = "emberflow-stats-v1";

/// The value of [`ActivationStats::format`] of binary statistics.
pub const FORMAT_V2: &str = "emberflow-stats-v2";

/// Counts of a whole model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivationStats {
    /// Format name and version.
    pub format: String,
    /// Tokens profiled.
    pub tokens: u64,
    /// One entry per layer, ascending; none for a model with experts.
    pub layers: Vec<LayerStats>,
    /// Added by the second version.
    #[serde(skip)]
    pub profile: Option<Box<Profile>>,
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertStats {
    /// Expert number.
    pub expert: u32,
    /// Tokens for which each neuron fired.
    pub counts: Vec<u64>,
    /// Original id of each neuron, if not in the original order (inside a container); otherwise
    /// empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub original: Vec<u32>,
}

/// Errors of statistics.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// Not JSON, or not of this structure.
    #[error("statistics are not valid {FORMAT} JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Binary statistics that are damaged or inconsistent.
    #[error("statistics are not valid {FORMAT_V2}: {0}; profile the model again")]
    Binary(String),
    /// Statistics that cannot be added up.
    #[error("statistics cannot be merged: {0}")]
    Merge(String),
    /// Another format or version.
    #[error("statistics have format {found:?}, expected {FORMAT:?}; profile the model again")]
    Format {
        /// Format in the file.
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
    /// Statistics of a dense model for a model with experts.
    #[error("statistics say nothing of experts, which this model has; profile it")]
    NoRouting,
    /// Original ids that are not a permutation.
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
    /// Parses a statistics file of either version and checks it against the model's sizes: `experts`
    /// FFNs in each layer, of as many neurons as `neurons` has for the layer.
    ///
    /// # Errors
    /// If the file is damaged, inconsistent, or of another model.
    pub fn parse(bytes: &[u8], neurons: &[usize], experts: usize) -> Result<Self, StatsError> {
        let stats = Self::read(bytes)?;
        stats.check(neurons, experts)?;
        Ok(stats)
    }

    /// Routing statistics; `None` for a dense model.
    pub fn routing(&self) -> Option<&routing::Routing> {
        self.profile.as_ref()?.routing.as_ref()
    }

    /// As [`ActivationStats::parse`] for a model with experts, whose statistics are those of its
    /// router.
    ///
    /// # Errors
    /// As [`ActivationStats::parse`].
    pub fn parse_routing(bytes: &[u8], layers: usize, experts: usize) -> Result<Self, StatsError> {
        let stats = Self::read(bytes)?;
        let profile = stats.profile.as_deref();
        let Some(routing) = profile.and_then(|p| p.routing.as_ref()) else {
            return Err(StatsError::NoRouting);
        };
        for (what, found, expected) in [
            ("number of layers", routing.layers.len(), layers),
            ("number of experts", routing.experts as usize, experts),
        ] {
            if found != expected {
                let what = what.into();
                return Err(StatsError::Shape {
                    what,
                    found,
                    expected,
                });
            }
        }
        Ok(stats)
    }

    /// Parses a statistics file of either version, of any model.
    ///
    /// # Errors
    /// If the file is damaged or inconsistent.
    pub fn read(bytes: &[u8]) -> Result<Self, StatsError> {
        if codec::is_binary(bytes) {
            return codec::decode(bytes);
        }
        let stats: Self = serde_json::from_slice(bytes)?;
        stats.check_itself()?;
        Ok(stats)
    }

    /// Encodes the statistics: binary with a profile, otherwise JSON.
    ///
    /// # Errors
    /// If a size exceeds the format.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StatsError> {
        match &self.profile {
            Some(profile) => codec::encode(self, profile),
            None => Ok(serde_json::to_vec(self)?),
        }
    }

    /// Layers, experts of the first layer, and neurons of the largest FFN.
    pub fn sizes(&self) -> [usize; 3] {
        let experts = self.layers.first().map_or(0, |l| l.experts.len());
        let most = self.neurons().into_iter().max().unwrap_or(0);
        [self.layers.len(), experts, most]
    }

    /// Neurons of each layer's FFNs, taken from its first.
    pub fn neurons(&self) -> Vec<usize> {
        let first = |layer: &LayerStats| layer.experts.first().map_or(0, |e| e.counts.len());
        self.layers.iter().map(first).collect()
    }

    fn check_itself(&self) -> Result<(), StatsError> {
        self.check(&self.neurons(), self.sizes()[1])
    }

    /// Adds the counts of another part of the text. The result, including the sample, does not
    /// depend on the order of merging.
    ///
    /// # Errors
    /// If the statistics are of another model, window length or neuron order, have no profile, or
    /// cover the same text.
    pub fn merge(&mut self, other: &Self) -> Result<(), StatsError> {
        let refuse = |reason: String| Err(StatsError::Merge(reason));
        if (self.sizes(), self.neurons()) != (other.sizes(), other.neurons()) {
            let [a, b] = [self.sizes(), other.sizes()];
            return refuse(format!(
                "one has {} layers of {} × {} neurons, the other {} of {} × {}",
                a[0], a[1], a[2], b[0], b[1], b[2]
            ));
        }
        let (Some(mine), Some(theirs)) = (&mut self.profile, &other.profile) else {
            return refuse(format!("both must be {FORMAT_V2}; profile the model again"));
        };
        mine.merge(theirs).map_err(StatsError::Merge)?;
        self.tokens = add(self.tokens, other.tokens)?;
        let experts = |s: &'_ Self| -> Vec<ExpertStats> {
            s.layers.iter().flat_map(|l| l.experts.clone()).collect()
        };
        let theirs = experts(other);
        let mine = self.layers.iter_mut().flat_map(|l| &mut l.experts);
        for (mine, theirs) in mine.zip(&theirs) {
            if mine.original != theirs.original {
                return refuse("the neurons are in different orders".into());
            }
            for (a, b) in mine.counts.iter_mut().zip(&theirs.counts) {
                *a = add(*a, *b)?;
            }
        }
        Ok(())
    }

    fn check(&self, neurons: &[usize], experts: usize) -> Result<(), StatsError> {
        let format = if self.profile.is_some() {
            FORMAT_V2
        } else {
            FORMAT
        };
        if self.format != format {
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
        same("number of layers".into(), self.layers.len(), neurons.len())?;
        for (l, (layer, &neurons)) in self.layers.iter().zip(neurons).enumerate() {
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
        match &self.profile {
            Some(profile) => profile.check(self).map_err(StatsError::Binary),
            None => Ok(()),
        }
    }

    /// Reorders neurons: `order` gives, for each FFN in file order, the original id of every packed
    /// neuron.
    pub fn permuted(mut self, order: &[Vec<u32>]) -> Self {
        let experts = self.layers.iter_mut().flat_map(|l| &mut l.experts);
        for (expert, order) in experts.zip(order) {
            expert.counts = order.iter().map(|&i| expert.counts[i as usize]).collect();
            expert.original = order.clone();
        }
        if let Some(profile) = &mut self.profile {
            profile.permute(order);
        }
        self
    }

    /// Restores the checkpoint's neuron order: `original` gives, for each FFN in file order, the
    /// original id of every neuron as counted here; an empty list means original order.
    ///
    /// # Errors
    /// If the ids are not a permutation.
    pub fn restored(mut self, original: &[Vec<u32>]) -> Result<Self, StatsError> {
        let experts = self.sizes()[1];
        let mut inverse = Vec::with_capacity(original.len());
        let counts = self.layers.iter().flat_map(|l| &l.experts);
        let sizes: Vec<usize> = counts.map(|e| e.counts.len()).collect();
        for (bank, (ids, neurons)) in original.iter().zip(sizes).enumerate() {
            if !ids.is_empty() && !is_permutation(ids, neurons) {
                return Err(StatsError::Order {
                    layer: (bank / experts.max(1)) as u32,
                    expert: (bank % experts.max(1)) as u32,
                });
            }
            let mut place: Vec<u32> = (0..neurons as u32).collect();
            for (packed, &id) in (0..).zip(ids) {
                place[id as usize] = packed;
            }
            inverse.push(place);
        }
        if !inverse.is_empty() {
            self = self.permuted(&inverse);
        }
        for expert in self.layers.iter_mut().flat_map(|l| &mut l.experts) {
            expert.original.clear();
        }
        Ok(self)
    }

    /// Drops the sample of tokens, which is needed only to choose an order.
    pub fn without_sample(mut self) -> Self {
        if let Some(profile) = &mut self.profile {
            profile.sample = Sample::default();
        }
        self
    }

    /// Mean share of neurons that fire per token, by layer (over all its experts).
    pub fn active_share(&self) -> Vec<f64> {
        let share = |layer: &LayerStats| {
            let counts = || layer.experts.iter().flat_map(|e| &e.counts);
            let possible = counts().count() as f64 * self.tokens as f64;
            total(counts()) as f64 / possible.max(1.0)
        };
        self.layers.iter().map(share).collect()
    }

    /// The counts of one FFN, if present.
    pub fn counts(&self, layer: u32, expert: u32) -> Option<&[u64]> {
        let e = self
            .layers
            .get(layer as usize)?
            .experts
            .get(expert as usize)?;
        Some(&e.counts)
    }
}

fn add(a: u64, b: u64) -> Result<u64, StatsError> {
    a.checked_add(b)
        .ok_or_else(|| StatsError::Merge(format!("{a} and {b} are too many to add")))
}

fn is_permutation(ids: &[u32], n: usize) -> bool {
    let mut seen = vec![false; n];
    ids.len() == n
        && ids.iter().all(|&i| {
            seen.get_mut(i as usize)
                .is_some_and(|s| !std::mem::replace(s, true))
        })
}

/// Sum of counts. A file may contain any counts; 2^64 of the largest fit.
fn total<'a>(counts: impl IntoIterator<Item = &'a u64>) -> u128 {
    counts.into_iter().map(|&c| u128::from(c)).sum()
}

/// Share of the neurons that produces `share` of all activations, for `counts` in any order; 0 if
/// nothing ever fired. PowerInfer's measure of skew: for `share` = 0.8, a small value means that
/// few neurons do most of the work.
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
            profile: None,
        }
    }

    #[test]
    fn round_trips_and_checks_shape() {
        let s = stats(vec![1, 2, 3]);
        let json = serde_json::to_vec(&s).unwrap();
        assert_eq!(ActivationStats::parse(&json, &[3], 1).unwrap(), s);
        assert!(matches!(
            ActivationStats::parse(&json, &[4], 1),
            Err(StatsError::Shape { .. })
        ));
        assert!(matches!(
            ActivationStats::parse(&json, &[3, 3], 1),
            Err(StatsError::Shape { .. })
        ));
        assert!(matches!(
            ActivationStats::parse(b"{}", &[3], 1),
            Err(StatsError::Json(_))
        ));
    }

    #[test]
    fn refuses_impossible_counts_and_other_formats() {
        let json = serde_json::to_vec(&stats(vec![1, 11, 0])).unwrap();
        assert!(matches!(
            ActivationStats::parse(&json, &[3], 1),
            Err(StatsError::Count { neuron: 1, .. })
        ));
        let mut s = stats(vec![0]);
        s.format = "v0".into();
        let json = serde_json::to_vec(&s).unwrap();
        assert!(matches!(
            ActivationStats::parse(&json, &[1], 1),
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
            ActivationStats::parse(&bytes, &[3], 1),
            Err(StatsError::Order { .. })
        ));
    }

    #[test]
    fn the_largest_counts_do_not_overflow() {
        let mut s = stats(vec![u64::MAX, u64::MAX, 0, 0]);
        s.tokens = u64::MAX;
        let json = serde_json::to_vec(&s).unwrap();
        let s = ActivationStats::parse(&json, &[4], 1).unwrap();
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
