//! Qwen 2 and 3, dense and with experts.

use super::experts::{Dense, EXPERTS, Experts, Shared};
use super::{Arch, Bias, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Windows};

const QWEN2: Family = Family {
    name: "qwen2",
    class: Some("Qwen2ForCausalLM"),
    gguf: Some(Arch {
        name: "qwen2",
        ..PLAIN_ARCH
    }),
    bias: Bias::Qkv,
    windows: Windows::ByLayer,
    ..PLAIN
};

const QWEN3: Family = Family {
    name: "qwen3",
    class: Some("Qwen3ForCausalLM"),
    gguf: Some(Arch {
        name: "qwen3",
        ..PLAIN_ARCH
    }),
    bias: OPTIONAL_BIAS,
    qk_norm: QkNorm::Head,
    head_dim_default: false,
    windows: Windows::ByLayer,
    ..PLAIN
};

const QWEN3_EXPERTS: Experts = Experts {
    ffn: "moe_intermediate_size",
    gguf_renormalise: true,
    dense: Dense::Steps,
    ..EXPERTS
};

const QWEN2_MOE: Family = Family {
    name: "qwen2_moe",
    class: Some("Qwen2MoeForCausalLM"),
    gguf: Some(Arch {
        name: "qwen2moe",
        ..PLAIN_ARCH
    }),
    bias: Bias::QkvBy("qkv_bias", true),
    windows: Windows::Disputed,
    experts: Some(Experts {
        shared: Some(Shared::Gated("shared_expert_intermediate_size")),
        gguf_renormalise: false,
        ..QWEN3_EXPERTS
    }),
    ..PLAIN
};

const QWEN3_MOE: Family = Family {
    name: "qwen3_moe",
    class: Some("Qwen3MoeForCausalLM"),
    gguf: Some(Arch {
        name: "qwen3moe",
        ..PLAIN_ARCH
    }),
    windows: Windows::Disputed,
    experts: Some(QWEN3_EXPERTS),
    ..QWEN3
};

pub(super) const FAMILIES: [Family; 4] = [QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE];
