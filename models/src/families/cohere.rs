//! Cohere 2.

use super::keys::{Key, Sets, Spelled};
use super::{Arch, Check, EveryNth, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, Quirk, Windows};
use crate::config::Parallel;

/// `modeling_cohere2.py` (Command R7B and A): attention and FFN read the same input after one LayerNorm
/// without a bias; logits are scaled; the rotary order is interleaved; layers without a window are not
/// rotated.
const COHERE2: Family = Family {
    name: "cohere2",
    class: Some("Cohere2ForCausalLM"),
    gguf: Some(Arch {
        name: "cohere2",
        interleaved: true,
        eps: "attention.layer_norm_epsilon",
        windows: Windows::Pattern(4),
        unrotated: Some(EveryNth {
            first: 3,
            windowed: true,
        }),
        reads: &["attention.sliding_window_pattern"],
        ..PLAIN_ARCH
    }),
    layer_norm: true,
    norm_bias: false,
    parallel: Parallel::OneNorm,
    bias: OPTIONAL_BIAS,
    eps: Some("layer_norm_eps"),
    kv_heads_default: true,
    tied: true,
    interleaved: true,
    windows: Windows::PatternOf(4, 4096),
    keys: &[Key::new(
        Sets::LogitScale,
        Spelled::or("logit_scale", 0.0625),
        Spelled::need("logit_scale"),
    )],
    checks: &[Check::Words("position_embedding_type", &["rope_gptj"])],
    reads: &["position_embedding_type", "sliding_window_pattern"],
    quirks: &[Quirk::FullUnrotated],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [COHERE2];
