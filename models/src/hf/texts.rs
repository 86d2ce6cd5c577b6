//! `tokenizer.json`, `tokenizer_config.json` and the files of chat templates.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::added::Declared;
use super::generation::{self, Generation};
use crate::config::ModelConfig;
use crate::error::Error;
use crate::file::{need_text, read_text};
use crate::json::{self, Keys, MAX_CONFIG};
use crate::special::SpecialTokens;

/// Longest `tokenizer.json`.
const MAX_TOKENIZER: u64 = 256 << 20;

/// Content of the files, besides the configuration.
pub(super) struct Texts {
    pub(super) tokenizer_json: String,
    pub(super) chat_template: Option<String>,
    pub(super) tool_template: Option<String>,
    pub(super) generation: Generation,
    pub(super) named_tokens: BTreeMap<String, String>,
}

/// The relevant part of `tokenizer_config.json`, and the tokens that it and similar files declare.
struct TokenizerConfig {
    chat_template: Option<String>,
    declared: Declared,
    tool_template: Option<String>,
}

/// Reads the files and completes `config`'s special tokens.
pub(super) fn read(folder: &Path, config: &mut ModelConfig) -> Result<Texts, Error> {
    let path = folder.join("tokenizer.json");
    let why = "it holds the tokenizer; save the fast tokenizer, which writes it, into the folder";
    let tokenizer_json = need_text(&path, MAX_TOKENIZER, why)?;
    let tokenizer = read_tokenizer_config(folder)?;
    let tokenizer_json = tokenizer.declared.complete(&path, tokenizer_json)?;
    let named_tokens = tokenizer.declared.names();
    let special = SpecialTokens::parse(&path, &tokenizer_json)?;
    let generation = generation::read(&folder.join("generation_config.json"))?;
    let file = |name: &str| read_text(&folder.join(name), MAX_CONFIG);
    // The files take precedence over the configuration.
    let (chat_template, tool_template) = match file("chat_template.jinja")? {
        Some(template) => (
            Some(template),
            file("additional_chat_templates/tool_use.jinja")?,
        ),
        None => (tokenizer.chat_template, tokenizer.tool_template),
    };

    // A token beyond the model's vocabulary has no row: it is never generated.
    let vocab = config.vocab;
    let token = |key: &str| {
        let id = named_tokens.get(key).and_then(|text| special.id(text));
        id.filter(|&id| id < vocab)
    };
    // Any token that one of the files declares as an end token is one, and so is one with the text
    // of an end token; the tokenizer's own comes first.
    let declared = std::mem::take(&mut config.eos);
    for id in token("eos_token")
        .into_iter()
        .chain(generation.eos.iter().copied())
        .chain(declared)
        .chain(special.ends().into_iter().filter(|&id| id < vocab))
    {
        if !config.eos.contains(&id) {
            config.eos.push(id);
        }
    }
    // Only the template decides which tokens are put around a text, as in transformers, which
    // ignores `add_bos_token` if there is a `tokenizer.json`.
    let leading = special.around.before.first().copied();
    config.add_bos = leading.is_some();
    config.bos = leading.or(token("bos_token")).or(config.bos);
    Ok(Texts {
        tokenizer_json,
        chat_template,
        tool_template,
        generation,
        named_tokens,
    })
}

fn read_tokenizer_config(folder: &Path) -> Result<TokenizerConfig, Error> {
    let path = &folder.join("tokenizer_config.json");
    let Some(text) = read_text(path, MAX_CONFIG)? else {
        return Ok(TokenizerConfig {
            chat_template: None,
            tool_template: None,
            declared: Declared::read(folder, None)?,
        });
    };
    let value = json::parse(path, &text)?;
    let keys = Keys::new(path, &value)?;
    Ok(TokenizerConfig {
        chat_template: chat_template(&keys)?,
        declared: Declared::read(folder, Some(&keys))?,
        tool_template: value["chat_template"]
            .as_array()
            .and_then(|list| named(list, "tool_use")),
    })
}

/// One template, or the `default` of a list of named ones.
fn chat_template(keys: &Keys) -> Result<Option<String>, Error> {
    let expected = "a string, or a list of {name, template} with one named default";
    keys.read("chat_template", expected, |value| match value {
        Value::String(template) => Some(template.clone()),
        Value::Array(list) => named(list, "default"),
        _ => None,
    })
}

/// The template of this name.
fn named(list: &[Value], name: &str) -> Option<String> {
    let found = list.iter().find(|entry| entry["name"] == name)?;
    found["template"].as_str().map(str::to_owned)
}
