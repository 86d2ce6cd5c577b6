//! Families of experts with a special router or FFN.

use super::experts::{Dense, EXPERTS, Experts, Renormalise, ScoringBy};
use super::keys::{Key, Sets};
use super::{
    Arch, Bias, EveryNth, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk, Unrotated,
};
use super::{Windows, gguf_names, hf_names};
use crate::config::{Activation, SWIGLU_ALPHA, SWIGLU_LIMIT, Scoring};
use crate::names::NameTable;

/// Norms of whole queries and keys.
const OLMOE: Family = Family {
    name: "olmoe",
    class: Some("OlmoeForCausalLM"),
    gguf: Some(Arch::named("olmoe")),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Whole,
    kv_heads_default: true,
    experts: Some(EXPERTS),
    reads: &["clip_qkv"],
    ..PLAIN
};

/// `modeling_flex_olmo.py`: Olmo 2's norms and OLMoE's experts.
const FLEX_OLMO: Family = Family {
    name: "flex_olmo",
    class: Some("FlexOlmoForCausalLM"),
    names: &NameTable {
        layers: &[
            hf_names::OLMO2.layers[0],
            hf_names::OLMO2.layers[2],
            hf_names::ROUTER,
        ],
        experts: hf_names::PLAIN.experts,
        ..hf_names::OLMO2
    },
    gguf: None,
    theta: 500_000.0,
    experts: Some(EXPERTS),
    quirks: &[Quirk::NoPadding],
    ..super::olmo::OLMO2
};

/// ReLU experts, chosen before attention. Layers without a window are not rotated.
const SMALL_THINKER: Family = Family {
    name: "smallthinker",
    class: Some("SmallThinkerForCausalLM"),
    names: &hf_names::SMALL_THINKER,
    gguf: Some(Arch {
        name: "smallthinker",
        names: &gguf_names::SMALL_THINKER,
        relu: true,
        windows: Windows::AllButFourth,
        unrotated: Some(EveryNth {
            first: 0,
            windowed: true,
        }),
        ..PLAIN_ARCH
    }),
    act_default: Some("relu"),
    one_act: true,
    windows: Windows::Layout,
    unrotated: Some(Unrotated {
        list: "rope_layout",
        interval: None,
    }),
    experts: Some(Experts {
        count: "moe_num_primary_experts",
        chosen: "moe_num_active_primary_experts",
        ffn: "moe_ffn_hidden_size",
        renormalise: Renormalise::Always,
        gguf_renormalise: true,
        // a softmax over the chosen scores equals the renormalised softmax over all
        scoring: ScoringBy::SoftmaxIf("moe_primary_router_apply_softmax"),
        dense: Dense::NeverBy("moe_layer_layout"),
        early_router: Some("moe_enable_early_router"),
        ..EXPERTS
    }),
    reads: &[
        "moe_primary_router_apply_softmax",
        "moe_num_primary_experts",
        "moe_layer_layout",
        "rope_layout",
        "sliding_window_layout",
    ],
    ..PLAIN
};

/// Biases everywhere, sinks, a clamped SwiGLU, experts in blocks of four bits.
const GPT_OSS: Family = Family {
    name: "gpt_oss",
    class: Some("GptOssForCausalLM"),
    names: &hf_names::GPT_OSS,
    gguf: Some(Arch {
        name: "gpt-oss",
        names: &gguf_names::GPT_OSS,
        act: Activation::ClampedSwiglu {
            limit: SWIGLU_LIMIT,
            alpha: SWIGLU_ALPHA,
        },
        windows: Windows::Alternate,
        yarn_truncate: false,
        ..PLAIN_ARCH
    }),
    bias: Bias::AllBy("attention_bias", true),
    ffn_bias: true,
    sinks: true,
    act_default: Some("silu"),
    one_act: true,
    clamped: true,
    windows: Windows::Alternate,
    theta: 150_000.0,
    always_scaled: true,
    experts: Some(Experts {
        renormalise: Renormalise::Always,
        gguf_renormalise: true,
        router_bias: true,
        blocks: true,
        ..EXPERTS
    }),
    reads: &["swiglu_limit", "swiglu_alpha"],
    ..PLAIN
};

/// LayerNorms, sparsemixer, LongRoPE with a factor for each list of divisors.
const PHIMOE: Family = Family {
    name: "phimoe",
    class: Some("PhimoeForCausalLM"),
    names: &hf_names::PHIMOE,
    layer_norm: true,
    bias: OPTIONAL_BIAS,
    kv_heads_default: true,
    windows: Windows::Every,
    theta: 1_000_000.0,
    named_factors: true,
    experts: Some(Experts {
        count: "num_local_experts",
        scoring: ScoringBy::Always(Scoring::SparseMixer),
        ..EXPERTS
    }),
    keys: &[Key::flag(Sets::HeadBias, "lm_head_bias", false)],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 5] = [OLMOE, FLEX_OLMO, SMALL_THINKER, GPT_OSS, PHIMOE];
