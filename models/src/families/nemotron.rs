//! Nemotron-H and Nemotron 3: layers of a single sublayer each.

use super::Preset::{Float, Int, Text};
use super::experts::{Dense, Experts, SIGMOID, Shared};
use super::keys::{Key, Sets};
use super::{Arch, Check, Family, FurtherTokens, PLAIN, PLAIN_ARCH, Quirk, Windows};
use super::{gguf_names, hf_names};
use crate::config::{Activation, Parallel};
use crate::mixers::mamba;
use crate::names::{ExpertNames, NameTable, Role, Stack};

/// Key of the experts' width in both formats.
const WIDTH: &str = "moe_latent_size";

/// Keys of experts in GGUF.
const EXPERT_KEYS: &[&str] = &[
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "nextn_predict_layers",
    WIDTH,
];

/// Every layer has one norm and one sublayer of any kind. Experts as in releases and as in
/// transformers 5.
const HF_NAMES: NameTable = NameTable {
    layer_prefix: "backbone.layers.",
    globals: &[
        (Role::Embed, "backbone.embeddings.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "backbone.norm_f.weight"),
    ],
    layers: &[
        mamba::NEMOTRON_NAMES,
        &[
            (Role::AttnNorm, "norm.weight"),
            (Role::Q, "mixer.q_proj.weight"),
            (Role::K, "mixer.k_proj.weight"),
            (Role::V, "mixer.v_proj.weight"),
            (Role::O, "mixer.o_proj.weight"),
            (Role::Gate, "mixer.up_proj.weight"),
            (Role::GateBias, "mixer.up_proj.bias"),
            (Role::Down, "mixer.down_proj.weight"),
            (Role::DownBias, "mixer.down_proj.bias"),
            (Role::Router, "mixer.gate.weight"),
            (Role::ChoiceBias, "mixer.gate.e_score_correction_bias"),
            (Role::ExpertsIn, "mixer.fc1_latent_proj.weight"),
            (Role::ExpertsOut, "mixer.fc2_latent_proj.weight"),
        ],
    ],
    experts: ExpertNames {
        one: (
            "mixer.experts.",
            &[
                (Role::Gate, "up_proj.weight"),
                (Role::Down, "down_proj.weight"),
            ],
        ),
        shared: &[
            (Role::Gate, "mixer.shared_experts.up_proj.weight"),
            (Role::Down, "mixer.shared_experts.down_proj.weight"),
        ],
        stacked: &[
            (Stack::One(Role::Gate), "mixer.experts.up_proj"),
            (Stack::One(Role::Down), "mixer.experts.down_proj"),
        ],
    },
    ..hf_names::PLAIN
};

const ARCH: Arch = Arch {
    name: "nemotron_h",
    names: &gguf_names::NEMOTRON_H,
    // although nothing is rotated, so that sums have the same order as in other files
    interleaved: true,
    act: Activation::Relu2,
    reads: EXPERT_KEYS,
    ..PLAIN_ARCH
};

/// `modeling_nemotron_h.py`: each layer has one norm and is Mamba-2, attention without positions, an FFN of
/// two matrices or a mixture of these. Without layers of experts, keys of experts are ignored.
const NEMOTRON_H: Family = Family {
    name: "nemotron_h",
    class: Some("NemotronHForCausalLM"),
    defaults: &[
        ("hidden_size", Int(4096)),
        ("intermediate_size", Int(21504)),
        ("num_attention_heads", Int(32)),
        ("num_key_value_heads", Int(8)),
        ("head_dim", Int(128)),
        ("max_position_embeddings", Int(4096)),
        ("layer_norm_epsilon", Float(1e-5)),
        ("mlp_hidden_act", Text("relu2")),
        ("n_routed_experts", Int(8)),
        ("num_experts_per_tok", Int(2)),
        ("moe_intermediate_size", Int(7688)),
        ("moe_shared_expert_intermediate_size", Int(7688)),
    ],
    names: &HF_NAMES,
    gguf: Some(ARCH),
    parallel: Parallel::OneNorm,
    ungated: true,
    eps: Some("layer_norm_epsilon"),
    act: "mlp_hidden_act",
    windows: Windows::None,
    further_tokens: FurtherTokens::Named(&["mtp."]),
    experts: Some(Experts {
        shared: Some(Shared::Plain("moe_shared_expert_intermediate_size")),
        dense: Dense::Sublayers,
        width: Some(WIDTH),
        optional: true,
        ..SIGMOID
    }),
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    checks: &[
        Check::Flag("use_conv_bias", true),
        Check::Flag("use_bias", false),
        Check::Flag("mamba_proj_bias", false),
        Check::Word("mamba_hidden_act", "silu"),
        Check::AtMost("time_step_min", MOST_TIME_STEP_MIN),
    ],
    reads: &["n_shared_experts", "use_bias"],
    mixers: &[&mamba::NEMOTRON_H],
    quirks: &[Quirk::Sublayers],
    ..PLAIN
};

/// `time_step_min` of every release. transformers clamps the steps of prompts to it, though not those of
/// single tokens; the releases' own code and llama.cpp do not.
const MOST_TIME_STEP_MIN: f32 = 0.001;

/// The same with experts, under llama.cpp's name.
const NEMOTRON_H_MOE: Family = Family {
    name: "nemotron_h_moe",
    class: None,
    gguf: Some(Arch {
        name: "nemotron_h_moe",
        ..ARCH
    }),
    ..NEMOTRON_H
};

pub(super) const FAMILIES: [Family; 2] = [NEMOTRON_H, NEMOTRON_H_MOE];
