//! Log-probabilities in OpenAI's formats.

use std::collections::BTreeMap;

use emberflow_engine::{LogProb, LogProbs};
use emberflow_models::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};

use super::api::Kind;

/// The `logprobs` object of a text or of a piece of it.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum LogProbsJson {
    /// Of a chat.
    Chat {
        /// One entry per token.
        content: Vec<TokenJson>,
    },
    /// Of a completion; all lists have one entry per token.
    Text {
        /// Text of each token.
        tokens: Vec<String>,
        /// Log-probabilities; `None` for the first token of a prompt.
        token_logprobs: Vec<Option<f32>>,
        /// Most likely tokens.
        top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
        /// Positions in the text, in characters.
        text_offset: Vec<usize>,
    },
}

impl LogProbsJson {
    /// The tokens of a chat.
    pub fn tokens(self) -> Vec<TokenJson> {
        match self {
            Self::Chat { content } => content,
            Self::Text { .. } => Vec::new(),
        }
    }
}

/// A token of a chat.
#[derive(Debug, Clone, Serialize)]
pub struct TokenJson {
    token: String,
    #[serde(serialize_with = "shortest")]
    logprob: f32,
    bytes: Vec<u8>,
    /// Most likely tokens, themselves without this member.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<TokenJson>>,
}

/// Writes the shortest number that is this f32, also where the number becomes an f64 first.
fn shortest<S: Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    let shortest = value.to_string().parse::<f64>();
    serializer.serialize_f64(shortest.unwrap_or(f64::from(*value)))
}

/// Formats log-probabilities.
#[derive(Debug, Clone, Copy)]
pub struct LogProbsWriter<'a> {
    /// API of the response.
    pub kind: Kind,
    /// Converts tokens to text.
    pub tokenizer: &'a Tokenizer,
}

/// Tokens of a piece of text.
#[derive(Debug, Clone, Copy)]
pub struct TokenSpan<'a> {
    /// First token of a prompt, which has no probability.
    pub first: Option<u32>,
    /// Other tokens.
    pub tokens: &'a [LogProbs],
}

impl LogProbsWriter<'_> {
    /// The `logprobs` object. `offset` is the position of the piece in the text, and is advanced to its end.
    pub fn write(&self, piece: TokenSpan<'_>, offset: &mut usize) -> LogProbsJson {
        match self.kind {
            Kind::Text => self.text(piece, offset),
            _ => LogProbsJson::Chat {
                content: piece.tokens.iter().map(|one| self.token(one)).collect(),
            },
        }
    }

    fn token(&self, one: &LogProbs) -> TokenJson {
        let plain = |entry: &LogProb| {
            let bytes = self.tokenizer.token_bytes(entry.token).unwrap_or_default();
            TokenJson {
                token: String::from_utf8_lossy(&bytes).into_owned(),
                logprob: entry.log_prob,
                bytes,
                top_logprobs: None,
            }
        };
        TokenJson {
            top_logprobs: Some(one.top.iter().map(plain).collect()),
            ..plain(&one.chosen)
        }
    }

    fn text(&self, piece: TokenSpan<'_>, offset: &mut usize) -> LogProbsJson {
        let (mut tokens, mut offsets) = (Vec::new(), Vec::new());
        let (mut likely, mut tops) = (Vec::new(), Vec::new());
        if let Some(first) = piece.first {
            offsets.push(*offset);
            // Special tokens do not appear in the text.
            *offset += self.shown(first);
            tokens.push(self.name(first));
            likely.push(None);
            tops.push(None);
        }
        for one in piece.tokens {
            offsets.push(*offset);
            *offset += self.shown(one.chosen.token);
            tokens.push(self.name(one.chosen.token));
            likely.push(Some(one.chosen.log_prob));
            let mut top = BTreeMap::new();
            for entry in &one.top {
                // Partial characters can have the same name; keep the most likely one.
                top.entry(self.name(entry.token)).or_insert(entry.log_prob);
            }
            tops.push(Some(top));
        }
        LogProbsJson::Text {
            tokens,
            token_logprobs: likely,
            top_logprobs: tops,
            text_offset: offsets,
        }
    }

    /// Number of characters of a token in the text.
    fn shown(&self, token: u32) -> usize {
        if self.tokenizer.is_special(token) {
            0
        } else {
            self.name(token).chars().count()
        }
    }

    fn name(&self, token: u32) -> String {
        let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
