//! The vocabulary of a GGUF file as `tokenizer.json` text.
//!
//! GGUF stores tokens, scores and merges, but leaves the algorithm to the reader. Supported are
//! `llama`, a SentencePiece BPE whose merges follow from the scores; `gpt2`, a BPE of listed merges
//! with a named pre-tokenizer ([`GgufVocab::pre`]), mostly byte-level; and `gemma4`, a BPE of
//! listed merges in SentencePiece's spelling. All later code then needs only one tokenizer.

mod from_json;
mod splitting;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use self::splitting::{Bytes, Splitting, level, splitting};
use crate::Error;
use crate::special::{self, Token};
use crate::text_index::TextIndex;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Maximum SentencePiece token in bytes. Real ones stay below 100; finding merges takes time
/// quadratic in it.
const MAX_PIECE: usize = 512;

/// The `tokenizer.ggml.*` keys of a GGUF file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufVocab {
    /// `model`: `llama`, `gpt2` or `gemma4`.
    pub model: String,
    /// `pre`: name of the pre-tokenizer; not of `llama`.
    pub pre: Option<String>,
    /// `tokens`, by id.
    pub tokens: Vec<String>,
    /// `scores`, one for each token; `llama` only.
    pub scores: Vec<f32>,
    /// `token_type`, one for each token: 1 normal, 2 unknown, 3 control,
    /// 4 user-defined, 5 unused, 6 byte. May be empty for `gpt2`.
    pub token_types: Vec<i32>,
    /// `merges`, each `"left right"`; not of `llama`.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `unknown_token_id`.
    pub unk: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`; `llama` only.
    pub add_space_prefix: Option<bool>,
}

impl GgufVocab {
    /// Whether a text starts with `bos`: as given by the file, else the default of its kind (yes
    /// for `llama` and some pre-tokenizers, such as Llama 3's).
    pub fn adds_bos(&self) -> bool {
        let usual = match self.model.as_str() {
            "llama" => true,
            _ => self.splitting().is_ok_and(|split| split.starts),
        };
        self.bos.is_some() && self.add_bos.unwrap_or(usual)
    }

    fn splitting(&self) -> Result<&'static Splitting, Error> {
        match self.model.as_str() {
            "gemma4" => splitting(Some("gemma4")),
            _ => splitting(self.pre.as_deref()),
        }
    }

    /// The same tokenizer as the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for another kind or pre-tokenizer, or inconsistent lists.
    pub fn to_tokenizer_json(&self) -> Result<String, Error> {
        self.check_lists()?;
        let listed = match self.model.as_str() {
            "llama" => false,
            "gpt2" | "gemma4" | "whitespace" => true,
            other => {
                let found = format!("{other:?}");
                let expected = "\"llama\", \"gpt2\" or \"gemma4\"";
                return Err(bad("tokenizer.ggml.model", found, expected));
            }
        };
        let ids = self.ids()?;
        let (parts, merges) = match listed {
            true => self.listed_merges()?,
            false => self.sentencepiece(&ids)?,
        };
        drop(ids);
        let Parts {
            normalizer,
            pre_tokenizer,
            mut processors,
            decoder,
            bpe,
        } = parts;
        processors.extend(self.template()?);
        let post_processor = match processors.is_empty() {
            true => Value::Null,
            false => json!({"type": "Sequence", "processors": processors}),
        };
        let mut small = json!({
            "decoder": decoder,
            "normalizer": normalizer,
            "post_processor": post_processor,
            "pre_tokenizer": pre_tokenizer,
        });
        // The text enters the checkpoint's fingerprint.
        small.sort_all_objects();
        let mut vocab: Vec<usize> = (0..self.tokens.len()).collect();
        vocab.retain(|&id| self.is_token(id));
        vocab.sort_unstable_by_key(|&id| &self.tokens[id]);
        let document = Document {
            added_tokens: self.added_tokens(),
            decoder: &small["decoder"],
            model: Model {
                byte_fallback: bpe.byte_fallback,
                continuing_subword_prefix: (),
                dropout: (),
                end_of_word_suffix: (),
                fuse_unk: bpe.fuse_unk,
                ignore_merges: bpe.ignore_merges,
                merges,
                kind: "BPE",
                unk_token: bpe.unk_token,
                vocab: Vocab(&self.tokens, vocab),
            },
            normalizer: &small["normalizer"],
            padding: (),
            post_processor: &small["post_processor"],
            pre_tokenizer: &small["pre_tokenizer"],
            truncation: (),
            version: "1.0",
        };
        serde_json::to_string(&document)
            .map_err(|error| bad("tokenizer.ggml", error, "lists that can be written"))
    }

    fn check_lists(&self) -> Result<(), Error> {
        let n = self.tokens.len();
        if n == 0 {
            return Err(bad("tokenizer.ggml.tokens", "no tokens", "at least one"));
        }
        for (key, len) in [
            ("tokenizer.ggml.scores", self.scores.len()),
            ("tokenizer.ggml.token_type", self.token_types.len()),
        ] {
            if len != 0 && len != n {
                return Err(bad(
                    key,
                    format!("{len} entries"),
                    &format!("one for each of {n} tokens"),
                ));
            }
        }
        for (key, id) in [
            ("tokenizer.ggml.bos_token_id", self.bos),
            ("tokenizer.ggml.eos_token_id", self.eos),
            ("tokenizer.ggml.unknown_token_id", self.unk),
        ] {
            if let Some(id) = id.filter(|id| self.token(*id).is_none()) {
                return Err(bad(key, id, &format!("a token id below {n}")));
            }
        }
        for (id, kind) in self.token_types.iter().enumerate() {
            if !(NORMAL..=BYTE).contains(kind) {
                let key = format!("tokenizer.ggml.token_type[{id}]");
                return Err(bad(&key, kind, "1 to 6"));
            }
        }
        Ok(())
    }

    fn token(&self, id: u32) -> Option<&str> {
        self.tokens
            .get(usize::try_from(id).ok()?)
            .map(String::as_str)
    }

    fn kind(&self, index: usize) -> i32 {
        self.token_types.get(index).copied().unwrap_or(NORMAL)
    }

    /// Whether a token exists: it is not empty, nor the padding that converters append to reach the
    /// model's vocabulary.
    fn is_token(&self, index: usize) -> bool {
        let token = &self.tokens[index];
        let padding = self.kind(index) == UNUSED && *token == format!("[PAD{index}]");
        !token.is_empty() && !padding
    }

    /// The ids of the tokens that exist.
    fn ids(&self) -> Result<TextIndex, Error> {
        let mut ids = TextIndex::with_capacity(self.tokens.len());
        for (id, token) in (0..).zip(&self.tokens) {
            if self.is_token(id as usize)
                && let Some(first) = ids.insert(id, |id| &self.tokens[id as usize])
            {
                let found = format!("{token:?} as token {first} and as token {id}");
                return Err(bad("tokenizer.ggml.tokens", found, "each token once"));
            }
        }
        Ok(ids)
    }

    /// Tokens that end a text, a turn or a message, recognised by their text; the keys of a file
    /// often name only one of them.
    pub fn ends(&self) -> Vec<u32> {
        let tokens = (0u32..).zip(&self.tokens).filter(|(id, text)| {
            let kind = self.kind(*id as usize);
            let special = matches!(kind, CONTROL | UNKNOWN | USER_DEFINED) || Some(*id) == self.eos;
            special || special::is_surely_end(text)
        });
        special::ends(tokens.map(|(id, text)| Token { id, text }))
    }

    /// Tokens matched in a text before all others.
    fn added_tokens(&self) -> Vec<Added<'_>> {
        let mut named = self.ends();
        named.extend([self.bos, self.eos, self.unk].into_iter().flatten());
        let mut added = Vec::new();
        for (id, content) in (0..).zip(&self.tokens) {
            let kind = self.kind(id as usize);
            let special = matches!(kind, CONTROL | UNKNOWN) || named.contains(&id);
            if (special || kind == USER_DEFINED) && !content.is_empty() {
                added.push(Added {
                    content,
                    id,
                    lstrip: false,
                    normalized: false,
                    rstrip: false,
                    single_word: false,
                    special,
                });
            }
        }
        added
    }

    /// The post-processor that adds `bos` and `eos` to a text, if any.
    fn template(&self) -> Result<Option<Value>, Error> {
        let bos = self.bos.filter(|_| self.adds_bos());
        let eos = self.eos.filter(|_| self.add_eos.unwrap_or(false));
        if bos.is_none() && eos.is_none() {
            return Ok(None);
        }
        let mut defined = Map::new();
        let mut piece = |id: Option<u32>| -> Result<Option<Value>, Error> {
            let Some(id) = id else { return Ok(None) };
            let text = self.token(id).filter(|text| !text.is_empty());
            let text = text.ok_or_else(|| {
                bad(
                    "tokenizer.ggml.tokens",
                    format!("an empty token {id}"),
                    "the text of bos and eos",
                )
            })?;
            defined.insert(
                text.to_owned(),
                json!({"id": text, "ids": [id], "tokens": [text]}),
            );
            Ok(Some(json!({"SpecialToken": {"id": text, "type_id": 0}})))
        };
        let (before, after) = (piece(bos)?, piece(eos)?);
        let around = |sequence: &str| -> Vec<Value> {
            let text = json!({"Sequence": {"id": sequence, "type_id": 0}});
            before
                .iter()
                .cloned()
                .chain([text])
                .chain(after.iter().cloned())
                .collect()
        };
        let pair: Vec<Value> = around("A").into_iter().chain(around("B")).collect();
        Ok(Some(json!({
            "type": "TemplateProcessing", "single": around("A"), "pair": pair,
            "special_tokens": defined,
        })))
    }

    fn sentencepiece(&self, ids: &TextIndex) -> Result<(Parts<'_>, Merges<'_>), Error> {
        if self.scores.is_empty() || self.token_types.is_empty() {
            let found = format!(
                "{} scores and {} types",
                self.scores.len(),
                self.token_types.len()
            );
            return Err(bad(
                "tokenizer.ggml.scores and token_type",
                found,
                "one for each token",
            ));
        }
        let merges = Merges::Splits(&self.tokens, self.merges_by_score(ids)?);
        let prefix = self.add_space_prefix.unwrap_or(true);
        Ok((self.pieces(prefix), merges))
    }

    /// A BPE in SentencePiece's spelling; `prefix` puts a space before a text.
    fn pieces(&self, prefix: bool) -> Parts<'_> {
        let mut normalizers = vec![replace(" ", "▁")];
        let mut decoders = vec![
            replace("▁", " "),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let bytes = self.tokens.iter().any(|token| is_byte_token(token));
        Parts {
            normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
            pre_tokenizer: Value::Null,
            processors: Vec::new(),
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            bpe: Bpe {
                byte_fallback: bytes,
                fuse_unk: true,
                ignore_merges: false,
                unk_token: self.unknown(),
            },
        }
    }

    /// The text of the unknown token.
    fn unknown(&self) -> Option<&str> {
        self.unk.and_then(|id| self.token(id)).or_else(|| {
            let index = self.token_types.iter().position(|kind| *kind == UNKNOWN)?;
            self.tokens.get(index).map(String::as_str)
        })
    }

    /// SentencePiece joins the adjacent pieces with the highest-scoring union. As a merge list:
    /// every split of a token into two tokens, best token first. Among equal scores the longest parts
    /// come first, then the first token.
    fn merges_by_score(&self, ids: &TextIndex) -> Result<Vec<Split>, Error> {
        let text = |id: u32| self.tokens[id as usize].as_str();
        let exists = |part: &str| ids.find(part, text).is_some();
        let mut splits: Vec<Split> = Vec::new();
        for (index, (token, score)) in self.tokens.iter().zip(&self.scores).enumerate() {
            let kind = self.kind(index);
            if !score.is_finite() {
                let key = format!("tokenizer.ggml.scores[{index}]");
                return Err(bad(&key, score, "a finite number"));
            }
            if kind == BYTE && !is_byte_token(token) {
                let key = format!("tokenizer.ggml.tokens[{index}]");
                return Err(bad(&key, format!("{token:?} of type byte"), "<0xHH>"));
            }
            if !matches!(kind, NORMAL | USER_DEFINED) {
                continue;
            }
            if token.len() > MAX_PIECE {
                let key = format!("tokenizer.ggml.tokens[{index}]");
                return Err(bad(
                    &key,
                    format!("{} bytes", token.len()),
                    &format!("at most {MAX_PIECE}"),
                ));
            }
            let total = token.chars().count();
            for (chars, (at, _)) in token.char_indices().enumerate().skip(1) {
                let (left, right) = token.split_at(at);
                if exists(left) && exists(right) {
                    splits.push(Split {
                        token: index as u32,
                        at: at as u16,
                        chars: [chars as u16, (total - chars) as u16],
                    });
                }
            }
        }
        // Both zeros are equal.
        let score = |of: &Split| self.scores[of.token as usize] + 0.0;
        splits.sort_unstable_by(|a, b| {
            (score(b).total_cmp(&score(a)))
                .then_with(|| b.chars.cmp(&a.chars))
                .then_with(|| a.token.cmp(&b.token))
        });
        Ok(splits)
    }

    /// A BPE whose merges the file lists.
    fn listed_merges(&self) -> Result<(Parts<'_>, Merges<'_>), Error> {
        let split = self.splitting()?;
        let mut merges = Vec::with_capacity(self.merges.len());
        for (rank, merge) in self.merges.iter().enumerate() {
            let parts = merge
                .split_once(' ')
                .filter(|(l, r)| !l.is_empty() && !r.is_empty() && !r.contains(' '));
            let (left, right) = parts.ok_or_else(|| {
                let key = format!("tokenizer.ggml.merges[{rank}]");
                bad(
                    &key,
                    format!("{merge:?}"),
                    "two tokens with a space between them",
                )
            })?;
            merges.push([left, right]);
        }
        let merges = Merges::Listed(merges);
        if split.bytes == Bytes::Pieces {
            let prefix = self.add_space_prefix.unwrap_or(false);
            return Ok((self.pieces(prefix), merges));
        }
        let letters = split.bytes == Bytes::Letters;
        let normalizer = split.nfc.then(|| json!({"type": "NFC"}));
        let parts = Parts {
            normalizer: normalizer.unwrap_or_default(),
            pre_tokenizer: json!({"type": "Sequence", "pretokenizers": split.pre_tokenizers()}),
            processors: if letters { vec![level()] } else { Vec::new() },
            decoder: if letters {
                level()
            } else {
                json!({"type": "Sequence", "decoders": [{"type": "Fuse"}]})
            },
            bpe: Bpe {
                byte_fallback: false,
                fuse_unk: false,
                ignore_merges: split.whole,
                unk_token: self.unknown().filter(|_| !letters),
            },
        };
        Ok((parts, merges))
    }
}

/// The parts that differ between the kinds.
struct Parts<'a> {
    normalizer: Value,
    pre_tokenizer: Value,
    processors: Vec<Value>,
    decoder: Value,
    bpe: Bpe<'a>,
}

/// Settings of the model.
struct Bpe<'a> {
    byte_fallback: bool,
    fuse_unk: bool,
    ignore_merges: bool,
    unk_token: Option<&'a str>,
}

/// A token matched in a text before all others, with keys in ascending order.
#[derive(Serialize)]
struct Added<'a> {
    content: &'a str,
    id: u32,
    lstrip: bool,
    normalized: bool,
    rstrip: bool,
    single_word: bool,
    special: bool,
}

/// A token in two parts, which are tokens. Within [`MAX_PIECE`].
struct Split {
    token: u32,
    /// Bytes of the first part.
    at: u16,
    /// Characters of the parts.
    chars: [u16; 2],
}

/// Merges in the order in which they are applied.
enum Merges<'a> {
    Listed(Vec<[&'a str; 2]>),
    /// Of these tokens.
    Splits(&'a [String], Vec<Split>),
}

impl Serialize for Merges<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Listed(pairs) => pairs.serialize(serializer),
            Self::Splits(tokens, splits) => serializer.collect_seq(
                splits
                    .iter()
                    .map(|of| tokens[of.token as usize].split_at(of.at.into())),
            ),
        }
    }
}

/// Of these tokens, some and their ids, as an object.
struct Vocab<'a>(&'a [String], Vec<usize>);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.1.iter().map(|&id| (&self.0[id], id)))
    }
}

/// A `tokenizer.json` with keys in ascending order. Borrows vocabulary and merges: a tree of JSON values takes 200 MB for
/// 262,144 tokens.
#[derive(Serialize)]
struct Document<'a> {
    added_tokens: Vec<Added<'a>>,
    decoder: &'a Value,
    model: Model<'a>,
    normalizer: &'a Value,
    padding: (),
    post_processor: &'a Value,
    pre_tokenizer: &'a Value,
    truncation: (),
    version: &'a str,
}

/// Its model.
#[derive(Serialize)]
struct Model<'a> {
    byte_fallback: bool,
    continuing_subword_prefix: (),
    dropout: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    ignore_merges: bool,
    merges: Merges<'a>,
    #[serde(rename = "type")]
    kind: &'a str,
    unk_token: Option<&'a str>,
    vocab: Vocab<'a>,
}

fn replace(from: &str, to: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": from}, "content": to})
}

fn is_byte_token(token: &str) -> bool {
    token
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .is_some_and(|digits| {
            digits.len() == 2
                && digits
                    .bytes()
                    .all(|b| matches!(b, b'0'..=b'9' | b'A'..=b'F'))
        })
}

fn bad(key: &str, found: impl std::fmt::Display, expected: &str) -> Error {
    Error::Tokenizer {
        what: key.to_owned(),
        found: found.to_string(),
        expected: expected.to_owned(),
    }
}

#[cfg(test)]
mod tests;
