//! The text model of a `config.json` that describes several, and the keys that releases leave out.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::json::Keys;
use crate::error::Error;

/// Models of several kinds of input, and their text models.
const PARTS: [(&str, &str); 2] = [("gemma3", "gemma3_text"), ("gemma3n", "gemma3n_text")];

/// What a text model takes from the whole, where it does not say so itself.
const SHARED: [&str; 5] = [
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
];

/// Key of the text model, with its dot in errors.
const KEY: &str = "text_config";

/// The text model's object and the prefix of its keys: that of a whole, or `value` itself. Absent
/// keys have the values that the family's configuration class has for them, which releases rely on.
pub(super) fn text_part<'a>(
    path: &Path,
    value: &'a Value,
) -> Result<(Cow<'a, Value>, &'static str), Error> {
    let keys = Keys::new(path, value)?;
    let family = keys.str("model_type")?.unwrap_or_default();
    let whole = PARTS.iter().find(|part| part.0 == family);
    let (mut part, name, prefix) = match whole {
        Some((_, text)) => {
            let inner = keys.object(KEY, "text_config.")?;
            let inner = inner.ok_or_else(|| keys.missing(KEY, "an object"))?;
            let mut part = inner.map().clone();
            for key in SHARED {
                if let (None, Some(value)) = (inner.get(key), keys.get(key)) {
                    part.insert(key.into(), value.clone());
                }
            }
            part.entry("model_type").or_insert_with(|| json!(text));
            (part, *text, "text_config.")
        }
        None if defaults(family).is_empty() => return Ok((Cow::Borrowed(value), "")),
        None => (keys.map().clone(), family, ""),
    };
    for (key, value) in defaults(name) {
        let unset = part.get(&key).is_none_or(Value::is_null);
        if unset {
            part.insert(key, value);
        }
    }
    Ok((Cow::Owned(Value::Object(part)), prefix))
}

/// Keys that releases of a family leave out.
fn defaults(family: &str) -> Map<String, Value> {
    let values = match family {
        "gemma3_text" => json!({
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        }),
        "gemma3n_text" => json!({
            "vocab_size": 262_400,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            "num_kv_shared_layers": 15,
        }),
        _ => Value::Null,
    };
    match values {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// The name of a tensor as the text model alone has it; `None` for a tensor of another part.
pub(super) fn text_name<'a>(family: &str, name: &'a str) -> Option<Cow<'a, str>> {
    const OTHERS: [&str; 5] = [
        "vision_tower.",
        "multi_modal_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
    ];
    if !PARTS.iter().any(|part| part.1 == family) {
        return Some(Cow::Borrowed(name));
    }
    let inside = name.strip_prefix("model.").unwrap_or(name);
    if OTHERS.iter().any(|other| inside.starts_with(other)) {
        return None;
    }
    if let Some(rest) = name.strip_prefix("model.language_model.") {
        return Some(Cow::Owned(format!("model.{rest}")));
    }
    let alone = name.strip_prefix("language_model.").unwrap_or(name);
    Some(Cow::Borrowed(alone))
}
