//! Apertus.

use super::{Arch, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk};
use super::{gguf_names, hf_names};
use crate::config::Activation;
use crate::names::{NameTable, Role};

/// Its own names for the norms; the FFN's `up` is Gate.
const HF_NAMES: NameTable = NameTable {
    layers: &[
        hf_names::ATTENTION,
        &[
            (Role::AttnNorm, "attention_layernorm.weight"),
            (Role::FfnNorm, "feedforward_layernorm.weight"),
            (Role::Gate, "mlp.up_proj.weight"),
            (Role::Down, "mlp.down_proj.weight"),
        ],
    ],
    experts: hf_names::NO_EXPERTS,
    ..hf_names::PLAIN
};

/// `modeling_apertus.py`: xIELU with parameters of its own in each layer, norms of queries and keys.
const APERTUS: Family = Family {
    name: "apertus",
    class: Some("ApertusForCausalLM"),
    names: &HF_NAMES,
    gguf: Some(Arch {
        name: "apertus",
        names: &gguf_names::UNGATED,
        act: Activation::XIELU,
        ..PLAIN_ARCH
    }),
    qk_norm: QkNorm::Head,
    bias: OPTIONAL_BIAS,
    ungated: true,
    act_default: Some("xielu"),
    one_act: true,
    kv_heads_default: true,
    theta: 12_000_000.0,
    always_scaled: true,
    quirks: &[Quirk::Xielu],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [APERTUS];
