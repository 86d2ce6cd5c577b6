//! `/v1/responses`: one text per request, whole or as named events. Nothing is stored.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};

use super::calls::Part;
use super::error::ApiError;
use super::reply::Call;
use super::submit::{PING, Pending};
use super::worker::Out;

/// The response object so far.
#[derive(Debug, Default)]
struct ResponseReply {
    items: Vec<OutputItem>,
    /// Once ended: true for a natural end, false at the length limit.
    stopped: Option<bool>,
}

/// An output item.
#[derive(Debug)]
enum OutputItem {
    /// Reasoning.
    Thoughts(String),
    /// Text.
    Message(String),
    /// A tool call.
    Call(Call),
}

/// Waits for the text, or streams it.
///
/// # Errors
/// The request failed.
pub async fn respond(pending: Pending, streams: bool) -> Result<Response, ApiError> {
    if streams {
        Ok(streamed(pending))
    } else {
        whole(pending).await
    }
}

async fn whole(mut pending: Pending) -> Result<Response, ApiError> {
    let mut answer = ResponseReply::default();
    while answer.stopped.is_none() {
        match pending.out.recv().await {
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(Out::Refused(why)) => return Err(ApiError::invalid(why)),
            Some(out) => {
                for part in answer.take(out, &mut pending) {
                    answer.add(part, &pending);
                }
            }
            None => return Err(ApiError::failed("the engine has stopped")),
        }
    }
    answer.end();
    Ok(Json(answer.object(&pending)).into_response())
}

impl ResponseReply {
    /// Handles one output of the engine thread and returns the new parts.
    fn take(&mut self, out: Out, pending: &mut Pending) -> Vec<Part> {
        match out {
            Out::Started { cached, .. } => pending.usage.cached += cached,
            Out::Text { text, .. } => return pending.parts(0, text),
            Out::Done { end, tokens, .. } => {
                self.stopped = Some(end.stopped());
                pending.usage.completion += tokens;
                return pending.rest(0, end.stopped()).0;
            }
            Out::Prompt { .. } | Out::Hidden(_) | Out::Failed(_) | Out::Refused(_) => {}
        }
        Vec::new()
    }

    /// Appends a part; returns whether it begins a new item.
    fn add(&mut self, part: Part, pending: &Pending) -> bool {
        match (part, self.items.last_mut()) {
            (Part::Text(more), Some(OutputItem::Message(text)))
            | (Part::Thought(more), Some(OutputItem::Thoughts(text))) => text.push_str(&more),
            (Part::Thought(text), _) => {
                self.items.push(OutputItem::Thoughts(text));
                return true;
            }
            (Part::Text(text), _) => {
                self.items.push(OutputItem::Message(text));
                return true;
            }
            (Part::Call(name), _) => {
                self.items.push(OutputItem::Call(Call {
                    id: pending.call_id(0, self.items.len()),
                    name,
                    arguments: String::new(),
                }));
                return true;
            }
            (Part::Arguments(more), Some(OutputItem::Call(call))) => call.arguments.push_str(&more),
            (Part::Arguments(_), _) => {}
        }
        false
    }

    /// Adds an empty message if there is neither a message nor a call; returns whether it did.
    fn end(&mut self) -> bool {
        let empty = matches!(self.items.last(), None | Some(OutputItem::Thoughts(_)));
        if empty {
            self.items.push(OutputItem::Message(String::new()));
        }
        empty
    }

    fn status(&self) -> &'static str {
        match self.stopped {
            None => "in_progress",
            Some(true) => "completed",
            Some(false) => "incomplete",
        }
    }

    /// The item at index `at`; without content if it `begins`.
    fn item(&self, at: usize, begins: bool, pending: &Pending) -> Value {
        let id = item_id(self, at, pending);
        let last = at + 1 == self.items.len();
        let status = match (begins, self.stopped) {
            (true, _) => "in_progress",
            (false, Some(false)) if last => "incomplete",
            _ => "completed",
        };
        match &self.items[at] {
            OutputItem::Thoughts(text) => json!({
                "id": id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": if begins { json!([]) } else { json!([thought(text)]) },
            }),
            OutputItem::Message(text) => json!({
                "id": id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": if begins { json!([]) } else { json!([part(text)]) },
            }),
            OutputItem::Call(call) => json!({
                "id": id,
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": if begins { "" } else { &*call.arguments },
                "status": status,
            }),
        }
    }

    fn object(&self, pending: &Pending) -> Value {
        let ended = self.stopped.is_some();
        let usage = &pending.usage;
        let sampling = &pending.request.sampling;
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
            "max_output_tokens": pending.request.max_tokens,
            "metadata": {},
            "output": if ended { (0..self.items.len()).map(|at| self.item(at, false, pending)).collect() } else { json!([]) },
            "parallel_tool_calls": true,
            "previous_response_id": null,
            "store": false,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
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

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn thought(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

fn item_id(answer: &ResponseReply, at: usize, pending: &Pending) -> String {
    let kind = match &answer.items[at] {
        OutputItem::Thoughts(_) => "rs",
        OutputItem::Message(_) => "msg",
        OutputItem::Call(_) => "fc",
    };
    format!("{kind}_{}_{at}", pending.head.id)
}

/// State of a stream.
struct ResponseStream {
    pending: Pending,
    answer: ResponseReply,
    ready: VecDeque<Value>,
    number: u64,
    ended: bool,
}

fn streamed(pending: Pending) -> Response {
    let mut state = ResponseStream {
        pending,
        answer: ResponseReply::default(),
        ready: VecDeque::new(),
        number: 0,
        ended: false,
    };
    let object = state.answer.object(&state.pending);
    for name in ["response.created", "response.in_progress"] {
        state.push(name, json!({"response": object}));
    }
    let events = stream::unfold(state, |mut state| async move {
        let data = state.next().await?;
        let name = data["type"].as_str().unwrap_or_default();
        let event = Event::default().event(name).data(data.to_string());
        Some((Ok::<_, Infallible>(event), state))
    });
    let keep = KeepAlive::new().interval(PING);
    Sse::new(events).keep_alive(keep).into_response()
}

impl ResponseStream {
    fn push(&mut self, name: &str, mut event: Value) {
        event["type"] = json!(name);
        event["sequence_number"] = json!(self.number);
        self.number += 1;
        self.ready.push_back(event);
    }

    /// An event of the last item.
    fn push_item(&mut self, name: &str, mut event: Value) {
        let at = self.answer.items.len().saturating_sub(1);
        event["item_id"] = json!(item_id(&self.answer, at, &self.pending));
        event["output_index"] = json!(at);
        if ["content_part", "output_text", "reasoning_text"]
            .iter()
            .any(|kind| name.contains(kind))
        {
            event["content_index"] = json!(0);
        }
        self.push(name, event);
    }

    /// The next event; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        while self.ready.is_empty() && !self.ended {
            match self.pending.out.recv().await {
                Some(Out::Failed(why) | Out::Refused(why)) => self.fail(&why),
                Some(out) => {
                    for part in self.answer.take(out, &mut self.pending) {
                        self.add(part);
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

    fn add(&mut self, part: Part) {
        let begins = match (&part, self.answer.items.last()) {
            (Part::Text(_), Some(OutputItem::Message(_)))
            | (Part::Thought(_), Some(OutputItem::Thoughts(_)))
            | (Part::Arguments(_), _) => false,
            (Part::Text(_) | Part::Thought(_) | Part::Call(_), _) => true,
        };
        if begins && !self.answer.items.is_empty() {
            self.end_item();
        }
        let event = match &part {
            Part::Text(text) => {
                let delta = json!({"delta": text, "logprobs": []});
                Some(("response.output_text.delta", delta))
            }
            Part::Thought(text) => {
                let delta = json!({"delta": text});
                Some(("response.reasoning_text.delta", delta))
            }
            Part::Call(_) => None,
            Part::Arguments(more) => {
                let delta = json!({"delta": more});
                Some(("response.function_call_arguments.delta", delta))
            }
        };
        if self.answer.add(part, &self.pending) {
            self.begin_item();
        }
        if let Some((name, event)) = event {
            self.push_item(name, event);
        }
    }

    fn begin_item(&mut self) {
        let at = self.answer.items.len() - 1;
        let item = self.answer.item(at, true, &self.pending);
        let event = json!({"output_index": at, "item": item});
        self.push("response.output_item.added", event);
        let part = match &self.answer.items[at] {
            OutputItem::Message(_) => part(""),
            OutputItem::Thoughts(_) => thought(""),
            OutputItem::Call(_) => return,
        };
        self.push_item("response.content_part.added", json!({"part": part}));
    }

    fn end_item(&mut self) {
        let at = self.answer.items.len() - 1;
        match &self.answer.items[at] {
            OutputItem::Thoughts(text) => {
                let (all, part) = (json!({"text": text}), thought(text));
                self.push_item("response.reasoning_text.done", all);
                self.push_item("response.content_part.done", json!({"part": part}));
            }
            OutputItem::Message(text) => {
                let (all, part) = (json!({"text": text, "logprobs": []}), part(text));
                self.push_item("response.output_text.done", all);
                self.push_item("response.content_part.done", json!({"part": part}));
            }
            OutputItem::Call(call) => {
                let all = json!({"name": call.name, "arguments": call.arguments});
                self.push_item("response.function_call_arguments.done", all);
            }
        }
        let item = self.answer.item(at, false, &self.pending);
        let event = json!({"output_index": at, "item": item});
        self.push("response.output_item.done", event);
    }

    fn end(&mut self) {
        if let Some(OutputItem::Thoughts(_)) = self.answer.items.last() {
            self.end_item();
        }
        if self.answer.end() {
            self.begin_item();
        }
        self.end_item();
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
