//! Parses a `tokenizer.json` and builds the tokenizer.
//!
//! `tokenizers` deserialises a model through two intermediate trees, which take 250 MB for 262,144 tokens. Here vocabulary and
//! merges borrow from the text and go straight into the crate's builder.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use crate::Error;

#[derive(Deserialize)]
struct KindOnly<'a> {
    #[serde(borrow)]
    model: KindOfModel<'a>,
}

#[derive(Deserialize)]
struct KindOfModel<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
}

/// The parts, without truncation and padding, which are for training.
#[derive(Deserialize)]
pub(super) struct File<'a> {
    version: Option<String>,
    #[serde(borrow)]
    pub model: Bpe<'a>,
    #[serde(default)]
    pub added_tokens: Vec<Added>,
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Option<Value>,
    pub post_processor: Option<Value>,
    pub decoder: Option<Value>,
}

/// The model.
#[derive(Deserialize)]
pub(super) struct Bpe<'a> {
    pub dropout: Option<f64>,
    pub continuing_subword_prefix: Option<String>,
    pub end_of_word_suffix: Option<String>,
    unk_token: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    #[serde(borrow)]
    pub vocab: HashMap<Text<'a>, u32>,
    #[serde(borrow)]
    pub merges: Vec<Merge<'a>>,
}

/// An added token and its id.
#[derive(Deserialize)]
pub(super) struct Added {
    pub id: u32,
    #[serde(flatten)]
    pub token: AddedToken,
}

/// Borrowed if the JSON has no escapes, so a large vocabulary is not copied.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Text<'a>(pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Borrowed<'b>(#[serde(borrow)] Cow<'b, str>);
        Borrowed::deserialize(deserializer).map(|text| Self(text.0))
    }
}

/// `["a", "b"]`, or `"a b"` in older files.
pub(super) struct Merge<'a>(pub Cow<'a, str>, pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        fn halves(text: &str) -> Option<(&str, &str)> {
            text.split_once(' ')
                .filter(|(_, right)| !right.contains(' '))
        }

        impl<'de> Visitor<'de> for Either {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens: [\"a\", \"b\"] or \"a b\"")
            }

            fn visit_borrowed_str<E: serde::de::Error>(
                self,
                v: &'de str,
            ) -> Result<Self::Value, E> {
                let (a, b) = halves(v).ok_or_else(|| E::custom("a merge needs two tokens"))?;
                Ok(Merge(a.into(), b.into()))
            }

            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Self::Value, E> {
                let (a, b) = halves(v).ok_or_else(|| E::custom("a merge needs two tokens"))?;
                Ok(Merge(a.to_owned().into(), b.to_owned().into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let short = || serde::de::Error::custom("a merge needs two tokens");
                let a: Text<'de> = seq.next_element()?.ok_or_else(short)?;
                let b: Text<'de> = seq.next_element()?.ok_or_else(short)?;
                if seq.next_element::<serde::de::IgnoredAny>()?.is_some() {
                    return Err(short());
                }
                Ok(Merge(a.0, b.0))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'a> File<'a> {
    /// Reads the text of a `tokenizer.json` with a BPE model.
    pub fn parse(json: &'a str) -> Result<Self, Error> {
        let kind = serde_json::from_str::<KindOnly>(json)
            .map_err(|error| bad("tokenizer.json", error, "json with model.type"))?;
        if kind.model.kind != "BPE" {
            let expected = "BPE, the only kind supported";
            return Err(bad("model.type", &kind.model.kind, expected));
        }
        let expected = "the format of tokenizers 0.x";
        let file = serde_json::from_str::<Self>(json)
            .map_err(|error| bad("tokenizer.json", error, expected))?;
        match file.version.as_deref() {
            None | Some("1.0") => Ok(file),
            Some(other) => Err(bad("version", format!("{other:?}"), "\"1.0\"")),
        }
    }

    /// Builds the tokenizer. The parts must have been checked.
    pub fn into_tokenizer(self) -> Result<tokenizers::Tokenizer, Error> {
        let failed =
            |error: tokenizers::Error| bad("tokenizer.json", error, "the format of tokenizers 0.x");
        let mut tokenizer = tokenizers::Tokenizer::new(self.model.build().map_err(failed)?);
        let normalizer = part::<tokenizers::NormalizerWrapper>(self.normalizer)?;
        tokenizer.with_normalizer(normalizer).map_err(failed)?;
        tokenizer.with_pre_tokenizer(part::<tokenizers::PreTokenizerWrapper>(self.pre_tokenizer)?);
        let processor = part::<tokenizers::PostProcessorWrapper>(self.post_processor)?;
        tokenizer.with_post_processor(processor);
        tokenizer.with_decoder(part::<tokenizers::DecoderWrapper>(self.decoder)?);
        let added = self.added_tokens.into_iter().map(|added| added.token);
        tokenizer.add_tokens(added).map_err(failed)?;
        Ok(tokenizer)
    }
}

/// A component, if there is one.
fn part<T: DeserializeOwned>(of: Option<Value>) -> Result<Option<T>, Error> {
    let read = of.map(serde_json::from_value).transpose();
    read.map_err(|error| bad("tokenizer.json", error, "the format of tokenizers 0.x"))
}

impl Bpe<'_> {
    /// The model; its dropout, prefix and suffix are none.
    fn build(self) -> tokenizers::Result<BPE> {
        let vocab = self.vocab.into_iter();
        let vocab: Vocab = vocab
            .map(|(token, id)| (token.0.into_owned(), id))
            .collect();
        let merges = self.merges.into_iter();
        let merges: Merges = merges
            .map(|of| (of.0.into_owned(), of.1.into_owned()))
            .collect();
        let mut builder = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .fuse_unk(self.fuse_unk.unwrap_or(false))
            .byte_fallback(self.byte_fallback.unwrap_or(false))
            .ignore_merges(self.ignore_merges.unwrap_or(false));
        if let Some(token) = self.unk_token {
            builder = builder.unk_token(token);
        }
        builder.build()
    }
}

pub(super) fn bad(what: &str, found: impl fmt::Display, expected: &str) -> Error {
    Error::Tokenizer {
        what: what.to_owned(),
        found: found.to_string(),
        expected: expected.to_owned(),
    }
}
