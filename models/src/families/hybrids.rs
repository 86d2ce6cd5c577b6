//! Hybrids of attention and recurrent mixers: Bamba, Falcon-H1, OLMo Hybrid, Jamba.

use super::experts::{Dense, EXPERTS, Experts};
use super::keys::{Key, Sets, Spelled};
use super::{
    Arch, Check, Family, OPTIONAL_BIAS, PLAIN, PLAIN_ARCH, QkNorm, Quirk, Windows, gguf_names,
    hf_names,
};
use crate::mixers::{delta_net, mamba, mamba1};
use crate::names::{ExpertNames, NameTable, Role, Spellings};

/// Norms and FFN of a layer.
const FEED_FORWARD: Spellings = &[
    (Role::AttnNorm, "input_layernorm.weight"),
    (Role::FfnNorm, "pre_ff_layernorm.weight"),
    (Role::Gate, "feed_forward.gate_proj.weight"),
    (Role::Up, "feed_forward.up_proj.weight"),
    (Role::Down, "feed_forward.down_proj.weight"),
    (Role::GateBias, "feed_forward.gate_proj.bias"),
    (Role::UpBias, "feed_forward.up_proj.bias"),
    (Role::DownBias, "feed_forward.down_proj.bias"),
];

const NAMES: NameTable = NameTable {
    globals: &[
        (Role::Embed, "model.embed_tokens.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "model.final_layernorm.weight"),
    ],
    layers: &[hf_names::ATTENTION, FEED_FORWARD, mamba::HF_NAMES],
    experts: hf_names::NO_EXPERTS,
    ..hf_names::PLAIN
};

/// `modeling_bamba.py`: Mamba-2, and attention in the listed layers, which rotates half of each head.
const BAMBA: Family = Family {
    name: "bamba",
    class: Some("BambaForCausalLM"),
    names: &NAMES,
    gguf_as: Some("granitehybrid"),
    bias: OPTIONAL_BIAS,
    act_default: Some("silu"),
    one_act: true,
    windows: Windows::None,
    rotated: Some(0.5),
    keys: &[Key::flag(Sets::FfnBias, "mlp_bias", false)],
    checks: &[
        Check::Flag("mamba_conv_bias", true),
        Check::Flag("mamba_proj_bias", false),
        // the class takes no other from here
        Check::Number("partial_rotary_factor", 0.5),
    ],
    mixers: &[&mamba::BAMBA],
    ..PLAIN
};

/// `modeling_falcon_h1.py`: attention and Mamba-2 beside each other in every layer.
const FALCON_H1: Family = Family {
    name: "falcon_h1",
    class: Some("FalconH1ForCausalLM"),
    names: &NAMES,
    gguf: Some(Arch {
        name: "falcon-h1",
        names: &NameTable {
            layers: &[
                gguf_names::ATTENTION,
                gguf_names::NORMS,
                gguf_names::FFN,
                mamba::GGUF_NAMES,
                // spelled so by the converter
                &[(Role::FfnNorm, "ffn_norm")],
            ],
            experts: gguf_names::NO_EXPERTS,
            ..gguf_names::PLAIN
        },
        ..PLAIN_ARCH
    }),
    act_default: Some("silu"),
    one_act: true,
    windows: Windows::None,
    keys: &[
        Key::new(
            Sets::EmbeddingScale,
            Spelled::or("embedding_multiplier", 1.0),
            Spelled::NONE,
        ),
        Key::new(
            Sets::LogitScale,
            Spelled::or("lm_head_multiplier", 1.0),
            Spelled::NONE,
        ),
    ],
    checks: &[
        Check::Flag("mamba_conv_bias", true),
        Check::Flag("mamba_proj_bias", false),
        Check::Flag("projectors_bias", false),
    ],
    mixers: &[&mamba::FALCON_H1],
    quirks: &[Quirk::Gains],
    ..PLAIN
};

/// Names in releases and in transformers 5. The second norm of a layer is that before its FFN, or that of attention's
/// output.
const OLMO_HYBRID_NAMES: NameTable = NameTable {
    layers: &[
        hf_names::ATTENTION,
        hf_names::NORMS,
        hf_names::FFN,
        &[
            (Role::AttnPostNorm, "post_attention_layernorm.weight"),
            (Role::FfnPostNorm, "post_feedforward_layernorm.weight"),
            (Role::AttnNorm, "attention_layer_norm.weight"),
            (Role::FfnNorm, "feedforward_layer_norm.weight"),
        ],
        delta_net::OLMO_NAMES,
    ],
    experts: hf_names::NO_EXPERTS,
    parts: delta_net::OLMO_PARTS,
    ..hf_names::PLAIN
};

/// `modeling_olmo_hybrid.py`: gated DeltaNets between layers of Olmo 2's attention.
const OLMO_HYBRID: Family = Family {
    name: "olmo_hybrid",
    class: Some("OlmoHybridForCausalLM"),
    names: &OLMO_HYBRID_NAMES,
    bias: OPTIONAL_BIAS,
    act_default: Some("silu"),
    one_act: true,
    qk_norm: QkNorm::Whole,
    kv_heads_default: true,
    windows: Windows::None,
    mixers: &[&delta_net::OLMO],
    quirks: &[Quirk::LateNorms, Quirk::NoPadding],
    ..PLAIN
};

/// `modeling_jamba.py`: Mamba-1, periodic layers of attention without positions, and periodic layers of experts.
const JAMBA: Family = Family {
    name: "jamba",
    class: Some("JambaForCausalLM"),
    names: &NameTable {
        layers: &[
            hf_names::ATTENTION,
            FEED_FORWARD,
            mamba1::HF_NAMES,
            mamba::HF_NAMES,
            &[(Role::Router, "feed_forward.router.weight")],
        ],
        experts: ExpertNames {
            one: ("feed_forward.experts.", hf_names::PROJECTIONS),
            shared: &[],
            stacked: hf_names::LFM2.experts.stacked,
        },
        ..NAMES
    },
    gguf: Some(Arch {
        name: "jamba",
        names: &NameTable {
            layers: &[
                gguf_names::ATTENTION,
                gguf_names::NORMS,
                gguf_names::FFN,
                gguf_names::ROUTER,
                mamba1::GGUF_NAMES,
                mamba::GGUF_NAMES,
            ],
            ..gguf_names::PLAIN
        },
        ..PLAIN_ARCH
    }),
    act_default: Some("silu"),
    one_act: true,
    windows: Windows::None,
    experts: Some(Experts {
        dense: Dense::Periodic([("expert_layer_period", 2), ("expert_layer_offset", 1)]),
        optional: true,
        ..EXPERTS
    }),
    checks: &[
        Check::Flag("mamba_conv_bias", true),
        Check::Flag("mamba_proj_bias", false),
        // the class ignores this key
        Check::Flag("norm_topk_prob", false),
    ],
    mixers: &[&mamba1::JAMBA],
    quirks: &[Quirk::Unrotated],
    ..PLAIN
};

pub(super) const FAMILIES: [Family; 4] = [BAMBA, FALCON_H1, OLMO_HYBRID, JAMBA];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{Named, TensorId};

    #[test]
    fn parts_of_a_delta_net_have_numbers() {
        let parse = |rest: &str| OLMO_HYBRID_NAMES.parse(&format!("model.layers.5.{rest}"), 1);
        for (rest, role, expert) in [
            ("linear_attn.q_proj.weight", Role::DeltaIn, 0),
            ("linear_attn.v_proj.weight", Role::DeltaIn, 2),
            ("linear_attn.conv1d.weight", Role::DeltaConv, 0),
            ("linear_attn.k_conv1d.weight", Role::DeltaConv, 1),
            ("attention_layer_norm.weight", Role::AttnNorm, 0),
        ] {
            let expected = TensorId {
                role,
                layer: 5,
                expert,
            };
            assert_eq!(parse(rest), Some(Named::One(expected)), "{rest}");
        }
    }
}
