//! Turns checked requests into jobs for the engine thread.

use std::sync::Arc;
use std::time::Duration;

use emberflow_engine::{Constraint, LogProbs, Request};
use emberflow_models::tokenizer::Tokenizer;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::api::{Common, Kind};
use super::app::{App, now};
use super::calls::{Part, Plan};
use super::error::{ApiError, ContextSize};
use super::log_probs::{LogProbsJson, LogProbsWriter, TokenSpan};
use super::reply::{Head, Usage, reason};
use super::thoughts::{Opening, Reading, ThoughtTokens};
use super::whole_calls::CallCount;
use super::worker::{Job, Out};

/// Interval between keep-alive comments of an idle stream.
pub const PING: Duration = Duration::from_secs(10);
/// Maximum texts of a request.
const MAX_TEXTS: usize = 128;
/// Maximum log-probabilities of a response.
const MAX_ENTRIES: usize = 4608;
/// Memory of one log-probability until the response is sent.
const ENTRY_BYTES: usize = 256;
/// Memory reserved per response for log-probabilities or embeddings.
pub const RESULT_BYTES: usize = MAX_ENTRIES * ENTRY_BYTES;

/// A checked request.
pub struct GenerateRequest {
    /// API of the request.
    pub kind: Kind,
    /// Tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// Text that each prompt's texts begin with; empty without `echo`.
    pub echo: Vec<String>,
    /// Default `max_tokens`.
    pub default_tokens: usize,
    /// Additional stop strings.
    pub ends: Vec<String>,
    /// How tools are called.
    pub plan: Option<Plan>,
    /// How reasoning begins, if it is separated from the answer.
    pub opening: Option<Opening>,
    /// Grammar or schema.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Background request.
    pub proactive: bool,
    /// Common fields.
    pub common: Common,
}

/// A response in progress.
pub struct Pending {
    app: Arc<App>,
    /// Output of the engine thread.
    pub out: UnboundedReceiver<Out>,
    /// Members common to all parts of the response.
    pub head: Head,
    /// Generation parameters.
    pub request: Request,
    /// Token counts so far.
    pub usage: Usage,
    /// Number of texts that have not ended.
    pub left: usize,
    /// Its texts.
    pub texts: Vec<TextState>,
    /// Released when the response is complete.
    _permit: OwnedSemaphorePermit,
}

/// One text of a response.
#[derive(Debug, Clone, Default)]
pub struct TextState {
    /// Text to prepend (`echo`).
    pub begin: String,
    /// Prompt tokens.
    pub prompt: usize,
    /// First prompt token, if log-probabilities include the prompt.
    pub first: Option<u32>,
    /// Characters whose log-probabilities were sent.
    pub offset: usize,
    /// Parser of reasoning and tool calls.
    pub reader: Option<Reading>,
    /// Counts its calls.
    calls: CallCount,
    /// Counts the tokens of its reasoning.
    pub thoughts: ThoughtTokens,
    /// Log-probabilities that were not sent yet.
    pub log_probs: Vec<LogProbs>,
}

/// The end of a text.
#[derive(Debug)]
pub struct Rest {
    /// Its last parts.
    pub parts: Vec<Part>,
    /// Whether it ended by itself, and with all calls whole; otherwise it is cut.
    pub stopped: bool,
    /// Whether it has calls.
    pub called: bool,
}

impl Rest {
    /// The `finish_reason`.
    pub fn reason(&self) -> &'static str {
        match self.stopped && self.called {
            true => "tool_calls",
            false => reason(self.stopped),
        }
    }
}

/// Sends the request to the engine thread.
pub fn submit(
    app: &Arc<App>,
    asked: GenerateRequest,
    permit: OwnedSemaphorePermit,
) -> Result<Pending, ApiError> {
    let samples = asked.common.samples();
    let mut all = texts(&asked)?;
    check_prompts(app, asked.kind, &asked.prompts)?;
    let number = app.next();
    let seed = now().wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let mut request = (asked.common).request(&app.text, asked.default_tokens, seed)?;
    let echoes = !asked.echo.is_empty();
    request.prompt_log_probs = echoes && request.log_probs.is_some();
    check_log_probs(&asked, &request)?;
    let stops = asked.common.stops()?;
    let quiet_stops = [&asked.ends[..], &app.text.rules().stop_strings].concat();
    let vocab = app.text.config().vocab;
    let bias = asked.common.bounds.bias(&app.text)?;
    let bounds = asked.common.bounds(&app.text, request.max_tokens)?;
    let ends: Arc<[u32]> = asked.common.bounds.ends(vocab)?.into();
    let (sender, out) = unbounded_channel();
    let mut usage = Usage::default();
    let signs = signs(app, &asked);
    for (at, prompt) in asked.prompts.into_iter().enumerate() {
        usage.prompt += prompt.len();
        for text in &mut all[at * samples..][..samples] {
            text.prompt = prompt.len();
            text.begin = asked.echo.get(at).cloned().unwrap_or_default();
            text.first = prompt.first().copied().filter(|_| request.prompt_log_probs);
        }
        // At most `parallel` texts per job; further ones wait in the queue.
        for first in (0..samples).step_by(app.parallel) {
            let mut request = request;
            request.sampling.seed = request.sampling.seed.wrapping_add(first as u64);
            let constraint = asked.constraint.as_ref().map(|c| c.fork());
            let job = Job {
                request,
                first: at * samples + first,
                samples: app.parallel.min(samples - first),
                begins: first == 0,
                stops: stops.clone(),
                quiet_stops: quiet_stops.clone(),
                keeps_stop: asked.common.keeps_stop(),
                lines: asked.common.lines,
                ends: ends.clone(),
                bias: bias.clone(),
                constraint: bounds.clone().hold(constraint),
                signs: signs.clone(),
                proactive: asked.proactive,
                progress: first == 0 && asked.common.reports_progress(),
                ..Job::new(prompt.clone(), sender.clone())
            };
            app.submit(job)?;
        }
    }
    Ok(Pending {
        app: app.clone(),
        out,
        head: Head {
            kind: asked.kind,
            id: id(app, asked.kind, number)?,
            created: now(),
            model: app.model.clone(),
        },
        request,
        usage,
        left: all.len(),
        texts: all,
        _permit: permit,
    })
}

/// The texts of a response before they begin.
fn texts(asked: &GenerateRequest) -> Result<Vec<TextState>, ApiError> {
    let count = asked.prompts.len().saturating_mul(asked.common.samples());
    if count == 0 || count > MAX_TEXTS {
        let message = format!("the request has {count} texts; expected 1 to {MAX_TEXTS}");
        let many = asked.prompts.len() > MAX_TEXTS;
        return Err(ApiError::param(if many { "prompt" } else { "n" }, message));
    }
    let mut all = vec![TextState::default(); count];
    let read = asked.plan.is_some() || asked.opening.is_some();
    for text in &mut all {
        let calls = asked.plan.as_ref().map(Plan::reader);
        text.reader = read.then(|| Reading::new(asked.opening, calls));
    }
    Ok(all)
}

/// Special tokens shown as text: markers of reasoning and tool calls, or all of them on request.
fn signs(app: &App, asked: &GenerateRequest) -> Arc<[u32]> {
    if asked.common.shows_special() {
        let tokens = 0..app.text.config().vocab;
        let tokenizer = app.text.tokenizer();
        return tokens
            .filter(|&token| tokenizer.is_special(token))
            .collect();
    }
    let chats = [Kind::Chat, Kind::Response, Kind::OllamaChat, Kind::Message];
    let calls = match &asked.plan {
        Some(plan) => plan.signs.clone(),
        // A client may look for calls in the text itself.
        None if chats.contains(&asked.kind) && !app.calls.harmony => app.calls.signs.clone(),
        None => Arc::default(),
    };
    let form = asked.opening.map(|opening| opening.form);
    let thoughts = form.map(|form| form.signs(app.text.tokenizer()));
    let thoughts = thoughts.into_iter().flatten();
    calls.iter().copied().chain(thoughts).collect()
}

/// Response id for this number.
fn id(app: &App, kind: Kind, number: u64) -> Result<String, ApiError> {
    let created = app.created;
    Ok(match kind {
        Kind::Chat => format!("chatcmpl-{created:x}-{number:x}"),
        Kind::Text => format!("cmpl-{created:x}-{number:x}"),
        // Who knows the id can read the stored response. Anthropic and OpenAI clients expect underscores.
        Kind::Response => {
            let random = || getrandom::u64().map_err(ApiError::failed);
            format!("resp_{:016x}{:016x}", random()?, random()?)
        }
        Kind::Message => format!("msg_{created:x}_{number:x}"),
        // These have no id.
        Kind::OllamaChat | Kind::OllamaGenerate | Kind::Embedding | Kind::Native => String::new(),
    })
}

/// Checks that prompts are not empty and fit the context.
pub fn check_prompts(app: &App, kind: Kind, prompts: &[Vec<u32>]) -> Result<(), ApiError> {
    let (field, what) = match kind {
        Kind::Chat | Kind::OllamaChat | Kind::Message => ("messages", "conversation"),
        Kind::Response => ("input", "conversation"),
        Kind::Text | Kind::Native | Kind::OllamaGenerate => ("prompt", "prompt"),
        Kind::Embedding => ("input", "text"),
    };
    for prompt in prompts {
        app.check_tokens(prompt)?;
        let len = prompt.len();
        if len == 0 {
            return Err(ApiError::param(field, format!("the {what} is empty")));
        }
        if len > app.context {
            let size = ContextSize {
                prompt: len,
                context: app.context,
            };
            return Err(ApiError::too_long(field, size));
        }
    }
    Ok(())
}

/// Checks that the requested log-probabilities are supported.
fn check_log_probs(asked: &GenerateRequest, request: &Request) -> Result<(), ApiError> {
    let Some(top) = request.log_probs else {
        return Ok(());
    };
    let refuse = |message: String| Err(ApiError::param("logprobs", message));
    if request.prompt_log_probs && (asked.common.samples() > 1 || asked.common.stream == Some(true))
    {
        return refuse("prompt log-probabilities cannot be combined with `n` or `stream`".into());
    }
    let prompts = asked.prompts.iter().map(|prompt| {
        if request.prompt_log_probs {
            prompt.len().saturating_add(request.max_tokens)
        } else {
            request.max_tokens.saturating_mul(asked.common.samples())
        }
    });
    let entries = prompts
        .fold(0, usize::saturating_add)
        .saturating_mul(top + 1);
    if entries <= MAX_ENTRIES {
        Ok(())
    } else {
        refuse(format!(
            "up to {entries} log-probabilities were requested; a response may have \
             {MAX_ENTRIES}; reduce `max_tokens` (`num_predict` in Ollama's API) or the number per token"
        ))
    }
}

impl Pending {
    /// Parses a piece of a text that has `tokens` tokens so far.
    pub fn parts(&mut self, index: usize, piece: &str, tokens: usize) -> Vec<Part> {
        let text = &mut self.texts[index];
        let Some(reader) = &mut text.reader else {
            return vec![Part::Text(piece.to_owned())];
        };
        let parts = reader.push(piece);
        text.calls.take(&parts);
        self.usage.reasoning += text.thoughts.take(tokens, &parts, reader.holds());
        parts
    }

    /// Ends a text. `stopped`: it ended by itself.
    pub fn rest(&mut self, index: usize, stopped: bool) -> Rest {
        let text = &mut self.texts[index];
        let reader = text.reader.as_mut();
        let parts = reader.map_or_else(Vec::new, |reader| reader.finish(!stopped));
        text.calls.take(&parts);
        self.usage.reasoning += text.thoughts.rest(&parts);
        let whole = text.calls.finish();
        Rest {
            parts,
            stopped: stopped && whole.is_some(),
            called: whole.is_some_and(|calls| calls > 0),
        }
    }

    /// Id of a tool call.
    pub fn call_id(&self, index: usize, call: usize) -> String {
        format!("call_{}_{index}_{call}", self.head.id)
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.app.text.tokenizer()
    }

    /// Log-probabilities of the next piece of a text.
    pub fn log_probs(&mut self, index: usize, tokens: &[LogProbs]) -> LogProbsJson {
        let writer = LogProbsWriter {
            kind: self.head.kind,
            tokenizer: self.app.text.tokenizer(),
        };
        let text = &mut self.texts[index];
        let first = text.first.take();
        writer.write(TokenSpan { first, tokens }, &mut text.offset)
    }
}
