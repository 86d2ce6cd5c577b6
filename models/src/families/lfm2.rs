//! LFM2: short convolutions between attention layers, dense and with experts.

use super::experts::{Dense, Experts, SIGMOID};
use super::{Arch, Check, Family, PLAIN, PLAIN_ARCH, QkNorm, Quirk, Windows, gguf_names, hf_names};
use crate::mixers::short_conv;

/// A dense FFN whose size is two thirds of the key's value, rounded up.
const LFM2: Family = Family {
    name: "lfm2",
    class: Some("Lfm2ForCausalLM"),
    names: &hf_names::LFM2,
    gguf: Some(Arch {
        name: "lfm2",
        names: &gguf_names::LFM2,
        ..PLAIN_ARCH
    }),
    qk_norm: QkNorm::Head,
    eps: Some("norm_eps"),
    act_default: Some("silu"),
    one_act: true,
    tied: true,
    windows: Windows::None,
    theta: 1_000_000.0,
    checks: &[Check::Flag("conv_bias", false)],
    mixers: &[&short_conv::LFM2],
    quirks: &[Quirk::Tied("tie_embedding"), Quirk::AdjustedFfn],
    ..PLAIN
};

/// Experts chosen by sigmoids and biases, after some dense layers.
const LFM2_MOE: Family = Family {
    name: "lfm2_moe",
    class: Some("Lfm2MoeForCausalLM"),
    gguf: Some(Arch {
        name: "lfm2moe",
        names: &gguf_names::LFM2,
        reads: &["leading_dense_block_count"],
        ..PLAIN_ARCH
    }),
    experts: Some(Experts {
        count: "num_experts",
        dense: Dense::First("num_dense_layers", 2),
        shared: None,
        grouped: false,
        scale: Some(("routed_scaling_factor", 1.0)),
        epsilon: 1e-6,
        ..SIGMOID
    }),
    checks: &[
        Check::Flag("conv_bias", false),
        Check::Flag("use_expert_bias", true),
    ],
    reads: &["use_expert_bias"],
    quirks: &[Quirk::Tied("tie_embedding")],
    ..LFM2
};

pub(super) const FAMILIES: [Family; 2] = [LFM2, LFM2_MOE];
