//! Families with latent attention (MLA).

use super::experts::{Dense, EXPERTS, Experts, Renormalise, SIGMOID, Shared};
use super::{Arch, Check, Family, FurtherTokens, PLAIN, PLAIN_ARCH, Quirk};
use super::{Windows, gguf_names, hf_names};
use crate::mixers::latent;
use crate::names::{ExpertNames, NameTable};

/// GGUF keys of these experts.
const KEYS: &[&str] = &[
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "nextn_predict_layers",
];

const INTERLEAVED: Check = Check::Flag("rope_interleave", true);
/// Flags whose null differs from an absent key.
const NOT_NULL: [Check; 2] = [
    Check::NotNull("rope_interleave"),
    Check::NotNull("norm_topk_prob"),
];

/// The same, and those of an indexer.
const INDEXED_KEYS: &[&str] = &[
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "attention.indexer.types",
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "nextn_predict_layers",
];

const LATENT_ARCH: Arch = Arch {
    names: &gguf_names::LATENT,
    interleaved: true,
    reads: KEYS,
    ..PLAIN_ARCH
};

const LATENT: Family = Family {
    names: &hf_names::LATENT,
    interleaved: true,
    rotated: Some(1.0),
    reads: &[
        "kv_lora_rank",
        "q_lora_rank",
        "rope_interleave",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
    ],
    mixers: &[&latent::DEEPSEEK],
    ..PLAIN
};

/// `modeling_deepseek_v3.py` (V3, R1), and the text model of Kimi K2.5. Layers past the last one predict further
/// tokens.
const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    whole: Some("kimi_k25"),
    class: Some("DeepseekV3ForCausalLM"),
    gguf: Some(Arch {
        name: "deepseek2",
        without_sigmoids: Some(&DEEPSEEK_V2),
        ..LATENT_ARCH
    }),
    further_tokens: FurtherTokens::PastLast,
    experts: Some(Experts {
        scale: Some(("routed_scaling_factor", 2.5)),
        groups: [8, 4],
        dense: Dense::First("first_k_dense_replace", 3),
        ..SIGMOID
    }),
    checks: &[
        INTERLEAVED,
        NOT_NULL[0],
        NOT_NULL[1],
        Check::One("moe_layer_freq"),
        Check::Words("scoring_func", &["sigmoid"]),
        Check::Words("topk_method", &["noaux_tc"]),
    ],
    ..LATENT
};

const INDEXED_EXPERTS: Experts = Experts {
    scale: Some(("routed_scaling_factor", 2.5)),
    dense: Dense::Kinds("mlp_layer_types", Some("first_k_dense_replace"), 3),
    ..SIGMOID
};

const INDEXED: Family = Family {
    whole: None,
    further_tokens: FurtherTokens::PastLastOr(".indexer."),
    windows: Windows::None,
    experts: Some(INDEXED_EXPERTS),
    quirks: &[Quirk::Indexed("index_topk", "attention.indexer.top_k")],
    ..DEEPSEEK_V3
};

/// `modeling_deepseek_v32.py`: DeepSeek-V3 whose attention sees only the positions chosen by an
/// indexer.
const DEEPSEEK_V32: Family = Family {
    name: "deepseek_v32",
    class: Some("DeepseekV32ForCausalLM"),
    experts: Some(Experts {
        groups: [8, 4],
        ..INDEXED_EXPERTS
    }),
    gguf: Some(Arch {
        name: "deepseek32",
        reads: INDEXED_KEYS,
        ..LATENT_ARCH
    }),
    ..INDEXED
};

/// `modeling_glm_moe_dsa.py` (GLM-5): the same; layers may share an indexer's choice.
const GLM_MOE_DSA: Family = Family {
    name: "glm_moe_dsa",
    class: Some("GlmMoeDsaForCausalLM"),
    gguf: Some(Arch {
        name: "glm-dsa",
        reads: INDEXED_KEYS,
        ..LATENT_ARCH
    }),
    ..INDEXED
};

/// Kimi K2, and the text model of K2.5 in releases: DeepSeek-V3 under its own name.
const KIMI_K2: Family = Family {
    name: "kimi_k2",
    gguf: None,
    gguf_as: Some("deepseek2"),
    ..DEEPSEEK_V3
};

/// `modeling_deepseek_v2.py` (V2, V2-Lite): experts chosen by a softmax, whose weights are not
/// renormalised.
const DEEPSEEK_V2: Family = Family {
    name: "deepseek_v2",
    class: Some("DeepseekV2ForCausalLM"),
    gguf_as: Some("deepseek2"),
    experts: Some(Experts {
        count: "n_routed_experts",
        ffn: "moe_intermediate_size",
        grouped: true,
        best_of_groups: true,
        scale: Some(("routed_scaling_factor", 1.0)),
        shared: Some(Shared::Experts("n_shared_experts", 2)),
        dense: Dense::First("first_k_dense_replace", 0),
        renormalise: Renormalise::Key(false),
        ..EXPERTS
    }),
    checks: &[
        Check::One("moe_layer_freq"),
        Check::Words("scoring_func", &["softmax"]),
        Check::Words("topk_method", &["greedy", "group_limited_greedy"]),
        // the class ignores this key
        Check::Flag("norm_topk_prob", false),
    ],
    ..LATENT
};

/// `modeling_glm4_moe_lite.py` (GLM-4.7-Flash).
const GLM4_MOE_LITE: Family = Family {
    name: "glm4_moe_lite",
    class: Some("Glm4MoeLiteForCausalLM"),
    gguf_as: Some("deepseek2"),
    further_tokens: FurtherTokens::PastLast,
    experts: Some(Experts {
        scale: Some(("routed_scaling_factor", 1.8)),
        dense: Dense::Kinds("mlp_layer_types", Some("first_k_dense_replace"), 1),
        ..SIGMOID
    }),
    checks: DEEPSEEK_V3.checks,
    ..LATENT
};

/// One tensor for all experts of a layer.
const STACKED: NameTable = NameTable {
    experts: ExpertNames {
        one: ("", &[]),
        ..hf_names::LATENT.experts
    },
    ..hf_names::LATENT
};

/// `modeling_mistral4.py` (Mistral Small 4): softmax shares, groups ranked by their two best experts,
/// queries scaled by position.
const MISTRAL4: Family = Family {
    name: "mistral4",
    whole: Some("mistral3"),
    class: Some("Mistral4ForCausalLM"),
    names_to_write: Some(&STACKED),
    gguf: Some(Arch {
        name: "mistral4",
        reads: &[
            "attention.temperature_scale",
            "attention.temperature_length",
            "leading_dense_block_count",
            "expert_shared_count",
            "expert_group_count",
            "expert_group_used_count",
        ],
        ..LATENT_ARCH
    }),
    experts: Some(Experts {
        count: "n_routed_experts",
        ffn: "moe_intermediate_size",
        renormalise: Renormalise::Key(true),
        gguf_renormalise: true,
        epsilon: 1e-20,
        grouped: true,
        scale: Some(("routed_scaling_factor", 1.0)),
        shared: Some(Shared::Experts("n_shared_experts", 1)),
        dense: Dense::First("first_k_dense_replace", 0),
        ..EXPERTS
    }),
    checks: &[INTERLEAVED, NOT_NULL[0], NOT_NULL[1]],
    quirks: &[Quirk::QueryScale],
    ..LATENT
};

pub(super) const FAMILIES: [Family; 7] = [
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    KIMI_K2,
    GLM4_MOE_LITE,
    MISTRAL4,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
];
