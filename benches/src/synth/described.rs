//! Shapes given by a `config.json`, with fewer or smaller layers.

use std::mem::{Discriminant, discriminant};

use emberflow_models::config::{Activation, FfnKind, MixerKind, ModelConfig};
use emberflow_models::describe_text;
use serde_json::{Map, Value};

use super::vocab::{BOS, EOS};
use emberflow::Failure;

/// Sizes of `--small`, for the keys that a shape has.
const SMALL: [(&str, u64); 25] = [
    ("hidden_size", 256),
    ("vocab_size", 4096),
    ("intermediate_size", 128),
    ("moe_intermediate_size", 64),
    ("shared_expert_intermediate_size", 64),
    ("moe_shared_expert_intermediate_size", 128),
    ("num_experts", 16),
    ("n_routed_experts", 16),
    ("num_local_experts", 16),
    ("num_experts_per_tok", 4),
    ("top_k_experts", 4),
    ("head_dim", 64),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 2),
    ("kv_lora_rank", 128),
    ("qk_head_dim", 96),
    ("qk_nope_head_dim", 64),
    ("qk_rope_head_dim", 32),
    ("v_head_dim", 64),
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
    ("linear_key_head_dim", 32),
    ("linear_value_head_dim", 32),
    ("mamba_num_heads", 8),
    ("mamba_head_dim", 32),
];

/// The model of `text`, a `config.json`. Its tokens are those of the synthetic vocabulary, and its head is not
/// tied to the embedding: a tied one would repeat the token forever.
///
/// # Errors
/// An invalid number of layers, or one that omits a kind of layer.
pub fn config(
    name: &str,
    text: &str,
    layers: Option<u16>,
    small: bool,
) -> Result<ModelConfig, Failure> {
    let mut keys: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| Failure::usage(format!("{name}: {error}")))?;
    keys.insert("bos_token_id".into(), BOS.into());
    keys.insert("eos_token_id".into(), EOS.into());
    if small {
        shrink(&mut keys);
    }
    let whole = read(name, &keys)?;
    let Some(layers) = layers.map(u32::from).filter(|&n| n != whole.layers) else {
        return Ok(whole);
    };
    let least = least_layers(&whole);
    if !(least..whole.layers).contains(&layers) {
        return Err(Failure::usage(format!(
            "--layers {layers}: {name} has {} layers, of which the first {least} are needed for one \
             of each kind",
            whole.layers
        )));
    }
    cut(&mut keys, whole.layers as usize, layers as usize);
    read(name, &keys).map_err(|error| Failure::usage(format!("--layers {layers}: {error}")))
}

fn read(name: &str, keys: &Map<String, Value>) -> Result<ModelConfig, Failure> {
    let text = serde_json::to_string(keys).unwrap_or_default();
    let mut config = describe_text(&text, &format!("synth-{name}"))?.config;
    config.tied_head = false;
    config.add_bos = true;
    // the order of a GGUF file
    if let Some(nets) = &mut config.form.delta_net {
        nets.shape.tiled = true;
    }
    Ok(config)
}

/// Replaces the sizes of the keys by small ones.
fn shrink(keys: &mut Map<String, Value>) {
    let is = |keys: &Map<String, Value>, key: &str| keys.get(key).is_some_and(|v| !v.is_null());
    let one_each = keys.get("num_attention_heads") == keys.get("num_key_value_heads");
    for (key, size) in SMALL {
        if is(keys, key) {
            keys.insert(key.into(), size.into());
        }
    }
    if is(keys, "kv_lora_rank") {
        keys.insert("head_dim".into(), 32.into());
    }
    for (key, size) in [
        ("q_lora_rank", 128),
        ("n_groups", 2),
        ("ssm_state_size", 32),
    ] {
        if is(keys, key) {
            keys.insert(key.into(), size.into());
        }
    }
    if one_each {
        keys.insert("num_key_value_heads".into(), 4.into());
    }
    let by_layer = keys
        .get_mut("per_layer_config")
        .and_then(Value::as_object_mut);
    for of_layer in by_layer.into_iter().flat_map(Map::values_mut) {
        if let Some(of_layer) = of_layer.as_object_mut() {
            of_layer.insert("head_dim".into(), 128.into());
            of_layer.insert("num_key_value_heads".into(), 1.into());
        }
    }
}

/// Keeps the first `to` of `from` layers.
fn cut(keys: &mut Map<String, Value>, from: usize, to: usize) {
    if keys.contains_key("num_hidden_layers") {
        keys.insert("num_hidden_layers".into(), to.into());
    }
    for value in keys.values_mut() {
        if let Some(list) = value.as_array_mut().filter(|list| list.len() == from) {
            list.truncate(to);
        }
    }
    let by_layer = keys
        .get_mut("per_layer_config")
        .and_then(Value::as_object_mut);
    if let Some(by_layer) = by_layer {
        by_layer.retain(|layer, _| layer.parse().is_ok_and(|layer: usize| layer < to));
    }
}

/// Properties that distinguish kinds of layers.
fn kind(config: &ModelConfig, layer: u32) -> (Discriminant<MixerKind>, u32, bool, bool) {
    (
        discriminant(&config.mixer_of(layer)),
        config.heads_of(layer).head_dim,
        config.mixture_of(layer).is_some(),
        config.has_ffn(layer),
    )
}

/// The smallest number of first layers with one of each kind.
fn least_layers(config: &ModelConfig) -> u32 {
    let mut seen = Vec::new();
    let mut least = 1;
    for layer in 0..config.layers {
        let kind = kind(config, layer);
        if !seen.contains(&kind) {
            seen.push(kind);
            least = layer + 1;
        }
    }
    least
}

/// Name of an FFN's activation.
pub fn activation(kind: FfnKind) -> &'static str {
    match kind.activation {
        Activation::Relu2 => "relu2",
        Activation::GeluTanh => "gelu-tanh",
        Activation::Gelu => "gelu",
        Activation::Relu | Activation::FatRelu { .. } => "relu",
        // without zeros, too
        Activation::Silu
        | Activation::ClampedSilu { .. }
        | Activation::ClampedSwiglu { .. }
        | Activation::Xielu { .. } => "silu",
    }
}
