//! Responses of `/v1/responses`: one text per request, whole or as named events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::http::header;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use emberflow_engine::LogProbs;
use futures_util::stream;
use serde_json::{Value, json};

use super::app::now;
use super::calls::Part;
use super::error::ApiError;
use super::log_probs::TokenJson;
use super::reply::Call;
use super::response_tools::{Callee, Callees, input_of};
use super::stored::{ResponseStore, StoredResponse};
use super::submit::{PING, Pending};
use super::whole_calls::{HeldCall, input};
use super::worker::Out;

/// What a response needs to know of its request.
#[derive(Debug)]
pub struct ResponseContext {
    /// Members of the response object that only depend on the request, as a JSON object.
    pub echo: String,
    /// The tools behind the functions that the model calls.
    pub tools: Callees,
    /// Where the response is kept, unless `store` is false.
    pub keep: Option<Keep>,
}

/// Where a finished response is kept.
#[derive(Debug)]
pub struct Keep {
    /// The store.
    pub store: Arc<ResponseStore>,
    /// The items of the conversation before the response as JSON, separated by commas.
    pub items: String,
}

/// The response object so far.
struct ResponseReply {
    pending: Pending,
    context: ResponseContext,
    items: Vec<OutputItem>,
    /// A call of a custom tool, whose input is sent when its JSON is complete.
    held: HeldCall,
    /// Once ended: true for a natural end, false if the text was cut or a call is not whole.
    stopped: Option<bool>,
    /// Why the request failed.
    failed: Option<String>,
    /// Log-probabilities of tokens whose text has not come yet.
    waiting: Vec<LogProbs>,
    /// Log-probabilities of the next part of a message.
    fresh: Vec<TokenJson>,
}

/// An output item.
#[derive(Debug)]
enum OutputItem {
    /// Reasoning.
    Thoughts(String),
    /// Text.
    Message(Message),
    /// A tool call.
    Call { call: Call, of: Callee },
}

#[derive(Debug, Default)]
struct Message {
    text: String,
    log_probs: Vec<TokenJson>,
}

/// Waits for the text, or streams it.
///
/// # Errors
/// The request failed.
pub async fn respond(
    pending: Pending,
    context: ResponseContext,
    streams: bool,
) -> Result<Response, ApiError> {
    let answer = ResponseReply {
        pending,
        context,
        items: Vec::new(),
        held: HeldCall::default(),
        stopped: None,
        failed: None,
        waiting: Vec::new(),
        fresh: Vec::new(),
    };
    if streams {
        Ok(streamed(answer))
    } else {
        whole(answer).await
    }
}

async fn whole(mut answer: ResponseReply) -> Result<Response, ApiError> {
    while answer.stopped.is_none() {
        match answer.pending.out.recv().await {
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(Out::Refused(why)) => return Err(ApiError::invalid(why)),
            Some(out) => {
                for part in answer.take(out) {
                    answer.add(part);
                }
            }
            None => return Err(ApiError::failed("the engine has stopped")),
        }
    }
    answer.end();
    let object = answer.object();
    answer.keep(&object);
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Ok((kind, object).into_response())
}

impl ResponseReply {
    /// Handles one output of the engine thread and returns the new parts.
    fn take(&mut self, out: Out) -> Vec<Part> {
        match out {
            Out::Started { cached, .. } => self.pending.usage.cached += cached,
            Out::Text {
                text,
                log_probs,
                tokens,
                ..
            } => {
                self.waiting.extend(log_probs);
                // A piece without text only carries log-probabilities.
                if text.is_empty() {
                    return Vec::new();
                }
                let parts = self.pending.parts(0, &text, tokens);
                return self.passed(parts);
            }
            Out::Done { end, tokens, .. } => {
                self.pending.usage.completion += tokens;
                let rest = self.pending.rest(0, end.stopped());
                self.stopped = Some(rest.stopped);
                return self.passed(rest.parts);
            }
            Out::Progress { .. }
            | Out::Prompt { .. }
            | Out::Hidden(_)
            | Out::Failed(_)
            | Out::Refused(_) => {}
        }
        Vec::new()
    }

    /// The parts to send. Attaches the waiting log-probabilities to them, if they are text.
    fn passed(&mut self, parts: Vec<Part>) -> Vec<Part> {
        if !parts.is_empty() {
            let tokens = std::mem::take(&mut self.waiting);
            if parts.iter().any(|part| matches!(part, Part::Text(_))) && !tokens.is_empty() {
                self.fresh = self.pending.log_probs(0, &tokens).tokens();
            }
        }
        let tools = &self.context.tools;
        let custom = |name: &str| tools.get(name).custom;
        self.held.pass(parts, self.stopped.is_some(), custom)
    }

    /// Appends a part; returns whether it begins a new item.
    fn add(&mut self, part: Part) -> bool {
        match (part, self.items.last_mut()) {
            (Part::Text(more), Some(OutputItem::Message(message))) => {
                message.text.push_str(&more);
                message.log_probs.append(&mut self.fresh);
            }
            (Part::Thought(more), Some(OutputItem::Thoughts(text))) => text.push_str(&more),
            (Part::Thought(text), _) => {
                self.items.push(OutputItem::Thoughts(text));
                return true;
            }
            (Part::Text(text), _) => {
                self.items.push(OutputItem::Message(Message {
                    text,
                    log_probs: std::mem::take(&mut self.fresh),
                }));
                return true;
            }
            (Part::Call(name), _) => {
                self.items.push(OutputItem::Call {
                    of: self.context.tools.get(&name),
                    call: Call {
                        id: self.pending.call_id(0, self.items.len()),
                        name,
                        arguments: String::new(),
                    },
                });
                return true;
            }
            (Part::Arguments(more), Some(OutputItem::Call { call, .. })) => {
                call.arguments.push_str(&more);
            }
            (Part::Arguments(_), _) => {}
        }
        false
    }

    /// Adds an empty message if there is neither a message nor a call; returns whether it did.
    fn end(&mut self) -> bool {
        let empty = matches!(self.items.last(), None | Some(OutputItem::Thoughts(_)));
        if empty {
            self.items.push(OutputItem::Message(Message::default()));
        }
        empty
    }

    fn status(&self) -> &'static str {
        match self.stopped {
            _ if self.failed.is_some() => "failed",
            None => "in_progress",
            Some(true) => "completed",
            Some(false) => "incomplete",
        }
    }

    /// The id of the item at index `at`.
    fn item_id(&self, at: usize) -> String {
        let kind = match &self.items[at] {
            OutputItem::Thoughts(_) => "rs",
            OutputItem::Message(_) => "msg",
            OutputItem::Call { of, .. } if of.custom => "ctc",
            OutputItem::Call { .. } => "fc",
        };
        format!("{kind}_{}_{at}", self.pending.head.id)
    }

    /// The item at index `at`; without content if it `begins`.
    fn item(&self, at: usize, begins: bool) -> Value {
        let id = self.item_id(at);
        let last = at + 1 == self.items.len();
        let whole = match &self.items[at] {
            OutputItem::Call { call, .. } => input(&call.arguments).is_some(),
            _ => !last || self.stopped != Some(false),
        };
        let status = match whole {
            _ if begins => "in_progress",
            true => "completed",
            false => "incomplete",
        };
        match &self.items[at] {
            OutputItem::Thoughts(text) => json!({
                "id": id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": if begins { json!([]) } else { json!([thought(text)]) },
            }),
            OutputItem::Message(message) => json!({
                "id": id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": if begins { json!([]) } else { json!([part(message)]) },
            }),
            OutputItem::Call { call, of } => {
                let mut item = json!({
                    "id": id,
                    "type": if of.custom { "custom_tool_call" } else { "function_call" },
                    "call_id": call.id,
                    "name": of.name,
                    "status": status,
                });
                if let Some(namespace) = &of.namespace {
                    item["namespace"] = namespace.as_str().into();
                }
                match (of.custom, begins) {
                    (true, true) => item["input"] = "".into(),
                    (true, false) => item["input"] = input_of(&call.arguments).into(),
                    (false, true) => item["arguments"] = "".into(),
                    (false, false) => item["arguments"] = call.arguments.as_str().into(),
                }
                item
            }
        }
    }

    /// Whether the last item is a call of a custom tool.
    fn calls_custom(&self) -> bool {
        matches!(self.items.last(), Some(OutputItem::Call { of, .. }) if of.custom)
    }

    /// All items, once the response has ended.
    fn output(&self) -> Vec<Value> {
        let all = 0..self.stopped.map_or(0, |_| self.items.len());
        all.map(|at| self.item(at, false)).collect()
    }

    /// The response object as JSON.
    fn object(&self) -> String {
        let Pending {
            usage,
            head,
            request,
            ..
        } = &self.pending;
        // As clients wrote them: 0.7 instead of the f32's 0.699999988.
        let sampling = serde_json::to_value(request.sampling).unwrap_or_default();
        let object = json!({
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": (self.stopped == Some(true)).then(now),
            "model": head.model,
            "status": self.status(),
            "error": self.failed.as_ref().map(|why| json!({"code": "server_error", "message": why})),
            "incomplete_details": match self.stopped {
                Some(false) => json!({"reason": "max_output_tokens"}),
                _ => Value::Null,
            },
            "output": self.output(),
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            "usage": self.stopped.map(|_| json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            })),
        });
        // Both are objects with members. The request's is not parsed again, because that takes many times its bytes.
        let mut object = object.to_string();
        object.pop();
        object.push(',');
        object.push_str(self.context.echo.get(1..).unwrap_or("}"));
        object
    }

    /// Keeps the finished response.
    fn keep(&mut self, object: &str) {
        let Some(Keep { store, items }) = self.context.keep.take() else {
            return;
        };
        let output = self.output().into_iter().map(|item| item.to_string());
        let inputs = items.len();
        let items: Vec<String> = (Some(items).into_iter().filter(|items| !items.is_empty()))
            .chain(output)
            .collect();
        store.put(StoredResponse {
            id: self.pending.head.id.clone(),
            object: object.into(),
            items: items.join(",").into(),
            inputs,
        });
    }
}

fn part(message: &Message) -> Value {
    let Message { text, log_probs } = message;
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs})
}

fn thought(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

/// An event.
struct ResponseEvent {
    name: &'static str,
    data: String,
}

/// State of a stream.
struct ResponseStream {
    answer: ResponseReply,
    ready: VecDeque<ResponseEvent>,
    number: u64,
    ended: bool,
}

fn streamed(answer: ResponseReply) -> Response {
    let mut state = ResponseStream {
        answer,
        ready: VecDeque::new(),
        number: 0,
        ended: false,
    };
    let object = state.answer.object();
    for name in ["response.created", "response.in_progress"] {
        state.push_response(name, &object);
    }
    let events = stream::unfold(state, |mut state| async move {
        let ResponseEvent { name, data } = state.next().await?;
        let event = Event::default().event(name).data(data);
        Some((Ok::<_, Infallible>(event), state))
    });
    let keep = KeepAlive::new().interval(PING);
    Sse::new(events).keep_alive(keep).into_response()
}

impl ResponseStream {
    fn push(&mut self, name: &'static str, mut event: Value) {
        event["type"] = json!(name);
        event["sequence_number"] = json!(self.number);
        self.number += 1;
        let data = event.to_string();
        self.ready.push_back(ResponseEvent { name, data });
    }

    /// An event with the response object.
    fn push_response(&mut self, name: &'static str, object: &str) {
        let number = self.number;
        self.number += 1;
        let data =
            format!("{{\"type\":\"{name}\",\"sequence_number\":{number},\"response\":{object}}}");
        self.ready.push_back(ResponseEvent { name, data });
    }

    /// An event of the last item.
    fn push_item(&mut self, name: &'static str, mut event: Value) {
        let at = self.answer.items.len().saturating_sub(1);
        event["item_id"] = json!(self.answer.item_id(at));
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
    async fn next(&mut self) -> Option<ResponseEvent> {
        while self.ready.is_empty() && !self.ended {
            match self.answer.pending.out.recv().await {
                Some(Out::Failed(why) | Out::Refused(why)) => self.fail(why),
                Some(out) => {
                    for part in self.answer.take(out) {
                        self.add(part);
                    }
                    if self.answer.stopped.is_some() {
                        self.end();
                    }
                }
                None => self.fail("the engine has stopped".to_owned()),
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
                let delta = json!({"delta": text, "logprobs": self.answer.fresh});
                Some(("response.output_text.delta", delta))
            }
            Part::Thought(text) => {
                let delta = json!({"delta": text});
                Some(("response.reasoning_text.delta", delta))
            }
            // Its input is sent at the end of its item.
            Part::Arguments(_) if self.answer.calls_custom() => None,
            Part::Call(_) => None,
            Part::Arguments(more) => {
                let delta = json!({"delta": more});
                Some(("response.function_call_arguments.delta", delta))
            }
        };
        if self.answer.add(part) {
            self.begin_item();
        }
        if let Some((name, event)) = event {
            self.push_item(name, event);
        }
    }

    fn begin_item(&mut self) {
        let at = self.answer.items.len() - 1;
        let item = self.answer.item(at, true);
        let event = json!({"output_index": at, "item": item});
        self.push("response.output_item.added", event);
        let part = match &self.answer.items[at] {
            OutputItem::Message(_) => part(&Message::default()),
            OutputItem::Thoughts(_) => thought(""),
            OutputItem::Call { .. } => return,
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
            OutputItem::Message(message) => {
                let all = json!({"text": message.text, "logprobs": message.log_probs});
                let part = part(message);
                self.push_item("response.output_text.done", all);
                self.push_item("response.content_part.done", json!({"part": part}));
            }
            OutputItem::Call { call, of } if of.custom => {
                let input = input_of(&call.arguments);
                let delta = json!({"delta": input});
                self.push_item("response.custom_tool_call_input.delta", delta);
                let all = json!({"input": input});
                self.push_item("response.custom_tool_call_input.done", all);
            }
            OutputItem::Call { call, of } => {
                let all = json!({"name": of.name, "arguments": call.arguments});
                self.push_item("response.function_call_arguments.done", all);
            }
        }
        let item = self.answer.item(at, false);
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
        let object = self.answer.object();
        self.answer.keep(&object);
        let name = match self.answer.stopped {
            Some(false) => "response.incomplete",
            _ => "response.completed",
        };
        self.push_response(name, &object);
        self.ended = true;
    }

    /// An event that most clients report, and one that Codex waits for.
    fn fail(&mut self, why: String) {
        let error = json!({"code": "server_error", "message": why, "param": null});
        self.push("error", error);
        self.answer.failed = Some(why);
        let object = self.answer.object();
        self.push_response("response.failed", &object);
        self.ended = true;
    }
}
