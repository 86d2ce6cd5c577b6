//! Qwen 2 and 3, dense and with experts.

use super::Preset::{Int, Text};
use super::experts::{Dense, EXPERTS, Experts, Renormalise, Shared};
use super::{
    Arch, Bias, Check, Family, FurtherTokens, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk,
    Windows, gguf_names, hf_names, qwen_names,
};

const QWEN2: Family = Family {
    name: "qwen2",
    class: Some("Qwen2ForCausalLM"),
    gguf: Some(Arch::named("qwen2")),
    bias: Bias::Qkv,
    windows: Windows::ByLayer,
    ..PLAIN
};
use crate::mixers::delta_net;

const QWEN3: Family = Family {
    name: "qwen3",
    class: Some("Qwen3ForCausalLM"),
    gguf: Some(Arch::named("qwen3")),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Head,
    head_dim_default: false,
    windows: Windows::ByLayer,
    ..PLAIN
};

const QWEN3_EXPERTS: Experts = Experts {
    ffn: "moe_intermediate_size",
    gguf_renormalise: true,
    dense: Dense::Steps,
    ..EXPERTS
};

const QWEN2_MOE: Family = Family {
    name: "qwen2_moe",
    class: Some("Qwen2MoeForCausalLM"),
    gguf: Some(Arch::named("qwen2moe")),
    bias: Bias::QkvBy("qkv_bias", true),
    windows: Windows::Disputed,
    experts: Some(Experts {
        shared: Some(Shared::Gated("shared_expert_intermediate_size")),
        gguf_renormalise: false,
        ..QWEN3_EXPERTS
    }),
    ..PLAIN
};

const QWEN3_MOE: Family = Family {
    name: "qwen3_moe",
    class: Some("Qwen3MoeForCausalLM"),
    gguf: Some(Arch::named("qwen3moe")),
    windows: Windows::Disputed,
    experts: Some(QWEN3_EXPERTS),
    ..QWEN3
};

/// Layers for multi-token prediction, which are counted.
const FURTHER_KEYS: &[&str] = &["nextn_predict_layers"];

/// `modeling_qwen3_next.py`: gated DeltaNets, and attention with gates in every fourth layer.
const QWEN3_NEXT: Family = Family {
    name: "qwen3_next",
    class: Some("Qwen3NextForCausalLM"),
    defaults: &[("head_dim", Int(256)), ("hidden_act", Text("silu"))],
    act_default: Some("silu"),
    one_act: true,
    names: &hf_names::QWEN3_NEXT,
    gguf: Some(Arch {
        name: "qwen3next",
        names: &gguf_names::QWEN3_NEXT,
        reads: FURTHER_KEYS,
        ..PLAIN_ARCH
    }),
    plus_one: true,
    qk_norm: QkNorm::Head,
    rotated: Some(0.25),
    windows: Windows::None,
    further_tokens: FurtherTokens::Named(&["mtp."]),
    experts: Some(Experts {
        shared: Some(Shared::Gated("shared_expert_intermediate_size")),
        renormalise: Renormalise::Key(true),
        ..QWEN3_EXPERTS
    }),
    checks: &[
        Check::NotNull("partial_rotary_factor"),
        Check::Flag("attn_output_gate", true),
        Check::Words("output_gate_type", &["swish", "silu"]),
    ],
    mixers: &[&delta_net::QWEN3_NEXT],
    quirks: &[Quirk::OutputGate],
    ..PLAIN
};

/// `modeling_qwen3_5.py`: the same, dense, and with separate projections of a DeltaNet.
const QWEN3_5: Family = Family {
    name: "qwen3_5_text",
    whole: Some("qwen3_5"),
    class: Some("Qwen3_5ForCausalLM"),
    names: &hf_names::QWEN3_5,
    gguf: Some(Arch {
        name: "qwen35",
        names: &gguf_names::QWEN3_5,
        reads: FURTHER_KEYS,
        ..PLAIN_ARCH
    }),
    experts: None,
    mixers: &[&delta_net::QWEN3_5],
    ..QWEN3_NEXT
};

/// `modeling_qwen3_5_moe.py`: experts in every layer, whose weights are always renormalised.
const QWEN3_5_MOE: Family = Family {
    name: "qwen3_5_moe_text",
    whole: Some("qwen3_5_moe"),
    class: Some("Qwen3_5MoeForCausalLM"),
    gguf: Some(Arch {
        name: "qwen35moe",
        names: &gguf_names::QWEN3_5,
        reads: FURTHER_KEYS,
        ..PLAIN_ARCH
    }),
    experts: Some(Experts {
        shared: Some(Shared::Gated("shared_expert_intermediate_size")),
        renormalise: Renormalise::Always,
        dense: Dense::Never,
        ..QWEN3_EXPERTS
    }),
    ..QWEN3_5
};

/// GGUF keys of Qwen3.8-Flash-Next in addition to those of DeltaNets.
const HYPER_KEYS: &[&str] = &[
    "nextn_predict_layers",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "attention.compress_ratios",
    "hyper_connection.count",
    "hyper_connection.low_rank",
    "embedding_length_per_layer_input",
    "ple.layers",
    "ple.ngram_size",
    "ple.heads_per_ngram",
    "ple.conv_kernel",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
    "ple.eos_token_id",
    "ple.image_token_id",
];

/// `modeling_qwen4_exp.py` (Qwen3.8-Flash-Next): the same with several residual streams, n-gram rows,
/// and attention to positions chosen by an indexer.
const QWEN4_EXP: Family = Family {
    name: "qwen4_exp_text",
    whole: Some("qwen4_exp"),
    class: Some("Qwen4ExpForCausalLM"),
    names: &qwen_names::HF,
    gguf: Some(Arch {
        name: "qwen4exp",
        names: &qwen_names::GGUF,
        reads: HYPER_KEYS,
        ..PLAIN_ARCH
    }),
    pre_norm: false,
    rotated: Some(1.0),
    further_tokens: FurtherTokens::Named(&["mtp.", ".indexer."]),
    experts: Some(Experts {
        shared: Some(Shared::Gated("shared_expert_intermediate_size")),
        renormalise: Renormalise::Key(true),
        dense: Dense::Never,
        ..QWEN3_EXPERTS
    }),
    checks: &[
        Check::NotNull("partial_rotary_factor"),
        Check::Flag("attn_output_gate", true),
        Check::Words("output_gate_type", &["sigmoid", "silu"]),
        Check::One("indexer_kv_heads"),
    ],
    mixers: &[&delta_net::QWEN4],
    quirks: &[
        Quirk::OutputGate,
        Quirk::Hyper,
        Quirk::Indexed("indexer_budget", "attention.indexer.top_k"),
    ],
    ..QWEN3_5_MOE
};

pub(super) const FAMILIES: [Family; 8] = [
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN4_EXP,
];
