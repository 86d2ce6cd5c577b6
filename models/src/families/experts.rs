//! How a family's experts are described.

use crate::config::Scoring;

/// A mixture of experts and the names of its keys in `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    /// Number of experts.
    pub(crate) count: &'static str,
    /// Experts that a token visits.
    pub(crate) chosen: &'static str,
    /// Neurons of an expert.
    pub(crate) ffn: &'static str,
    pub(crate) renormalise: Renormalise,
    /// What llama.cpp does if a file does not say whether it renormalises.
    pub(crate) gguf_renormalise: bool,
    pub(crate) scoring: ScoringBy,
    /// The expert that every token visits.
    pub(crate) shared: Option<Shared>,
    /// Which layers have a dense FFN.
    pub(crate) dense: Dense,
    /// Key of its number of neurons.
    pub(crate) dense_ffn: &'static str,
    /// The router reads the layer's input, if this key is not false.
    pub(crate) early_router: Option<&'static str>,
    pub(crate) router_bias: bool,
    /// A tensor of biases says which experts are chosen, beside their scores.
    pub(crate) choice_bias: bool,
    /// `n_group` and `topk_group` say from which groups experts are chosen.
    pub(crate) grouped: bool,
    /// What they are without these keys.
    pub(crate) groups: [u32; 2],
    /// A group is as good as the best of its experts, and `topk_method` says whether there are groups.
    pub(crate) best_of_groups: bool,
    /// Key of the factor of the weights, and the factor without it.
    pub(crate) scale: Option<(&'static str, f32)>,
    /// What is added to the sum that weights are divided by.
    pub(crate) epsilon: f32,
    /// Weights are factors of what an expert reads.
    pub(crate) scales_input: bool,
    /// Key of the width of what experts read and give, where that may be another than `d_model`.
    pub(crate) width: Option<&'static str>,
    /// A list that says which layers take a token's experts from a table (`hash_moe`); without it as many
    /// of the first ones as the key says, or so many without it.
    pub(crate) by_token: Option<(&'static str, &'static str, u32)>,
    /// Stored as MXFP4 blocks or as weights.
    pub(crate) blocks: bool,
    /// With 0 experts, the shared one is the dense FFN of every layer.
    pub(crate) optional: bool,
    /// There are experts only if this key is set, in parallel with a dense FFN (Gemma 4).
    pub(crate) parallel_dense: Option<&'static str>,
}

/// Whether the weights of the chosen experts are divided by their sum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renormalise {
    Always,
    /// As `norm_topk_prob` says; this without it.
    Key(bool),
}

/// Where the scoring comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScoringBy {
    Always(Scoring),
    /// Softmax if this key is set, sigmoid otherwise.
    SoftmaxIf(&'static str),
}

/// The expert that every token visits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shared {
    /// Of as many neurons as this key says, with a gate of its own.
    Gated(&'static str),
    /// Of as many neurons as this key says, without a gate.
    Plain(&'static str),
    /// Of the neurons of as many experts as this key says, or so many without it; without a gate.
    Experts(&'static str, u32),
    /// Of as many neurons as any other expert, without a gate.
    AsOthers,
}

/// Which layers have a dense FFN instead of experts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dense {
    Never,
    /// None, and a list of switches has to agree.
    NeverBy(&'static str),
    /// As many of the first ones as this key says, or so many without it.
    First(&'static str, u32),
    /// Those of which a list says `dense`; without the list as many of the first ones as the key says,
    /// or so many without it.
    Kinds(&'static str, Option<&'static str>, u32),
    /// All before the first of these and after the last of these, -1 for the last of all.
    Outside(&'static str, &'static str),
    /// Those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
    Steps,
    /// All but those of a list; without it, all but every so manyth, as the second key says, or every
    /// one.
    But(&'static str, &'static str),
    /// Those that the list of sublayers says are one.
    Sublayers,
}

impl Experts {
    /// Whether there is a shared expert without a gate of its own.
    pub(crate) fn has_plain_shared(&self) -> bool {
        matches!(
            self.shared,
            Some(Shared::Plain(_) | Shared::Experts(..) | Shared::AsOthers)
        )
    }

    /// Whether a key is read for them that families without such experts refuse.
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

/// `DeepseekV3TopkRouter`: chosen by sigmoids plus biases, weighed by the sigmoids, times a factor; a
/// shared expert and dense first layers.
pub(super) const SIGMOID: Experts = Experts {
    count: "n_routed_experts",
    ffn: "moe_intermediate_size",
    renormalise: Renormalise::Key(true),
    gguf_renormalise: true,
    scoring: ScoringBy::Always(Scoring::Sigmoid),
    choice_bias: true,
    // so that shares that are all 0 stay 0
    epsilon: 1e-20,
    grouped: true,
    scale: Some(("routed_scaling_factor", 1.0)),
    shared: Some(Shared::Experts("n_shared_experts", 1)),
    dense: Dense::First("first_k_dense_replace", 1),
    ..EXPERTS
};

/// Keys of such experts in GGUF.
pub(super) const SIGMOID_KEYS: &[&str] = &[
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
];
