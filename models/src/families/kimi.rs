//! Families with Kimi Delta Attention: Kimi Linear, Ling 3.

use super::experts::{Dense, Experts, SIGMOID, Shared};
use super::{Arch, Check, Family, FurtherTokens, PLAIN, PLAIN_ARCH, Quirk, Windows};
use super::{gguf_names, hf_names};
use crate::mixers::{kda, latent};
use crate::names::{Fused, NameTable, Role};

/// `modeling_kimi_linear.py`: Kimi Delta Attention, and latent attention without rotary positions.
const KIMI_LINEAR: Family = Family {
    name: "kimi_linear",
    class: Some("KimiLinearForCausalLM"),
    aliases: &[
        ("max_position_embeddings", "model_max_length"),
        ("norm_topk_prob", "moe_renormalize"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_group", "num_expert_group"),
        ("n_shared_experts", "num_shared_experts"),
    ],
    // also that of the convolutions
    act_default: Some("silu"),
    one_act: true,
    names: &hf_names::KIMI_LINEAR,
    gguf: Some(Arch {
        name: "kimi-linear",
        names: &gguf_names::KIMI_LINEAR,
        reads: &[
            "leading_dense_block_count",
            "expert_shared_count",
            "expert_group_count",
            "expert_group_used_count",
        ],
        ..PLAIN_ARCH
    }),
    rotated: Some(1.0),
    windows: Windows::None,
    experts: Some(Experts {
        count: "num_experts",
        scale: Some(("routed_scaling_factor", 2.446)),
        shared: Some(Shared::Experts("n_shared_experts", 1)),
        dense: Dense::Kinds("mlp_layer_types", Some("first_k_dense_replace"), 1),
        ..SIGMOID
    }),
    checks: &[
        Check::NotNull("norm_topk_prob"),
        Check::NotNull("moe_renormalize"),
        Check::Flag("mla_use_nope", true),
        Check::Flag("use_grouped_topk", true),
        Check::One("moe_layer_freq"),
        Check::Words("moe_router_activation_func", &["sigmoid"]),
        Check::Words("topk_method", &["noaux_tc"]),
    ],
    reads: &[
        "kv_lora_rank",
        "q_lora_rank",
        "topk_method",
        "moe_layer_freq",
    ],
    mixers: &[&latent::KIMI, &kda::KIMI],
    quirks: &[Quirk::Unrotated, Quirk::NoPadding],
    ..PLAIN
};

/// Latent attention with gates, and Kimi Delta Attention with full-rank projections.
const BAILING_NAMES: NameTable = NameTable {
    globals: &[
        (Role::Embed, "model.word_embeddings.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "model.norm.weight"),
    ],
    layers: &[
        hf_names::NORMS,
        hf_names::FFN,
        latent::LING_NAMES,
        kda::LING_NAMES,
        &[
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "mlp.gate.expert_bias"),
        ],
    ],
    fused: &[(Fused::LatentKeysValues, "attention.kv_b_proj.weight")],
    ..hf_names::LATENT
};

/// `modeling_bailing_hybrid.py` (Ling 3): full-rank projections, bounded decays, and latent attention with
/// rotary positions and a gate for each head. Layers past the last one predict further tokens.
const BAILING_HYBRID: Family = Family {
    name: "bailing_hybrid",
    class: Some("BailingHybridForCausalLM"),
    names: &BAILING_NAMES,
    gguf: Some(Arch {
        name: "bailingmoe3",
        names: &gguf_names::BAILING_HYBRID,
        interleaved: true,
        reads: &[
            "leading_dense_block_count",
            "expert_shared_count",
            "expert_group_count",
            "expert_group_used_count",
            "nextn_predict_layers",
        ],
        ..PLAIN_ARCH
    }),
    interleaved: true,
    theta: 6e6,
    further_tokens: FurtherTokens::PastLast,
    experts: Some(Experts {
        count: "num_experts",
        scale: Some(("routed_scaling_factor", 2.5)),
        groups: [8, 4],
        shared: Some(Shared::Experts("n_shared_experts", 1)),
        dense: Dense::Kinds("mlp_layer_types", Some("first_k_dense_replace"), 2),
        ..SIGMOID
    }),
    checks: &[
        Check::NotNull("norm_topk_prob"),
        Check::NotNull("moe_renormalize"),
        Check::Flag("rope_interleave", true),
        Check::Flag("no_kda_lora", true),
        Check::Words("gated_attention_proj_granularity_type", &["head_wise"]),
        Check::Words("score_function", &["sigmoid"]),
        Check::Words("scoring_func", &["sigmoid"]),
        Check::Words("topk_method", &["noaux_tc"]),
        Check::One("moe_layer_freq"),
    ],
    reads: &[
        "kv_lora_rank",
        "q_lora_rank",
        "rope_interleave",
        // of other layers, which have their own norms
        "use_qk_norm",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
    ],
    mixers: &[&latent::LING, &kda::LING],
    quirks: &[Quirk::NoPadding],
    ..KIMI_LINEAR
};

pub(super) const FAMILIES: [Family; 2] = [KIMI_LINEAR, BAILING_HYBRID];
