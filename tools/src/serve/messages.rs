//! Responses of `/v1/messages`: one message, whole or as named events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};

use super::calls::Part;
use super::error::{ApiError, Typed};
use super::reply::Call;
use super::submit::{PING, Pending};
use super::whole_calls::{HeldCall, input};
use super::worker::{End, Out};

/// A content block.
#[derive(Debug)]
enum Block {
    /// Text.
    Text(String),
    /// Reasoning.
    Thoughts(String),
    /// A tool call.
    Call(Call),
}

/// The message so far.
struct MessageReply {
    pending: Pending,
    blocks: Vec<Block>,
    /// Clients run a call when its block ends, and repair its arguments: it is sent when it is whole.
    held: HeldCall,
    started: bool,
    end: Option<End>,
}

/// Waits for the text, or streams it.
///
/// # Errors
/// The request failed.
pub async fn respond(pending: Pending, streams: bool) -> Result<Response, Typed> {
    let mut answer = MessageReply {
        pending,
        blocks: Vec::new(),
        held: HeldCall::default(),
        started: false,
        end: None,
    };
    if streams {
        return Ok(streamed(answer));
    }
    while answer.end.is_none() {
        for part in answer.next().await? {
            answer.add(part);
        }
    }
    Ok(Json(answer.message()).into_response())
}

impl MessageReply {
    /// Handles one output of the engine thread and returns the new parts.
    async fn next(&mut self) -> Result<Vec<Part>, ApiError> {
        let mut parts = match self.pending.out.recv().await {
            Some(Out::Started { cached, .. }) => {
                self.started = true;
                self.pending.usage.cached += cached;
                Vec::new()
            }
            Some(Out::Text { text, tokens, .. }) => self.pending.parts(0, &text, tokens),
            Some(Out::Done { end, tokens, .. }) => {
                self.pending.usage.completion += tokens;
                let rest = self.pending.rest(0, end.stopped());
                self.end = Some(if rest.stopped { end } else { End::Length });
                rest.parts
            }
            Some(Out::Progress { .. } | Out::Prompt { .. } | Out::Hidden(_)) => Vec::new(),
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(Out::Refused(why)) => return Err(ApiError::invalid(why)),
            None => return Err(ApiError::failed("the engine has stopped")),
        };
        parts.retain(
            |part| !matches!(part, Part::Text(text) | Part::Thought(text) if text.is_empty()),
        );
        Ok(self.held.pass(parts, self.end.is_some(), |_| true))
    }

    /// Whether the part begins a new block.
    fn begins(&self, part: &Part) -> bool {
        !matches!(
            (part, self.blocks.last()),
            (Part::Text(_), Some(Block::Text(_)))
                | (Part::Thought(_), Some(Block::Thoughts(_)))
                | (Part::Arguments(_), _)
        )
    }

    /// Appends a part.
    fn add(&mut self, part: Part) {
        match (part, self.blocks.last_mut()) {
            (Part::Text(more), Some(Block::Text(text)))
            | (Part::Thought(more), Some(Block::Thoughts(text))) => text.push_str(&more),
            (Part::Text(text), _) => self.blocks.push(Block::Text(text)),
            (Part::Thought(text), _) => self.blocks.push(Block::Thoughts(text)),
            (Part::Call(name), _) => {
                let call = Call {
                    id: self.pending.call_id(0, self.blocks.len()),
                    name,
                    ..Call::default()
                };
                self.blocks.push(Block::Call(call));
            }
            (Part::Arguments(more), Some(Block::Call(call))) => call.arguments.push_str(&more),
            (Part::Arguments(_), _) => {}
        }
    }

    fn stop_reason(&self) -> Option<&'static str> {
        let called = self.blocks.iter().any(|b| matches!(b, Block::Call(_)));
        Some(match self.end.as_ref()? {
            End::Length => "max_tokens",
            End::Word(_) | End::Eos if called => "tool_use",
            End::Word(_) => "stop_sequence",
            End::Eos => "end_turn",
        })
    }

    fn stop_sequence(&self) -> Option<&str> {
        match &self.end {
            Some(End::Word(word)) if self.stop_reason() == Some("stop_sequence") => Some(word),
            _ => None,
        }
    }

    /// Token counts; cached prompt tokens are listed separately.
    fn usage(&self) -> Value {
        let usage = &self.pending.usage;
        json!({
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        })
    }

    fn message(&self) -> Value {
        json!({
            "id": self.pending.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.pending.head.model,
            "content": self.blocks.iter().map(Block::json).collect::<Vec<_>>(),
            "stop_reason": self.stop_reason(),
            "stop_sequence": self.stop_sequence(),
            "usage": self.usage(),
        })
    }
}

impl Block {
    fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!({"type": "text", "text": text}),
            // This server does not sign reasoning.
            Self::Thoughts(text) => {
                json!({"type": "thinking", "thinking": text, "signature": ""})
            }
            Self::Call(call) => {
                let input = input(&call.arguments).unwrap_or_default();
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
            }
        }
    }

    /// The block without content, for its start event.
    fn begin(&self) -> Value {
        match self {
            Self::Text(_) => Self::Text(String::new()).json(),
            Self::Thoughts(_) => Self::Thoughts(String::new()).json(),
            Self::Call(call) => Self::Call(Call {
                arguments: String::new(),
                ..call.clone()
            })
            .json(),
        }
    }
}

/// State of a stream.
struct MessageStream {
    answer: MessageReply,
    ready: VecDeque<Value>,
    begun: bool,
    ended: bool,
}

fn streamed(answer: MessageReply) -> Response {
    let state = MessageStream {
        answer,
        ready: VecDeque::new(),
        begun: false,
        ended: false,
    };
    let named = |data: &Value| {
        let name = data["type"].as_str().unwrap_or_default();
        Event::default().event(name).data(data.to_string())
    };
    let events = stream::unfold(state, move |mut state| async move {
        let data = state.next().await?;
        Some((Ok::<_, Infallible>(named(&data)), state))
    });
    let keep = KeepAlive::new().interval(PING);
    let keep = keep.event(named(&json!({"type": "ping"})));
    Sse::new(events).keep_alive(keep).into_response()
}

impl MessageStream {
    /// The next event; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        while self.ready.is_empty() && !self.ended {
            match self.answer.next().await {
                Ok(parts) => self.take(parts),
                Err(why) => {
                    self.ready.push_back(why.typed());
                    self.ended = true;
                }
            }
        }
        self.ready.pop_front()
    }

    fn take(&mut self, parts: Vec<Part>) {
        if self.answer.started && !std::mem::replace(&mut self.begun, true) {
            let message = self.answer.message();
            self.push(json!({"type": "message_start", "message": message}));
        }
        for part in parts {
            self.part(part);
        }
        if self.answer.end.is_some() {
            self.end();
        }
    }

    fn push(&mut self, event: Value) {
        self.ready.push_back(event);
    }

    /// Index of the last block.
    fn last(&self) -> usize {
        self.answer.blocks.len().saturating_sub(1)
    }

    fn part(&mut self, part: Part) {
        let begins = self.answer.begins(&part);
        if begins {
            self.end_block();
        }
        let delta = match &part {
            Part::Text(text) => Some(json!({"type": "text_delta", "text": text})),
            Part::Thought(text) => Some(json!({"type": "thinking_delta", "thinking": text})),
            Part::Call(_) => None,
            Part::Arguments(more) => {
                Some(json!({"type": "input_json_delta", "partial_json": more}))
            }
        };
        self.answer.add(part);
        let index = self.last();
        if let Some(block) = self.answer.blocks.last().filter(|_| begins) {
            let block = block.begin();
            let kind = "content_block_start";
            self.push(json!({"type": kind, "index": index, "content_block": block}));
        }
        if let Some(delta) = delta {
            self.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
    }

    fn end_block(&mut self) {
        if let Some(block) = self.answer.blocks.last() {
            let index = self.last();
            if matches!(block, Block::Thoughts(_)) {
                let delta = json!({"type": "signature_delta", "signature": ""});
                self.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
            }
            self.push(json!({"type": "content_block_stop", "index": index}));
        }
    }

    fn end(&mut self) {
        self.end_block();
        let delta = json!({
            "stop_reason": self.answer.stop_reason(),
            "stop_sequence": self.answer.stop_sequence(),
        });
        let usage = self.answer.usage();
        self.push(json!({"type": "message_delta", "delta": delta, "usage": usage}));
        self.push(json!({"type": "message_stop"}));
        self.ended = true;
    }
}
