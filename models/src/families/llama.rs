//! Llama, and families that differ from it in a few keys.

use super::experts::{EXPERTS, Experts, Renormalise};
use super::hf_names;
use super::keys::{By, Key, Sets, Spelled};
use super::{
    Arch, Bias, Check, EveryNth, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, Quirk, Unrotated,
};
use super::{Windows, gguf_names};
use crate::names::{NameTable, Role};

/// Llama's own architecture; Mistral's windows apply to all layers.
const ARCH: Arch = Arch {
    name: "llama",
    interleaved: true,
    windows: Windows::Every,
    ..PLAIN_ARCH
};

const LLAMA: Family = Family {
    name: "llama",
    class: Some("LlamaForCausalLM"),
    gguf: Some(ARCH),
    bias: OPTIONAL_BIAS,
    kv_heads_default: true,
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    ..PLAIN
};

const MISTRAL: Family = Family {
    name: "mistral",
    // Mistral Small 3
    whole: Some("mistral3"),
    class: Some("MistralForCausalLM"),
    gguf_as: Some("llama"),
    windows: Windows::Every,
    ..PLAIN
};

/// `modeling_ministral3.py`: YaRN, and queries scaled by position.
const MINISTRAL3: Family = Family {
    name: "ministral3",
    whole: Some("mistral3"),
    gguf: Some(Arch {
        name: "mistral3",
        reads: &[
            "attention.temperature_scale",
            "rope.scaling.yarn_log_multiplier",
        ],
        ..ARCH
    }),
    always_scaled: true,
    quirks: &[Quirk::QueryScale],
    class: Some("Ministral3ForCausalLM"),
    gguf_as: None,
    ..MISTRAL
};

/// ReLU on gate and up (Bamboo). PowerInfer's files use another architecture.
const BAMBOO: Family = Family {
    name: "bamboo",
    class: Some("BambooForCausalLM"),
    gguf: Some(Arch {
        name: "bamboo",
        relu: true,
        ..ARCH
    }),
    gguf_as: Some("llama"),
    relu_on_up: true,
    windows: Windows::Every,
    ..PLAIN
};

const MIXTRAL: Family = Family {
    name: "mixtral",
    class: Some("MixtralForCausalLM"),
    names: &hf_names::MIXTRAL,
    gguf_as: Some("llama"),
    windows: Windows::Every,
    theta: 1_000_000.0,
    experts: Some(Experts {
        count: "num_local_experts",
        renormalise: Renormalise::Always,
        gguf_renormalise: true,
        ..EXPERTS
    }),
    ..PLAIN
};

const TURBO_SPARSE_MIXTRAL: Family = Family {
    name: "turbosparsemixtral",
    class: Some("TurboSparseMixtralForCausalLM"),
    relu_on_up: true,
    ..MIXTRAL
};

/// No rotary positions in every fourth layer.
const SMOLLM3: Family = Family {
    name: "smollm3",
    class: Some("SmolLM3ForCausalLM"),
    gguf: Some(Arch {
        name: "smollm3",
        interleaved: true,
        // in every release
        unrotated: Some(EveryNth {
            first: 3,
            windowed: false,
        }),
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    tied: true,
    theta: 2_000_000.0,
    windows: Windows::Unrotated,
    unrotated: Some(Unrotated {
        list: "no_rope_layers",
        interval: Some(("no_rope_layer_interval", 4)),
    }),
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    reads: &["no_rope_layers", "no_rope_layer_interval"],
    quirks: &[Quirk::NoPadding],
    ..PLAIN
};

/// `modeling_minicpm.py` of openbmb's releases. GGUF files without the keys are refused: programs
/// once disagreed on the values.
const MINICPM: Family = Family {
    name: "minicpm",
    class: Some("MiniCPMForCausalLM"),
    gguf: Some(Arch {
        name: "minicpm",
        interleaved: true,
        ..PLAIN_ARCH
    }),
    kv_heads_default: true,
    tied: true,
    keys: &[
        Key::new(
            Sets::EmbeddingScale,
            Spelled::need("scale_emb"),
            Spelled::need("embedding_scale"),
        ),
        Key::new(
            Sets::ResidualScale,
            Spelled::need("scale_depth").by(By::OverRootLayers),
            Spelled::need("residual_scale"),
        ),
        Key::new(
            Sets::LogitScale,
            Spelled::need("dim_model_base").by(By::OverWidth),
            Spelled::need("logit_scale").by(By::Reciprocal),
        ),
    ],
    ..PLAIN
};

/// `modeling_seed_oss.py`: biases on queries, keys and values.
const SEED_OSS: Family = Family {
    name: "seed_oss",
    class: Some("SeedOssForCausalLM"),
    gguf: Some(Arch {
        name: "seed_oss",
        // the norm before the FFN is named after the attention before it
        names: &NameTable {
            layers: &[
                gguf_names::ATTENTION,
                gguf_names::FFN,
                &[
                    (Role::AttnNorm, "attn_norm.weight"),
                    (Role::FfnNorm, "post_attention_norm.weight"),
                ],
            ],
            experts: gguf_names::NO_EXPERTS,
            ..gguf_names::PLAIN
        },
        ..PLAIN_ARCH
    }),
    bias: Bias::QkvBy("attention_bias", true),
    head_dim_default: false,
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    checks: &[Check::Flag("attention_out_bias", false)],
    ..PLAIN
};

/// Fused projections, LongRoPE, a window in every layer.
const PHI3: Family = Family {
    name: "phi3",
    class: Some("Phi3ForCausalLM"),
    names: &hf_names::PHI3,
    gguf: Some(Arch {
        name: "phi3",
        names: &gguf_names::PHI3,
        windows: Windows::Every,
        reads: &["rope.scaling.attn_factor"],
        ..PLAIN_ARCH
    }),
    bias: Bias::No,
    kv_heads_default: true,
    windows: Windows::Every,
    rotated: Some(1.0),
    quirks: &[Quirk::NoPadding, Quirk::OriginalContextBeside],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 10] = [
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    BAMBOO,
    MIXTRAL,
    TURBO_SPARSE_MIXTRAL,
    SMOLLM3,
    MINICPM,
    SEED_OSS,
    PHI3,
];
