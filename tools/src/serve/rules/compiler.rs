//! Compiles grammars and schemas to constraints, in bounded time and memory.

use std::sync::{Arc, Mutex, PoisonError};

use emberflow_engine::Text;
use emberflow_models::tokenizer::Tokenizer;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, ParserFactory};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::super::error::ApiError;
use super::library::{begin, factory};
use super::matcher::{ByteMatcher, Room};
use super::options::Rules;
use super::plain::plain;
use super::trial::Trials;
use super::{MAX_SOURCE, gbnf, lark, schema};

/// Memory of the constraint of one text.
pub const TEXT_BYTES: u64 = 4 << 20;

/// Maximum number of texts of a choice.
const MAX_CHOICE: usize = 1000;

/// Vocabulary of a model.
#[derive(Debug, Clone, Copy)]
pub struct Vocabulary<'a> {
    /// Gives the bytes of tokens.
    pub tokenizer: &'a Tokenizer,
    /// Number of tokens in the model.
    pub size: u32,
    /// Tokens that end a text.
    pub ends: &'a [u32],
}

impl<'a> Vocabulary<'a> {
    /// The vocabulary of a model.
    pub fn of(text: &'a Text) -> Self {
        Self {
            tokenizer: text.tokenizer(),
            size: text.config().vocab,
            ends: &text.config().eos,
        }
    }
}

/// A grammar for what precedes the constrained text, which it refers to as `@text`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preface {
    /// With the special tokens of the model.
    pub grammar: String,
    /// With ordinary text in place of them, for the trial compilation.
    pub tried: String,
}

/// The grammar of a text after its preface.
fn preceded(preface: &str, text: TopLevelGrammar) -> TopLevelGrammar {
    let mut grammars = vec![GrammarWithLexer::from_lark(preface.to_owned())];
    grammars.extend(text.grammars.into_iter().map(|grammar| GrammarWithLexer {
        name: Some("text".to_owned()),
        ..grammar
    }));
    TopLevelGrammar { grammars, ..text }
}

/// Compiler for one vocabulary.
pub struct Compiler {
    factory: ParserFactory,
    trials: Trials,
    one: Mutex<()>,
    /// Permits for constrained texts, and for those of background requests.
    texts: Arc<Semaphore>,
    background: Arc<Semaphore>,
    most: usize,
}

impl Compiler {
    /// A compiler for a vocabulary and at most `most` constrained texts.
    ///
    /// # Errors
    /// A vocabulary that llguidance rejects.
    pub fn new(vocabulary: Vocabulary<'_>, most: usize) -> Result<Self, String> {
        let Vocabulary {
            tokenizer,
            size: vocab,
            ends,
        } = vocabulary;
        let mut words = Vec::with_capacity(vocab as usize);
        for token in 0..vocab {
            let bytes = tokenizer.token_bytes(token).unwrap_or_default();
            // Special tokens are not text: give them names that no text contains.
            let structural = tokenizer.is_special(token) || ends.contains(&token);
            words.push(if structural && !bytes.is_empty() {
                [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &bytes[..]].concat()
            } else {
                bytes
            });
        }
        let ends: Vec<u32> = ends.iter().copied().filter(|&end| end < vocab).collect();
        let vocabulary = || -> TokEnv {
            let info = TokRxInfo::new(vocab, ends.first().copied().unwrap_or(0));
            let trie = TokTrie::from(&info, &words);
            Arc::new(ApproximateTokEnv::new(if ends.is_empty() {
                trie
            } else {
                trie.with_eos_tokens(&ends)
            }))
        };
        let factory = factory(vocabulary)?;
        Ok(Self {
            factory,
            trials: Trials::default(),
            one: Mutex::new(()),
            texts: Arc::new(Semaphore::new(most)),
            // One permit is reserved for interactive requests.
            background: Arc::new(Semaphore::new(most.saturating_sub(1).max(1))),
            most,
        })
    }

    /// Waits for the permits of `texts` texts.
    ///
    /// # Errors
    /// More texts than permits.
    pub async fn room(&self, texts: usize, proactive: bool) -> Result<Room, ApiError> {
        let most = if proactive {
            self.most.saturating_sub(1).max(1).min(self.most)
        } else {
            self.most
        };
        if texts > most {
            return Err(ApiError::invalid(format!(
                "{texts} texts with a grammar, a schema or a forced tool call; at most {most} are allowed (see \
                 --grammars)"
            )));
        }
        let closed = |_| ApiError::unavailable("the server is shutting down");
        let texts = texts as u32;
        let behind = if proactive {
            Some(
                self.background
                    .clone()
                    .acquire_many_owned(texts)
                    .await
                    .map_err(closed)?,
            )
        } else {
            None
        };
        let all = self
            .texts
            .clone()
            .acquire_many_owned(texts)
            .await
            .map_err(closed)?;
        Ok(Room {
            _all: all,
            _behind: behind,
        })
    }

    /// Test-compiles a grammar in a child process, then compiles it; takes up to a second.
    ///
    /// # Errors
    /// Invalid, unsupported or too large grammars.
    pub fn check(
        &self,
        rules: &Rules,
        preface: Option<&Preface>,
        room: Room,
    ) -> Result<ByteMatcher, ApiError> {
        let _one = self.one.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = grammar(rules).map_err(ApiError::invalid)?;
        let tried = match rules {
            Rules::Written { tried, .. } => TopLevelGrammar::from_lark(tried.clone()),
            _ => wanted.clone(),
        };
        let behind = |preface: Option<&String>, text| match preface {
            Some(preface) => preceded(preface, text),
            None => text,
        };
        let tried = behind(preface.map(|preface| &preface.tried), tried);
        self.trials.check(&tried).map_err(refusal)?;
        self.begin(
            behind(preface.map(|preface| &preface.grammar), wanted),
            room,
        )
    }

    /// Compiles a grammar known to be valid.
    #[cfg(test)]
    pub fn compile(&self, rules: &Rules, room: Room) -> Result<ByteMatcher, ApiError> {
        self.begin(grammar(rules).map_err(ApiError::invalid)?, room)
    }

    /// The same after a preface.
    #[cfg(test)]
    pub fn compile_behind(
        &self,
        preface: &Preface,
        rules: &Rules,
        room: Room,
    ) -> Result<ByteMatcher, ApiError> {
        let text = grammar(rules).map_err(ApiError::invalid)?;
        self.begin(preceded(&preface.grammar, text), room)
    }

    fn begin(&self, grammar: TopLevelGrammar, room: Room) -> Result<ByteMatcher, ApiError> {
        let matcher = begin(&self.factory, grammar).map_err(refusal)?;
        Ok(ByteMatcher::new(matcher, room))
    }
}

fn refusal(why: String) -> ApiError {
    ApiError::invalid(format!("invalid grammar or schema: {why}"))
}

/// The grammar in llguidance's form, with bounded cost.
fn grammar(rules: &Rules) -> Result<TopLevelGrammar, String> {
    match rules {
        Rules::Schema(schema) => {
            schema::check(schema)?;
            let schema = with_options(&plain(schema, true)?);
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        Rules::Grammar(grammar) if lark::is_gbnf(grammar) => {
            lark::check_size(grammar)?;
            Ok(TopLevelGrammar::from_lark(gbnf::to_lark(grammar)?))
        }
        Rules::Grammar(grammar) => {
            lark::check(grammar)?;
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
        Rules::Written { grammar, .. } => Ok(TopLevelGrammar::from_lark(grammar.clone())),
        Rules::Regex(regex) => {
            if regex.len() > MAX_SOURCE {
                return Err(format!(
                    "a regular expression may have at most {MAX_SOURCE} bytes"
                ));
            }
            // It is anchored anyway.
            let inner = regex.strip_prefix('^').unwrap_or(regex);
            let inner = inner
                .strip_suffix('$')
                .filter(|i| !i.ends_with('\\'))
                .unwrap_or(inner);
            Ok(TopLevelGrammar::from_regex(inner))
        }
        Rules::Choice(texts) => {
            let bytes: usize = texts.iter().map(String::len).sum();
            if texts.is_empty() || texts.len() > MAX_CHOICE || bytes > MAX_SOURCE {
                return Err(format!(
                    "a choice must have 1 to {MAX_CHOICE} texts of at most {MAX_SOURCE} bytes in total"
                ));
            }
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            Ok(TopLevelGrammar::from_lark(format!(
                "start: {}",
                texts.join(" | ")
            )))
        }
    }
}

/// Adds the format of JSON to a schema: no white space except one space after `,` and `:`, as models write it. With
/// free white space, a small model may never stop writing it.
pub fn with_options(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(map) => Value::Object(map.clone()),
        // `true` and `false` are schemas too.
        other => json!({"allOf": [other]}),
    };
    let options = JsonCompileOptions {
        item_separator: r",\x20?".to_owned(),
        key_separator: r":\x20?".to_owned(),
        whitespace_flexible: false,
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    schema
}
