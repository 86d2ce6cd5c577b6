//! The inverse: a byte-level `tokenizer.json` as the lists of a GGUF file.

use serde_json::{Value, json};

use super::splitting::{Bytes, SPLITTINGS, in_one_spelling};
use super::{CONTROL, GgufVocab, NORMAL, UNUSED, USER_DEFINED, bad};
use crate::Error;
use crate::config::ModelConfig;
use crate::special::Around;

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
        let Around { before, after } = Around::of(&document["post_processor"]);
        let eos = config.eos.first().copied();
        let (start, end) = (config.bos.into_iter(), eos.into_iter());
        let plain = (before.is_empty() || start.eq(before.iter().copied()))
            && (after.is_empty() || end.eq(after.iter().copied()));
        if !plain {
            let found = &document["post_processor"];
            let expected = "at most the start token before a text and the end token after it, \
                            which is all that gguf has keys for";
            return Err(bad("post_processor", found, expected));
        }
        Ok(Self {
            model: "gpt2".into(),
            pre: Some(splitting_of(&document)?.into()),
            tokens,
            token_types: types,
            merges: merges(model)?,
            bos: config.bos,
            eos,
            add_bos: Some(config.add_bos),
            add_eos: Some(!after.is_empty()),
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
    let whole = &document["pre_tokenizer"];
    let steps = match whole["pretokenizers"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(whole),
    };
    let nfc = document["normalizer"]["type"] == "NFC";
    let none = json!({"type": "Sequence", "normalizers": []});
    if !document["normalizer"].is_null() && document["normalizer"] != none && !nfc {
        return Err(bad("normalizer", &document["normalizer"], "none, or NFC"));
    }
    let plain = |steps: Vec<Value>| -> Vec<Value> { steps.iter().map(relevant).collect() };
    let found = plain(in_one_spelling(steps));
    let merges = &document["model"]["ignore_merges"];
    let known = SPLITTINGS.iter().find(|split| {
        split.bytes == Bytes::Letters
            && split.nfc == nfc
            && split.whole == merges.as_bool().unwrap_or(false)
            && plain(split.pre_tokenizers()) == found
    });
    let name = known.and_then(|split| split.names.first().copied());
    name.ok_or_else(|| {
        bad(
            "pre_tokenizer",
            whole,
            "a splitting that gguf has a name for",
        )
    })
}

/// The properties of a step that determine how it splits.
fn relevant(step: &Value) -> Value {
    let (kind, behavior) = (&step["type"], &step["behavior"]);
    let invert = step["invert"].as_bool().unwrap_or(false);
    match kind.as_str() {
        Some("ByteLevel") => json!([kind, step["add_prefix_space"]]),
        _ => json!([
            kind,
            step["pattern"],
            behavior,
            step["individual_digits"],
            invert
        ]),
    }
}
