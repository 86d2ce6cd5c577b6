//! Names of the tensors of Gemma 3n and 4.

use super::{gguf_names, hf_names};
use crate::names::{ExpertNames, NameTable, Role, Spellings, Stack};

const HF_GLOBALS: Spellings = &[
    (Role::Embed, "model.embed_tokens.weight"),
    (Role::Head, "lm_head.weight"),
    (Role::FinalNorm, "model.norm.weight"),
    (Role::LayerInputs, "model.embed_tokens_per_layer.weight"),
    (
        Role::LayerInputsProj,
        "model.per_layer_model_projection.weight",
    ),
    (
        Role::LayerInputsNorm,
        "model.per_layer_projection_norm.weight",
    ),
];

const GGUF_GLOBALS: Spellings = &[
    (Role::Embed, "token_embd.weight"),
    (Role::Head, "output.weight"),
    (Role::FinalNorm, "output_norm.weight"),
    (Role::LayerInputs, "per_layer_token_embd.weight"),
    (Role::LayerInputsProj, "per_layer_model_proj.weight"),
    (Role::LayerInputsNorm, "per_layer_proj_norm.weight"),
];

const HF_INPUTS: Spellings = &[
    (Role::InputGate, "per_layer_input_gate.weight"),
    (Role::InputProj, "per_layer_projection.weight"),
    (Role::InputNorm, "post_per_layer_input_norm.weight"),
];

const GGUF_INPUTS: Spellings = &[
    (Role::InputGate, "inp_gate.weight"),
    (Role::InputProj, "proj.weight"),
    (Role::InputNorm, "post_norm.weight"),
];

pub(super) const HF_GEMMA3N: NameTable = NameTable {
    globals: HF_GLOBALS,
    numbered: &[
        (Role::StreamIn, "model.altup_projections."),
        (Role::StreamOut, "model.altup_unembed_projections."),
    ],
    layers: &[
        hf_names::ATTENTION,
        hf_names::FFN,
        hf_names::FOUR_NORMS,
        HF_INPUTS,
        &[
            (Role::StreamRouterNorm, "altup.router_norm.weight"),
            (Role::StreamRouter, "altup.modality_router.weight"),
            (Role::StreamPredict, "altup.prediction_coefs.weight"),
            (Role::StreamCorrect, "altup.correction_coefs.weight"),
            (Role::StreamScale, "altup.correct_output_scale"),
            (Role::LaurelLeft, "laurel.linear_left.weight"),
            (Role::LaurelRight, "laurel.linear_right.weight"),
            (Role::LaurelNorm, "laurel.post_laurel_norm.weight"),
        ],
    ],
    experts: hf_names::NO_EXPERTS,
    ..hf_names::PLAIN
};

pub(super) const HF_GEMMA4: NameTable = NameTable {
    globals: HF_GLOBALS,
    layers: &[
        hf_names::ATTENTION,
        hf_names::FFN,
        hf_names::FOUR_NORMS,
        HF_INPUTS,
        &[
            (Role::LayerScale, "layer_scalar"),
            (Role::Router, "router.proj.weight"),
            (Role::RouterScale, "router.scale"),
            (Role::ExpertScale, "router.per_expert_scale"),
            (Role::ExpertsNorm, "pre_feedforward_layernorm_2.weight"),
            (Role::DensePostNorm, "post_feedforward_layernorm_1.weight"),
            (Role::ExpertsPostNorm, "post_feedforward_layernorm_2.weight"),
        ],
    ],
    experts: ExpertNames {
        shared: hf_names::FFN,
        stacked: &[
            (Stack::GateUp, "experts.gate_up_proj"),
            (Stack::One(Role::Down), "experts.down_proj"),
        ],
        ..hf_names::NO_EXPERTS
    },
    ..hf_names::PLAIN
};

pub(super) const GGUF_GEMMA3N: NameTable = NameTable {
    globals: GGUF_GLOBALS,
    layers: &[
        gguf_names::ATTENTION,
        gguf_names::NORMS,
        gguf_names::FFN,
        gguf_names::POST_NORMS,
        GGUF_INPUTS,
        &[
            (Role::StreamRouterNorm, "altup_router_norm.weight"),
            (Role::StreamRouter, "altup_router.weight"),
            (Role::StreamPredict, "altup_predict_coef.weight"),
            (Role::StreamCorrect, "altup_correct_coef.weight"),
            (Role::StreamScale, "altup_correct_scale.weight"),
            (Role::LaurelLeft, "laurel_l.weight"),
            (Role::LaurelRight, "laurel_r.weight"),
            (Role::LaurelNorm, "laurel_post_norm.weight"),
        ],
    ],
    experts: gguf_names::NO_EXPERTS,
    ..gguf_names::PLAIN
};

pub(super) const GGUF_GEMMA4: NameTable = NameTable {
    globals: GGUF_GLOBALS,
    layers: &[
        gguf_names::ATTENTION,
        gguf_names::NORMS,
        gguf_names::FFN,
        gguf_names::POST_NORMS,
        GGUF_INPUTS,
        &[
            (Role::LayerScale, "layer_output_scale.weight"),
            (Role::Router, "ffn_gate_inp.weight"),
            (Role::RouterScale, "ffn_gate_inp.scale"),
            (Role::ExpertScale, "ffn_down_exps.scale"),
            (Role::ExpertsNorm, "pre_ffw_norm_2.weight"),
            (Role::DensePostNorm, "post_ffw_norm_1.weight"),
            (Role::ExpertsPostNorm, "post_ffw_norm_2.weight"),
        ],
    ],
    experts: ExpertNames {
        shared: gguf_names::FFN,
        stacked: &[
            (Stack::GateUp, "ffn_gate_up_exps.weight"),
            (Stack::One(Role::Gate), "ffn_gate_exps.weight"),
            (Stack::One(Role::Up), "ffn_up_exps.weight"),
            (Stack::One(Role::Down), "ffn_down_exps.weight"),
        ],
        ..gguf_names::NO_EXPERTS
    },
    ..gguf_names::PLAIN
};
