//! A configuration as part of a checkpoint's fingerprint.

use crate::config::{Form, ModelConfig};

/// Parts of a form that were added later, with their defaults, besides mixers.
const LATER: [&str; 30] = [
    ", local_rope: None",
    ", value_norm: false",
    ", shared_kv: 0",
    ", gate_top: []",
    ", streams: None",
    ", output_gate: false",
    ", query_scale: None",
    ", without_mixer: []",
    ", without_ffn: []",
    ", rotated_qk_norm: false",
    ", global_heads: None",
    ", shared_kv_ffn: 0",
    ", layer_scale: false",
    ", layer_inputs: None",
    ", hyper: None",
    ", ngrams: None",
    // of a DeltaNet
    ", sigmoid_gate: false",
    ", plain_qk_norm: false",
    ", qk_layer_norms: false",
    ", activations: []",
    ", chunked: false",
    // of latent attention
    ", gated: false",
    // of Kimi Delta Attention
    ", direct: false",
    ", bound: None",
    // of a query scale
    ", unrotated: false",
    ", late_norms: false",
    // of a DeltaNet
    ", signed: false",
    ", norm_eps: None",
    // of Mamba-2
    ", unnormed: false",
    ", beside: false",
];

/// A configuration as part of a fingerprint. Fields added later count only if they are set, so that
/// statistics that refer to a fingerprint stay valid.
pub(super) fn of(config: &ModelConfig) -> String {
    let plain_form = format!(", form: {:?}", Form::default()).replace(", head_bias: false", "");
    let mixers = (Form::MIXERS.iter()).map(|field| format!(", {field}: None"));
    let later: Vec<String> = mixers.chain(LATER.map(str::to_owned)).collect();
    let plain_form = (later.iter()).fold(plain_form, |text, unset| text.replace(unset, ""));
    let unset = [
        ", mixture: None",
        ", qk_norm_whole: false",
        ", clip_qkv: None",
        ", scoring: Softmax",
        ", early_router: false",
        ", router_bias: false",
        ", jitter: 0.0",
        ", long_attention_factor: None",
        ", ungated: false",
        ", shared_is_plain: false",
        ", choice_bias: false",
        ", groups: None",
        ", by_best: false",
        ", epsilon: 0.0",
        ", parallel_dense: false",
        ", scale: 1.0",
        ", scales_input: false",
        ", width: 0",
        ", by_token: []",
        ", head_bias: false",
    ];
    let later = later.iter().map(String::as_str);
    let unset = unset.into_iter().chain(later).chain([plain_form.as_str()]);
    let text = format!("{config:?}");
    unset.fold(text, |text, unset| text.replace(unset, ""))
}
