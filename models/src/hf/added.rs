//! Tokens declared in the files next to `tokenizer.json`.
//!
//! Some releases declare tokens only in `tokenizer_config.json` (`added_tokens_decoder`,
//! `additional_special_tokens`, `eos_token` and similar keys), in `special_tokens_map.json` or in
//! `added_tokens.json`. transformers adds them to the tokenizer when it opens the folder; this
//! module does the same, by the same rules, so that a text has the same tokens.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Error;
use crate::file::read_text;
use crate::json::{self, Keys, MAX_CONFIG};

/// Keys of named tokens, in the order in which they get ids.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Keys of lists of further special tokens, the newer name first.
const LISTS: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

const DECODER: &str = "added_tokens_decoder";

/// An added token as in `tokenizer.json`, without its id.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Token {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

/// The same with its id.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Added {
    id: u64,
    #[serde(flatten)]
    token: Token,
}

impl Token {
    fn special(content: &str) -> Self {
        Self {
            content: content.to_owned(),
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: Some(false),
            special: true,
        }
    }

    /// A token written as its text or as an object.
    fn read(value: &Value) -> Option<Self> {
        match value {
            Value::String(content) => Some(Self::special(content)),
            value => Some(Self::complete(Self::deserialize(value).ok()?)),
        }
    }

    /// Special tokens are not normalised unless their file says so.
    fn complete(mut self) -> Self {
        self.normalized = self.normalized.or(Some(!self.special));
        self
    }
}

/// Declarations of the files next to `tokenizer.json`.
#[derive(Debug, Default)]
pub(super) struct Declared {
    /// By id.
    placed: BTreeMap<u64, Token>,
    /// By key, in the order in which they get ids.
    named: Vec<Named>,
    /// Further special tokens.
    more: Vec<Token>,
}

#[derive(Debug)]
struct Named {
    key: String,
    token: Token,
}

impl Declared {
    /// Reads the files. `config` is `tokenizer_config.json`, if there is one.
    pub(super) fn read(folder: &Path, config: Option<&Keys>) -> Result<Self, Error> {
        let mut declared = Self::default();
        if let Some(keys) = config {
            declared.take_names(keys)?;
            if let Some(decoder) = keys.object(DECODER, "added_tokens_decoder.")? {
                for (id, value) in decoder.map() {
                    let token = Token::read(value).filter(|_| value.is_object());
                    let id = id.parse().ok().filter(|&id| id < u64::from(u32::MAX));
                    let bad = || keys.bad(DECODER, "objects with `content`, by token id");
                    declared.placed.extend([id.zip(token).ok_or_else(bad)?]);
                }
                return Ok(declared);
            }
        }
        // The other two files count only without `added_tokens_decoder`, which is newer.
        with_object(&folder.join("special_tokens_map.json"), |keys| {
            declared.take_names(keys)
        })?;
        with_object(&folder.join("added_tokens.json"), |keys| {
            for (content, id) in keys.map() {
                let special = declared.is_named(content);
                let token = Token {
                    normalized: Some(!special),
                    special,
                    ..Token::special(content)
                };
                let id = id.as_u64().ok_or_else(|| keys.bad(content, "a token id"))?;
                declared.placed.insert(id, token);
            }
            Ok(())
        })?;
        Ok(declared)
    }

    /// The texts of the named tokens, by key.
    pub(super) fn names(&self) -> BTreeMap<String, String> {
        let names = self.named.iter();
        names
            .map(|named| (named.key.clone(), named.token.content.clone()))
            .collect()
    }

    fn is_named(&self, content: &str) -> bool {
        let named = self.named.iter().map(|named| &named.token);
        named
            .chain(&self.more)
            .any(|token| token.content == content)
    }

    /// Takes the named and further special tokens of an object; they replace earlier ones.
    fn take_names(&mut self, keys: &Keys) -> Result<(), Error> {
        let own = |key: &&String| key.ends_with("_token") && !NAMED.contains(&key.as_str());
        let own = keys.map().keys().filter(own).map(String::as_str);
        for key in NAMED.into_iter().chain(own) {
            let expected = "a token's text, or an object with `content`";
            let token = match keys.get(key) {
                // switches such as `add_bos_token`, and numbers under other names
                Some(Value::Bool(_)) => None,
                Some(Value::Number(_)) if !NAMED.contains(&key) => None,
                _ => keys.read(key, expected, Token::read)?,
            };
            if let Some(token) = token {
                self.name(key, token);
            }
        }
        let full = |key: &&str| match keys.get(key) {
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(map)) => !map.is_empty(),
            other => other.is_some(),
        };
        let Some(key) = LISTS.into_iter().find(full) else {
            return Ok(());
        };
        let expected = "a list of tokens, or an object of tokens by name";
        let by_name = keys.read(key, expected, |value| match value {
            Value::Array(list) => {
                self.more = list.iter().map(Token::read).collect::<Option<_>>()?;
                Some(Map::new())
            }
            value => value.as_object().cloned(),
        })?;
        for (name, value) in by_name.into_iter().flatten() {
            let token = Token::read(&value).ok_or_else(|| keys.bad(key, expected))?;
            self.name(&name, token);
        }
        Ok(())
    }

    fn name(&mut self, key: &str, token: Token) {
        match self.named.iter_mut().find(|named| named.key == key) {
            Some(named) => named.token = token,
            None => self.named.push(Named {
                key: key.to_owned(),
                token,
            }),
        }
    }

    /// `tokenizer_json` with the missing tokens added; the same text if none are missing.
    pub(super) fn complete(&self, path: &Path, tokenizer_json: String) -> Result<String, Error> {
        #[derive(Deserialize)]
        struct Known {
            #[serde(default)]
            added_tokens: Vec<Added>,
        }
        let wrong = |error| json::json_error(path, &error);
        let known: Known = serde_json::from_str(&tokenizer_json).map_err(wrong)?;
        let mut list = List {
            all: known.added_tokens,
            changed: Vec::new(),
        };
        let named: Vec<&Token> = self.named.iter().map(|named| &named.token).collect();
        for (&id, token) in &self.placed {
            let special = named.iter().any(|named| named.content == token.content);
            list.put(Some(id), token, special);
        }
        for token in named.into_iter().chain(&self.more) {
            if !list.has(&token.content) {
                list.put(None, token, true);
            }
        }
        if list.changed.is_empty() {
            return Ok(tokenizer_json);
        }
        let mut document: Value = serde_json::from_str(&tokenizer_json).map_err(wrong)?;
        drop(tokenizer_json);
        let added = list.placed(&document["model"]["vocab"]);
        if let Value::Object(map) = &mut document {
            let added = serde_json::to_value(added).map_err(wrong)?;
            map.insert("added_tokens".to_owned(), added);
        }
        Ok(document.to_string())
    }
}

/// The added tokens of a tokenizer during the merge.
struct List {
    all: Vec<Added>,
    /// Tokens to add or to change, in order.
    changed: Vec<Change>,
}

struct Change {
    /// Its id in a file.
    id: Option<u64>,
    token: Token,
}

impl List {
    fn has(&self, content: &str) -> bool {
        let changed = self.changed.iter().map(|change| &change.token);
        let mut all = self.all.iter().map(|added| &added.token).chain(changed);
        all.any(|token| token.content == content)
    }

    /// Adds a token, unless the tokenizer has an identical one; `special` marks it special.
    fn put(&mut self, id: Option<u64>, token: &Token, special: bool) {
        let known = (self.all.iter()).find(|added| added.token.content == token.content);
        let same = known.is_some_and(|added| added.token.clone().complete() == *token);
        if !same && !token.content.is_empty() {
            let mut token = token.clone();
            token.special |= special;
            self.changed.push(Change { id, token });
        }
    }

    /// All tokens with their ids. One without an id in a file gets that of the vocabulary, or the
    /// next one.
    fn placed(mut self, vocab: &Value) -> Vec<Added> {
        let size = vocab.as_object().map_or(0, |map| map.len() as u64);
        for Change { id, token } in self.changed {
            let known = self
                .all
                .iter_mut()
                .find(|added| added.token.content == token.content);
            if let Some(added) = known {
                // Once special, always special.
                let special = added.token.special || token.special;
                added.token = Token { special, ..token };
                continue;
            }
            let next = self
                .all
                .iter()
                .map(|added| added.id.saturating_add(1))
                .max()
                .unwrap_or(0);
            let of_vocab = vocab.get(&token.content).and_then(Value::as_u64);
            let id = id.or(of_vocab).unwrap_or(next.max(size));
            self.all.push(Added { id, token });
        }
        self.all
    }
}

/// Returns the object in a file, if there is one.
fn with_object(path: &Path, take: impl FnOnce(&Keys) -> Result<(), Error>) -> Result<(), Error> {
    let Some(text) = read_text(path, MAX_CONFIG)? else {
        return Ok(());
    };
    let value = json::parse(path, &text)?;
    take(&Keys::new(path, &value)?)
}
