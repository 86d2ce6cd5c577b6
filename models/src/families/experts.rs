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
    /// Neurons of the expert that every token visits, which has a gate of its own.
    pub(crate) shared: Option<&'static str>,
    /// Which layers have a dense FFN.
    pub(crate) dense: Dense,
    /// The router reads the layer's input, if this key is not false.
    pub(crate) early_router: Option<&'static str>,
    pub(crate) router_bias: bool,
    /// Stored as MXFP4 blocks or as weights.
    pub(crate) blocks: bool,
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

/// Which layers have a dense FFN instead of experts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dense {
    Never,
    /// None, and a list of switches has to agree.
    NeverBy(&'static str),
    /// Those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
    Steps,
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
    early_router: None,
    router_bias: false,
    blocks: false,
};
