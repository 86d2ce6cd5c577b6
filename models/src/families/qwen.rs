//! Qwen 2 and 3, dense and with experts.

use super::Preset::{Int, Text};
use super::experts::{Dense, EXPERTS, Experts, Renormalise, Shared};
use super::{
    Arch, Bias, Check, Family, FurtherTokens, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk,
    ValueHeads, Windows, gguf_names, hf_names,
};

const QWEN2: Family = Family {
    name: "qwen2",
    class: Some("Qwen2ForCausalLM"),
    gguf: Some(Arch {
        name: "qwen2",
        ..PLAIN_ARCH
    }),
    bias: Bias::Qkv,
    windows: Windows::ByLayer,
    ..PLAIN
};

const QWEN3: Family = Family {
    name: "qwen3",
    class: Some("Qwen3ForCausalLM"),
    gguf: Some(Arch {
        name: "qwen3",
        ..PLAIN_ARCH
    }),
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
    gguf: Some(Arch {
        name: "qwen2moe",
        ..PLAIN_ARCH
    }),
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
    gguf: Some(Arch {
        name: "qwen3moe",
        ..PLAIN_ARCH
    }),
    windows: Windows::Disputed,
    experts: Some(QWEN3_EXPERTS),
    ..QWEN3
};

/// GGUF keys of layers with DeltaNets, of M-RoPE (plain RoPE in texts) and of layers for multi-token
/// prediction.
const DELTA_KEYS: &[&str] = &[
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "attention.recurrent_layers",
    "full_attention_interval",
    "rope.dimension_sections",
    "nextn_predict_layers",
];

/// `modeling_qwen3_next.py`: gated DeltaNets, and attention with gates in every fourth layer.
const QWEN3_NEXT: Family = Family {
    name: "qwen3_next",
    defaults: &[("head_dim", Int(256)), ("hidden_act", Text("silu"))],
    act_default: Some("silu"),
    one_act: true,
    names: &hf_names::QWEN3_NEXT,
    gguf: Some(Arch {
        name: "qwen3next",
        names: &gguf_names::QWEN3_NEXT,
        reads: DELTA_KEYS,
        ..PLAIN_ARCH
    }),
    plus_one: true,
    qk_norm: QkNorm::Head,
    rotated: Some(0.25),
    windows: Windows::None,
    further_tokens: FurtherTokens::Named("mtp."),
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
    quirks: &[Quirk::DeltaNet(ValueHeads::Grouped)],
    ..PLAIN
};

/// `modeling_qwen3_5.py`: the same, dense, and with a DeltaNet's projections apart.
const QWEN3_5: Family = Family {
    name: "qwen3_5_text",
    whole: Some("qwen3_5"),
    names: &hf_names::QWEN3_5,
    gguf: Some(Arch {
        name: "qwen35",
        names: &gguf_names::QWEN3_5,
        reads: DELTA_KEYS,
        ..PLAIN_ARCH
    }),
    experts: None,
    quirks: &[Quirk::DeltaNet(ValueHeads::Tiled)],
    ..QWEN3_NEXT
};

/// `modeling_qwen3_5_moe.py`: experts in every layer, whose weights are always renormalised.
const QWEN3_5_MOE: Family = Family {
    name: "qwen3_5_moe_text",
    whole: Some("qwen3_5_moe"),
    gguf: Some(Arch {
        name: "qwen35moe",
        names: &gguf_names::QWEN3_5,
        reads: DELTA_KEYS,
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

pub(super) const FAMILIES: [Family; 7] = [
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
];
