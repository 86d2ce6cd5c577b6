//! LayerNorms with biases, and two matrices in the FFN.

use super::keys::{Key, Sets};
use super::{Arch, Bias, Check, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, Quirk, Windows};
use super::{gguf_names, hf_names};
use crate::config::Activation;

const UNGATED: Family = Family {
    layer_norm: true,
    ungated: true,
    ..PLAIN
};

const UNGATED_ARCH: Arch = Arch {
    names: &gguf_names::UNGATED,
    act: Activation::Gelu,
    eps: "attention.layer_norm_epsilon",
    ..PLAIN_ARCH
};

const STARCODER2: Family = Family {
    name: "starcoder2",
    class: Some("Starcoder2ForCausalLM"),
    names: &hf_names::STARCODER2,
    gguf: Some(Arch {
        name: "starcoder2",
        act: Activation::GeluTanh,
        ..UNGATED_ARCH
    }),
    bias: Bias::AllBy("use_bias", true),
    eps: Some("norm_epsilon"),
    tied: true,
    windows: Windows::Every,
    keys: &[Key::flag(Sets::FfnBias, "use_bias", true)],
    checks: &[Check::Word("norm_type", "layer_norm")],
    reads: &["norm_type"],
    ..UNGATED
};

/// `modeling_opt.py`: learned positions; the first two rows of their table are unused. GGUF files
/// exist only from PowerInfer: llama.cpp does not support it.
const OPT: Family = Family {
    name: "opt",
    class: Some("OPTForCausalLM"),
    names: &hf_names::OPT,
    gguf: Some(Arch {
        name: "opt",
        names: &gguf_names::OPT,
        act: Activation::Relu,
        relu: true,
        usual_eps: Some(1e-5),
        ..UNGATED_ARCH
    }),
    bias: Bias::AllBy("enable_bias", true),
    learned_positions: Some(2),
    eps: None,
    act: "activation_function",
    ffn: "ffn_dim",
    tied: true,
    keys: &[Key::flag(Sets::FfnBias, "enable_bias", true)],
    checks: &[
        Check::Flag("do_layer_norm_before", true),
        Check::Flag("_remove_final_layer_norm", false),
        Check::Flag("layer_norm_elementwise_affine", true),
        Check::Width("word_embed_proj_dim"),
    ],
    quirks: &[
        Quirk::OneKvHeadEach,
        Quirk::Lacks(&[
            "head_dim",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
        ]),
    ],
    ..UNGATED
};

/// ReLU², norms stored minus one, half of each head rotated.
const NEMOTRON: Family = Family {
    name: "nemotron",
    class: Some("NemotronForCausalLM"),
    names: &hf_names::NEMOTRON,
    gguf: Some(Arch {
        name: "nemotron",
        act: Activation::Relu2,
        ..UNGATED_ARCH
    }),
    bias: OPTIONAL_BIAS,
    eps: Some("norm_eps"),
    kv_heads_default: true,
    rotated: Some(0.5),
    plus_one: true,
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    ..UNGATED
};

/// `modeling_falcon.py`: 7B, 40B and RW.
const FALCON: Family = Family {
    name: "falcon",
    class: Some("FalconForCausalLM"),
    names: &hf_names::FALCON,
    names_of_two_norms: Some(&hf_names::FALCON_TWO_NORMS),
    gguf: Some(Arch {
        name: "falcon",
        names: &gguf_names::FALCON,
        names_of_two_norms: Some(&gguf_names::FALCON_TWO_NORMS),
        ..UNGATED_ARCH
    }),
    eps: Some("layer_norm_epsilon"),
    act: "activation",
    act_default: Some("gelu"),
    ffn: "ffn_hidden_size",
    ffn_default: Some(4),
    kv_heads: "num_kv_heads",
    kv_heads_default: true,
    tied: true,
    checks: &[Check::Flag("bias", false)],
    reads: &["parallel_attn"],
    quirks: &[Quirk::Lacks(&["head_dim", "num_kv_heads"]), Quirk::Falcon],
    ..UNGATED
};

pub(super) const FAMILIES: [Family; 4] = [STARCODER2, OPT, NEMOTRON, FALCON];
