//! Responses of OpenAI's API: whole, or as chunks of server-sent events.

use emberflow_engine::Repetition;
use serde::Serialize;
use serde_json::{Value, json};

use super::api::Kind;
use super::calls::Part;
use super::log_probs::LogProbsJson;
use super::out::PromptProgress;

/// Members common to all chunks of a response.
#[derive(Debug, Clone)]
pub struct Head {
    /// API of the response.
    pub kind: Kind,
    /// Response id.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// Model name.
    pub model: String,
}

/// Token counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt: usize,
    /// Prompt tokens reused from the KV cache.
    pub cached: usize,
    /// Generated tokens.
    pub completion: usize,
    /// Those of them that are reasoning.
    pub reasoning: usize,
}

impl Usage {
    /// As a `usage` object.
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        })
    }
}

/// A text, or a piece of it.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Index of the text.
    pub index: usize,
    /// The text.
    pub text: String,
    /// Reasoning.
    pub thoughts: String,
    /// Tool calls.
    pub calls: Vec<Call>,
    /// Log-probabilities, if requested.
    pub log_probs: Option<LogProbsJson>,
    /// Finish reason, at the end.
    pub reason: Option<&'static str>,
    /// The loop in which the text ends, at its end.
    pub repetition: Option<Repetition>,
}

/// A tool call.
#[derive(Debug, Clone, Default)]
pub struct Call {
    /// Call id.
    pub id: String,
    /// Tool name.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

/// A piece of a tool call in a stream.
#[derive(Debug, Clone, Copy)]
pub struct CallPiece<'a> {
    /// Index of the call.
    pub index: usize,
    /// Id and name, in the first piece.
    pub begin: Option<&'a Call>,
    /// Further text of its arguments.
    pub arguments: &'a str,
}

/// The `finish_reason`.
pub fn reason(stopped: bool) -> &'static str {
    if stopped { "stop" } else { "length" }
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
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
}

#[derive(Serialize)]
struct ChoiceJson<'a> {
    index: usize,
    #[serde(flatten)]
    text: TextJson<'a>,
    logprobs: Option<&'a LogProbsJson>,
    finish_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repetition: Option<Repetition>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum TextJson<'a> {
    Text(&'a str),
    Message(MessageJson<'a>),
    Delta(Delta<'a>),
}

#[derive(Serialize)]
struct MessageJson<'a> {
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

/// The delta of a chat chunk.
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
    Empty {},
}

impl Response<'_> {
    fn json(&self) -> String {
        // Strings and numbers always serialize.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Head {
    fn with<'a>(&'a self, object: &'a str, choices: Vec<ChoiceJson<'a>>) -> Response<'a> {
        Response {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
            prompt_progress: None,
        }
    }

    fn chunk<'a>(&'a self, choices: Vec<ChoiceJson<'a>>) -> Response<'a> {
        let object = match self.kind {
            Kind::Text => "text_completion",
            _ => "chat.completion.chunk",
        };
        self.with(object, choices)
    }

    /// A chunk that tells how much of the prompt of text `index` is read.
    pub fn progress(&self, index: usize, progress: PromptProgress) -> String {
        let choice = Choice {
            index,
            ..Choice::default()
        };
        let text = match self.kind {
            Kind::Text => TextJson::Text(""),
            _ => TextJson::Delta(Delta::Empty {}),
        };
        let mut chunk = self.chunk(vec![choice.json(text)]);
        chunk.prompt_progress = Some(progress);
        chunk.json()
    }

    /// The first chunk of text `index`; `None` for completions.
    pub fn first(&self, index: usize) -> Option<String> {
        let choice = ChoiceJson {
            index,
            text: TextJson::Delta(Delta::First {
                role: "assistant",
                content: None,
            }),
            logprobs: None,
            finish_reason: None,
            repetition: None,
        };
        (self.kind == Kind::Chat).then(|| self.chunk(vec![choice]).json())
    }

    /// A further chunk: text, or the finish reason.
    pub fn piece(&self, choice: &Choice) -> String {
        let text = match (self.kind, choice.reason) {
            (Kind::Text, _) => TextJson::Text(&choice.text),
            (_, None) if !choice.thoughts.is_empty() => TextJson::Delta(Delta::Thought {
                reasoning_content: &choice.thoughts,
            }),
            (_, None) => TextJson::Delta(Delta::Piece {
                content: &choice.text,
            }),
            (_, Some(_)) => TextJson::Delta(Delta::Empty {}),
        };
        self.chunk(vec![choice.json(text)]).json()
    }

    /// A piece of a tool call.
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
        self.chunk(vec![choice.json(text)]).json()
    }

    /// The final chunk with token counts.
    pub fn usage(&self, usage: Usage) -> String {
        let mut chunk = self.chunk(Vec::new());
        chunk.usage = Some(usage.json());
        chunk.json()
    }

    /// A whole response.
    pub fn whole(&self, choices: &[Choice], usage: Usage) -> String {
        let mut all = Vec::with_capacity(choices.len());
        for choice in choices {
            all.push(
                choice.json(match self.kind {
                    Kind::Text => TextJson::Text(&choice.text),
                    _ => TextJson::Message(MessageJson {
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
        let mut response = self.with(object, all);
        response.usage = Some(usage.json());
        response.json()
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
    /// Appends a part; `id` gives the id of a new call.
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
            repetition: self.repetition,
        }
    }
}
