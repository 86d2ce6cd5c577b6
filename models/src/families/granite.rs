//! Granite.

use super::keys::{By, Key, Sets, Spelled};
use super::{Arch, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH};

/// `modeling_granite.py`: embeddings, what a layer adds and attention scores are multiplied, logits
/// are divided. All factors are 1 if absent; in GGUF, that of attention is the usual one.
const GRANITE: Family = Family {
    name: "granite",
    class: Some("GraniteForCausalLM"),
    gguf: Some(Arch {
        name: "granite",
        interleaved: true,
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    kv_heads_default: true,
    keys: &[
        Key::new(
            Sets::EmbeddingScale,
            Spelled::or("embedding_multiplier", 1.0),
            Spelled::or("embedding_scale", 1.0),
        ),
        Key::new(
            Sets::ResidualScale,
            Spelled::or("residual_multiplier", 1.0),
            Spelled::or("residual_scale", 1.0),
        ),
        Key::new(
            Sets::AttentionScale,
            Spelled::or("attention_multiplier", 1.0),
            Spelled::or_kept("attention.scale"),
        ),
        Key::new(
            Sets::LogitScale,
            Spelled::or("logits_scaling", 1.0).by(By::Reciprocal),
            Spelled::or("logit_scale", 1.0).by(By::Reciprocal),
        ),
        Key::flag(Sets::FfnBias, "mlp_bias", false),
    ],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [GRANITE];
