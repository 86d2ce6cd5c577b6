//! How a model writes its thoughts.

use emberflow_models::tokenizer::Tokenizer;
use serde_json::json;

use super::super::calls::{HARMONY, special};
use super::super::rules::Preface;

/// Signs around thoughts.
#[derive(Debug, PartialEq, Eq)]
pub struct Signs {
    /// Before them.
    pub open: &'static str,
    /// Behind them.
    pub close: &'static str,
}

impl Signs {
    /// What may be a token of the sign before them.
    fn token(&self) -> &'static str {
        let end = self.open.rfind(['>', ']']).map_or(0, |end| end + 1);
        &self.open[..end]
    }
}

/// The form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Between two signs, before the answer.
    Tags(&'static Signs),
    /// gpt-oss's messages: `<|channel|>analysis<|message|>…<|end|>`, then a channel with the answer or a call.
    Harmony,
}

/// The signs of some families.
const SIGNS: [Signs; 7] = [
    Signs {
        open: "<think>",
        close: "</think>",
    },
    Signs {
        open: "[THINK]",
        close: "[/THINK]",
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

impl Form {
    /// That of a chat template; `None` if it knows no thoughts.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            return Some(Self::Harmony);
        }
        let signs = SIGNS.iter();
        let mut known = signs.filter(|signs| has(signs.open) || has(signs.close));
        known.next().map(Self::Tags)
    }

    /// Those tokens of its signs that are no text elsewhere.
    pub fn signs(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let of = |signs: &[&str]| {
            let tokens = signs.iter().filter_map(|sign| special(sign, tokenizer));
            tokens.collect()
        };
        match self {
            Self::Tags(signs) => of(&[signs.token(), signs.close]),
            Self::Harmony => of(&HARMONY),
        }
    }
}

/// How a text begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// The form of its thoughts.
    pub form: Form,
    /// Whether the prompt ends inside of them.
    pub opened: bool,
}

impl Opening {
    /// That behind a prompt of this chat template.
    pub fn behind(prompt: &str, template: &str) -> Option<Self> {
        let form = Form::of_template(template)?;
        let opened = match form {
            Form::Tags(signs) => prompt.trim_end().ends_with(signs.open),
            Form::Harmony => false,
        };
        Some(Self { form, opened })
    }
}

impl Opening {
    /// What may stand before a text that is held to rules: thoughts. `called` if these rules are those of calls,
    /// which have their own channel.
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
        // A sign that is text ends free text as soon as it is there.
        let before = |close: &str| match sign(close) {
            token if token.starts_with('<') => format!("before: TEXT {token}\n"),
            text => format!("before[lazy]: TEXT {text}\n"),
        };
        let text = "TEXT: /(?s:.)*/\n";
        match self.form {
            Form::Tags(signs) => {
                let begin = match self.opened {
                    true => "start: before BREAK? @text\n".to_owned(),
                    false => {
                        let (token, rest) = signs.open.split_at(signs.token().len());
                        let rest = match rest {
                            "" => String::new(),
                            rest => quoted(rest),
                        };
                        let open = sign(token);
                        format!("start: ({open} {rest} before BREAK?)? @text\n")
                    }
                };
                let before = before(signs.close);
                format!("{begin}{before}BREAK: /\\s{{1,2}}/\n{text}")
            }
            Form::Harmony => {
                let [start, channel, constrain, message, _] = HARMONY.map(sign);
                let answer = match called {
                    true => String::new(),
                    false => format!("{channel} \"final\" (\" \" {constrain} \"json\")? {message}"),
                };
                let before = before("<|end|>");
                format!(
                    "start: thought? {answer} @text\nthought: {channel} \"analysis\" {message} before \
                     {start} \"assistant\"\n{before}{text}"
                )
            }
        }
    }
}

fn quoted(text: &str) -> String {
    json!(text).to_string()
}
