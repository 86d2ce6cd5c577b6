//! Names of attention's tensors.

use crate::role::{Role, Spellings};

/// In safetensors.
pub(crate) const HF_NAMES: Spellings = &[
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

/// Without a separate Q, which is stored with the output gates.
pub(crate) const HF_GATED: Spellings = &[
    (Role::K, "self_attn.k_proj.weight"),
    (Role::V, "self_attn.v_proj.weight"),
    (Role::O, "self_attn.o_proj.weight"),
    (Role::QNorm, "self_attn.q_norm.weight"),
    (Role::KNorm, "self_attn.k_norm.weight"),
];

/// In GGUF.
pub(crate) const GGUF_NAMES: Spellings = &[
    (Role::Q, "attn_q.weight"),
    (Role::K, "attn_k.weight"),
    (Role::V, "attn_v.weight"),
    (Role::O, "attn_output.weight"),
    (Role::QBias, "attn_q.bias"),
    (Role::KBias, "attn_k.bias"),
    (Role::VBias, "attn_v.bias"),
    (Role::OBias, "attn_output.bias"),
    (Role::QNorm, "attn_q_norm.weight"),
    (Role::KNorm, "attn_k_norm.weight"),
];

/// Without a separate Q, which is stored with the output gates.
pub(crate) const GGUF_GATED: Spellings = &[
    (Role::K, "attn_k.weight"),
    (Role::V, "attn_v.weight"),
    (Role::O, "attn_output.weight"),
    (Role::QNorm, "attn_q_norm.weight"),
    (Role::KNorm, "attn_k_norm.weight"),
];
