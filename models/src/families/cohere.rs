//! Cohere 1 and 2.

use super::Windows;
use super::keys::{Key, Sets, Spelled};
use super::{Arch, Check, EveryNth, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk};
use crate::config::Parallel;

const COHERE: Family = Family {
    layer_norm: true,
    norm_bias: false,
    parallel: Parallel::OneNorm,
    bias: OPTIONAL_BIAS,
    eps: Some("layer_norm_eps"),
    kv_heads_default: true,
    tied: true,
    interleaved: true,
    keys: &[Key::new(
        Sets::LogitScale,
        Spelled::or("logit_scale", 0.0625),
        Spelled::need("logit_scale"),
    )],
    ..PLAIN
};

/// `modeling_cohere.py` (Command R and R+, Aya 23): attention and FFN read the same input after one
/// LayerNorm without a bias; logits are scaled; the rotary order is interleaved; R+ has LayerNorms of
/// heads.
const COHERE1: Family = Family {
    name: "cohere",
    class: Some("CohereForCausalLM"),
    gguf: Some(Arch {
        name: "command-r",
        interleaved: true,
        eps: "attention.layer_norm_epsilon",
        ..PLAIN_ARCH
    }),
    qk_norm: QkNorm::LayersBy("use_qk_norm"),
    theta: 500_000.0,
    ..COHERE
};

/// `modeling_cohere2.py` (Command R7B and A): layers without a window are not rotated.
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
    windows: Windows::PatternOf(4, 4096),
    checks: &[Check::Words("position_embedding_type", &["rope_gptj"])],
    reads: &["position_embedding_type", "sliding_window_pattern"],
    quirks: &[Quirk::FullUnrotated],
    ..COHERE
};

pub(super) const FAMILIES: [Family; 2] = [COHERE1, COHERE2];
