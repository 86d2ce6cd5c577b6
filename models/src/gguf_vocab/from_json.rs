//! The inverse: a byte-level `tokenizer.json` as the lists of a GGUF file.

use serde_json::Value;

use super::{CONTROL, GPT2, GgufVocab, NORMAL, SPLITTINGS, UNUSED, USER_DEFINED, bad};
use crate::Error;
use crate::config::ModelConfig;

impl GgufVocab {
    /// The vocabulary of a `tokenizer.json` text, with the start and end tokens of `config`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for anything but a byte-level BPE, or a pre-tokenizer without a name.
    pub fn from_tokenizer_json(json: &str, config: &ModelConfig) -> Result<Self, Error> {
        let document: Value = serde_json::from_str(json)
            .map_err(|e| bad("tokenizer.json", e, "the text of a tokenizer"))?;
        let model = &document["model"];
        let vocab = match (model["type"].as_str(), model["vocab"].as_object()) {
            (Some("BPE") | None, Some(vocab))
                if !model["byte_fallback"].as_bool().unwrap_or(false) =>
            {
                vocab
            }
            (kind, _) => return Err(bad("model", format!("{kind:?}"), "a byte-level BPE")),
        };
        let size = config.vocab as usize;
        let mut tokens: Vec<String> = (0..size).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED; size];
        let mut put = |id: Option<u64>, text: &str, kind: i32| -> Result<(), Error> {
            let place = id
                .and_then(|id| usize::try_from(id).ok())
                .filter(|&id| id < size)
                .ok_or_else(|| {
                    bad(
                        "vocab",
                        format!("{id:?} for {text:?}"),
                        "an id of the model",
                    )
                })?;
            text.clone_into(&mut tokens[place]);
            types[place] = kind;
            Ok(())
        };
        for (text, id) in vocab {
            put(id.as_u64(), text, NORMAL)?;
        }
        for token in document["added_tokens"].as_array().into_iter().flatten() {
            let special = token["special"].as_bool().unwrap_or(false);
            let kind = if special { CONTROL } else { USER_DEFINED };
            let text = token["content"].as_str().unwrap_or_default();
            put(token["id"].as_u64(), text, kind)?;
        }
        Ok(Self {
            model: "gpt2".into(),
            pre: Some(splitting_of(&document)?.into()),
            tokens,
            token_types: types,
            merges: merges(model)?,
            bos: config.bos,
            eos: config.eos.first().copied(),
            add_bos: Some(config.add_bos),
            ..Self::default()
        })
    }
}

/// Merges as `left right`; newer files have pairs.
fn merges(model: &Value) -> Result<Vec<String>, Error> {
    let list = model["merges"].as_array().into_iter().flatten();
    list.map(
        |merge| match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
            (Some(text), _) => Ok(text.to_owned()),
            (None, Some([Value::String(left), Value::String(right)])) => {
                Ok(format!("{left} {right}"))
            }
            _ => Err(bad("merges", merge, "two tokens")),
        },
    )
    .collect()
}

/// The name of the tokenizer's pre-tokenizer.
fn splitting_of(document: &Value) -> Result<&'static str, Error> {
    let steps = match &document["pre_tokenizer"] {
        Value::Object(step) => match step.get("pretokenizers").and_then(Value::as_array) {
            Some(steps) => steps.iter().collect(),
            None => vec![&document["pre_tokenizer"]],
        },
        _ => Vec::new(),
    };
    let of = |step: &Value, kind: &str| step["type"] == kind;
    let level = steps.last().copied().filter(|step| of(step, "ByteLevel"));
    let level = level.filter(|step| step["add_prefix_space"] != Value::Bool(true));
    let patterns: Option<Vec<&str>> = steps
        .iter()
        .rev()
        .skip(1)
        .rev()
        .copied()
        .map(|step| {
            step["pattern"]["Regex"]
                .as_str()
                .filter(|_| of(step, "Split"))
        })
        .collect();
    let (Some(level), Some(mut patterns)) = (level, patterns) else {
        let found = &document["pre_tokenizer"];
        return Err(bad(
            "pre_tokenizer",
            found,
            "a byte-level one without a blank in front",
        ));
    };
    // its built-in pattern is GPT-2's
    if level["use_regex"].as_bool().unwrap_or(true) {
        patterns.push(GPT2);
    }
    let nfc = document["normalizer"]["type"] == "NFC";
    let whole = document["model"]["ignore_merges"]
        .as_bool()
        .unwrap_or(false);
    let known = SPLITTINGS
        .iter()
        .find(|split| split.patterns == patterns && split.nfc == nfc && split.is_llama3() == whole);
    if !document["normalizer"].is_null() && !nfc {
        return Err(bad("normalizer", &document["normalizer"], "none, or NFC"));
    }
    known
        .and_then(|split| split.names.first().copied())
        .ok_or_else(|| {
            bad(
                "pre_tokenizer",
                patterns.join(" "),
                "a splitting that gguf has a name for",
            )
        })
}
