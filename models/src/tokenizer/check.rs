//! Validates a `tokenizer.json` before it is passed to the `tokenizers` crate.
//!
//! The crate trusts its input: a template that names an undefined token, or a strip step on an empty
//! token makes it panic. It would also accept components outside the supported families, which could
//! silently change the tokens. So the file is first checked here against a closed list.

use std::collections::HashSet;

use serde_json::Value;

use super::file::{File, StoredBpe, bad};
use crate::Error;
use crate::special::Around;

/// Maximum id: larger ones would make vocabulary-sized tables too large.
const MAX_ID: u32 = (1 << 24) - 1;

/// Maximum number of patterns in a splitter: the library uses up to 12 MiB for each, even a short
/// one (`\p{L}{99}`).
const MAX_PATTERNS: usize = 8;

/// The character of a byte in the alphabet of byte-level tokenizers.
pub(super) fn byte_level_char(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0x00..=0x20 => code + 0x100,
        0x7f..=0xa0 => code - 0x7f + 0x121,
        0xad => 0x143,
        _ => code,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Facts about a checked file.
#[derive(Debug)]
pub(super) struct Checked {
    pub decoding: Decoding,
    /// Added tokens with the ids in the file.
    pub added: Vec<(String, u32)>,
    pub special: HashSet<u32>,
    pub around: Around,
    /// Some added token also consumes the white space after it.
    pub takes_space: bool,
    /// One more than the largest id.
    pub size: u32,
}

/// Decoding of tokens to text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decoding {
    /// Every character of a token stands for a byte.
    ByteLevel,
    /// Tokens are text with a visible space, and bytes as `<0xHH>`.
    Pieces(Pieces),
}

/// The steps of a SentencePiece-like decoder.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Text replacements, in order (`▁` by a space).
    pub replace: Vec<(String, String)>,
    pub byte_fallback: bool,
    /// Leading spaces to drop from the whole text.
    pub strip: usize,
}

/// Checks the parts of a `tokenizer.json`.
pub(super) fn check(file: &File<'_>) -> Result<Checked, Error> {
    let mut size = check_model(&file.model)?;
    let mut special = HashSet::new();
    for token in &file.added_tokens {
        if token.id > MAX_ID || token.token.content.is_empty() {
            let expected = format!("some text and an id up to {MAX_ID}");
            return Err(bad(
                "added token",
                format!("{:?} with id {}", token.token.content, token.id),
                &expected,
            ));
        }
        size = size.max(token.id + 1);
        if token.token.special {
            special.insert(token.id);
        }
    }
    let steps = steps_of(file.normalizer.as_ref(), "normalizer", "normalizers")?;
    steps.into_iter().try_for_each(check_normalizer)?;
    check_steps(file, size)?;
    let takes_space = file.added_tokens.iter().any(|token| token.token.rstrip);
    let decoding = check_decoder(file.decoder.as_ref())?;
    let around = file.post_processor.as_ref().map(Around::of);
    let added = file.added_tokens.iter();
    let added = added.map(|of| (of.token.content.clone(), of.id)).collect();
    Ok(Checked {
        decoding,
        added,
        special,
        around: around.unwrap_or_default(),
        takes_space,
        size,
    })
}

/// Checks the splitter and the post-processor of a file of `size` tokens.
fn check_steps(file: &File<'_>, size: u32) -> Result<(), Error> {
    let steps = steps_of(
        file.pre_tokenizer.as_ref(),
        "pre_tokenizer",
        "pretokenizers",
    )?;
    steps
        .iter()
        .try_for_each(|step| check_pre_tokenizer(step))?;
    let patterns = (steps.iter()).filter(|step| step.get("pattern").is_some());
    let patterns = patterns.count();
    if patterns > MAX_PATTERNS {
        let expected = format!("up to {MAX_PATTERNS}");
        return Err(bad("patterns of the pre_tokenizer", patterns, &expected));
    }
    // Each one writes bytes above 0x7f as two: a text would double with every step.
    let byte_levels = steps.iter().filter(|step| kind_of(step) == "ByteLevel");
    let byte_levels = byte_levels.count();
    if byte_levels > 1 {
        let what = "ByteLevel steps of the pre_tokenizer";
        return Err(bad(what, byte_levels, "one at most"));
    }
    let known = |id: u64| id < u64::from(size);
    let steps = steps_of(file.post_processor.as_ref(), "post_processor", "processors")?;
    steps
        .iter()
        .try_for_each(|step| check_post_processor(step, &known))?;
    let templates = steps
        .iter()
        .filter(|step| kind_of(step) == "TemplateProcessing");
    let templates = templates.count();
    // The crate fails on a template applied to the several pieces that another one made.
    if templates > 1 {
        let what = "TemplateProcessing steps of the post_processor";
        return Err(bad(what, templates, "one at most"));
    }
    Ok(())
}

/// Checks settings and ids; returns one more than the largest id.
fn check_model(model: &StoredBpe<'_>) -> Result<u32, Error> {
    if let Some(dropout) = model.dropout.filter(|p| *p != 0.0) {
        return Err(bad(
            "model.dropout",
            dropout,
            "null: tokens must not depend on chance",
        ));
    }
    for (key, value) in [
        (
            "model.continuing_subword_prefix",
            &model.continuing_subword_prefix,
        ),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(text) = value.as_deref().filter(|text| !text.is_empty()) {
            return Err(bad(key, format!("{text:?}"), "null"));
        }
    }
    let largest = model.vocab.0.iter().map(|(_, id)| *id).max();
    let Some(largest) = largest else {
        return Err(bad("model.vocab", "no tokens", "at least one"));
    };
    if largest > MAX_ID {
        return Err(bad(
            "model.vocab",
            format!("id {largest}"),
            &format!("ids up to {MAX_ID}"),
        ));
    }
    Ok(largest + 1)
}

/// The steps of a component: its own, or those of a sequence, recursively.
pub(super) fn steps_of<'a>(
    component: Option<&'a Value>,
    what: &str,
    steps_key: &str,
) -> Result<Vec<&'a Value>, Error> {
    match component {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(component) if kind_of(component) == "Sequence" => {
            let Some(steps) = component.get(steps_key).and_then(Value::as_array) else {
                return Err(bad(
                    &format!("{what}.{steps_key}"),
                    "no list",
                    "the steps of the sequence",
                ));
            };
            let steps = steps
                .iter()
                .map(|step| steps_of(Some(step), what, steps_key));
            Ok(steps.collect::<Result<Vec<_>, Error>>()?.concat())
        }
        Some(component) => Ok(vec![component]),
    }
}

pub(super) fn kind_of(component: &Value) -> &str {
    component.get("type").and_then(Value::as_str).unwrap_or("")
}

fn unsupported(what: &str, component: &Value, supported: &str) -> Error {
    let mut found = component.to_string();
    if found.len() > 200 {
        found = format!("{} …", found.chars().take(200).collect::<String>());
    }
    bad(what, found, supported)
}

fn check_normalizer(step: &Value) -> Result<(), Error> {
    match kind_of(step) {
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => Ok(()),
        "Prepend" if step.get("prepend").and_then(Value::as_str) != Some("") => Ok(()),
        // The crate fails on replacing an empty match (a regex can have one), and on an added token
        // that becomes empty.
        "Replace" if literal(step).is_some() && step.get("content") != Some(&Value::from("")) => {
            Ok(())
        }
        _ => Err(unsupported(
            "normalizer",
            step,
            "Sequence, Prepend of some text, Replace of a String by some text, NFC, NFD, NFKC, NFKD or Lowercase",
        )),
    }
}

fn check_pre_tokenizer(step: &Value) -> Result<(), Error> {
    match kind_of(step) {
        "ByteLevel" | "Metaspace" | "Digits" | "Punctuation" | "Whitespace" | "WhitespaceSplit" => {
            Ok(())
        }
        "Split" if literal(step).is_some() || step.pointer("/pattern/Regex").is_some() => Ok(()),
        _ => Err(unsupported(
            "pre_tokenizer",
            step,
            "Sequence, Split, ByteLevel, Metaspace, Digits, Punctuation, Whitespace or WhitespaceSplit",
        )),
    }
}

/// The literal text that a step searches for. An empty one matches everywhere.
pub(super) fn literal(step: &Value) -> Option<&str> {
    let text = step.get("pattern")?.get("String")?.as_str()?;
    (!text.is_empty()).then_some(text)
}

fn check_post_processor(step: &Value, known: &dyn Fn(u64) -> bool) -> Result<(), Error> {
    match kind_of(step) {
        "ByteLevel" => Ok(()),
        "TemplateProcessing" => check_template(step, known),
        _ => Err(unsupported(
            "post_processor",
            step,
            "Sequence, ByteLevel or TemplateProcessing",
        )),
    }
}

/// A template for one text may use sequence A and the special tokens it defines.
fn check_template(step: &Value, known: &dyn Fn(u64) -> bool) -> Result<(), Error> {
    let wrong = || {
        unsupported(
            "post_processor TemplateProcessing",
            step,
            "sequence A once and defined special tokens",
        )
    };
    let defined = step
        .get("special_tokens")
        .and_then(Value::as_object)
        .ok_or_else(wrong)?;
    for token in defined.values() {
        let ids = token
            .get("ids")
            .and_then(Value::as_array)
            .ok_or_else(wrong)?;
        let texts = token
            .get("tokens")
            .and_then(Value::as_array)
            .ok_or_else(wrong)?;
        if ids.len() != texts.len() || !ids.iter().all(|id| id.as_u64().is_some_and(known)) {
            return Err(wrong());
        }
    }
    let mut texts = 0;
    for piece in step
        .get("single")
        .and_then(Value::as_array)
        .ok_or_else(wrong)?
    {
        let name = |kind: &str| piece.get(kind)?.get("id")?.as_str();
        match (name("SpecialToken"), name("Sequence")) {
            (Some(id), None) if defined.contains_key(id) => {}
            (None, Some("A")) => texts += 1,
            _ => return Err(wrong()),
        }
    }
    if texts == 1 { Ok(()) } else { Err(wrong()) }
}

fn check_decoder(decoder: Option<&Value>) -> Result<Decoding, Error> {
    const SUPPORTED: &str = "ByteLevel, or a Sequence of Replace, ByteFallback, Fuse and Strip of \
                             leading spaces in this order";
    let steps = steps_of(decoder, "decoder", "decoders")?;
    if let [only] = steps.as_slice()
        && kind_of(only) == "ByteLevel"
    {
        return Ok(Decoding::ByteLevel);
    }
    let mut pieces = Pieces::default();
    let mut reached = 0;
    for step in &steps {
        let wrong = || unsupported("decoder", step, SUPPORTED);
        let text = |key: &str| step.get(key).and_then(Value::as_str);
        let number = |key: &str| step.get(key).and_then(Value::as_u64);
        let stage = match kind_of(step) {
            "Replace" => {
                let from = literal(step).ok_or_else(wrong)?;
                let to = text("content").ok_or_else(wrong)?;
                pieces.replace.push((from.to_owned(), to.to_owned()));
                1
            }
            "ByteFallback" => {
                pieces.byte_fallback = true;
                2
            }
            "Fuse" => 3,
            "Strip"
                if reached == 3 && text("content") == Some(" ") && number("stop") == Some(0) =>
            {
                let start = number("start").and_then(|n| usize::try_from(n).ok());
                pieces.strip = start.ok_or_else(wrong)?;
                4
            }
            _ => return Err(wrong()),
        };
        if stage < reached || (stage == reached && stage != 1) {
            return Err(wrong());
        }
        reached = stage;
    }
    if reached == 0 {
        return Err(bad("decoder", "none", SUPPORTED));
    }
    Ok(Decoding::Pieces(pieces))
}
