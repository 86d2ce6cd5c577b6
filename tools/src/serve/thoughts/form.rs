//! Formats of reasoning.

use emberflow_models::tokenizer::Tokenizer;
use serde_json::json;

use super::super::calls::{HARMONY, special};
use super::super::rules::Preface;
use super::solar::SOLAR;

/// Tags around reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct Signs {
    /// Opening tag.
    pub open: &'static str,
    /// Closing tag.
    pub close: &'static str,
}

impl Signs {
    /// The part of the opening tag that may be a special token.
    fn token(&self) -> &'static str {
        let end = self.open.rfind(['>', ']']).map_or(0, |end| end + 1);
        &self.open[..end]
    }
}

/// How a model writes its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Between two tags, before the answer.
    Tags(&'static Signs),
    /// gpt-oss: `<|channel|>analysis<|message|>…<|end|>`, then a channel with the answer or a call.
    Harmony,
    /// Solar Open: `<|think|>…<|end|>`, then a message with the answer or calls.
    Solar,
}

/// Tags of some model families.
const SIGNS: [Signs; 8] = [
    Signs {
        open: "<think>",
        close: "</think>",
    },
    Signs {
        open: "[THINK]",
        close: "[/THINK]",
    },
    Signs {
        open: "<think:opensource>",
        close: "</think:opensource>",
    },
    Signs {
        open: "<seed:think>",
        close: "</seed:think>",
    },
    Signs {
        open: "<mm:think>",
        close: "</mm:think>",
    },
    Signs {
        open: "<|START_THINKING|>",
        close: "<|END_THINKING|>",
    },
    Signs {
        open: "<|inner_prefix|>",
        close: "<|inner_suffix|>",
    },
    Signs {
        open: "<|channel>thought",
        close: "<channel|>",
    },
];

impl ReasoningFormat {
    /// The format used by a chat template; `None` if it has no reasoning.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            return Some(Self::Harmony);
        }
        if has("<|think|>") && has("<|content|>") {
            return Some(Self::Solar);
        }
        // Hy3's template inserts the end of its tags: `'<think{}>'.format(':opensource')`.
        let formatted = |tag: &str| {
            let parts = tag.rsplit_once(':');
            parts.is_some_and(|(name, end)| {
                has(&format!("{name}{{}}>")) && has(&format!(":{}", end.trim_end_matches('>')))
            })
        };
        let writes = |tag: &str| has(tag) || formatted(tag);
        let signs = SIGNS.iter();
        let mut known = signs.filter(|signs| writes(signs.open) || writes(signs.close));
        known.next().map(Self::Tags)
    }

    /// Whether a special token with this text is a tag, so that it appears in texts to be parsed.
    pub fn shows(self, special: &str) -> bool {
        match self {
            Self::Tags(signs) => [signs.token(), signs.close].contains(&special),
            Self::Harmony => HARMONY.contains(&special),
            Self::Solar => SOLAR.contains(&special),
        }
    }

    /// Tags that are special tokens.
    pub fn signs(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let of = |signs: &[&str]| {
            let tokens = signs.iter().filter_map(|sign| special(sign, tokenizer));
            tokens.collect()
        };
        match self {
            Self::Tags(signs) => of(&[signs.token(), signs.close]),
            Self::Harmony => of(&HARMONY),
            Self::Solar => of(&SOLAR),
        }
    }
}

/// How a generated text begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// Format of the reasoning.
    pub form: ReasoningFormat,
    /// Whether the prompt ends inside the reasoning.
    pub opened: bool,
}

impl Opening {
    /// The opening after a prompt of this chat template.
    pub fn behind(prompt: &str, template: &str) -> Option<Self> {
        let form = ReasoningFormat::of_template(template)?;
        let opened = match form {
            ReasoningFormat::Tags(signs) => prompt.trim_end().ends_with(signs.open),
            ReasoningFormat::Harmony | ReasoningFormat::Solar => false,
        };
        Some(Self { form, opened })
    }
}

impl Opening {
    /// Grammar of the reasoning before a constrained text. `called`: the constraint is a forced call, which has its
    /// own channel.
    pub fn preface(self, called: bool, tokenizer: &Tokenizer) -> Preface {
        let token = |text: &str| match special(text, tokenizer) {
            Some(token) => format!("<[{token}]>"),
            None => quoted(text),
        };
        Preface {
            grammar: self.written(called, &token),
            tried: self.written(called, &quoted),
        }
    }

    fn written(self, called: bool, sign: &dyn Fn(&str) -> String) -> String {
        // If a tag is ordinary text, free text ends as soon as it appears.
        let before = |close: &str| match sign(close) {
            token if token.starts_with('<') => format!("before: TEXT {token}\n"),
            text => format!("before[lazy]: TEXT {text}\n"),
        };
        let text = "TEXT: /(?s:.)*/\n";
        match self.form {
            ReasoningFormat::Tags(signs) => {
                let begin = if self.opened {
                    "start: before BREAK? @text\n".to_owned()
                } else {
                    let (token, rest) = signs.open.split_at(signs.token().len());
                    let rest = match rest {
                        "" => String::new(),
                        rest => quoted(rest),
                    };
                    let open = sign(token);
                    format!("start: ({open} {rest} before BREAK?)? @text\n")
                };
                let before = before(signs.close);
                format!("{begin}{before}BREAK: /\\s{{1,2}}/\n{text}")
            }
            ReasoningFormat::Harmony => {
                let [start, channel, constrain, message, _] = HARMONY.map(sign);
                let answer = if called {
                    String::new()
                } else {
                    format!("{channel} \"final\" (\" \" {constrain} \"json\")? {message}")
                };
                let before = before("<|end|>");
                format!(
                    "start: thought? {answer} @text\nthought: {channel} \"analysis\" {message} before \
                     {start} \"assistant\"\n{before}{text}"
                )
            }
            ReasoningFormat::Solar => {
                let [begin, think, content, _, _] = SOLAR.map(sign);
                let answer = if called { "" } else { &*content };
                let before = before("<|end|>");
                format!(
                    "start: thought? {answer} @text\nthought: {think} before {begin} \"assistant\"\n{before}{text}"
                )
            }
        }
    }
}

fn quoted(text: &str) -> String {
    json!(text).to_string()
}
