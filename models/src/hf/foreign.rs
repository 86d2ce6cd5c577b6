//! Keys of `config.json` that change a model's output and that no family here supports.
//!
//! Most unknown keys do not affect a decoder, so they cannot all be rejected. These keys change the
//! output of other decoders (and of variants with the same `model_type`). Values without effect are
//! accepted.

use serde_json::Value;

use crate::error::Error;
use crate::families::{Family, QkNorm, Quirk};
use crate::json::Keys;

/// Values of a foreign key without effect; null never has one.
#[derive(Clone, Copy)]
enum Harmless {
    /// None.
    Nothing,
    /// `false`, 0 and an empty list.
    Off,
    /// 1.
    One,
    /// 0 and 1.
    AtMostOne,
    /// `true`.
    On,
    /// One of these words.
    Words(&'static [&'static str]),
}

use Harmless::{AtMostOne, Nothing, Off, On, One, Words};

const FOREIGN: [(&str, Harmless); 68] = [
    // attention: masks, scores, positions
    ("attention_chunk_size", Nothing),
    ("attn_logit_softcapping", Off),
    ("attention_multiplier", Nothing),
    ("attn_scale", Nothing),
    ("attn_temperature_tuning", Off),
    ("query_pre_attn_scalar", Nothing),
    ("interleaved_sliding_window", Off),
    ("sliding_window_pattern", Off),
    ("is_causal", On),
    ("use_bidirectional_attention", Off),
    ("use_logn_attn", Off),
    ("clip_qkv", Nothing),
    ("alibi", Off),
    ("use_alibi", Off),
    ("position_embedding_type", Words(&["rope", "rotary"])),
    ("no_rope_layers", Off),
    ("no_rope_layer_interval", Off),
    ("use_dynamic_ntk", Off),
    ("use_mrope", Off),
    ("rope_interleave", Off),
    ("rope_interleaved", Off),
    ("rope_traditional", Off),
    ("rotary_pct", One),
    ("rope_pct", One),
    ("rotary_percentage", One),
    ("kv_lora_rank", Off),
    ("q_lora_rank", Off),
    ("num_kv_shared_layers", Off),
    ("is_encoder_decoder", Off),
    ("add_cross_attention", Off),
    // the residual stream and the head
    ("use_parallel_residual", Off),
    ("parallel_attn", Off),
    ("embedding_multiplier", One),
    ("residual_multiplier", One),
    ("scale_emb", One),
    ("scale_depth", Nothing),
    ("mup_enabled", Off),
    ("logit_scale", One),
    ("logits_scaling", One),
    ("final_logit_softcapping", Off),
    ("lm_head_bias", Off),
    // norms and the FFN
    (
        "norm_type",
        Words(&["rms", "rmsnorm", "rms_norm", "RMSNorm"]),
    ),
    ("n_routed_experts", AtMostOne),
    ("moe_latent_size", Nothing),
    ("n_shared_experts", Off),
    ("num_shared_experts", Off),
    ("first_k_dense_replace", Off),
    ("n_group", AtMostOne),
    ("topk_group", AtMostOne),
    ("routed_scaling_factor", One),
    ("scoring_func", Words(&["softmax"])),
    ("topk_method", Words(&["greedy"])),
    ("moe_layer_freq", One),
    ("interleave_moe_layer_step", One),
    ("moe_primary_router_apply_softmax", Nothing),
    ("moe_num_primary_experts", AtMostOne),
    ("moe_layer_layout", Nothing),
    ("moe_enable_secondary_experts", Off),
    ("moe_num_secondary_experts", Off),
    ("moe_shared_primary_experts", Off),
    ("rope_layout", Nothing),
    ("sliding_window_layout", Nothing),
    ("swiglu_limit", Nothing),
    ("swiglu_alpha", Nothing),
    ("num_zero_experts", Off),
    ("use_expert_bias", Off),
    ("mlp_bias", Off),
    ("use_bias", Off),
];

/// The same, for a family without experts.
const OF_EXPERTS: [(&str, Harmless); 2] =
    [("num_experts", AtMostOne), ("num_local_experts", AtMostOne)];

impl Harmless {
    fn is(self, value: &Value) -> bool {
        let number = value.as_f64();
        match self {
            Nothing => false,
            Off => {
                value.as_bool() == Some(false)
                    || number == Some(0.0)
                    || value.as_array().is_some_and(Vec::is_empty)
            }
            One => number == Some(1.0),
            AtMostOne => number == Some(0.0) || number == Some(1.0),
            On => value.as_bool() == Some(true),
            Words(words) => value.as_str().is_some_and(|word| words.contains(&word)),
        }
    }
}

/// Rejects a key that would change the output.
pub(super) fn refuse(keys: &Keys, family: &Family) -> Result<(), Error> {
    const WHY: &str = "it changes what a model computes, and is not implemented for this family";
    let experts = OF_EXPERTS.iter().filter(|_| family.experts.is_none());
    let foreign = (FOREIGN.iter()).filter(|(key, _)| !family.reads(key));
    for &(key, harmless) in foreign.chain(experts) {
        if keys.get(key).is_some_and(|value| !harmless.is(value)) {
            return Err(keys.unsupported(key, WHY));
        }
    }
    for key in ["qk_norm", "use_qk_norm", "qk_layernorm"] {
        let normed = family.qk_norm != QkNorm::No || family.reads(key);
        if keys.get(key).is_some_and(|value| !Off.is(value)) && !normed {
            return Err(keys.unsupported(key, WHY));
        }
    }
    let act = keys.str("hidden_act")?;
    let other = keys.str("hidden_activation")?;
    let meant = |name| match name {
        "gelu" if family.has(Quirk::TanhGelu) => "gelu_pytorch_tanh",
        name => name,
    };
    if let (Some(act), Some(other)) = (act, other)
        && meant(act) != meant(other)
    {
        return Err(keys.bad("hidden_activation", &format!("{act:?}, as hidden_act")));
    }
    Ok(())
}
