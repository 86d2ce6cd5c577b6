//! Parses a `tokenizer.json` and builds the tokenizer.
//!
//! Large vocabularies must not be copied often: tokens borrow from the text, and merges are read one by one.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerImpl,
};

use super::bpe::{Bpe, Settings};
use crate::Error;

/// The crate's tokenizer, with our model.
pub(super) type Inner = TokenizerImpl<
    Bpe,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

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
    pub model: StoredBpe<'a>,
    #[serde(default)]
    pub added_tokens: Vec<Added>,
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Option<Value>,
    pub post_processor: Option<Value>,
    pub decoder: Option<Value>,
}

/// The model.
#[derive(Deserialize)]
pub(super) struct StoredBpe<'a> {
    pub dropout: Option<f64>,
    pub continuing_subword_prefix: Option<String>,
    pub end_of_word_suffix: Option<String>,
    unk_token: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    #[serde(borrow)]
    pub vocab: Vocab<'a>,
    #[serde(borrow)]
    merges: &'a RawValue,
}

/// An added token and its id.
#[derive(Deserialize)]
pub(super) struct Added {
    pub id: u32,
    #[serde(flatten)]
    pub token: AddedToken,
}

/// Borrowed if the JSON has no escapes, so a large vocabulary is not copied.
#[derive(Deserialize)]
pub(super) struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl AsRef<str> for Text<'_> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// Tokens and their ids.
pub(super) struct Vocab<'a>(pub Vec<(Text<'a>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the ids of tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let entries = std::iter::from_fn(|| map.next_entry().transpose());
                entries.collect::<Result<_, _>>().map(Vocab)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// `["a", "b"]`, or `"a b"` in older files.
struct Merge<'a>(Cow<'a, str>, Cow<'a, str>);

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
    pub fn into_tokenizer(self) -> Result<Inner, Error> {
        let failed =
            |error: tokenizers::Error| bad("tokenizer.json", error, "the format of tokenizers 0.x");
        let mut tokenizer = Inner::new(self.model.build()?);
        let normalizer = part::<NormalizerWrapper>(self.normalizer)?;
        tokenizer.with_normalizer(normalizer).map_err(failed)?;
        tokenizer.with_pre_tokenizer(part::<PreTokenizerWrapper>(self.pre_tokenizer)?);
        let processor = part::<PostProcessorWrapper>(self.post_processor)?;
        tokenizer.with_post_processor(processor);
        tokenizer.with_decoder(part::<DecoderWrapper>(self.decoder)?);
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

impl StoredBpe<'_> {
    /// The model; its dropout, prefix and suffix are none.
    fn build(self) -> Result<Bpe, Error> {
        let settings = Settings {
            unknown: self.unk_token,
            fuse_unknown: self.fuse_unk.unwrap_or(false),
            byte_fallback: self.byte_fallback.unwrap_or(false),
            ignore_merges: self.ignore_merges.unwrap_or(false),
        };
        let mut model = Bpe::new(self.vocab.0, settings).map_err(|found| {
            let expected = "one token for each id, and one id for each token";
            bad("model.vocab", found, expected)
        })?;
        let mut merges = serde_json::Deserializer::from_str(self.merges.get());
        let added = merges.deserialize_seq(Merges(&mut model));
        let expected = "pairs of tokens that are one token together";
        added.map_err(|error| bad("model.merges", error, expected))?;
        Ok(model)
    }
}

/// Adds a list of merges to a model.
struct Merges<'a>(&'a mut Bpe);

impl<'de> Visitor<'de> for Merges<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(Merge(left, right)) = seq.next_element::<Merge<'de>>()? {
            let rank = self.0.merges();
            self.0.add_merge(&left, &right).map_err(|missing| {
                let what = format!("no token {missing:?} for merge {rank}, ({left:?}, {right:?})");
                serde::de::Error::custom(what)
            })?;
        }
        Ok(())
    }
}

pub(super) fn bad(what: &str, found: impl fmt::Display, expected: &str) -> Error {
    Error::Tokenizer {
        what: what.to_owned(),
        found: found.to_string(),
        expected: expected.to_owned(),
    }
}
