//! The text model in a multimodal `config.json`, and keys that releases leave out.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Value, json};

use crate::error::Error;
use crate::families::{self, Preset, Quirk};
use crate::json::Keys;

/// Keys that a text model inherits from the outer object.
const SHARED: [&str; 6] = [
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
    "quantization",
    "compression_config",
];

/// Key of the text model, with its dot in errors.
const KEY: &str = "text_config";

/// The text model's object and the prefix of its keys: that of a multimodal model, or `value`
/// itself. Absent keys have the values of the family's configuration class, on which releases rely.
pub(super) fn text_part<'a>(
    path: &Path,
    value: &'a Value,
) -> Result<(Cow<'a, Value>, &'static str), Error> {
    let keys = Keys::new(path, value)?;
    let family = keys.str("model_type")?.unwrap_or_default();
    let inner = keys.object(KEY, "text_config.")?;
    let kind = inner
        .as_ref()
        .map_or(Ok(None), |inner| inner.str("model_type"))?;
    let of_whole = || families::all().filter(|text| text.whole == Some(family));
    let text = of_whole()
        .find(|text| kind == Some(text.name))
        .or(of_whole().next());
    let alone = families::of(family);
    let (mut part, of, prefix) = match text {
        Some(text) => {
            let inner = inner.ok_or_else(|| keys.missing(KEY, "an object"))?;
            let kind = inner.str("model_type")?.unwrap_or(text.name);
            if families::find(kind).is_some_and(|of| of.whole != Some(family)) {
                let known: Vec<&str> = of_whole().map(|text| text.name).collect();
                let why = format!("implemented in a {family}: {}", known.join(", "));
                return Err(inner.unsupported("model_type", &why));
            }
            let mut part = inner.map().clone();
            for key in SHARED {
                if let (None, Some(value)) = (inner.get(key), keys.get(key)) {
                    part.insert(key.into(), value.clone());
                }
            }
            part.entry("model_type").or_insert_with(|| json!(text.name));
            (part, text, "text_config.")
        }
        None if alone.defaults.is_empty() => return Ok((Cow::Borrowed(value), "")),
        None => (keys.map().clone(), alone, ""),
    };
    for (key, value) in of.defaults {
        let unset = part.get(*key).is_none_or(Value::is_null);
        if unset {
            let value = match *value {
                Preset::Int(number) => json!(number),
                Preset::Float(number) => json!(number),
                Preset::Text(text) => json!(text),
            };
            part.insert((*key).into(), value);
        }
    }
    Ok((Cow::Owned(Value::Object(part)), prefix))
}

/// The name of a tensor in the text model alone; `None` for a tensor of another part.
pub(super) fn text_name<'a>(family: &str, name: &'a str) -> Option<Cow<'a, str>> {
    const OTHERS: [&str; 8] = [
        "visual.",
        "vision_model.",
        "vision_tower.",
        "multi_modal_projector.",
        "mm_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
    ];
    let of = families::of(family);
    // transformers 5 uses another name than releases
    if of.has(Quirk::Sublayers)
        && let Some(rest) = name.strip_prefix("model.")
    {
        return Some(Cow::Owned(format!("backbone.{rest}")));
    }
    let prefix = of.quirks.iter().find_map(|quirk| match quirk {
        Quirk::Prefix(prefix) => Some(*prefix),
        _ => None,
    });
    if let Some(prefix) = prefix
        && !name.starts_with(prefix)
        && name != "lm_head.weight"
    {
        return Some(Cow::Owned(format!("{prefix}{name}")));
    }
    if of.has(Quirk::DeepSeek4) {
        // DeepSeek-V4-Flash-Vision: an encoder, its projection, and a bias for routing images
        let of_images = ["vision.", "aligner.", "image_"];
        let inside = name.strip_prefix("model.").unwrap_or(name);
        let other = of_images.iter().any(|part| inside.starts_with(part));
        return (!other && !inside.ends_with(".ffn.gate.bias_vl")).then_some(Cow::Borrowed(inside));
    }
    if of.whole.is_none() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_for_images_are_no_part_of_the_text_model() {
        let of = |name| text_name("deepseek_v4", name);
        assert_eq!(
            of("model.layers.3.ffn.gate.bias").unwrap(),
            "layers.3.ffn.gate.bias"
        );
        for name in [
            "vision.blocks.0.attn.wqkv.weight",
            "aligner.proj.weight",
            "image_newline",
            "layers.3.ffn.gate.bias_vl",
        ] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    #[test]
    fn a_whole_with_another_text_model_is_refused_by_name() {
        let part = |whole: &str, kind: &str| {
            let value = json!({"model_type": whole, "text_config": {"model_type": kind}});
            let part = text_part(Path::new("config.json"), &value);
            part.map(|(part, prefix)| (part["model_type"].clone(), prefix))
        };
        for (whole, kind) in [
            ("mistral3", "ministral3"),
            // in releases and in transformers
            ("kimi_k25", "kimi_k2"),
            ("kimi_k25", "deepseek_v3"),
        ] {
            let expected = (json!(kind), "text_config.");
            assert_eq!(part(whole, kind).unwrap(), expected, "{whole}");
            for other in ["llama", "deepseek_v32"] {
                let refused = part(whole, other).unwrap_err().to_string();
                assert!(
                    refused.contains("text_config.model_type") && refused.contains(kind),
                    "{refused}"
                );
            }
        }
    }

    #[test]
    fn kimis_parts_for_images_are_left_out() {
        for family in ["kimi_k2", "deepseek_v3"] {
            let of = |name| text_name(family, name);
            let inside = "model.layers.1.mlp.gate.weight";
            for name in [
                "language_model.model.layers.1.mlp.gate.weight",
                "model.language_model.layers.1.mlp.gate.weight",
                inside,
            ] {
                assert_eq!(of(name).unwrap(), inside, "{name}");
            }
            for name in [
                "vision_tower.encoder.blocks.0.norm0.weight",
                "mm_projector.proj.0.weight",
                "model.vision_tower.patch_embed.proj.bias",
                "model.mm_projector.pre_norm.weight",
            ] {
                assert_eq!(of(name), None, "{name}");
            }
        }
    }
}
