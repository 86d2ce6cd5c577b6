//! OLMo 2 and 3.

use super::{Arch, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk, Windows, hf_names};

/// Norms of outputs instead of inputs, and of whole queries and keys.
const OLMO: Family = Family {
    names: &hf_names::OLMO2,
    pre_norm: false,
    post_norm: true,
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Whole,
    kv_heads_default: true,
    ..PLAIN
};

/// `modeling_olmo2.py`. GGUF files with a window are Olmo 3.
pub(super) const OLMO2: Family = Family {
    name: "olmo2",
    class: Some("Olmo2ForCausalLM"),
    gguf: Some(Arch {
        name: "olmo2",
        windows: Windows::Pattern(4),
        windowed: Some(&OLMO3),
        reads: &["attention.sliding_window_pattern", "rope.freq_base_swa"],
        ..PLAIN_ARCH
    }),
    ..OLMO
};

/// `modeling_olmo3.py`: a window in three of four layers, whose rotary positions are not scaled.
const OLMO3: Family = Family {
    name: "olmo3",
    class: Some("Olmo3ForCausalLM"),
    gguf_as: Some("olmo2"),
    windows: Windows::PatternOf(4, 4096),
    theta: 500_000.0,
    two_ropes: true,
    quirks: &[Quirk::OneBase],
    ..OLMO
};

pub(super) const FAMILIES: [Family; 2] = [OLMO2, OLMO3];
