//! Names of tensors in safetensors.

use crate::mixers::attention::HF_GATED;
pub(super) use crate::mixers::attention::HF_NAMES as ATTENTION;
use crate::mixers::{delta_net, kda, latent, mamba, short_conv};
use crate::names::{ExpertNames, Fused, NameTable, Role, Spellings, Stack};

const OUTSIDE: Spellings = &[
    (Role::Embed, "model.embed_tokens.weight"),
    (Role::Head, "lm_head.weight"),
    (Role::HeadBias, "lm_head.bias"),
    (Role::FinalNorm, "model.norm.weight"),
    (Role::FinalNormBias, "model.norm.bias"),
];

pub(super) const FOUR_NORMS: Spellings = &[
    (Role::AttnNorm, "input_layernorm.weight"),
    (Role::AttnPostNorm, "post_attention_layernorm.weight"),
    (Role::FfnNorm, "pre_feedforward_layernorm.weight"),
    (Role::FfnPostNorm, "post_feedforward_layernorm.weight"),
];

pub(super) const NORMS: Spellings = &[
    (Role::AttnNorm, "input_layernorm.weight"),
    (Role::AttnNormBias, "input_layernorm.bias"),
    (Role::FfnNorm, "post_attention_layernorm.weight"),
    (Role::FfnNormBias, "post_attention_layernorm.bias"),
];

pub(super) const FFN: Spellings = &[
    (Role::Gate, "mlp.gate_proj.weight"),
    (Role::Up, "mlp.up_proj.weight"),
    (Role::Down, "mlp.down_proj.weight"),
    (Role::GateBias, "mlp.gate_proj.bias"),
    (Role::UpBias, "mlp.up_proj.bias"),
    (Role::DownBias, "mlp.down_proj.bias"),
];

const PREDICTORS: Spellings = &[
    (Role::PredictorFc1, "mlp.predictor.fc1.weight"),
    (Role::PredictorFc2, "mlp.predictor.fc2.weight"),
];

/// Matrices of an expert after its number.
pub(super) const PROJECTIONS: Spellings = &[
    (Role::Gate, "gate_proj.weight"),
    (Role::Up, "up_proj.weight"),
    (Role::Down, "down_proj.weight"),
];

/// The same, numbered.
pub(super) const NUMBERED: Spellings = &[
    (Role::Gate, "w1.weight"),
    (Role::Up, "w3.weight"),
    (Role::Down, "w2.weight"),
];

/// Experts in three-dimensional tensors, as written by
/// `save_pretrained(save_original_format=False)`.
pub(super) const STACKED: &[(Stack, &str)] = &[
    (Stack::GateUp, "mlp.experts.gate_up_proj"),
    (Stack::One(Role::Down), "mlp.experts.down_proj"),
];

pub(super) const NO_EXPERTS: ExpertNames = ExpertNames {
    one: ("", &[]),
    shared: &[],
    stacked: &[],
};

/// Llama and most others.
pub(super) const PLAIN: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    numbered: &[],
    layers: &[ATTENTION, NORMS, FFN, PREDICTORS, ROUTER],
    experts: ExpertNames {
        one: ("mlp.experts.", PROJECTIONS),
        shared: &[
            (Role::Gate, "mlp.shared_expert.gate_proj.weight"),
            (Role::Up, "mlp.shared_expert.up_proj.weight"),
            (Role::Down, "mlp.shared_expert.down_proj.weight"),
        ],
        stacked: STACKED,
    },
    by_head: &[],
    fused: &[],
    parts: &[],
};

pub(super) const MIXTRAL: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        PREDICTORS,
        &[
            (Role::Router, "block_sparse_moe.gate.weight"),
            (Role::Router, "mlp.gate.weight"),
        ],
    ],
    experts: ExpertNames {
        one: ("block_sparse_moe.experts.", NUMBERED),
        shared: &[],
        stacked: STACKED,
    },
    ..PLAIN
};

pub(super) const PHIMOE: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        &[
            (Role::Router, "block_sparse_moe.gate.weight"),
            (Role::Router, "mlp.router.weight"),
        ],
    ],
    ..MIXTRAL
};

pub(super) const SMALL_THINKER: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        &[(Role::Router, "block_sparse_moe.primary_router.weight")],
    ],
    experts: ExpertNames {
        one: (
            "block_sparse_moe.experts.",
            &[
                (Role::Gate, "gate.weight"),
                (Role::Up, "up.weight"),
                (Role::Down, "down.weight"),
            ],
        ),
        ..NO_EXPERTS
    },
    ..PLAIN
};

pub(super) const GPT_OSS: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        &[
            (Role::Router, "mlp.router.weight"),
            (Role::RouterBias, "mlp.router.bias"),
            (Role::Sinks, "self_attn.sinks"),
            (Role::DownBias, "mlp.experts.down_proj_bias"),
        ],
    ],
    experts: ExpertNames {
        stacked: &[
            (Stack::Pairs, "mlp.experts.gate_up_proj"),
            (Stack::PairBlocks, "mlp.experts.gate_up_proj_blocks"),
            (Stack::PairBias, "mlp.experts.gate_up_proj_bias"),
            (Stack::Neurons, "mlp.experts.down_proj"),
            (Stack::DownBlocks, "mlp.experts.down_proj_blocks"),
        ],
        ..NO_EXPERTS
    },
    ..PLAIN
};

pub(super) const OLMO2: NameTable = NameTable {
    layers: &[
        ATTENTION,
        FFN,
        &[
            (Role::AttnPostNorm, "post_attention_layernorm.weight"),
            (Role::FfnPostNorm, "post_feedforward_layernorm.weight"),
        ],
    ],
    experts: NO_EXPERTS,
    ..PLAIN
};

pub(super) const GEMMA2: NameTable = NameTable {
    layers: &[ATTENTION, FFN, FOUR_NORMS],
    experts: NO_EXPERTS,
    ..PLAIN
};

/// [`FOUR_NORMS`] without those of outputs.
pub(super) const VAULT_GEMMA: NameTable = NameTable {
    layers: &[ATTENTION, FFN, &[FOUR_NORMS[0], FOUR_NORMS[2]]],
    ..GEMMA2
};

pub(super) const PHI3: NameTable = NameTable {
    layers: &[&[
        (Role::AttnNorm, "input_layernorm.weight"),
        (Role::O, "self_attn.o_proj.weight"),
        (Role::FfnNorm, "post_attention_layernorm.weight"),
        (Role::Down, "mlp.down_proj.weight"),
    ]],
    experts: NO_EXPERTS,
    fused: &[
        (Fused::Qkv, "self_attn.qkv_proj.weight"),
        (Fused::GateUp, "mlp.gate_up_proj.weight"),
    ],
    ..PLAIN
};

pub(super) const STARCODER2: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        &[
            (Role::Gate, "mlp.c_fc.weight"),
            (Role::GateBias, "mlp.c_fc.bias"),
            (Role::Down, "mlp.c_proj.weight"),
            (Role::DownBias, "mlp.c_proj.bias"),
        ],
    ],
    experts: NO_EXPERTS,
    ..PLAIN
};

pub(super) const NEMOTRON: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        &[
            (Role::Gate, "mlp.up_proj.weight"),
            (Role::GateBias, "mlp.up_proj.bias"),
            (Role::Down, "mlp.down_proj.weight"),
            (Role::DownBias, "mlp.down_proj.bias"),
        ],
    ],
    experts: NO_EXPERTS,
    ..PLAIN
};

pub(super) const OPT: NameTable = NameTable {
    layer_prefix: "model.decoder.layers.",
    globals: &[
        (Role::Embed, "model.decoder.embed_tokens.weight"),
        (Role::Positions, "model.decoder.embed_positions.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "model.decoder.final_layer_norm.weight"),
        (Role::FinalNormBias, "model.decoder.final_layer_norm.bias"),
    ],
    layers: &[
        &[
            (Role::AttnNorm, "self_attn_layer_norm.weight"),
            (Role::AttnNormBias, "self_attn_layer_norm.bias"),
            (Role::O, "self_attn.out_proj.weight"),
            (Role::OBias, "self_attn.out_proj.bias"),
            (Role::FfnNorm, "final_layer_norm.weight"),
            (Role::FfnNormBias, "final_layer_norm.bias"),
            (Role::Gate, "fc1.weight"),
            (Role::GateBias, "fc1.bias"),
            (Role::Down, "fc2.weight"),
            (Role::DownBias, "fc2.bias"),
        ],
        ATTENTION,
    ],
    experts: NO_EXPERTS,
    ..PLAIN
};

pub(super) const FALCON: NameTable = NameTable {
    layer_prefix: "transformer.h.",
    globals: &[
        (Role::Embed, "transformer.word_embeddings.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "transformer.ln_f.weight"),
        (Role::FinalNormBias, "transformer.ln_f.bias"),
    ],
    layers: &[
        NORMS,
        &[
            (Role::AttnNorm, "ln_attn.weight"),
            (Role::AttnNormBias, "ln_attn.bias"),
            (Role::FfnNorm, "ln_mlp.weight"),
            (Role::FfnNormBias, "ln_mlp.bias"),
            (Role::O, "self_attention.dense.weight"),
            (Role::Gate, "mlp.dense_h_to_4h.weight"),
            (Role::Down, "mlp.dense_4h_to_h.weight"),
        ],
    ],
    experts: NO_EXPERTS,
    fused: &[(Fused::QkvByGroup, "self_attention.query_key_value.weight")],
    ..PLAIN
};

/// Falcon 40B for writing: the names of its norms come first.
pub(super) const FALCON_TWO_NORMS: NameTable = NameTable {
    layers: &[
        &[
            (Role::AttnNorm, "ln_attn.weight"),
            (Role::AttnNormBias, "ln_attn.bias"),
            (Role::FfnNorm, "ln_mlp.weight"),
            (Role::FfnNormBias, "ln_mlp.bias"),
        ],
        FALCON.layers[1],
    ],
    ..FALCON
};

const SHARED_EXPERTS: Spellings = &[
    (Role::Gate, "mlp.shared_experts.gate_proj.weight"),
    (Role::Up, "mlp.shared_experts.up_proj.weight"),
    (Role::Down, "mlp.shared_experts.down_proj.weight"),
];

/// DeepSeek-V3's experts.
pub(super) const ROUTED: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        &[
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "mlp.gate.e_score_correction_bias"),
        ],
    ],
    experts: ExpertNames {
        shared: SHARED_EXPERTS,
        ..PLAIN.experts
    },
    ..PLAIN
};

/// [`ROUTED`] with latent attention.
pub(super) const LATENT: NameTable = NameTable {
    layers: &[NORMS, FFN, latent::HF_NAMES, ROUTED.layers[3]],
    fused: &[(Fused::LatentKeysValues, "self_attn.kv_b_proj.weight")],
    ..ROUTED
};

/// Attention of two kinds, and experts as in releases of Mixtral; transformers 5 stores them as
/// DeepSeek-V3's.
pub(super) const KIMI_LINEAR: NameTable = NameTable {
    layers: &[
        latent::HF_NAMES,
        ROUTED.layers[3],
        NORMS,
        FFN,
        kda::HF_NAMES,
        &[
            (Role::Router, "block_sparse_moe.gate.weight"),
            (
                Role::ChoiceBias,
                "block_sparse_moe.gate.e_score_correction_bias",
            ),
        ],
    ],
    experts: ExpertNames {
        shared: &[
            (
                Role::Gate,
                "block_sparse_moe.shared_experts.gate_proj.weight",
            ),
            (Role::Up, "block_sparse_moe.shared_experts.up_proj.weight"),
            (
                Role::Down,
                "block_sparse_moe.shared_experts.down_proj.weight",
            ),
            (Role::Gate, "mlp.shared_experts.gate_proj.weight"),
            (Role::Up, "mlp.shared_experts.up_proj.weight"),
            (Role::Down, "mlp.shared_experts.down_proj.weight"),
        ],
        ..MIXTRAL.experts
    },
    ..LATENT
};

/// The bias is a separate tensor, not part of the router.
pub(super) const EXAONE_MOE: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        &[
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "mlp.e_score_correction_bias"),
            (Role::ChoiceBias, "mlp.gate.e_score_correction_bias"),
        ],
    ],
    ..ROUTED
};

/// Its own names for the norms of queries and keys, the router and the shared expert.
pub(super) const HUNYUAN: NameTable = NameTable {
    layers: &[
        &[
            (Role::QNorm, "self_attn.query_layernorm.weight"),
            (Role::KNorm, "self_attn.key_layernorm.weight"),
            (Role::Router, "mlp.gate.wg.weight"),
        ],
        ATTENTION,
        NORMS,
        FFN,
    ],
    experts: ExpertNames {
        shared: SHARED_MLP,
        ..PLAIN.experts
    },
    ..PLAIN
};

const SHARED_MLP: Spellings = &[
    (Role::Gate, "mlp.shared_mlp.gate_proj.weight"),
    (Role::Up, "mlp.shared_mlp.up_proj.weight"),
    (Role::Down, "mlp.shared_mlp.down_proj.weight"),
];

/// Releases use other names than transformers.
pub(super) const HY_V3: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        FFN,
        &[
            (Role::Router, "mlp.router.gate.weight"),
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "mlp.expert_bias"),
            (Role::ChoiceBias, "mlp.e_score_correction_bias"),
        ],
    ],
    experts: ExpertNames {
        shared: &[
            (Role::Gate, "mlp.shared_mlp.gate_proj.weight"),
            (Role::Up, "mlp.shared_mlp.up_proj.weight"),
            (Role::Down, "mlp.shared_mlp.down_proj.weight"),
            (Role::Gate, "mlp.shared_experts.gate_proj.weight"),
            (Role::Up, "mlp.shared_experts.up_proj.weight"),
            (Role::Down, "mlp.shared_experts.down_proj.weight"),
        ],
        ..PLAIN.experts
    },
    ..PLAIN
};

pub(super) const MINIMAX_M2: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        &[
            (Role::Router, "block_sparse_moe.gate.weight"),
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "block_sparse_moe.e_score_correction_bias"),
            (Role::ChoiceBias, "mlp.e_score_correction_bias"),
        ],
    ],
    ..MIXTRAL
};

/// Experts are named like the dense FFN, and attention's output like that of convolutions.
pub(super) const LFM2: NameTable = NameTable {
    globals: &[
        (Role::Embed, "model.embed_tokens.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "model.embedding_norm.weight"),
    ],
    layers: &[
        &[
            (Role::AttnNorm, "operator_norm.weight"),
            (Role::O, "self_attn.out_proj.weight"),
            (Role::QNorm, "self_attn.q_layernorm.weight"),
            (Role::KNorm, "self_attn.k_layernorm.weight"),
            (Role::FfnNorm, "ffn_norm.weight"),
            (Role::Gate, "feed_forward.w1.weight"),
            (Role::Up, "feed_forward.w3.weight"),
            (Role::Down, "feed_forward.w2.weight"),
            (Role::Router, "feed_forward.gate.weight"),
            (Role::ChoiceBias, "feed_forward.expert_bias"),
        ],
        short_conv::HF_NAMES,
        ATTENTION,
    ],
    experts: ExpertNames {
        one: ("feed_forward.experts.", NUMBERED),
        shared: &[],
        stacked: &[
            (Stack::GateUp, "feed_forward.experts.gate_up_proj"),
            (Stack::One(Role::Down), "feed_forward.experts.down_proj"),
        ],
    },
    ..PLAIN
};

/// Experts as in releases and as in transformers 5. Without experts, the FFN has the name of the shared
/// one.
pub(super) const GRANITE_HYBRID: NameTable = NameTable {
    layers: &[
        ATTENTION,
        NORMS,
        mamba::HF_NAMES,
        &[
            (Role::Down, "shared_mlp.output_linear.weight"),
            (Role::Router, "block_sparse_moe.router.layer.weight"),
            (Role::Router, "block_sparse_moe.router.weight"),
        ],
    ],
    experts: ExpertNames {
        shared: &[(Role::Down, "shared_mlp.output_linear.weight")],
        stacked: &[
            (Stack::GateUp, "block_sparse_moe.input_linear.weight"),
            (
                Stack::One(Role::Down),
                "block_sparse_moe.output_linear.weight",
            ),
            (Stack::GateUp, "block_sparse_moe.experts.gate_up_proj"),
            (Stack::One(Role::Down), "block_sparse_moe.experts.down_proj"),
        ],
        ..NO_EXPERTS
    },
    fused: &[(Fused::SharedGateUp, "shared_mlp.input_linear.weight")],
    ..PLAIN
};

pub(super) const ROUTER: Spellings = &[
    (Role::Router, "mlp.gate.weight"),
    (Role::SharedGate, "mlp.shared_expert_gate.weight"),
];

/// A DeltaNet's projections in one tensor, key head by key head.
pub(super) const QWEN3_NEXT: NameTable = NameTable {
    layers: &[HF_GATED, NORMS, FFN, delta_net::HF_NAMES, ROUTER],
    fused: &[
        (Fused::GatedQ, "self_attn.q_proj.weight"),
        (Fused::DeltaQkvz, "linear_attn.in_proj_qkvz.weight"),
        (Fused::DeltaBa, "linear_attn.in_proj_ba.weight"),
    ],
    ..PLAIN
};

/// The same in separate tensors.
pub(super) const QWEN3_5: NameTable = NameTable {
    layers: &[
        HF_GATED,
        NORMS,
        FFN,
        delta_net::HF_NAMES,
        ROUTER,
        delta_net::HF_INPUTS,
    ],
    fused: &[(Fused::GatedQ, "self_attn.q_proj.weight")],
    ..PLAIN
};
