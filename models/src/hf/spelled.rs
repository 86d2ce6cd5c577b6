//! Tensor names of the families that do not spell them as Llama does.

use crate::names::{ExpertNames, Fused, NameTable, Role, Spellings};

const NO_EXPERTS: ExpertNames = ExpertNames {
    one: ("", &[]),
    shared: &[],
    stacked: &[],
};

const OUTSIDE: Spellings = &[
    (Role::Embed, "model.embed_tokens.weight"),
    (Role::Head, "lm_head.weight"),
    (Role::FinalNorm, "model.norm.weight"),
    (Role::FinalNormBias, "model.norm.bias"),
];

const ATTENTION: Spellings = &[
    (Role::Q, "self_attn.q_proj.weight"),
    (Role::K, "self_attn.k_proj.weight"),
    (Role::V, "self_attn.v_proj.weight"),
    (Role::O, "self_attn.o_proj.weight"),
    (Role::QBias, "self_attn.q_proj.bias"),
    (Role::KBias, "self_attn.k_proj.bias"),
    (Role::VBias, "self_attn.v_proj.bias"),
    (Role::OBias, "self_attn.o_proj.bias"),
    (Role::QNorm, "self_attn.q_norm.weight"),
    (Role::KNorm, "self_attn.k_norm.weight"),
];

const FFN: Spellings = &[
    (Role::Gate, "mlp.gate_proj.weight"),
    (Role::Up, "mlp.up_proj.weight"),
    (Role::Down, "mlp.down_proj.weight"),
];

const NORMS_WITH_BIAS: Spellings = &[
    (Role::AttnNorm, "input_layernorm.weight"),
    (Role::AttnNormBias, "input_layernorm.bias"),
    (Role::FfnNorm, "post_attention_layernorm.weight"),
    (Role::FfnNormBias, "post_attention_layernorm.bias"),
];

const OLMO2: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    layers: &[
        ATTENTION,
        FFN,
        &[
            (Role::AttnPostNorm, "post_attention_layernorm.weight"),
            (Role::FfnPostNorm, "post_feedforward_layernorm.weight"),
        ],
    ],
    experts: NO_EXPERTS,
    fused: &[],
};

const GEMMA2: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    layers: &[
        ATTENTION,
        FFN,
        &[
            (Role::AttnNorm, "input_layernorm.weight"),
            (Role::AttnPostNorm, "post_attention_layernorm.weight"),
            (Role::FfnNorm, "pre_feedforward_layernorm.weight"),
            (Role::FfnPostNorm, "post_feedforward_layernorm.weight"),
        ],
    ],
    experts: NO_EXPERTS,
    fused: &[],
};

const PHI3: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
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
};

const STARCODER2: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    layers: &[
        ATTENTION,
        NORMS_WITH_BIAS,
        &[
            (Role::Gate, "mlp.c_fc.weight"),
            (Role::GateBias, "mlp.c_fc.bias"),
            (Role::Down, "mlp.c_proj.weight"),
            (Role::DownBias, "mlp.c_proj.bias"),
        ],
    ],
    experts: NO_EXPERTS,
    fused: &[],
};

const NEMOTRON: NameTable = NameTable {
    layer_prefix: "model.layers.",
    globals: OUTSIDE,
    layers: &[
        ATTENTION,
        NORMS_WITH_BIAS,
        &[
            (Role::Gate, "mlp.up_proj.weight"),
            (Role::GateBias, "mlp.up_proj.bias"),
            (Role::Down, "mlp.down_proj.weight"),
            (Role::DownBias, "mlp.down_proj.bias"),
        ],
    ],
    experts: NO_EXPERTS,
    fused: &[],
};

const OPT: NameTable = NameTable {
    layer_prefix: "model.decoder.layers.",
    globals: &[
        (Role::Embed, "model.decoder.embed_tokens.weight"),
        (Role::Positions, "model.decoder.embed_positions.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "model.decoder.final_layer_norm.weight"),
        (Role::FinalNormBias, "model.decoder.final_layer_norm.bias"),
    ],
    layers: &[
        ATTENTION,
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
    ],
    experts: NO_EXPERTS,
    fused: &[],
};

const FALCON: NameTable = NameTable {
    layer_prefix: "transformer.h.",
    globals: &[
        (Role::Embed, "transformer.word_embeddings.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "transformer.ln_f.weight"),
        (Role::FinalNormBias, "transformer.ln_f.bias"),
    ],
    layers: &[
        NORMS_WITH_BIAS,
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
};

/// The table of a family that has one of its own here.
pub(super) fn table_of(family: &str) -> Option<&'static NameTable> {
    Some(match family {
        "olmo2" => &OLMO2,
        "phi3" => &PHI3,
        "starcoder2" => &STARCODER2,
        "opt" => &OPT,
        "nemotron" => &NEMOTRON,
        "falcon" => &FALCON,
        "gemma2" => &GEMMA2,
        _ => return None,
    })
}
