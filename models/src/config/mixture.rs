//! Mixtures of experts.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_BANKS, MAX_WIDTH, ModelConfig};

/// Structure of a mixture of experts. In every layer but those of `dense_layers`, a router chooses
/// some of [`ModelConfig::experts`] experts for each token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mixture {
    /// Experts that a token visits in a layer: those with the highest scores.
    pub chosen: u32,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub renormalise: bool,
    /// Neurons of the shared expert, which every token visits, weighted by the sigmoid of its own
    /// gate; 0 without one. It follows the others and has number [`ModelConfig::experts`].
    pub shared: u32,
    /// The shared expert has no gate: its weight is 1.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared_is_plain: bool,
    /// The shared expert is a dense FFN in parallel with the others (Gemma 4): each has its own input norm and
    /// output norm, the router reads the residual stream through its own norm, and each expert's weight has a
    /// factor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub parallel_dense: bool,
    /// Width of the chosen experts' input and output, if matrices project the layer's input to it and
    /// their sum back (LatentMoE, Nemotron 3 Super); 0 without. A shared expert is then not a bank: its
    /// matrices are resident.
    #[serde(default, skip_serializing_if = "is_zero_width")]
    pub width: u32,
    /// Layers that have a dense FFN instead, ascending.
    pub dense_layers: Vec<u32>,
    /// Neurons of these dense FFNs; 0 without any.
    pub dense_ffn: u32,
    /// Source of an expert's weight.
    #[serde(default, skip_serializing_if = "Scoring::is_softmax")]
    pub scoring: Scoring,
    /// The router reads the residual stream before the attention norm (SmallThinker), instead of the
    /// input of the experts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early_router: bool,
    /// The router's scores carry a bias.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub router_bias: bool,
    /// Biases are added to the scores for choosing experts, but not to the weights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub choice_bias: bool,
    /// Experts are chosen only from the best groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<ExpertGroups>,
    /// Added to the sum by which weights are divided.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epsilon: f32,
    /// Factor of the weights.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub scale: f32,
    /// With [`Scoring::SparseMixer`], half of the relative distance from the highest score within
    /// which other experts have a share; 0 otherwise.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub jitter: f32,
    /// Weights scale an expert's input, not its output (Llama 4).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scales_input: bool,
    /// Layers that look up the token's experts in a table, ascending; the router weights them
    /// (DeepSeek-V4).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_token: Vec<u32>,
}

/// Groups of consecutive experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertGroups {
    /// Total number of groups.
    pub count: u32,
    /// Number of groups from which experts are chosen.
    pub chosen: u32,
    /// A group is ranked by its best expert, not by the sum of the two best.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_best: bool,
}

impl Default for Mixture {
    /// One expert, whose weight is its share.
    fn default() -> Self {
        Self {
            chosen: 1,
            renormalise: false,
            shared: 0,
            shared_is_plain: false,
            parallel_dense: false,
            width: 0,
            dense_layers: Vec::new(),
            dense_ffn: 0,
            scoring: Scoring::Softmax,
            early_router: false,
            router_bias: false,
            choice_bias: false,
            groups: None,
            epsilon: 0.0,
            scale: 1.0,
            jitter: 0.0,
            scales_input: false,
            by_token: Vec::new(),
        }
    }
}

impl Mixture {
    /// Whether experts are chosen by something other than their scores.
    pub fn chooses_apart(&self) -> bool {
        self.choice_bias || self.groups.is_some()
    }

    /// Neurons of the shared expert, if it is a bank; 0 otherwise.
    pub fn shared_bank(&self) -> u32 {
        match self.width {
            0 => self.shared,
            _ => 0,
        }
    }

    /// Whether the experts of layer `layer` follow from the token.
    pub fn is_by_token(&self, layer: u32) -> bool {
        self.by_token.binary_search(&layer).is_ok()
    }
}

fn is_zero_width(width: &u32) -> bool {
    *width == 0
}

fn one() -> f32 {
    1.0
}

fn is_one(value: &f32) -> bool {
    *value == 1.0
}

fn is_zero(value: &f32) -> bool {
    *value == 0.0
}

/// Conversion of a router's scores to weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// An expert's share among all (softmax).
    #[default]
    Softmax,
    /// The sigmoid of each score.
    Sigmoid,
    /// `sqrt(ln(1 + exp(score)))` of each (DeepSeek-V4).
    SqrtSoftplus,
    /// sparsemixer (PhiMoE): two experts, chosen one after the other; the weight of each is its
    /// share among experts with hardly lower scores ([`Mixture::jitter`]).
    SparseMixer,
}

impl Scoring {
    fn is_softmax(&self) -> bool {
        *self == Self::Softmax
    }
}

/// Invalid numbers of the choice.
fn bad_choice(mixture: &Mixture, experts: u32) -> Option<BadField> {
    if !(mixture.scale.is_finite() && mixture.scale > 0.0) {
        let expected = "a finite number above 0";
        return BadField::some("scale of experts", &mixture.scale, expected);
    }
    if !(mixture.epsilon.is_finite() && mixture.epsilon >= 0.0) {
        let expected = "a finite number, 0 or more";
        return BadField::some("router epsilon", &mixture.epsilon, expected);
    }
    if mixture.chooses_apart() && mixture.scoring == Scoring::SparseMixer {
        return BadField::some("choice_bias", &true, "false, with sparsemixer");
    }
    let ExpertGroups {
        count,
        chosen,
        by_best,
    } = mixture.groups?;
    let size = experts.checked_div(count).unwrap_or(0);
    let least = 2 - u32::from(by_best);
    let fits = size >= least && experts.is_multiple_of(count) && (1..=count).contains(&chosen);
    if !fits || chosen.saturating_mul(size) < mixture.chosen {
        let expected = "a divisor of the experts, and enough groups for those that are chosen";
        return BadField::some("groups of experts", &mixture.groups, expected);
    }
    None
}

impl ModelConfig {
    /// A mixture that does not fit its layers.
    pub(super) fn bad_mixture(&self) -> Option<BadField> {
        let Some(mixture) = &self.mixture else {
            return match self.experts {
                1 => None,
                _ => BadField::some("experts", &self.experts, "1, as there is no mixture"),
            };
        };
        let banks = u64::from(self.layers) * (u64::from(self.experts) + 1);
        if self.experts < 2 || banks > MAX_BANKS {
            let most = MAX_BANKS / u64::from(self.layers);
            return BadField::some("experts", &self.experts, format!("2 to {}", most - 1));
        }
        if mixture.chosen == 0 || mixture.chosen > self.experts {
            let expected = format!("1 to {} experts", self.experts);
            return BadField::some("chosen experts", &mixture.chosen, expected);
        }
        let mixed = mixture.scoring == Scoring::SparseMixer;
        if mixed && mixture.chosen != 2 {
            return BadField::some("chosen experts", &mixture.chosen, "2, with sparsemixer");
        }
        if let Some(bad) = bad_choice(mixture, self.experts) {
            return Some(bad);
        }
        let form = &self.form;
        let one_after_other = form.pre_norm && !form.parallel.is_parallel();
        let whole = form.without_ffn.is_empty() && form.without_mixer.is_empty();
        let apart = mixture.shared > 0 && mixture.shared_is_plain && !mixture.early_router;
        if mixture.parallel_dense && !(one_after_other && whole && apart) {
            let expected =
                "false, without a plain FFN of every token in layers one after the other";
            return BadField::some("parallel_dense", &true, expected);
        }
        let alone = mixture.shared == 0 || mixture.shared_is_plain;
        let plain = !(mixture.parallel_dense || mixture.early_router || mixture.scales_input);
        let even = mixture.dense_layers.is_empty() && !form.ffn_bias && form.streams.is_none();
        if mixture.width > MAX_WIDTH || mixture.width > 0 && !(alone && plain && even) {
            let expected = "0, with dense layers, biases or gates of a shared expert";
            return BadField::some("width of experts", &mixture.width, expected);
        }
        let jitter = mixture.jitter;
        if !(jitter.is_finite() && jitter >= 0.0 && (mixed || jitter == 0.0)) {
            let expected = "a finite number, 0 or more; 0 without sparsemixer";
            return BadField::some("router jitter", &jitter, expected);
        }
        for (key, value) in [
            ("shared expert's neurons", mixture.shared),
            ("dense layers' neurons", mixture.dense_ffn),
        ] {
            if value > MAX_WIDTH {
                return BadField::some(key, &value, format!("at most {MAX_WIDTH}"));
            }
        }
        if !tables_are_sound(self, mixture) {
            let expected = "layers with experts, ascending, whose router reads their input";
            let by_token = &mixture.by_token;
            return BadField::some("layers with experts by token", by_token, expected);
        }
        let dense = &mixture.dense_layers;
        if !self.are_layers(dense) {
            let expected = format!("layers below {}, ascending", self.layers);
            return BadField::some("dense layers", dense, expected);
        }
        if dense.is_empty() != (mixture.dense_ffn == 0) {
            let expected = "above 0 with dense layers, 0 without";
            return BadField::some("dense layers' neurons", &mixture.dense_ffn, expected);
        }
        None
    }
}

/// Whether the layers with a table of experts support it.
fn tables_are_sound(config: &ModelConfig, mixture: &Mixture) -> bool {
    let by_token = &mixture.by_token;
    let routed = |&layer: &u32| config.mixture_of(layer).is_some();
    let alone = !mixture.early_router && !mixture.parallel_dense && mixture.groups.is_none();
    let weighed = mixture.scoring == Scoring::SqrtSoftplus;
    let there = config.are_layers(by_token) && by_token.iter().all(routed);
    by_token.is_empty() || there && alone && weighed
}
