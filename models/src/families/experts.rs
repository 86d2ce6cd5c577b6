//! Descriptions of a family's experts.

use crate::config::Scoring;

/// A mixture of experts and its key names in `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    /// Number of experts.
    pub(crate) count: &'static str,
    /// Experts that a token visits.
    pub(crate) chosen: &'static str,
    /// Neurons of an expert.
    pub(crate) ffn: &'static str,
    pub(crate) renormalise: Renormalise,
    /// llama.cpp's behaviour if a file does not say whether it renormalises.
    pub(crate) gguf_renormalise: bool,
    pub(crate) scoring: ScoringBy,
    /// The shared expert.
    pub(crate) shared: Option<Shared>,
    /// Layers with a dense FFN.
    pub(crate) dense: Dense,
    /// Key of the dense FFNs' number of neurons.
    pub(crate) dense_ffn: &'static str,
    /// The router reads the layer's input unless this key is false.
    pub(crate) early_router: Option<&'static str>,
    pub(crate) router_bias: bool,
    /// A tensor of biases is added to the scores for choosing experts.
    pub(crate) choice_bias: bool,
    /// `n_group` and `topk_group` restrict the choice to the best groups.
    pub(crate) grouped: bool,
    /// Their values without these keys.
    pub(crate) groups: [u32; 2],
    /// A group is ranked by its best expert, and `topk_method` says whether there are groups.
    pub(crate) best_of_groups: bool,
    /// Key of the factor of the weights, and the factor without it.
    pub(crate) scale: Option<(&'static str, f32)>,
    /// Added to the sum by which weights are divided.
    pub(crate) epsilon: f32,
    /// Weights scale an expert's input.
    pub(crate) scales_input: bool,
    /// Key of the width of the experts' input and output, if it may differ from `d_model`.
    pub(crate) width: Option<&'static str>,
    /// A list marks the layers with a table of experts (`hash_moe`); without it, the first layers, as
    /// many as the key says (or this default).
    pub(crate) by_token: Option<(&'static str, &'static str, u32)>,
    /// Stored as MXFP4 blocks or as plain weights.
    pub(crate) blocks: bool,
    /// With 0 experts, the shared one becomes the dense FFN of every layer.
    pub(crate) optional: bool,
    /// There are experts only if this key is set, in parallel with a dense FFN (Gemma 4).
    pub(crate) parallel_dense: Option<&'static str>,
}

/// Whether the weights of the chosen experts are divided by their sum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renormalise {
    Always,
    /// As `norm_topk_prob` says; the default without it.
    Key(bool),
}

/// Source of the scoring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScoringBy {
    Always(Scoring),
    /// Softmax if this key is set, sigmoid otherwise.
    SoftmaxIf(&'static str),
}

/// The shared expert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shared {
    /// With this key's number of neurons and its own gate.
    Gated(&'static str),
    /// With this key's number of neurons, without a gate.
    Plain(&'static str),
    /// With the neurons of as many experts as this key (or default) says, without a gate.
    Experts(&'static str, u32),
    /// With the neurons of another expert, without a gate.
    AsOthers,
}

/// Layers with a dense FFN instead of experts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dense {
    Never,
    /// None; a list of switches must agree.
    NeverBy(&'static str),
    /// The first ones, as many as this key (or default) says.
    First(&'static str, u32),
    /// Those marked `dense` in a list; without the list, the first ones, as many as the key (or
    /// default) says.
    Kinds(&'static str, Option<&'static str>, u32),
    /// All before the first and after the last of these; -1 means the last layer.
    Outside(&'static str, &'static str),
    /// Those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
    Steps,
    /// All but those of a list; without it, all but every n-th, with n from the second key, or 1.
    But(&'static str, &'static str),
    /// All but those at a distance of each other, of which two keys (with defaults) give it and the first; 1 expert means
    /// that every layer has a dense FFN.
    Periodic([(&'static str, u32); 2]),
    /// Those that the list of sublayers marks.
    Sublayers,
}

impl Experts {
    /// Whether there is a shared expert without its own gate.
    pub(crate) fn has_plain_shared(&self) -> bool {
        matches!(
            self.shared,
            Some(Shared::Plain(_) | Shared::Experts(..) | Shared::AsOthers)
        )
    }

    /// Whether a key is read for them and refused for families without such experts.
    pub(super) fn reads(&self, key: &str) -> bool {
        let shared = match self.shared {
            Some(Shared::Gated(name) | Shared::Plain(name) | Shared::Experts(name, _)) => {
                Some(name)
            }
            Some(Shared::AsOthers) | None => None,
        };
        let dense = match self.dense {
            Dense::First(name, _) | Dense::Kinds(_, Some(name), _) | Dense::But(_, name) => {
                Some(name)
            }
            _ => None,
        };
        let scale = self.scale.map(|(name, _)| name);
        let named = [Some(self.count), shared, dense, scale, self.width];
        named.contains(&Some(key)) || self.grouped && matches!(key, "n_group" | "topk_group")
    }
}

/// Experts of `intermediate_size` in every layer, chosen by a softmax.
pub(super) const EXPERTS: Experts = Experts {
    count: "num_experts",
    chosen: "num_experts_per_tok",
    ffn: "intermediate_size",
    renormalise: Renormalise::Key(false),
    gguf_renormalise: false,
    scoring: ScoringBy::Always(Scoring::Softmax),
    shared: None,
    dense: Dense::Never,
    dense_ffn: "intermediate_size",
    early_router: None,
    router_bias: false,
    choice_bias: false,
    grouped: false,
    groups: [1; 2],
    best_of_groups: false,
    scale: None,
    epsilon: 0.0,
    scales_input: false,
    width: None,
    by_token: None,
    blocks: false,
    optional: false,
    parallel_dense: None,
};

/// `DeepseekV3TopkRouter`: chosen by sigmoids plus biases, weighted by the sigmoids times a factor; a
/// shared expert and dense first layers.
pub(super) const SIGMOID: Experts = Experts {
    count: "n_routed_experts",
    ffn: "moe_intermediate_size",
    renormalise: Renormalise::Key(true),
    gguf_renormalise: true,
    scoring: ScoringBy::Always(Scoring::Sigmoid),
    choice_bias: true,
    // so that all-zero shares remain 0
    epsilon: 1e-20,
    grouped: true,
    scale: Some(("routed_scaling_factor", 1.0)),
    shared: Some(Shared::Experts("n_shared_experts", 1)),
    dense: Dense::First("first_k_dense_replace", 1),
    ..EXPERTS
};

/// GGUF keys of these experts.
pub(super) const SIGMOID_KEYS: &[&str] = &[
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
];
