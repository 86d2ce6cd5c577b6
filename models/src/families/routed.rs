//! Families whose experts are chosen by scores plus biases, with shared experts and dense first layers;
//! Ernie 4.5 without experts, and Exaone 4.

use super::experts::{Dense, EXPERTS, Experts, Renormalise, SIGMOID, SIGMOID_KEYS, Shared};
use super::keys::{Key, Sets};
use super::{
    Arch, Bias, Check, EveryNth, Family, FurtherTokens, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm,
    Quirk,
};
use super::{Windows, gguf_names, hf_names};
use crate::names::{NameTable, Role};

const ROUTED_ARCH: Arch = Arch {
    names: &gguf_names::ROUTED,
    reads: SIGMOID_KEYS,
    ..PLAIN_ARCH
};

/// `modeling_dots1.py`: Qwen 3's attention, DeepSeek-V3's experts.
const DOTS1: Family = Family {
    name: "dots1",
    class: Some("Dots1ForCausalLM"),
    names: &hf_names::ROUTED,
    gguf: Some(Arch {
        name: "dots1",
        ..ROUTED_ARCH
    }),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Head,
    kv_heads_default: true,
    windows: Windows::Late(62, 4096),
    experts: Some(Experts {
        renormalise: Renormalise::Key(false),
        shared: Some(Shared::Experts("n_shared_experts", 0)),
        dense: Dense::First("first_k_dense_replace", 0),
        ..SIGMOID
    }),
    checks: &[
        Check::Words("scoring_func", &["sigmoid", "noaux_tc"]),
        Check::Words("topk_method", &["noaux_tc"]),
    ],
    reads: &["scoring_func", "topk_method"],
    ..PLAIN
};

/// `modeling_glm4_moe.py` (GLM-4.5, 4.6, 4.7, Air): half of each head rotated. Layers past the last
/// one predict further tokens.
const GLM4_MOE: Family = Family {
    name: "glm4_moe",
    class: Some("Glm4MoeForCausalLM"),
    names: &hf_names::ROUTED,
    gguf: Some(Arch {
        name: "glm4moe",
        names: &gguf_names::ROUTED_AFTER_ATTENTION,
        reads: &[
            "leading_dense_block_count",
            "expert_shared_count",
            "expert_group_count",
            "expert_group_used_count",
            "nextn_predict_layers",
        ],
        ..ROUTED_ARCH
    }),
    bias: Bias::QkvBy("attention_bias", false),
    qk_norm: QkNorm::HeadBy("use_qk_norm"),
    rotated: Some(0.5),
    further_tokens: FurtherTokens::PastLast,
    experts: Some(SIGMOID),
    checks: &[Check::NotNull("partial_rotary_factor")],
    ..PLAIN
};

/// `modeling_solar_open.py`: Llama's attention, GLM-4.5's experts in every layer.
const SOLAR_OPEN: Family = Family {
    name: "solar_open",
    class: Some("SolarOpenForCausalLM"),
    names: &hf_names::ROUTED,
    bias: Bias::QkvBy("attention_bias", false),
    head_dim_default: false,
    theta: 1_000_000.0,
    experts: Some(Experts {
        dense: Dense::Never,
        ..SIGMOID
    }),
    ..PLAIN
};

/// `modeling_minimax_m2.py`: norms of whole queries and keys, part of each head rotated, no shared
/// expert.
const MINIMAX_M2: Family = Family {
    name: "minimax_m2",
    class: Some("MiniMaxM2ForCausalLM"),
    names: &hf_names::MINIMAX_M2,
    gguf: Some(Arch {
        name: "minimax-m2",
        ..ROUTED_ARCH
    }),
    qk_norm: QkNorm::Whole,
    head_dim_default: false,
    rotated: Some(1.0),
    rotated_dims: Some("rotary_dim"),
    theta: 5_000_000.0,
    experts: Some(Experts {
        count: "num_local_experts",
        ffn: "intermediate_size",
        renormalise: Renormalise::Always,
        epsilon: 0.0,
        grouped: false,
        scale: None,
        shared: None,
        dense: Dense::Never,
        ..SIGMOID
    }),
    checks: &[Check::Words("scoring_func", &["sigmoid"])],
    reads: &["scoring_func"],
    ..PLAIN
};

/// `modeling_ernie4_5.py`: Llama with an interleaved rotary order.
const ERNIE4_5: Family = Family {
    name: "ernie4_5",
    class: Some("Ernie4_5ForCausalLM"),
    gguf: Some(Arch {
        name: "ernie4_5",
        interleaved: true,
        ..PLAIN_ARCH
    }),
    bias: Bias::AllBy("use_bias", false),
    kv_heads_default: true,
    head_dim_default: false,
    tied: true,
    theta: 500_000.0,
    interleaved: true,
    keys: &[Key::flag(Sets::FfnBias, "use_bias", false)],
    ..PLAIN
};

/// Biases have other names in releases and in transformers.
const ERNIE_NAMES: NameTable = NameTable {
    layers: &[
        hf_names::ATTENTION,
        hf_names::NORMS,
        hf_names::FFN,
        &[
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "mlp.moe_statics.e_score_correction_bias"),
            (
                Role::ChoiceBias,
                "mlp.gate.moe_statics.e_score_correction_bias",
            ),
        ],
    ],
    ..hf_names::ROUTED
};

/// `modeling_ernie4_5_moe.py`: softmax plus biases; the rotary order is interleaved.
const ERNIE4_5_MOE: Family = Family {
    name: "ernie4_5_moe",
    class: Some("Ernie4_5_MoeForCausalLM"),
    names: &ERNIE_NAMES,
    gguf: Some(Arch {
        name: "ernie4_5-moe",
        interleaved: true,
        reads: SIGMOID_KEYS,
        ..ROUTED_ARCH
    }),
    interleaved: true,
    further_tokens: FurtherTokens::Named(&["mtp"]),
    tied: true,
    theta: 500_000.0,
    experts: Some(Experts {
        count: "moe_num_experts",
        chosen: "moe_k",
        ffn: "moe_intermediate_size",
        renormalise: Renormalise::Always,
        gguf_renormalise: true,
        choice_bias: true,
        shared: Some(Shared::Experts("moe_num_shared_experts", 2)),
        dense: Dense::Outside("moe_layer_start_index", "moe_layer_end_index"),
        ..EXPERTS
    }),
    checks: &[
        Check::One("moe_layer_interval"),
        // lower bound of the sum of the chosen shares; never reached in practice
        Check::AtMost("moe_norm_min", 1e-6),
    ],
    quirks: &[Quirk::ChoiceRow],
    ..PLAIN
};

/// `modeling_hy_v3.py`.
const HY_V3: Family = Family {
    name: "hy_v3",
    class: Some("HYV3ForCausalLM"),
    names: &hf_names::HY_V3,
    gguf: Some(Arch {
        name: "hy_v3",
        reads: &["nextn_predict_layers"],
        ..ROUTED_ARCH
    }),
    further_tokens: FurtherTokens::PastLast,
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Head,
    head_dim_default: false,
    theta: 11_158_840.0,
    experts: Some(Experts {
        count: "num_experts",
        renormalise: Renormalise::Always,
        grouped: false,
        scale: Some(("router_scaling_factor", 2.826)),
        shared: Some(Shared::Experts("num_shared_experts", 1)),
        dense: Dense::Kinds("mlp_layer_types", None, 1),
        ..SIGMOID
    }),
    ..PLAIN
};

/// `modeling_exaone4.py`: norms of outputs, of queries and of keys; if some layers have a window,
/// the others are not rotated.
const EXAONE4: Family = Family {
    name: "exaone4",
    class: Some("Exaone4ForCausalLM"),
    names: &hf_names::OLMO2,
    gguf: Some(Arch {
        name: "exaone4",
        windows: Windows::Pattern(4),
        unrotated: Some(EveryNth {
            first: 3,
            windowed: true,
        }),
        reads: &["attention.sliding_window_pattern", "nextn_predict_layers"],
        ..PLAIN_ARCH
    }),
    pre_norm: false,
    post_norm: true,
    qk_norm: QkNorm::Head,
    windows: Windows::PatternOf(4, 4096),
    reads: &["sliding_window_pattern"],
    quirks: &[Quirk::FullUnrotated],
    ..PLAIN
};

/// `modeling_exaone_moe.py`: Exaone 4's attention after norms of inputs, DeepSeek-V3's experts.
const EXAONE_MOE: Family = Family {
    name: "exaone_moe",
    class: Some("ExaoneMoeForCausalLM"),
    names: &hf_names::EXAONE_MOE,
    gguf: Some(Arch {
        name: "exaone-moe",
        windows: Windows::Pattern(4),
        unrotated: Some(EveryNth {
            first: 3,
            windowed: true,
        }),
        reads: &[
            "attention.sliding_window_pattern",
            "leading_dense_block_count",
            "expert_shared_count",
            "expert_group_count",
            "expert_group_used_count",
            "nextn_predict_layers",
        ],
        ..ROUTED_ARCH
    }),
    further_tokens: FurtherTokens::Named(&["mtp"]),
    qk_norm: QkNorm::Head,
    windows: Windows::PatternOf(4, 4096),
    experts: Some(Experts {
        count: "num_experts",
        scale: Some(("routed_scaling_factor", 2.5)),
        shared: Some(Shared::Experts("num_shared_experts", 1)),
        dense: Dense::Kinds("mlp_layer_types", Some("first_k_dense_replace"), 1),
        ..SIGMOID
    }),
    reads: &["sliding_window_pattern"],
    quirks: &[Quirk::FullUnrotated],
    ..PLAIN
};

/// Norms on both sides, gates of attention's output, biases of experts next to them.
const AFMOE_NAMES: NameTable = NameTable {
    layers: &[
        hf_names::ATTENTION,
        hf_names::FFN,
        &[
            (Role::QGate, "self_attn.gate_proj.weight"),
            (Role::AttnNorm, "input_layernorm.weight"),
            (Role::AttnPostNorm, "post_attention_layernorm.weight"),
            (Role::FfnNorm, "pre_mlp_layernorm.weight"),
            (Role::FfnPostNorm, "post_mlp_layernorm.weight"),
            (Role::Router, "mlp.router.gate.weight"),
            (Role::ChoiceBias, "mlp.expert_bias"),
        ],
    ],
    ..hf_names::ROUTED
};

/// `modeling_afmoe.py` (Arcee Trinity): gates of attention's output, norms on both sides; layers without a
/// window are not rotated.
const AFMOE: Family = Family {
    name: "afmoe",
    class: Some("AfmoeForCausalLM"),
    aliases: &[("sliding_window_pattern", "global_attn_every_n_layers")],
    names: &AFMOE_NAMES,
    gguf: Some(Arch {
        name: "afmoe",
        names: &NameTable {
            layers: &[
                gguf_names::ATTENTION,
                gguf_names::NORMS,
                gguf_names::POST_NORMS,
                gguf_names::FFN,
                gguf_names::ROUTER,
                &[(Role::QGate, "attn_gate.weight")],
            ],
            ..gguf_names::PLAIN
        },
        windows: Windows::Pattern(4),
        unrotated: Some(EveryNth {
            first: 3,
            windowed: true,
        }),
        ..ROUTED_ARCH
    }),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Head,
    post_norm: true,
    width_scale: true,
    kv_heads_default: true,
    head_dim_default: false,
    windows: Windows::PatternOf(4, 1024),
    experts: Some(Experts {
        count: "num_experts",
        renormalise: Renormalise::Always,
        grouped: false,
        scale: Some(("route_scale", 1.0)),
        shared: Some(Shared::Experts("num_shared_experts", 2)),
        dense: Dense::First("num_dense_layers", 1),
        ..SIGMOID
    }),
    checks: &[
        Check::Flag("route_norm", true),
        Check::Words("score_func", &["sigmoid"]),
        Check::NotNull("sliding_window"),
    ],
    reads: &["mup_enabled", "sliding_window_pattern"],
    quirks: &[
        Quirk::OutputGate,
        Quirk::FullUnrotated,
        Quirk::WidthScaleBy("mup_enabled"),
    ],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 10] = [
    DOTS1,
    GLM4_MOE,
    SOLAR_OPEN,
    MINIMAX_M2,
    ERNIE4_5,
    ERNIE4_5_MOE,
    HY_V3,
    EXAONE4,
    EXAONE_MOE,
    AFMOE,
];
