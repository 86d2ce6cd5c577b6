//! Restrictions on tokens besides grammars: allowed tokens, bad words, minimum length.

use std::collections::VecDeque;
use std::sync::Arc;

use emberflow_engine::{Bias, Constraint, Text};
use serde::Deserialize;
use serde_json::Value;

use super::error::ApiError;

/// Maximum numbers of stop tokens and bad words, and of bytes per word.
const MAX_ENDS: usize = 128;
const MAX_WORDS: usize = 300;
const MAX_WORD: usize = 256;
/// Maximum number of tokens with a bias.
const MAX_BIAS: usize = 300;

/// Request fields, with vLLM's names and meaning.
#[derive(Debug, Default, Deserialize)]
pub struct TokenLimits {
    min_tokens: Option<usize>,
    stop_token_ids: Option<Vec<u32>>,
    allowed_token_ids: Option<Vec<u32>>,
    bad_words: Option<Vec<String>>,
    logit_bias: Option<Value>,
}

impl TokenLimits {
    /// Additional tokens that end the text; they are not part of it.
    ///
    /// # Errors
    /// Too many, or unknown tokens.
    pub fn ends(&self, vocab: u32) -> Result<Vec<u32>, ApiError> {
        let ends = self.stop_token_ids.clone().unwrap_or_default();
        if ends.len() > MAX_ENDS {
            let message = format!("{} tokens; at most {MAX_ENDS} are allowed", ends.len());
            return Err(ApiError::param("stop_token_ids", message));
        }
        known("stop_token_ids", &ends, vocab)?;
        Ok(ends)
    }

    /// The restrictions of a text of at most `most` tokens.
    ///
    /// # Errors
    /// Invalid or too large fields.
    pub fn bounds(&self, text: &Text, ignore_eos: bool, most: usize) -> Result<Bounds, ApiError> {
        let vocab = text.config().vocab;
        let least = self.min_tokens.unwrap_or(0);
        if least > most {
            let message = format!("`min_tokens` is {least}, more than the {most} of `max_tokens`");
            return Err(ApiError::param("min_tokens", message));
        }
        let mut ends = self.ends(vocab)?;
        if !ignore_eos {
            ends.extend_from_slice(&text.config().eos);
        }
        let mut only = self
            .allowed_token_ids
            .clone()
            .filter(|only| !only.is_empty());
        if let Some(only) = &mut only {
            known("allowed_token_ids", only, vocab)?;
            only.sort_unstable();
            only.dedup();
        }
        Ok(Bounds {
            only,
            never: self.never(text)?,
            least,
            ends,
            vocab,
        })
    }

    /// `logit_bias`: an object from tokens to numbers, or a list of pairs. A token is a number, or a text all of
    /// whose tokens are meant; `false` bans it.
    ///
    /// # Errors
    /// Another form, unknown tokens, or too many.
    pub fn bias(&self, text: &Text) -> Result<Vec<Bias>, ApiError> {
        let wrong = |message: &str| ApiError::param("logit_bias", message);
        let mut biases = Vec::new();
        let mut add = |token: Value, value: &Value| {
            biases.extend(biased(text, &token, value)?);
            if biases.len() <= MAX_BIAS {
                Ok(())
            } else {
                Err(wrong(&format!("at most {MAX_BIAS} tokens are allowed")))
            }
        };
        match &self.logit_bias {
            None => {}
            Some(Value::Object(all)) => {
                for (name, value) in all {
                    let number = name.parse::<u32>().map(Value::from);
                    add(number.unwrap_or_else(|_| name.clone().into()), value)?;
                }
            }
            Some(Value::Array(all)) => {
                for pair in all {
                    let (Some(token), Some(value)) = (pair.get(0), pair.get(1)) else {
                        return Err(wrong("a pair must be [TOKEN, NUMBER]"));
                    };
                    add(token.clone(), value)?;
                }
            }
            Some(_) => return Err(wrong("`logit_bias` must be an object or a list of pairs")),
        }
        Ok(biases)
    }

    /// Tokens of the bad words, at the start of a text and after a space.
    fn never(&self, text: &Text) -> Result<Vec<Vec<u32>>, ApiError> {
        let words = self.bad_words.as_deref().unwrap_or_default();
        let refuse = |message: String| ApiError::param("bad_words", message);
        if words.len() > MAX_WORDS || words.iter().any(|word| word.len() > MAX_WORD) {
            return Err(refuse(format!(
                "at most {MAX_WORDS} words of {MAX_WORD} bytes are allowed"
            )));
        }
        let mut never: Vec<Vec<u32>> = Vec::new();
        for word in words {
            let word = word.trim_start();
            let tokens = |word: &str| text.tokens(word).map_err(|e| refuse(e.to_string()));
            let (plain, spaced) = (tokens(word)?, tokens(&format!(" {word}"))?);
            if spaced != plain {
                never.push(spaced);
            }
            never.push(plain);
        }
        never.retain(|word| !word.is_empty());
        Ok(never)
    }
}

/// Bias of a token, or of each token of a text.
fn biased(text: &Text, token: &Value, add: &Value) -> Result<Vec<Bias>, ApiError> {
    let vocab = text.config().vocab;
    let add = match add {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        add => add
            .as_f64()
            .filter(|add| add.abs() <= 100.0)
            .map(|add| add as f32),
    };
    let tokens = match token {
        Value::String(word) => text.tokens(word).map_err(ApiError::invalid)?,
        token => {
            let known = token.as_u64().filter(|&token| token < vocab.into());
            known.map(|token| token as u32).into_iter().collect()
        }
    };
    match add.filter(|_| !tokens.is_empty()) {
        Some(add) => Ok(tokens
            .into_iter()
            .map(|token| Bias { token, add })
            .collect()),
        None => {
            let message = format!(
                "expected tokens below {vocab} or strings, with values of -100 to 100 or false"
            );
            Err(ApiError::param("logit_bias", message))
        }
    }
}

/// Checks that the vocabulary has these tokens.
fn known(field: &'static str, tokens: &[u32], vocab: u32) -> Result<(), ApiError> {
    match tokens.iter().find(|&&token| token >= vocab) {
        None => Ok(()),
        Some(token) => {
            let message = format!("token {token} is outside the vocabulary of {vocab}");
            Err(ApiError::param(field, message))
        }
    }
}

/// Restrictions on the tokens of a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Allowed tokens, ascending; `None` for all.
    pub only: Option<Vec<u32>>,
    /// Banned token sequences.
    pub never: Vec<Vec<u32>>,
    /// Minimum number of tokens.
    pub least: usize,
    /// Tokens that end the text.
    pub ends: Vec<u32>,
    /// Vocabulary size.
    pub vocab: u32,
}

impl Bounds {
    /// Combines these restrictions with the constraint `inner`; returns `inner` if there are none.
    pub fn hold(self, inner: Option<Box<dyn Constraint>>) -> Option<Box<dyn Constraint>> {
        if self.only.is_none() && self.never.is_empty() && self.least == 0 {
            return inner;
        }
        Some(Box::new(Bounded {
            bounds: Arc::new(self),
            inner,
            last: VecDeque::new(),
            taken: 0,
            banned: Vec::new(),
        }))
    }
}

/// A text with restrictions.
#[derive(Debug)]
struct Bounded {
    bounds: Arc<Bounds>,
    inner: Option<Box<dyn Constraint>>,
    /// Last tokens, as many as the longest bad word needs.
    last: VecDeque<u32>,
    taken: usize,
    /// Tokens that would complete a bad word, ascending.
    banned: Vec<u32>,
}

impl Constraint for Bounded {
    fn prepare(&mut self) -> Result<(), String> {
        if let Some(inner) = &mut self.inner {
            inner.prepare()?;
        }
        let last = self.last.make_contiguous();
        let ends = self.bounds.never.iter().filter_map(|word| {
            let (end, before) = word.split_last()?;
            last.ends_with(before).then_some(*end)
        });
        self.banned.clear();
        self.banned.extend(ends);
        self.banned.sort_unstable();
        let any = match &self.bounds.only {
            Some(only) => only.iter().any(|&token| self.allows(token)),
            None => (0..self.bounds.vocab).any(|token| self.allows(token)),
        };
        if any {
            Ok(())
        } else {
            Err(
                "`allowed_token_ids`, `bad_words` and `min_tokens` leave no token to choose from"
                    .to_owned(),
            )
        }
    }

    fn allows(&self, token: u32) -> bool {
        let Bounds {
            only, least, ends, ..
        } = &*self.bounds;
        let listed = only
            .as_ref()
            .is_none_or(|only| only.binary_search(&token).is_ok());
        let early = self.taken < *least && ends.contains(&token);
        let inner = || self.inner.as_ref().is_none_or(|inner| inner.allows(token));
        listed && !early && self.banned.binary_search(&token).is_err() && inner()
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        let longest = self.bounds.never.iter().map(Vec::len).max();
        self.last.push_back(token);
        while self.last.len() >= longest.unwrap_or(1).max(1) {
            self.last.pop_front();
        }
        self.taken += 1;
        self.inner
            .as_mut()
            .map_or(Ok(()), |inner| inner.accept(token))
    }

    fn is_complete(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_complete())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            bounds: self.bounds.clone(),
            inner: self.inner.as_ref().map(|inner| inner.fork()),
            last: self.last.clone(),
            taken: self.taken,
            banned: self.banned.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens allowed after `taken`, of a vocabulary of eight.
    fn allowed(bounds: &Bounds, taken: &[u32]) -> Result<Vec<u32>, String> {
        let mut held = bounds.clone().hold(None).unwrap();
        for &token in taken {
            held.prepare()?;
            held.accept(token)?;
        }
        held = held.fork();
        held.prepare()?;
        Ok((0..8).filter(|&token| held.allows(token)).collect())
    }

    #[test]
    fn lists_bad_words_and_least_lengths_bound_a_text() {
        let none = Bounds {
            vocab: 8,
            ..Bounds::default()
        };
        assert!(none.clone().hold(None).is_none());
        let list = Bounds {
            only: Some(vec![1, 5]),
            ..none.clone()
        };
        assert_eq!(allowed(&list, &[5]), Ok(vec![1, 5]));
        let words = Bounds {
            never: vec![vec![3], vec![1, 2], vec![2, 1, 2]],
            ..none.clone()
        };
        assert_eq!(allowed(&words, &[]), Ok(vec![0, 1, 2, 4, 5, 6, 7]));
        assert_eq!(allowed(&words, &[0, 1]), Ok(vec![0, 1, 4, 5, 6, 7]));
        assert_eq!(allowed(&words, &[1, 0]), Ok(vec![0, 1, 2, 4, 5, 6, 7]));
        let least = Bounds {
            least: 2,
            ends: vec![7, 0],
            ..none.clone()
        };
        assert_eq!(allowed(&least, &[1]), Ok(vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(allowed(&least, &[1, 1]).unwrap().len(), 8);
        let nothing = Bounds {
            only: Some(vec![7]),
            ..least
        };
        assert!(
            allowed(&nothing, &[])
                .unwrap_err()
                .contains("leave no token")
        );
    }
}
