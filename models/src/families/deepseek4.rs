//! DeepSeek-V4.

use super::experts::{Experts, Renormalise, SIGMOID, ScoringBy};
use super::{Arch, Check, Family, FurtherTokens, PLAIN, PLAIN_ARCH, Quirk, Windows};
use super::{gguf_names, hf_names};
use crate::config::Scoring;
use crate::mixers::pooled;
use crate::names::{ExpertNames, NameTable, Role};

/// `modeling_deepseek_v4.py`: attention over a window and over pools, hyper-connections, the first layers'
/// experts by token.
const DEEPSEEK_V4: Family = Family {
    name: "deepseek_v4",
    class: Some("DeepseekV4ForCausalLM"),
    names: &NAMES,
    gguf: Some(Arch {
        name: "deepseek4",
        names: &GGUF_NAMES,
        windows: Windows::Every,
        ..PLAIN_ARCH
    }),
    rotated: Some(0.125),
    sinks: true,
    act_default: Some("silu"),
    one_act: true,
    head_dim_default: false,
    // weights that predict further tokens, and indexers, which choose everything in contexts that are run
    further_tokens: FurtherTokens::Named(&["mtp.", ".indexer", ".nextn."]),
    experts: Some(Experts {
        renormalise: Renormalise::Always,
        scoring: ScoringBy::Always(Scoring::SqrtSoftplus),
        grouped: false,
        scale: Some(("routed_scaling_factor", 1.5)),
        dense: super::Dense::Never,
        by_token: Some(("mlp_layer_types", "num_hash_layers", 3)),
        ..SIGMOID
    }),
    checks: &[
        Check::Words("scoring_func", &["sqrtsoftplus"]),
        Check::NotNull("scoring_func"),
        Check::Words("topk_method", &["noaux_tc"]),
        Check::Flag("norm_topk_prob", true),
        Check::Flag("mlp_bias", false),
        Check::One("n_shared_experts"),
        Check::Words("expert_dtype", &["fp4"]),
    ],
    reads: &[
        "q_lora_rank",
        "scoring_func",
        "topk_method",
        "swiglu_limit",
        "mlp_bias",
    ],
    mixers: &[&pooled::DEEPSEEK4],
    quirks: &[Quirk::DeepSeek4],
    ..PLAIN
};

/// Names of releases, as transformers writes them, and as it holds them; without `model.` before them.
const NAMES: NameTable = NameTable {
    layer_prefix: "layers.",
    globals: &[
        (Role::Embed, "embed.weight"),
        (Role::Embed, "embed_tokens.weight"),
        (Role::Head, "head.weight"),
        (Role::Head, "lm_head.weight"),
        (Role::FinalNorm, "norm.weight"),
        (Role::HyperHeadMix, "hc_head_fn"),
        (Role::HyperHeadBase, "hc_head_base"),
        (Role::HyperHeadScale, "hc_head_scale"),
        (Role::HyperHeadMix, "hc_head.hc_fn"),
        (Role::HyperHeadBase, "hc_head.hc_base"),
        (Role::HyperHeadScale, "hc_head.hc_scale"),
    ],
    layers: &[
        pooled::HF_NAMES,
        pooled::CLASS_NAMES,
        &[
            (Role::AttnNorm, "attn_norm.weight"),
            (Role::FfnNorm, "ffn_norm.weight"),
            (Role::HyperMixerMix, "hc_attn_fn"),
            (Role::HyperMixerBase, "hc_attn_base"),
            (Role::HyperMixerScale, "hc_attn_scale"),
            (Role::HyperFfnMix, "hc_ffn_fn"),
            (Role::HyperFfnBase, "hc_ffn_base"),
            (Role::HyperFfnScale, "hc_ffn_scale"),
            (Role::Router, "ffn.gate.weight"),
            (Role::ChoiceBias, "ffn.gate.bias"),
            (Role::TokenExperts, "ffn.gate.tid2eid"),
        ],
        &[
            (Role::AttnNorm, "input_layernorm.weight"),
            (Role::FfnNorm, "post_attention_layernorm.weight"),
            (Role::HyperMixerMix, "attn_hc.fn"),
            (Role::HyperMixerBase, "attn_hc.base"),
            (Role::HyperMixerScale, "attn_hc.scale"),
            (Role::HyperFfnMix, "ffn_hc.fn"),
            (Role::HyperFfnBase, "ffn_hc.base"),
            (Role::HyperFfnScale, "ffn_hc.scale"),
            (Role::Router, "mlp.gate.weight"),
            (Role::ChoiceBias, "mlp.gate.e_score_correction_bias"),
            (Role::TokenExperts, "mlp.gate.tid2eid"),
        ],
    ],
    experts: ExpertNames {
        one: ("ffn.experts.", hf_names::NUMBERED),
        shared: &[
            (Role::Gate, "ffn.shared_experts.w1.weight"),
            (Role::Up, "ffn.shared_experts.w3.weight"),
            (Role::Down, "ffn.shared_experts.w2.weight"),
            (Role::Gate, "mlp.shared_experts.gate_proj.weight"),
            (Role::Up, "mlp.shared_experts.up_proj.weight"),
            (Role::Down, "mlp.shared_experts.down_proj.weight"),
        ],
        stacked: hf_names::STACKED,
    },
    ..hf_names::PLAIN
};

/// Those of llama.cpp.
const GGUF_NAMES: NameTable = NameTable {
    globals: &[
        (Role::Embed, "token_embd.weight"),
        (Role::Head, "output.weight"),
        (Role::FinalNorm, "output_norm.weight"),
        (Role::HyperHeadMix, "output_hc_fn.weight"),
        (Role::HyperHeadBase, "output_hc_base.weight"),
        (Role::HyperHeadScale, "output_hc_scale.weight"),
    ],
    layers: &[
        pooled::GGUF_NAMES,
        &[
            (Role::AttnNorm, "attn_norm.weight"),
            (Role::FfnNorm, "ffn_norm.weight"),
            (Role::HyperMixerMix, "hc_attn_fn.weight"),
            (Role::HyperMixerBase, "hc_attn_base.weight"),
            (Role::HyperMixerScale, "hc_attn_scale.weight"),
            (Role::HyperFfnMix, "hc_ffn_fn.weight"),
            (Role::HyperFfnBase, "hc_ffn_base.weight"),
            (Role::HyperFfnScale, "hc_ffn_scale.weight"),
            (Role::Router, "ffn_gate_inp.weight"),
            (Role::ChoiceBias, "exp_probs_b.bias"),
            (Role::TokenExperts, "ffn_gate_tid2eid.weight"),
        ],
    ],
    experts: ExpertNames {
        shared: gguf_names::PLAIN.experts.shared,
        stacked: gguf_names::PLAIN.experts.stacked,
        ..gguf_names::NO_EXPERTS
    },
    ..gguf_names::PLAIN
};

pub(super) const FAMILIES: [Family; 1] = [DEEPSEEK_V4];
