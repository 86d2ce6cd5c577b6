//! Granite.

use super::keys::{By, Key, Sets, Side};
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
            Side::or("embedding_multiplier", 1.0),
            Side::or("embedding_scale", 1.0),
        ),
        Key::new(
            Sets::ResidualScale,
            Side::or("residual_multiplier", 1.0),
            Side::or("residual_scale", 1.0),
        ),
        Key::new(
            Sets::AttentionScale,
            Side::or("attention_multiplier", 1.0),
            Side::or_kept("attention.scale"),
        ),
        Key::new(
            Sets::LogitScale,
            Side::or("logits_scaling", 1.0).by(By::Reciprocal),
            Side::or("logit_scale", 1.0).by(By::Reciprocal),
        ),
        Key::flag(Sets::FfnBias, "mlp_bias", false),
    ],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [GRANITE];
