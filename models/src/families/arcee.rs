//! Llama with two matrices in the FFN (Arcee), and with interleaved rotary order (Helium).

use super::keys::{Key, Sets};
use super::{Arch, Bias, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, gguf_names, hf_names};
use crate::config::Activation;

/// `modeling_arcee.py` (AFM-4.5B): ReLU² without a gate.
const ARCEE: Family = Family {
    name: "arcee",
    class: Some("ArceeForCausalLM"),
    names: &hf_names::NEMOTRON,
    gguf: Some(Arch {
        name: "arcee",
        names: &gguf_names::UNGATED,
        interleaved: true,
        act: Activation::Relu2,
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    ungated: true,
    act_default: Some("relu2"),
    kv_heads_default: true,
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    ..PLAIN
};

/// `modeling_helium.py`.
const HELIUM: Family = Family {
    name: "helium",
    class: Some("HeliumForCausalLM"),
    bias: Bias::QkvBy("attention_bias", false),
    head_dim_default: false,
    theta: 100_000.0,
    interleaved: true,
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 2] = [ARCEE, HELIUM];
