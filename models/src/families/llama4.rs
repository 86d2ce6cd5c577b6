//! Llama 4.

use super::experts::{Dense, EXPERTS, Experts, ScoringBy, Shared};
use super::{Arch, EveryNth, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk, Unrotated};
use super::{Windows, hf_names};
use crate::config::Scoring;
use crate::names::{ExpertNames, NameTable, Role, Stack};

const NAMES: NameTable = NameTable {
    layers: &[
        hf_names::ATTENTION,
        hf_names::NORMS,
        &[
            (Role::Gate, "feed_forward.gate_proj.weight"),
            (Role::Up, "feed_forward.up_proj.weight"),
            (Role::Down, "feed_forward.down_proj.weight"),
            (Role::Router, "feed_forward.router.weight"),
        ],
    ],
    experts: ExpertNames {
        one: ("", &[]),
        shared: &[
            (Role::Gate, "feed_forward.shared_expert.gate_proj.weight"),
            (Role::Up, "feed_forward.shared_expert.up_proj.weight"),
            (Role::Down, "feed_forward.shared_expert.down_proj.weight"),
        ],
        stacked: &[
            (Stack::Halves, "feed_forward.experts.gate_up_proj"),
            (Stack::Neurons, "feed_forward.experts.down_proj"),
        ],
    },
    ..hf_names::PLAIN
};

/// `modeling_llama4.py`: layers with rotary positions see the query's chunk of the text, the others all
/// of it with scaled queries; the sigmoid of an expert's score scales its input.
const LLAMA4: Family = Family {
    name: "llama4_text",
    whole: Some("llama4"),
    class: Some("Llama4ForCausalLM"),
    names: &NAMES,
    gguf: Some(Arch {
        name: "llama4",
        interleaved: true,
        // llama.cpp uses these numbers for every file
        windows: Windows::Chunks(8192),
        unrotated: Some(EveryNth {
            first: 3,
            windowed: false,
        }),
        reads: &["interleave_moe_layer_step"],
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::PlainUnless("use_qk_norm"),
    windows: Windows::Chunks(8192),
    unrotated: Some(Unrotated {
        list: "no_rope_layers",
        interval: Some(("no_rope_layer_interval", 4)),
    }),
    theta: 500_000.0,
    interleaved: true,
    experts: Some(Experts {
        count: "num_local_experts",
        scoring: ScoringBy::Always(Scoring::Sigmoid),
        scales_input: true,
        shared: Some(Shared::AsOthers),
        dense: Dense::But("moe_layers", "interleave_moe_layer_step"),
        dense_ffn: "intermediate_size_mlp",
        ..EXPERTS
    }),
    reads: &[
        "attention_chunk_size",
        "attn_scale",
        "attn_temperature_tuning",
        "no_rope_layers",
        "no_rope_layer_interval",
    ],
    quirks: &[Quirk::Temperature],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [LLAMA4];
