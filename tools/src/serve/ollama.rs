//! Responses of Ollama's API: whole, or as lines of JSON. Times are in nanoseconds.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use emberflow_engine::LogProbs;
use emberflow_models::chat::date;
use futures_util::stream;
use serde_json::{Value, json};

use super::api::Kind;
use super::calls::Part;
use super::error::ApiError;
use super::reply::{Call, Choice, Head, reason};
use super::submit::Pending;
use super::whole_calls::input;
use super::worker::Out;

/// State of a response.
struct OllamaReply {
    pending: Pending,
    asked: Instant,
    started: Option<Instant>,
    /// Time of the first token.
    first: Option<Instant>,
    stopped: Option<bool>,
    ended: bool,
    /// Tool calls so far.
    calls: Choice,
    /// Log-probabilities that were not sent yet.
    log_probs: Vec<LogProbs>,
    history: Option<History>,
}

/// Tokens of a conversation, which a later request continues: `context` of `/api/generate`.
#[derive(Debug, Default)]
pub struct History {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The generated text, with its reasoning.
    pub said: String,
}

/// Waits for the text, or streams it. `history`: return the tokens of the conversation.
///
/// # Errors
/// The request failed.
pub async fn respond(
    pending: Pending,
    history: Option<History>,
    streams: bool,
) -> Result<Response, ApiError> {
    let mut answer = OllamaReply {
        history,
        log_probs: Vec::new(),
        pending,
        asked: Instant::now(),
        started: None,
        first: None,
        stopped: None,
        ended: false,
        calls: Choice::default(),
    };
    if streams {
        return Ok(answer.streamed());
    }
    let mut all = OllamaPiece::default();
    while answer.stopped.is_none() {
        let more = answer.next().await.map_err(ApiError::failed)?;
        all.text += &more.text;
        all.thoughts += &more.thoughts;
    }
    all.log_probs = std::mem::take(&mut answer.log_probs);
    Ok(Json(answer.last(&all)).into_response())
}

/// Formats Unix seconds as Ollama does.
pub fn written(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    date::strftime("%Y-%m-%dT%H:%M:%SZ", seconds).unwrap_or_default()
}

/// A model name without Ollama's default tag.
pub fn plain_name(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

/// Content of one part of a response.
#[derive(Debug, Default)]
struct OllamaPiece {
    text: String,
    thoughts: String,
    log_probs: Vec<LogProbs>,
}

/// A part of a response, or a whole one.
fn part(head: &Head, piece: &OllamaPiece) -> Value {
    let OllamaPiece { text, thoughts, .. } = piece;
    let mut part = json!({
        "model": head.model,
        "created_at": written(head.created),
        "done": false,
    });
    match head.kind {
        Kind::OllamaChat => part["message"] = json!({"role": "assistant", "content": text}),
        _ => part["response"] = text.as_str().into(),
    }
    if !thoughts.is_empty() {
        let place = match head.kind {
            Kind::OllamaChat => &mut part["message"],
            _ => &mut part,
        };
        place["thinking"] = thoughts.as_str().into();
    }
    part
}

/// The response to a request without a prompt, which only loads the model.
pub fn loaded(head: &Head) -> Value {
    let mut part = part(head, &OllamaPiece::default());
    part["done"] = true.into();
    part["done_reason"] = "load".into();
    part
}

impl OllamaReply {
    /// Handles one output of the engine thread and returns what is new.
    async fn next(&mut self) -> Result<OllamaPiece, String> {
        match self.pending.out.recv().await {
            Some(Out::Started { cached, .. }) => {
                self.started = Some(Instant::now());
                self.pending.usage.cached += cached;
            }
            Some(Out::Text {
                text,
                log_probs,
                tokens,
                ..
            }) => {
                self.first.get_or_insert_with(Instant::now);
                self.log_probs.extend(log_probs);
                if let Some(history) = &mut self.history {
                    history.said.push_str(&text);
                }
                let parts = self.pending.parts(0, &text, tokens);
                return Ok(self.piece(parts));
            }
            Some(Out::Done { end, tokens, .. }) => {
                self.pending.usage.completion += tokens;
                let rest = self.pending.rest(0, end.stopped());
                self.stopped = Some(rest.stopped);
                let piece = self.piece(rest.parts);
                let calls = &mut self.calls.calls;
                calls.retain(|call| input(&call.arguments).is_some());
                return Ok(piece);
            }
            Some(Out::Progress { .. } | Out::Prompt { .. } | Out::Hidden(_)) => {}
            Some(Out::Failed(why) | Out::Refused(why)) => return Err(why),
            None => return Err("the engine has stopped".to_owned()),
        }
        Ok(OllamaPiece::default())
    }

    /// Collects tool calls, which are sent at the end; returns everything else.
    fn piece(&mut self, parts: Vec<Part>) -> OllamaPiece {
        for part in parts {
            self.calls.take(part, |_| String::new());
        }
        OllamaPiece {
            text: std::mem::take(&mut self.calls.text),
            thoughts: std::mem::take(&mut self.calls.thoughts),
            log_probs: Vec::new(),
        }
    }

    /// A part of the response with its log-probabilities.
    fn part(&mut self, piece: &OllamaPiece) -> Value {
        let mut part = part(&self.pending.head, piece);
        if !piece.log_probs.is_empty() {
            let tokens = self.pending.log_probs(0, &piece.log_probs).tokens();
            part["logprobs"] = json!(tokens);
        }
        part
    }

    /// The last part, or the whole response.
    fn last(&mut self, piece: &OllamaPiece) -> Value {
        let now = Instant::now();
        let started = self.started.unwrap_or(self.asked);
        let first = self.first.unwrap_or(now);
        let ns = |time: Duration| time.as_nanos() as u64;
        let mut last = self.part(piece);
        let call = |call: &Call| {
            let arguments = input(&call.arguments).unwrap_or_default();
            json!({"function": {"name": call.name, "arguments": arguments}})
        };
        if !self.calls.calls.is_empty() && last["message"].is_object() {
            last["message"]["tool_calls"] = self.calls.calls.iter().map(call).collect();
        }
        last["done"] = true.into();
        last["done_reason"] = reason(self.stopped.unwrap_or(false)).into();
        last["total_duration"] = ns(now - self.asked).into();
        // The time until the request starts.
        last["load_duration"] = ns(started - self.asked).into();
        last["prompt_eval_count"] = self.pending.usage.prompt.into();
        last["prompt_eval_duration"] = ns(first - started).into();
        last["eval_count"] = self.pending.usage.completion.into();
        last["eval_duration"] = ns(now - first).into();
        if let Some(History { prompt, said }) = self.history.take() {
            // Known text: it encodes.
            let said = self.pending.tokenizer().encode(&said, false);
            last["context"] = json!([prompt, said.unwrap_or_default()].concat());
        }
        last
    }

    fn streamed(self) -> Response {
        let lines = stream::unfold(self, |mut answer| async move {
            let line = answer.line().await?;
            Some((Ok::<_, Infallible>(format!("{line}\n")), answer))
        });
        let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
        (kind, Body::from_stream(lines)).into_response()
    }

    /// The next line; `None` at the end.
    async fn line(&mut self) -> Option<Value> {
        while !self.ended {
            match self.next().await {
                Ok(mut piece) if !piece.text.is_empty() || !piece.thoughts.is_empty() => {
                    piece.log_probs = std::mem::take(&mut self.log_probs);
                    return Some(self.part(&piece));
                }
                Ok(mut piece) if self.stopped.is_some() => {
                    self.ended = true;
                    piece.log_probs = std::mem::take(&mut self.log_probs);
                    return Some(self.last(&piece));
                }
                Ok(_) => {}
                Err(why) => {
                    self.ended = true;
                    return Some(json!({"error": why}));
                }
            }
        }
        None
    }
}
