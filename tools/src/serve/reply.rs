//! Responses: whole, or as a stream of server-sent events.

use serde::Serialize;
use serde_json::{Value, json};

use super::api::Kind;
use super::calls::Part;
use super::log_probs::LogProbsJson;

/// What all parts of a response have in common.
#[derive(Debug, Clone)]
pub struct Head {
    /// Its kind.
    pub kind: Kind,
    /// Its id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model.
    pub model: String,
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Of all prompts.
    pub prompt: usize,
    /// Of these, how many were known.
    pub cached: usize,
    /// Generated.
    pub completion: usize,
}

impl Usage {
    /// As a `usage` object.
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// A text, or a piece of it.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Which of the response's texts.
    pub index: usize,
    /// The text.
    pub text: String,
    /// What the model wrote to itself before.
    pub thoughts: String,
    /// Calls of tools.
    pub calls: Vec<Call>,
    /// How likely its tokens were, if that was asked.
    pub log_probs: Option<LogProbsJson>,
    /// Why it ended, if it did.
    pub reason: Option<&'static str>,
}

/// A call of a tool.
#[derive(Debug, Clone, Default)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments: JSON.
    pub arguments: String,
}

/// A piece of a call in a stream.
#[derive(Debug, Clone, Copy)]
pub struct CallPiece<'a> {
    /// Which of the text's calls.
    pub index: usize,
    /// Its id and the tool, in its first piece.
    pub begin: Option<&'a Call>,
    /// More of its arguments.
    pub arguments: &'a str,
}

/// Why a text ended, as a `finish_reason`.
pub fn reason(stopped: bool) -> &'static str {
    match stopped {
        true => "stop",
        false => "length",
    }
}

#[derive(Serialize)]
struct Response<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

#[derive(Serialize)]
struct ChoiceJson<'a> {
    index: usize,
    #[serde(flatten)]
    text: TextJson<'a>,
    logprobs: Option<&'a LogProbsJson>,
    finish_reason: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum TextJson<'a> {
    Text(&'a str),
    Message(Message<'a>),
    Delta(Delta<'a>),
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    refusal: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: Vec<CallJson<'a>>,
}

#[derive(Serialize)]
struct CallJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'a str>,
    function: FunctionJson<'a>,
}

#[derive(Serialize)]
struct FunctionJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// What a chunk of a chat adds.
#[derive(Serialize)]
#[serde(untagged)]
enum Delta<'a> {
    First {
        role: &'a str,
        content: Option<&'a str>,
    },
    Piece {
        content: &'a str,
    },
    Thought {
        reasoning_content: &'a str,
    },
    Call {
        tool_calls: [CallJson<'a>; 1],
    },
    Last {},
}

impl Head {
    fn with(&self, object: &str, choices: Vec<ChoiceJson<'_>>, usage: Option<Usage>) -> String {
        let response = Response {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage: usage.map(Usage::json),
        };
        // Strings and numbers: cannot fail.
        serde_json::to_string(&response).unwrap_or_default()
    }

    fn chunk(&self, choices: Vec<ChoiceJson<'_>>, usage: Option<Usage>) -> String {
        let object = match self.kind {
            Kind::Text => "text_completion",
            _ => "chat.completion.chunk",
        };
        self.with(object, choices, usage)
    }

    /// The first chunk of text `index`; completions have none.
    pub fn first(&self, index: usize) -> Option<String> {
        let choice = ChoiceJson {
            index,
            text: TextJson::Delta(Delta::First {
                role: "assistant",
                content: None,
            }),
            logprobs: None,
            finish_reason: None,
        };
        (self.kind == Kind::Chat).then(|| self.chunk(vec![choice], None))
    }

    /// A further chunk: text, or the reason why it ended.
    pub fn piece(&self, choice: &Choice) -> String {
        let text = match (self.kind, choice.reason) {
            (Kind::Text, _) => TextJson::Text(&choice.text),
            (_, None) if !choice.thoughts.is_empty() => TextJson::Delta(Delta::Thought {
                reasoning_content: &choice.thoughts,
            }),
            (_, None) => TextJson::Delta(Delta::Piece {
                content: &choice.text,
            }),
            (_, Some(_)) => TextJson::Delta(Delta::Last {}),
        };
        self.chunk(vec![choice.json(text)], None)
    }

    /// A piece of a call.
    pub fn call(&self, choice: &Choice, piece: CallPiece<'_>) -> String {
        let call = CallJson {
            index: Some(piece.index),
            id: piece.begin.map(|call| &*call.id),
            kind: piece.begin.map(|_| "function"),
            function: FunctionJson {
                name: piece.begin.map(|call| &*call.name),
                arguments: piece.arguments,
            },
        };
        let tool_calls = [call];
        let text = TextJson::Delta(Delta::Call { tool_calls });
        self.chunk(vec![choice.json(text)], None)
    }

    /// The chunk after the last one, with the numbers of tokens.
    pub fn usage(&self, usage: Usage) -> String {
        self.chunk(Vec::new(), Some(usage))
    }

    /// A whole response.
    pub fn whole(&self, choices: &[Choice], usage: Usage) -> String {
        let mut all = Vec::with_capacity(choices.len());
        for choice in choices {
            all.push(
                choice.json(match self.kind {
                    Kind::Text => TextJson::Text(&choice.text),
                    _ => TextJson::Message(Message {
                        role: "assistant",
                        content: Some(&*choice.text)
                            .filter(|text| choice.calls.is_empty() || !text.is_empty()),
                        reasoning_content: &choice.thoughts,
                        refusal: None,
                        tool_calls: choice.calls.iter().map(Call::json).collect(),
                    }),
                }),
            );
        }
        let object = match self.kind {
            Kind::Text => "text_completion",
            _ => "chat.completion",
        };
        self.with(object, all, Some(usage))
    }
}

impl Call {
    fn json(&self) -> CallJson<'_> {
        CallJson {
            index: None,
            id: Some(&self.id),
            kind: Some("function"),
            function: FunctionJson {
                name: Some(&self.name),
                arguments: &self.arguments,
            },
        }
    }
}

impl Choice {
    /// Takes what a text brings; `id` is that of a call that begins.
    pub fn take(&mut self, part: Part, id: impl FnOnce(usize) -> String) {
        match part {
            Part::Text(text) => self.text.push_str(&text),
            Part::Thought(text) => self.thoughts.push_str(&text),
            Part::Call(name) => self.calls.push(Call {
                id: id(self.calls.len()),
                name,
                arguments: String::new(),
            }),
            Part::Arguments(more) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&more);
                }
            }
        }
    }

    fn json<'a>(&'a self, text: TextJson<'a>) -> ChoiceJson<'a> {
        ChoiceJson {
            index: self.index,
            text,
            logprobs: self.log_probs.as_ref(),
            finish_reason: self.reason,
        }
    }
}
