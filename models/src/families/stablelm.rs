//! StableLM.

use super::{Arch, Bias, Family, PLAIN, PLAIN_ARCH, QkNorm, Quirk};
use super::{gguf_names, hf_names};
use crate::config::Parallel;
use crate::names::{NameTable, Role};

/// Norms of queries and keys in a tensor for each head.
const HF_NAMES: NameTable = NameTable {
    by_head: &[
        (Role::QNorm, "self_attn.q_layernorm.norms."),
        (Role::KNorm, "self_attn.k_layernorm.norms."),
    ],
    experts: hf_names::NO_EXPERTS,
    ..hf_names::PLAIN
};

/// `modeling_stablelm.py` (StableLM 3B, StableLM 2): LayerNorms with biases, a quarter of each head
/// rotated; the 12B has LayerNorms of heads, and one norm for attention and FFN.
const STABLELM: Family = Family {
    name: "stablelm",
    class: Some("StableLmForCausalLM"),
    names: &HF_NAMES,
    gguf: Some(Arch {
        name: "stablelm",
        names: &gguf_names::PLAIN,
        eps: "attention.layer_norm_epsilon",
        reads: &["use_parallel_residual"],
        ..PLAIN_ARCH
    }),
    layer_norm: true,
    parallel: Parallel::OneNorm,
    qk_norm: QkNorm::LayersBy("qk_layernorm"),
    bias: Bias::QkvBy("use_qkv_bias", false),
    eps: Some("layer_norm_eps"),
    rotated: Some(0.25),
    reads: &["use_parallel_residual"],
    quirks: &[
        Quirk::ParallelIf("use_parallel_residual", false),
        Quirk::Lacks(&["head_dim"]),
    ],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [STABLELM];
