//! Granite 3 and 4.

use super::Preset::{Float, Int, Text};
use super::experts::{EXPERTS, Experts, Renormalise, Shared};
use super::keys::{By, Key, Sets, Spelled};
use super::{
    Arch, Check, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, Quirk, Windows, gguf_names, hf_names,
};
use crate::mixers::mamba;

const OF_EMBEDDINGS: Key = Key::new(
    Sets::EmbeddingScale,
    Spelled::or("embedding_multiplier", 1.0),
    Spelled::or("embedding_scale", 1.0),
);
const OF_LAYERS: Key = Key::new(
    Sets::ResidualScale,
    Spelled::or("residual_multiplier", 1.0),
    Spelled::or("residual_scale", 1.0),
);
const OF_SCORES: Key = Key::new(
    Sets::AttentionScale,
    Spelled::or("attention_multiplier", 1.0),
    Spelled::or_kept("attention.scale"),
);
const OF_LOGITS: Key = Key::new(
    Sets::LogitScale,
    Spelled::or("logits_scaling", 1.0).by(By::Reciprocal),
    Spelled::or("logit_scale", 1.0).by(By::Reciprocal),
);

/// `modeling_granite.py`: factors on embeddings, on each layer's outputs and on attention scores;
/// logits are divided. All factors are 1 if absent; in GGUF, the attention factor is then the usual
/// one.
const GRANITE: Family = Family {
    name: "granite",
    class: Some("GraniteForCausalLM"),
    gguf: Some(Arch {
        name: "granite",
        interleaved: true,
        rotated_by_key: true,
        // in files of Granite 4 without Mamba-2 layers
        reads: mamba::GGUF_KEYS,
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    kv_heads_default: true,
    keys: &[
        OF_EMBEDDINGS,
        OF_LAYERS,
        OF_SCORES,
        OF_LOGITS,
        Key::flag(Sets::FfnBias, "mlp_bias", false),
    ],
    ..PLAIN
};

/// `modeling_granitemoe.py` (Granite 3's 1B-A400M and 3B-A800M): Granite 3 with experts.
const GRANITE_MOE: Family = Family {
    name: "granitemoe",
    class: Some("GraniteMoeForCausalLM"),
    gguf_as: Some("granitemoe"),
    gguf: None,
    experts: Some(Experts {
        shared: None,
        ..SOFTMAX
    }),
    ..GRANITE_MOE_SHARED
};

/// `modeling_granitemoeshared.py`: with or without a shared expert. GGUF files contain either.
const GRANITE_MOE_SHARED: Family = Family {
    name: "granitemoeshared",
    class: Some("GraniteMoeSharedForCausalLM"),
    defaults: &[("shared_intermediate_size", Int(0))],
    names: &hf_names::GRANITE_HYBRID,
    gguf: Some(Arch {
        name: "granitemoe",
        interleaved: true,
        rotated_by_key: true,
        // in files of Granite 4 without Mamba-2 layers
        reads: mamba::GGUF_KEYS,
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    kv_heads_default: true,
    experts: Some(SOFTMAX),
    keys: &[OF_EMBEDDINGS, OF_LAYERS, OF_SCORES, OF_LOGITS],
    ..PLAIN
};

/// A softmax over the chosen scores, equal to the renormalised softmax over all.
const SOFTMAX: Experts = Experts {
    count: "num_local_experts",
    renormalise: Renormalise::Always,
    gguf_renormalise: true,
    shared: Some(Shared::Plain("shared_intermediate_size")),
    ..EXPERTS
};

/// `modeling_granitemoehybrid.py`: Granite 4, with or without Mamba-2 layers, with experts and a shared
/// one, or with a dense FFN of that one's size.
const GRANITE_HYBRID: Family = Family {
    name: "granitemoehybrid",
    class: Some("GraniteMoeHybridForCausalLM"),
    defaults: &[
        ("hidden_size", Int(4096)),
        ("intermediate_size", Int(11008)),
        ("num_hidden_layers", Int(32)),
        ("num_attention_heads", Int(32)),
        ("max_position_embeddings", Int(2048)),
        ("rms_norm_eps", Float(1e-6)),
        ("hidden_act", Text("silu")),
        ("num_local_experts", Int(8)),
        ("num_experts_per_tok", Int(2)),
        ("shared_intermediate_size", Int(1024)),
    ],
    names: &hf_names::GRANITE_HYBRID,
    gguf: Some(Arch {
        name: "granitehybrid",
        names: &gguf_names::GRANITE_HYBRID,
        interleaved: true,
        // in files of Bamba
        part_rotated: true,
        rotated_by_key: true,
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    act_default: Some("silu"),
    one_act: true,
    ffn: "shared_intermediate_size",
    kv_heads_default: true,
    windows: Windows::None,
    experts: Some(Experts {
        optional: true,
        ..SOFTMAX
    }),
    keys: &[OF_EMBEDDINGS, OF_LAYERS, OF_SCORES, OF_LOGITS],
    checks: &[
        Check::Flag("mamba_conv_bias", true),
        Check::Flag("mamba_proj_bias", false),
    ],
    reads: &["position_embedding_type"],
    mixers: &[&mamba::GRANITE],
    quirks: &[Quirk::RotatedByName],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 4] = [GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_HYBRID];
