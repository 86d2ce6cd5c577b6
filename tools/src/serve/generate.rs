//! Builds responses of chats and completions from the engine's output.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::http::header;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use emberflow_engine::Repetition;
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;

use super::app::App;
use super::calls::Part;
use super::error::ApiError;
use super::peer::{COMMENT, json_with_probes, stream_with_probes};
use super::reply::{Call, CallPiece, Choice};
use super::submit::{GenerateRequest, PING, Pending, submit};
use super::worker::Out;

/// Waits for a request's output, or streams it.
///
/// # Errors
/// Invalid or failed requests.
pub async fn respond(
    app: Arc<App>,
    asked: GenerateRequest,
    permit: OwnedSemaphorePermit,
) -> Result<Response, ApiError> {
    let streams = asked.common.stream == Some(true);
    let with_usage = asked.common.include_usage();
    let pending = submit(&app, asked, permit)?;
    if streams {
        Ok(stream_with_probes(streamed(pending, with_usage), COMMENT))
    } else {
        json_with_probes(whole(pending), ApiError::into_response).await
    }
}

/// Waits for all texts.
async fn whole(mut pending: Pending) -> Result<Response, ApiError> {
    let count = pending.texts.len();
    let mut choices = Vec::with_capacity(count);
    for (index, text) in pending.texts.iter().enumerate() {
        choices.push(Choice {
            index,
            text: text.begin.clone(),
            ..Choice::default()
        });
    }
    let mut log_probs = vec![Vec::new(); count];
    while pending.left > 0 {
        match pending.out.recv().await {
            Some(Out::Started { cached, .. }) => pending.usage.cached += cached,
            Some(Out::Prompt {
                index,
                log_probs: more,
            }) => log_probs[index].extend(more),
            Some(Out::Text {
                index,
                text,
                log_probs: more,
                tokens,
            }) => {
                for part in pending.parts(index, &text, tokens) {
                    choices[index].take(part, |call| pending.call_id(index, call));
                }
                log_probs[index].extend(more);
            }
            Some(Out::Done {
                index,
                end,
                tokens,
                repetition,
            }) => {
                let rest = pending.rest(index, end.stopped());
                choices[index].repetition = repetition;
                choices[index].reason = Some(rest.reason());
                for part in rest.parts {
                    choices[index].take(part, |call| pending.call_id(index, call));
                }
                pending.usage.completion += tokens;
                pending.left -= 1;
            }
            // Only sent in streams.
            Some(Out::Progress { .. } | Out::Hidden(_)) => {}
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(Out::Refused(why)) => return Err(ApiError::invalid(why)),
            None => return Err(ApiError::failed("the engine has stopped")),
        }
    }
    if pending.request.log_probs.is_some() {
        for (choice, tokens) in choices.iter_mut().zip(&log_probs) {
            choice.log_probs = Some(pending.log_probs(choice.index, tokens));
        }
    }
    let body = pending.head.whole(&choices, pending.usage);
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// State of a stream.
struct ChunkStream {
    pending: Pending,
    with_usage: bool,
    /// Number of tool calls per text so far.
    calls: Vec<usize>,
    /// Events ready to be sent.
    ready: VecDeque<String>,
    ended: bool,
}

/// Streams the texts as server-sent events.
fn streamed(mut pending: Pending, with_usage: bool) -> Response {
    let mut ready = VecDeque::new();
    for (index, text) in pending.texts.iter_mut().enumerate() {
        ready.extend(pending.head.first(index));
        if !text.begin.is_empty() {
            text.offset = text.begin.chars().count();
            let text = text.begin.clone();
            ready.push_back(pending.head.piece(&Choice {
                index,
                text,
                ..Choice::default()
            }));
        }
    }
    let state = ChunkStream {
        calls: vec![0; pending.texts.len()],
        pending,
        with_usage,
        ready,
        ended: false,
    };
    let events = stream::unfold(state, |mut state| async move {
        let data = state.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(data)), state))
    });
    let keep = KeepAlive::new().interval(PING);
    Sse::new(events).keep_alive(keep).into_response()
}

impl ChunkStream {
    /// The next event's data; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        while self.ready.is_empty() && !self.ended {
            self.take().await;
        }
        self.ready.pop_front()
    }

    /// Handles one output of the engine thread.
    async fn take(&mut self) {
        match self.pending.out.recv().await {
            Some(Out::Started { cached, .. }) => self.pending.usage.cached += cached,
            Some(Out::Progress { index, progress }) => {
                (self.ready).push_back(self.pending.head.progress(index, progress));
            }
            // Never requested in streams.
            Some(Out::Prompt { .. } | Out::Hidden(_)) => {}
            Some(Out::Text {
                index,
                text,
                log_probs,
                tokens,
            }) => {
                self.pending.texts[index].log_probs.extend(log_probs);
                // A piece without text only carries log-probabilities.
                let parts = if text.is_empty() {
                    vec![Part::Text(text)]
                } else {
                    self.pending.parts(index, &text, tokens)
                };
                for part in parts {
                    self.part(index, part);
                }
            }
            Some(Out::Done {
                index,
                end,
                tokens,
                repetition,
            }) => self.end(index, end.stopped(), tokens, repetition),
            Some(Out::Failed(why)) => self.fail(&ApiError::failed(why)),
            Some(Out::Refused(why)) => self.fail(&ApiError::invalid(why)),
            None => self.fail(&ApiError::failed("the engine has stopped")),
        }
    }

    /// Sends a part of a text with the pending log-probabilities.
    fn part(&mut self, index: usize, part: Part) {
        let tokens = std::mem::take(&mut self.pending.texts[index].log_probs);
        let log_probs = (!tokens.is_empty()).then(|| self.pending.log_probs(index, &tokens));
        let calls = self.calls[index];
        let mut choice = Choice {
            index,
            log_probs,
            ..Choice::default()
        };
        let Pending { head, .. } = &self.pending;
        let chunk = match part {
            Part::Text(text) => {
                choice.text = text;
                head.piece(&choice)
            }
            Part::Thought(text) => {
                choice.thoughts = text;
                head.piece(&choice)
            }
            Part::Call(name) => {
                self.calls[index] += 1;
                let begin = Call {
                    id: self.pending.call_id(index, calls),
                    name,
                    ..Call::default()
                };
                let begin = Some(&begin);
                let piece = CallPiece {
                    index: calls,
                    begin,
                    arguments: "",
                };
                head.call(&choice, piece)
            }
            Part::Arguments(arguments) => {
                let piece = CallPiece {
                    index: calls.saturating_sub(1),
                    begin: None,
                    arguments: &arguments,
                };
                head.call(&choice, piece)
            }
        };
        self.ready.push_back(chunk);
    }

    /// Ends a text; the last one ends the stream.
    fn end(&mut self, index: usize, stopped: bool, tokens: usize, repetition: Option<Repetition>) {
        let rest = self.pending.rest(index, stopped);
        let reason = rest.reason();
        for part in rest.parts {
            self.part(index, part);
        }
        if !self.pending.texts[index].log_probs.is_empty() {
            self.part(index, Part::Text(String::new()));
        }
        let Pending {
            head, usage, left, ..
        } = &mut self.pending;
        usage.completion += tokens;
        *left -= 1;
        self.ready.push_back(head.piece(&Choice {
            index,
            reason: Some(reason),
            repetition,
            ..Choice::default()
        }));
        if *left == 0 {
            if self.with_usage {
                self.ready.push_back(head.usage(*usage));
            }
            self.ready.push_back("[DONE]".to_owned());
            self.ended = true;
        }
    }

    fn fail(&mut self, why: &ApiError) {
        self.ready.push_back(why.body().to_string());
        self.ended = true;
    }
}
