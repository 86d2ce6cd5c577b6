//! Requests of `/v1/chat/completions` and `/v1/completions`.
//!
//! `fields/` lists how each field is handled.

use emberflow_engine::{Request, Text};
use emberflow_models::chat::{Conversation, Message};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::bounds::{self, Bounds};
use super::error::ApiError;
use super::infill::{self, Infill};
use super::rules::{self, Rules};
use super::turn::Turn;
use super::{calls, lines, sampling, thoughts};
use crate::template::Renderer;

/// Maximum number of stop strings of a request, and of bytes of each.
const MAX_STOPS: usize = 16;
const MAX_STOP: usize = 256;
/// Maximum `top_logprobs`.
const MAX_TOP: usize = 20;
/// Default `max_tokens` of a completion.
const COMPLETION_TOKENS: usize = 16;

/// The API endpoint of a request, which decides the form of the response.
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

/// Fields common to all generation requests.
#[derive(Debug, Default, Deserialize)]
pub struct Common {
    /// Model name.
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
    return_progress: Option<bool>,
    priority: Option<i64>,
    logprobs: Option<LogProbsOption>,
    top_logprobs: Option<usize>,
    #[serde(flatten)]
    rules: rules::ConstraintOptions,
    #[serde(flatten)]
    sampling: sampling::SamplingOptions,
    /// Restrictions on tokens.
    #[serde(flatten)]
    pub bounds: bounds::TokenLimits,
    /// Tools.
    #[serde(flatten)]
    pub calls: calls::ToolOptions,
    /// Chat template arguments and reasoning.
    #[serde(flatten)]
    pub thoughts: thoughts::ReasoningOptions,
    /// Line-based end conditions.
    #[serde(flatten)]
    pub lines: lines::LineOptions,
    best_of: Option<usize>,
}

/// `logprobs`: a boolean in chats, a number in completions.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(
    untagged,
    expecting = "`logprobs` must be a boolean in chats, a number in completions"
)]
enum LogProbsOption {
    Whether(bool),
    Top(usize),
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`stop` must be a string or a list of strings")]
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
    /// Common fields.
    #[serde(flatten)]
    pub common: Common,
}

#[derive(Debug, Deserialize)]
struct InMessage {
    role: String,
    content: Option<MessageContent>,
    tool_calls: Option<Vec<Value>>,
    tool_call_id: Option<String>,
    name: Option<String>,
    reasoning_content: Option<String>,
    /// Other members, for the chat template.
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`content` must be a string or a list of parts")]
enum MessageContent {
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

/// `/v1/completions`
#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    prompt: PromptInput,
    /// Whether the prompt is repeated before each text.
    pub echo: Option<bool>,
    /// Text after the gap to fill.
    suffix: Option<String>,
    /// Common fields.
    #[serde(flatten)]
    pub common: Common,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`prompt` must be a string, a list of strings, a list of tokens or a list of token lists"
)]
pub enum PromptInput {
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
    /// Checks that `best_of` is not larger than `n`.
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

    /// The grammar or schema of the response.
    ///
    /// # Errors
    /// More than one, or an invalid one.
    pub fn rules(&self) -> Result<Option<Rules>, ApiError> {
        self.rules.rules()
    }

    /// `n`: number of choices.
    pub fn samples(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// Whether this is a background request: priority above 0.
    pub fn proactive(&self) -> bool {
        self.priority.is_some_and(|p| p > 0)
    }

    /// Whether a stream ends with a usage chunk.
    pub fn include_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// Whether a stream tells how much of the prompt is read.
    pub fn reports_progress(&self) -> bool {
        self.stream == Some(true) && self.return_progress == Some(true)
    }

    /// The stop strings.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP) {
            let message =
                format!("at most {MAX_STOPS} stop strings of {MAX_STOP} bytes are allowed");
            return Err(ApiError::param("stop", message));
        }
        Ok(stops)
    }

    /// `top_logprobs` if log-probabilities are requested.
    fn log_probs(&self) -> Result<Option<usize>, ApiError> {
        let top = match self.logprobs {
            None | Some(LogProbsOption::Whether(false)) => match self.top_logprobs {
                None | Some(0) => return Ok(None),
                Some(_) => {
                    let message = "`top_logprobs` needs `logprobs`";
                    return Err(ApiError::param("top_logprobs", message));
                }
            },
            Some(LogProbsOption::Whether(true)) => self.top_logprobs.unwrap_or(0),
            Some(LogProbsOption::Top(top)) => top,
        };
        if top <= MAX_TOP {
            Ok(Some(top))
        } else {
            let message = format!(
                "{top} log-probabilities per token are requested; at most {MAX_TOP} are allowed"
            );
            Err(ApiError::param("logprobs", message))
        }
    }

    /// Restrictions on the tokens of each text, whose maximum length is `most`.
    pub fn bounds(&self, text: &Text, most: usize) -> Result<Bounds, ApiError> {
        let ignore_eos = self.ignore_eos.unwrap_or(false);
        self.bounds.bounds(text, ignore_eos, most)
    }

    /// Whether the response includes the stop string that ended it.
    pub fn keeps_stop(&self) -> bool {
        self.include_stop_str_in_output.unwrap_or(false)
    }

    /// Whether special tokens appear in the text.
    pub fn shows_special(&self) -> bool {
        self.skip_special_tokens == Some(false)
    }

    /// Truncates a prompt to the requested number of last tokens; -1 stands for the context length.
    pub fn truncate(&self, prompt: &mut Vec<u32>, context: usize) -> Result<(), ApiError> {
        let most = match self.truncate_prompt_tokens {
            None => return Ok(()),
            Some(-1) => context,
            Some(most) => usize::try_from(most)
                .ok()
                .filter(|&most| most > 0)
                .ok_or_else(|| {
                    let message =
                        format!("`truncate_prompt_tokens` is {most}; expected at least 1, or -1");
                    ApiError::param("truncate_prompt_tokens", message)
                })?,
        };
        prompt.drain(..prompt.len().saturating_sub(most));
        Ok(())
    }

    /// The engine's request for a prompt of `prompt` tokens in a context of `context`. `seed` is the default seed.
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
    /// Tokens of the rendered conversation.
    pub fn tokens(&self, text: &Text, rendered: &str) -> Result<Vec<u32>, ApiError> {
        let tokens = match self.common.add_special_tokens {
            Some(true) => text.encode(rendered),
            // The template writes special tokens itself.
            _ => text.tokens(rendered),
        };
        tokens.map_err(ApiError::invalid)
    }

    /// Renders the conversation with the chat template, which writes special tokens itself.
    pub fn rendered(&self, template: &Renderer, tools: &[Value]) -> Result<String, ApiError> {
        let developer = template.source(!tools.is_empty()).contains("developer");
        let messages = self
            .messages
            .iter()
            .map(|message| message.message(developer));
        let mut messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
        if messages.is_empty() {
            return Err(ApiError::param("messages", "`messages` must not be empty"));
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
        // Many templates expect `content` to be a string even if there are tool calls.
        for message in messages.iter_mut().filter(|message| is_null(message)) {
            message.set("content", "".into());
        }
        turn.prompt(&messages, render).or(first)
    }
}

/// A tool call with its arguments as an object, as templates expect, instead of JSON text.
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

impl InMessage {
    /// Converts the message for the template. `developer`: whether the template knows this role.
    fn message(&self, developer: bool) -> Result<Message, ApiError> {
        let mut thoughts = String::new();
        let content = match &self.content {
            None => Value::Null,
            Some(MessageContent::Text(text)) => text.as_str().into(),
            Some(MessageContent::Parts(parts)) => {
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
            // The newer name of `system`; few templates know it.
            "developer" if !developer => "system",
            role @ "developer" | role @ ("system" | "user" | "assistant" | "tool" | "function") => {
                role
            }
            role => {
                let message = format!(
                    "unknown role `{role}`; expected system, developer, user, assistant, tool or function"
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

impl PromptInput {
    /// Tokens of each prompt; `add_special` adds BOS and EOS around texts as the tokenizer does.
    pub fn tokens(&self, text: &Text, add_special: bool) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |prompt: &String| {
            let tokens = if add_special {
                text.encode(prompt)
            } else {
                text.tokens(prompt)
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
            _ if self.echo == Some(true) => refuse("`echo` and `suffix` cannot be combined"),
            PromptInput::Text(prompt) => Ok(vec![between(prompt)?]),
            PromptInput::Texts(prompts) => prompts.iter().map(between).collect(),
            PromptInput::Tokens(_) | PromptInput::TokenLists(_) => {
                refuse("`suffix` needs a `prompt` of text")
            }
        }
    }

    /// Stop strings of fill-in-the-middle texts.
    pub fn ends(&self, text: &Text) -> Vec<String> {
        match self.suffix.as_deref() {
            None | Some("") => Vec::new(),
            Some(_) => infill::ends(text),
        }
    }

    /// Default `max_tokens`.
    pub fn default_tokens() -> usize {
        COMPLETION_TOKENS
    }
}
