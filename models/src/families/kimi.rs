//! Kimi Linear.

use super::experts::{Dense, Experts, SIGMOID, Shared};
use super::{Arch, Check, Family, PLAIN, PLAIN_ARCH, Quirk, Windows, gguf_names, hf_names};

/// `modeling_kimi_linear.py`: Kimi Delta Attention, and latent attention without rotary positions.
const KIMI_LINEAR: Family = Family {
    name: "kimi_linear",
    aliases: &[
        ("max_position_embeddings", "model_max_length"),
        ("norm_topk_prob", "moe_renormalize"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_group", "num_expert_group"),
        ("n_shared_experts", "num_shared_experts"),
    ],
    // that of the convolutions, too
    act_default: Some("silu"),
    one_act: true,
    names: &hf_names::KIMI_LINEAR,
    gguf: Some(Arch {
        name: "kimi-linear",
        names: &gguf_names::KIMI_LINEAR,
        reads: &[
            "kda.head_dim",
            "ssm.conv_kernel",
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
    quirks: &[Quirk::Latent, Quirk::Kda],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [KIMI_LINEAR];
