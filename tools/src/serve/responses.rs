//! `/v1/responses`: one text per request, whole or as named events. Nothing is stored.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};

use super::error::ApiError;
use super::submit::{PING, Pending};
use super::worker::Out;

/// The response object as far as it is known.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    /// Why it ended: by itself or not.
    stopped: Option<bool>,
}

/// Waits for the text, or streams it.
///
/// # Errors
/// A request that failed.
pub async fn respond(pending: Pending, streams: bool) -> Result<Response, ApiError> {
    match streams {
        true => Ok(streamed(pending)),
        false => whole(pending).await,
    }
}

async fn whole(mut pending: Pending) -> Result<Response, ApiError> {
    let mut answer = Answer::default();
    while answer.stopped.is_none() {
        match pending.out.recv().await {
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(out) => answer.take(out, &mut pending),
            None => return Err(ApiError::failed("the engine has stopped")),
        };
    }
    Ok(Json(answer.object(&pending)).into_response())
}

impl Answer {
    /// Takes output of the engine's thread; returns new text.
    fn take(&mut self, out: Out, pending: &mut Pending) -> Option<String> {
        match out {
            Out::Started(cached) => pending.usage.cached += cached,
            Out::Text { text, .. } => {
                self.text.push_str(&text);
                return Some(text);
            }
            Out::Done {
                stopped, tokens, ..
            } => {
                self.stopped = Some(stopped);
                pending.usage.completion += tokens;
            }
            Out::Prompt { .. } | Out::Failed(_) => {}
        }
        None
    }

    fn status(&self) -> &'static str {
        match self.stopped {
            None => "in_progress",
            Some(true) => "completed",
            Some(false) => "incomplete",
        }
    }

    fn part(&self) -> Value {
        json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []})
    }

    fn item(&self, pending: &Pending) -> Value {
        let content = match self.stopped {
            None => json!([]),
            Some(_) => json!([self.part()]),
        };
        json!({
            "id": item_id(pending),
            "type": "message",
            "role": "assistant",
            "status": self.status(),
            "content": content,
        })
    }

    fn object(&self, pending: &Pending) -> Value {
        let ended = self.stopped.is_some();
        let usage = &pending.usage;
        json!({
            "id": pending.head.id,
            "object": "response",
            "created_at": pending.head.created,
            "model": pending.head.model,
            "status": self.status(),
            "error": null,
            "incomplete_details": match self.stopped {
                Some(false) => json!({"reason": "max_output_tokens"}),
                _ => Value::Null,
            },
            "instructions": null,
            "metadata": {},
            "output": if ended { json!([self.item(pending)]) } else { json!([]) },
            "parallel_tool_calls": false,
            "previous_response_id": null,
            "store": false,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "usage": ended.then(|| json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            })),
        })
    }
}

fn item_id(pending: &Pending) -> String {
    format!("msg_{}", pending.head.id)
}

/// A stream in the making.
struct Streamed {
    pending: Pending,
    answer: Answer,
    ready: VecDeque<Value>,
    number: u64,
    ended: bool,
}

fn streamed(pending: Pending) -> Response {
    let mut state = Streamed {
        pending,
        answer: Answer::default(),
        ready: VecDeque::new(),
        number: 0,
        ended: false,
    };
    let object = state.answer.object(&state.pending);
    for name in ["response.created", "response.in_progress"] {
        state.push(name, json!({"response": object}));
    }
    let item = state.answer.item(&state.pending);
    let added = json!({"output_index": 0, "item": item});
    state.push("response.output_item.added", added);
    let part = state.answer.part();
    state.push_part("response.content_part.added", json!({"part": part}));
    let events = stream::unfold(state, |mut state| async move {
        let data = state.next().await?;
        let name = data["type"].as_str().unwrap_or_default();
        let event = Event::default().event(name).data(data.to_string());
        Some((Ok::<_, Infallible>(event), state))
    });
    let keep = KeepAlive::new().interval(PING);
    Sse::new(events).keep_alive(keep).into_response()
}

impl Streamed {
    fn push(&mut self, name: &str, mut event: Value) {
        event["type"] = json!(name);
        event["sequence_number"] = json!(self.number);
        self.number += 1;
        self.ready.push_back(event);
    }

    /// An event of the only part of the only item.
    fn push_part(&mut self, name: &str, mut event: Value) {
        event["item_id"] = json!(item_id(&self.pending));
        event["output_index"] = json!(0);
        event["content_index"] = json!(0);
        self.push(name, event);
    }

    /// The next event; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        while self.ready.is_empty() && !self.ended {
            match self.pending.out.recv().await {
                Some(Out::Failed(why)) => self.fail(&why),
                Some(out) => {
                    if let Some(delta) = self.answer.take(out, &mut self.pending) {
                        let event = json!({"delta": delta, "logprobs": []});
                        self.push_part("response.output_text.delta", event);
                    }
                    if self.answer.stopped.is_some() {
                        self.end();
                    }
                }
                None => self.fail("the engine has stopped"),
            }
        }
        self.ready.pop_front()
    }

    fn end(&mut self) {
        let text = json!({"text": self.answer.text, "logprobs": []});
        self.push_part("response.output_text.done", text);
        let part = json!({"part": self.answer.part()});
        self.push_part("response.content_part.done", part);
        let item = json!({"output_index": 0, "item": self.answer.item(&self.pending)});
        self.push("response.output_item.done", item);
        let name = format!("response.{}", self.answer.status());
        let object = json!({"response": self.answer.object(&self.pending)});
        self.push(&name, object);
        self.ended = true;
    }

    fn fail(&mut self, why: &str) {
        let error = json!({"code": "server_error", "message": why, "param": null});
        self.push("error", error);
        self.ended = true;
    }
}
