//! GLM 4 without experts.

use super::{Arch, Bias, Check, Family, PLAIN, PLAIN_ARCH, Quirk};
use super::{gguf_names, hf_names};
use crate::names::{Fused, NameTable, Role, Spellings};

const HF_DOWN: Spellings = &[(Role::Down, "mlp.down_proj.weight")];

/// Gate and Up in one matrix.
const HF_GLM: NameTable = NameTable {
    layers: &[hf_names::ATTENTION, hf_names::NORMS, HF_DOWN],
    experts: hf_names::NO_EXPERTS,
    fused: &[(Fused::GateUp, "mlp.gate_up_proj.weight")],
    ..hf_names::PLAIN
};

/// The norm before the FFN is named after the attention before it.
const HF_GLM4: NameTable = NameTable {
    layers: &[
        hf_names::ATTENTION,
        HF_DOWN,
        &[
            (Role::AttnNorm, "input_layernorm.weight"),
            (Role::AttnPostNorm, "post_self_attn_layernorm.weight"),
            (Role::FfnNorm, "post_attention_layernorm.weight"),
            (Role::FfnPostNorm, "post_mlp_layernorm.weight"),
        ],
    ],
    ..HF_GLM
};

/// Projections of attention in separate tensors, or, in files from the first releases, in one.
const GGUF: NameTable = NameTable {
    layers: &[
        gguf_names::ATTENTION,
        gguf_names::NORMS,
        gguf_names::POST_NORMS,
        &[(Role::Down, "ffn_down.weight")],
    ],
    experts: gguf_names::NO_EXPERTS,
    fused: &[
        (Fused::GateUp, "ffn_up.weight"),
        (Fused::Qkv, "attn_qkv.weight"),
        (Fused::QkvBias, "attn_qkv.bias"),
    ],
    ..gguf_names::PLAIN
};

/// `modeling_glm.py` (GLM-4-9B): the first half of each head is rotated, in interleaved order.
const GLM: Family = Family {
    name: "glm",
    class: Some("GlmForCausalLM"),
    names: &HF_GLM,
    gguf: Some(Arch {
        name: "chatglm",
        names: &GGUF,
        interleaved: true,
        ..PLAIN_ARCH
    }),
    bias: Bias::QkvBy("attention_bias", true),
    head_dim_default: false,
    rotated: Some(0.5),
    interleaved: true,
    checks: &[Check::NotNull("partial_rotary_factor")],
    quirks: &[Quirk::NoPadding],
    ..PLAIN
};

/// `modeling_glm4.py` (GLM-4-0414, GLM-Z1): further norms after attention and FFN.
const GLM4: Family = Family {
    name: "glm4",
    class: Some("Glm4ForCausalLM"),
    names: &HF_GLM4,
    gguf: Some(Arch {
        name: "glm4",
        names: &GGUF,
        interleaved: true,
        ..PLAIN_ARCH
    }),
    post_norm: true,
    ..GLM
};

pub(super) const FAMILIES: [Family; 2] = [GLM, GLM4];
