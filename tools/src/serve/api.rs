//! Requests of `/v1/chat/completions` and `/v1/completions`.
//!
//! What becomes of each field says `fields/`.

use emberflow_engine::{Request, Text};
use emberflow_models::chat::{Conversation, Message};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bounds::{self, Bounds};
use super::error::ApiError;
use super::infill::{self, Infill};
use super::rules::{self, Rules};
use super::turn::Turn;
use super::{calls, lines, sampling, thoughts};
use crate::template::Renderer;

/// Most stop strings of a request, and bytes of each.
const MAX_STOPS: usize = 16;
const MAX_STOP: usize = 256;
/// Most tokens that are told at a place.
const MAX_TOP: usize = 20;
/// Tokens of a completion that names no number.
const COMPLETION_TOKENS: usize = 16;

/// Which of the two kinds of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
    /// `/v1/responses`
    Response,
    /// `/api/chat`
    OllamaChat,
    /// `/api/generate`
    OllamaGenerate,
    /// `/v1/embeddings`, `/api/embed`
    Embedding,
    /// `/v1/messages`
    Message,
    /// `/completion`, `/infill`
    Native,
}

/// Fields that both kinds of request share.
#[derive(Debug, Default, Deserialize)]
pub struct Common {
    /// Name of the model.
    pub model: Option<String>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    n: Option<usize>,
    stop: Option<OneOrMany>,
    ignore_eos: Option<bool>,
    include_stop_str_in_output: Option<bool>,
    skip_special_tokens: Option<bool>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    /// Whether to stream.
    pub stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    priority: Option<i64>,
    logprobs: Option<LogProbsAsked>,
    top_logprobs: Option<usize>,
    #[serde(flatten)]
    rules: rules::Asked,
    #[serde(flatten)]
    sampling: sampling::Asked,
    /// What tokens its texts may have.
    #[serde(flatten)]
    pub bounds: bounds::Asked,
    /// Tools that may be called.
    #[serde(flatten)]
    pub calls: calls::Asked,
    /// What the chat template is told, and what becomes of thoughts.
    #[serde(flatten)]
    pub thoughts: thoughts::Asked,
    /// Where its texts end by their lines.
    #[serde(flatten)]
    pub lines: lines::Asked,
    best_of: Option<usize>,
}

/// Whether (chats) or how many (completions).
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(
    untagged,
    expecting = "`logprobs` is true or false in chats, a number in completions"
)]
enum LogProbsAsked {
    Whether(bool),
    Top(usize),
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`stop` is a text or a list of texts")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// `/v1/chat/completions`
#[derive(Debug, Deserialize)]
pub struct ChatRequest {
    messages: Vec<InMessage>,
    continue_final_message: Option<Value>,
    add_generation_prompt: Option<bool>,
    /// The other fields.
    #[serde(flatten)]
    pub common: Common,
}

#[derive(Debug, Deserialize)]
struct InMessage {
    role: String,
    content: Option<Content>,
    tool_calls: Option<Vec<Value>>,
    tool_call_id: Option<String>,
    name: Option<String>,
    reasoning_content: Option<String>,
    /// Others, which the chat template may know.
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`content` is a text or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
}

/// Text of a reasoning item's parts.
fn joined(parts: &[ContentPart]) -> String {
    parts
        .iter()
        .filter_map(|part| part.text.as_deref())
        .collect()
}

/// `/v1/responses`
#[derive(Debug, Deserialize)]
pub struct ResponsesRequest {
    input: Input,
    instructions: Option<String>,
    text: Option<Value>,
    /// The other fields.
    #[serde(flatten)]
    pub common: Common,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`input` is a text or a list of items")]
enum Input {
    Text(String),
    Items(Vec<InItem>),
}

#[derive(Debug, Deserialize)]
struct InItem {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
    summary: Option<Vec<ContentPart>>,
}

/// `/v1/completions`
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    prompt: Prompt,
    /// Whether each text begins with its prompt.
    pub echo: Option<bool>,
    /// What follows each text.
    suffix: Option<String>,
    /// The other fields.
    #[serde(flatten)]
    pub common: Common,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`prompt` is a text, a list of texts, a list of tokens or a list of such lists"
)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several texts as tokens.
    TokenLists(Vec<Vec<u32>>),
}

impl Common {
    /// Refuses a choice among more texts than are sent.
    pub fn check(&self) -> Result<(), ApiError> {
        let (best, n) = (self.best_of, self.samples());
        match best.filter(|&best| best != n) {
            None => Ok(()),
            Some(best) => {
                let message =
                    format!("`best_of` is {best}, and only {n}, the value of `n`, is supported");
                Err(ApiError::param("best_of", message))
            }
        }
    }

    /// What the texts are held to.
    ///
    /// # Errors
    /// More than one kind, or a malformed one.
    pub fn rules(&self) -> Result<Option<Rules>, ApiError> {
        self.rules.rules()
    }

    /// Number of continuations.
    pub fn samples(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// Whether this is background work: a priority above 0.
    pub fn proactive(&self) -> bool {
        self.priority.is_some_and(|p| p > 0)
    }

    /// Whether a stream ends with the numbers of tokens.
    pub fn include_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// The stop strings.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP) {
            let message = format!("at most {MAX_STOPS} stop strings of {MAX_STOP} bytes");
            return Err(ApiError::param("stop", message));
        }
        Ok(stops)
    }

    /// How many of the likeliest tokens to say at each token, if log-probabilities are asked for.
    fn log_probs(&self) -> Result<Option<usize>, ApiError> {
        let top = match self.logprobs {
            None | Some(LogProbsAsked::Whether(false)) => match self.top_logprobs {
                None | Some(0) => return Ok(None),
                Some(_) => {
                    let message = "`top_logprobs` needs `logprobs`";
                    return Err(ApiError::param("top_logprobs", message));
                }
            },
            Some(LogProbsAsked::Whether(true)) => self.top_logprobs.unwrap_or(0),
            Some(LogProbsAsked::Top(top)) => top,
        };
        match top <= MAX_TOP {
            true => Ok(Some(top)),
            false => {
                let message = format!("at most {MAX_TOP} tokens are told at each place");
                Err(ApiError::param("logprobs", message))
            }
        }
    }

    /// What bounds each text of at most `most` tokens.
    pub fn bounds(&self, text: &Text, most: usize) -> Result<Bounds, ApiError> {
        let ignore_eos = self.ignore_eos.unwrap_or(false);
        self.bounds.bounds(text, ignore_eos, most)
    }

    /// Whether the stop string that ends a text is a part of it.
    pub fn keeps_stop(&self) -> bool {
        self.include_stop_str_in_output.unwrap_or(false)
    }

    /// Whether special tokens give text.
    pub fn shows_special(&self) -> bool {
        self.skip_special_tokens == Some(false)
    }

    /// Keeps as many of a prompt's last tokens as the request says; -1 as many as the context has.
    pub fn truncate(&self, prompt: &mut Vec<u32>, context: usize) -> Result<(), ApiError> {
        let most = match self.truncate_prompt_tokens {
            None => return Ok(()),
            Some(-1) => context,
            Some(most) => usize::try_from(most)
                .ok()
                .filter(|&most| most > 0)
                .ok_or_else(|| {
                    let message =
                        format!("`truncate_prompt_tokens` is {most}, expected 1 or more, or -1");
                    ApiError::param("truncate_prompt_tokens", message)
                })?,
        };
        prompt.drain(..prompt.len().saturating_sub(most));
        Ok(())
    }

    /// What to generate after a prompt of `prompt` of `context` positions. `seed` is used where none
    /// is given.
    pub fn request(
        &self,
        text: &Text,
        default_tokens: usize,
        seed: u64,
    ) -> Result<Request, ApiError> {
        let sampling = self.sampling.sampling(text, seed)?;
        let asked = self.max_completion_tokens.or(self.max_tokens);
        Ok(Request {
            max_tokens: asked.unwrap_or(default_tokens),
            sampling,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            log_probs: self.log_probs()?,
            ..Request::default()
        })
    }
}

impl ChatRequest {
    /// Tokens of the conversation's text.
    pub fn tokens(&self, text: &Text, rendered: &str) -> Result<Vec<u32>, ApiError> {
        let tokens = match self.common.add_special_tokens {
            Some(true) => text.encode(rendered),
            // The template writes its own special tokens.
            _ => text.tokens(rendered),
        };
        tokens.map_err(ApiError::invalid)
    }

    /// Text of the conversation. It has its own special tokens.
    pub fn rendered(&self, template: &Renderer, tools: &[Value]) -> Result<String, ApiError> {
        let developer = template.source(!tools.is_empty()).contains("developer");
        let messages = self
            .messages
            .iter()
            .map(|message| message.message(developer));
        let mut messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
        if messages.is_empty() {
            return Err(ApiError::param("messages", "there are no messages"));
        }
        let turn = Turn::of(
            self.continue_final_message.as_ref(),
            self.add_generation_prompt,
            messages.last(),
        )?;
        let render = |messages: &[Message], open| {
            let rendered = template.render(&Conversation {
                messages: messages.to_vec(),
                tools: tools.to_vec(),
                add_generation_prompt: open,
                variables: self.common.thoughts.variables(),
            });
            rendered.map_err(|e| ApiError::param("messages", e))
        };
        let is_null = |message: &Message| message.get("content").is_none_or(Value::is_null);
        let first = turn.prompt(&messages, render);
        if first.is_ok() || !messages.iter().any(is_null) {
            return first;
        }
        // Many templates take content for a text, also beside calls.
        for message in messages.iter_mut().filter(|message| is_null(message)) {
            message.set("content", "".into());
        }
        turn.prompt(&messages, render).or(first)
    }
}

/// A call as templates read it: its arguments are an object, not its text.
fn with_object(call: &Value) -> Value {
    let mut call = call.clone();
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && let Some(object) = arguments
            .as_str()
            .and_then(|a| serde_json::from_str(a).ok())
    {
        *arguments = object;
    }
    call
}

impl InItem {
    /// Adds what the item says to the conversation.
    fn say(self, messages: &mut Vec<InMessage>) -> Result<(), ApiError> {
        match (self.kind.as_deref(), self.role) {
            (None | Some("message"), Some(role)) => match messages.last_mut() {
                Some(last) if role == "assistant" && last.only_reasons() => {
                    last.content = self.content;
                }
                _ => messages.push(InMessage::new(&role, self.content)),
            },
            (Some("function_call"), _) => {
                let function = json!({"name": self.name, "arguments": self.arguments});
                let call = json!({"id": self.call_id, "type": "function", "function": function});
                match messages.last_mut() {
                    // Several calls are one turn.
                    Some(last) if last.tool_calls.is_some() || last.only_reasons() => {
                        last.tool_calls.get_or_insert_default().push(call);
                    }
                    _ => messages.push(InMessage {
                        tool_calls: Some(vec![call]),
                        ..InMessage::new("assistant", None)
                    }),
                }
            }
            (Some("function_call_output"), _) => messages.push(InMessage {
                tool_call_id: self.call_id,
                ..InMessage::new("tool", self.output)
            }),
            (Some("reasoning"), _) => {
                let text = match (self.content, self.summary) {
                    (Some(Content::Text(text)), _) => text,
                    (Some(Content::Parts(parts)), _) => joined(&parts),
                    (None, summary) => joined(&summary.unwrap_or_default()),
                };
                // Of the turn that follows.
                messages.push(InMessage {
                    reasoning_content: Some(text),
                    ..InMessage::new("assistant", None)
                });
            }
            _ => {
                let message = "only messages with a role, calls of functions and their outputs";
                return Err(ApiError::param("input", message));
            }
        }
        Ok(())
    }
}

impl InMessage {
    fn new(role: &str, content: Option<Content>) -> Self {
        Self {
            role: role.to_owned(),
            content,
            tool_calls: None,
            tool_call_id: None,
            name: None,
            reasoning_content: None,
            more: Map::new(),
        }
    }

    /// Whether it is the beginning of a turn.
    fn only_reasons(&self) -> bool {
        let rest = self.content.is_none() && self.tool_calls.is_none();
        rest && self.reasoning_content.is_some()
    }

    /// As the template sees it, which may know the role `developer`.
    fn message(&self, developer: bool) -> Result<Message, ApiError> {
        let mut thoughts = String::new();
        let content = match &self.content {
            None => Value::Null,
            Some(Content::Text(text)) => text.as_str().into(),
            Some(Content::Parts(parts)) => {
                let mut all = String::new();
                for part in parts {
                    match (part.text.as_ref().or(part.thinking.as_ref()), &*part.kind) {
                        (Some(text), "text" | "input_text" | "output_text") => all.push_str(text),
                        (Some(text), "thinking" | "reasoning") => thoughts.push_str(text),
                        (_, kind) => {
                            let message = format!("content of type `{kind}` is not supported");
                            return Err(ApiError::param("messages", message));
                        }
                    }
                }
                all.into()
            }
        };
        let role = match self.role.as_str() {
            // The newer name of the same role, which few templates know.
            "developer" if !developer => "system",
            role @ "developer" | role @ ("system" | "user" | "assistant" | "tool" | "function") => {
                role
            }
            role => {
                let message = format!(
                    "there is no role `{role}`; known: system, developer, user, assistant, tool, function"
                );
                return Err(ApiError::param("messages", message));
            }
        };
        let calls = self.tool_calls.as_ref().filter(|calls| !calls.is_empty());
        let mut message = Message::default();
        for (name, value) in &self.more {
            message.set(name, value.clone());
        }
        let thoughts = Some(thoughts).filter(|thoughts| !thoughts.is_empty());
        let reasoning = self.reasoning_content.clone().or(thoughts);
        for (name, text) in [
            ("tool_call_id", &self.tool_call_id),
            ("name", &self.name),
            ("reasoning_content", &reasoning),
        ] {
            message.set(name, text.clone().into());
        }
        message.set("role", role.into());
        message.set("content", content);
        if let Some(calls) = calls {
            let calls = calls.iter().map(with_object);
            message.set("tool_calls", calls.collect());
        }
        Ok(message)
    }
}

impl ResponsesRequest {
    /// The same as a chat.
    pub fn chat(mut self) -> Result<ChatRequest, ApiError> {
        if let Some(format) = self.text.as_mut().and_then(|text| text.get_mut("format")) {
            self.common.rules.set_format(format.take());
        }
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions {
            messages.push(InMessage::new("system", Some(Content::Text(instructions))));
        }
        match self.input {
            Input::Text(text) => messages.push(InMessage::new("user", Some(Content::Text(text)))),
            Input::Items(items) => {
                for item in items {
                    item.say(&mut messages)?;
                }
            }
        }
        Ok(ChatRequest {
            messages,
            continue_final_message: None,
            add_generation_prompt: None,
            common: self.common,
        })
    }
}

impl Prompt {
    /// Tokens of each; with `add_special` with the tokenizer's own around texts.
    pub fn tokens(&self, text: &Text, add_special: bool) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |prompt: &String| {
            let tokens = match add_special {
                true => text.encode(prompt),
                false => text.tokens(prompt),
            };
            tokens.map_err(ApiError::invalid)
        };
        match self {
            Self::Text(prompt) => Ok(vec![encode(prompt)?]),
            Self::Texts(prompts) => prompts.iter().map(encode).collect(),
            Self::Tokens(tokens) => Ok(vec![tokens.clone()]),
            Self::TokenLists(lists) => Ok(lists.clone()),
        }
    }
}

impl CompletionRequest {
    /// Tokens of each prompt.
    pub fn prompts(&self, text: &Text) -> Result<Vec<Vec<u32>>, ApiError> {
        let Some(suffix) = self.suffix.as_deref().filter(|s| !s.is_empty()) else {
            return self
                .prompt
                .tokens(text, self.common.add_special_tokens != Some(false));
        };
        let refuse = |message: &str| Err(ApiError::param("suffix", message));
        let infill = Infill::of(text, "suffix")?;
        let between = |prompt: &String| infill.between(prompt, suffix);
        match &self.prompt {
            _ if self.echo == Some(true) => refuse("`echo` and `suffix` do not go together"),
            Prompt::Text(prompt) => Ok(vec![between(prompt)?]),
            Prompt::Texts(prompts) => prompts.iter().map(between).collect(),
            Prompt::Tokens(_) | Prompt::TokenLists(_) => refuse("`suffix` needs `prompt` as text"),
        }
    }

    /// What ends the texts of gaps.
    pub fn ends(&self, text: &Text) -> Vec<String> {
        match self.suffix.as_deref() {
            None | Some("") => Vec::new(),
            Some(_) => infill::ends(text),
        }
    }

    /// Tokens to generate where the request does not say.
    pub fn default_tokens() -> usize {
        COMPLETION_TOKENS
    }
}
