//! From a checked request to its response.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::api::Common;
use super::app::{App, now};
use super::error::ApiError;
use super::reply::{Head, Kind, Usage, reason};
use super::worker::{Job, Out};

/// Time between comments while a stream has nothing to say.
const PING: Duration = Duration::from_secs(10);
/// Most texts of one request.
const MAX_TEXTS: usize = 128;

/// A checked request.
pub struct Asked {
    /// Its kind.
    pub kind: Kind,
    /// Tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// What each prompt's texts begin with, if they do.
    pub echo: Vec<String>,
    /// Tokens to generate if the request does not say.
    pub default_tokens: usize,
    /// Background work.
    pub proactive: bool,
    /// Its other fields.
    pub common: Common,
}

/// A response in the making.
struct Pending {
    out: UnboundedReceiver<Out>,
    head: Head,
    usage: Usage,
    /// Texts that have not ended.
    left: usize,
    /// What each text begins with.
    begin: Vec<String>,
    /// Held until the response is complete.
    _permit: OwnedSemaphorePermit,
}

/// Runs a request.
///
/// # Errors
/// A request that is wrong, or failed.
pub async fn respond(
    app: Arc<App>,
    asked: Asked,
    permit: OwnedSemaphorePermit,
) -> Result<Response, ApiError> {
    let streams = asked.common.stream == Some(true);
    let with_usage = asked.common.include_usage();
    let pending = submit(&app, asked, permit)?;
    if streams {
        return Ok(streamed(pending, with_usage));
    }
    whole(pending).await
}

/// Hands the request to the engine's thread.
fn submit(app: &App, asked: Asked, permit: OwnedSemaphorePermit) -> Result<Pending, ApiError> {
    let samples = asked.common.samples();
    let texts = asked.prompts.len() * samples;
    if texts == 0 || texts > MAX_TEXTS {
        let message = format!("a request has 1 to {MAX_TEXTS} texts, and this one {texts}");
        return Err(ApiError::param("prompt", message));
    }
    for prompt in &asked.prompts {
        app.check_tokens(prompt)?;
        let len = prompt.len();
        if len == 0 {
            return Err(ApiError::param("prompt", "the prompt is empty"));
        }
        if len > app.context {
            let message = format!(
                "the prompt has {len} tokens, and there is room for {} (see --context)",
                app.context
            );
            return Err(ApiError::param("prompt", message));
        }
    }
    let number = app.next();
    let seed = now().wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let request = (asked.common).request(&app.text, asked.default_tokens, seed)?;
    let stops = asked.common.stops()?;
    let (sender, out) = unbounded_channel();
    let mut usage = Usage::default();
    for (at, prompt) in asked.prompts.into_iter().enumerate() {
        usage.prompt += prompt.len();
        let job = Job {
            prompt,
            request,
            first: at * samples,
            samples,
            stops: stops.clone(),
            proactive: asked.proactive,
            arrived: Instant::now(),
            out: sender.clone(),
        };
        let sent = app.jobs.send(job);
        sent.map_err(|_| ApiError::unavailable("the server is shutting down"))?;
    }
    if !asked.proactive {
        app.shared.interrupt();
    }
    let prefix = match asked.kind {
        Kind::Chat => "chatcmpl",
        Kind::Text => "cmpl",
    };
    let mut begin = vec![String::new(); texts];
    for (text, begin) in begin.iter_mut().enumerate() {
        *begin = asked.echo.get(text / samples).cloned().unwrap_or_default();
    }
    Ok(Pending {
        out,
        head: Head {
            kind: asked.kind,
            id: format!("{prefix}-{:x}-{number:x}", app.created),
            created: now(),
            model: app.model.clone(),
        },
        usage,
        left: texts,
        begin,
        _permit: permit,
    })
}

/// Waits for all texts.
async fn whole(mut pending: Pending) -> Result<Response, ApiError> {
    let mut texts = std::mem::take(&mut pending.begin);
    let mut reasons = vec!["length"; texts.len()];
    while pending.left > 0 {
        match pending.out.recv().await {
            Some(Out::Started(cached)) => pending.usage.cached += cached,
            Some(Out::Text { index, text }) => texts[index].push_str(&text),
            Some(Out::Done {
                index,
                stopped,
                tokens,
            }) => {
                reasons[index] = reason(stopped);
                pending.usage.completion += tokens;
                pending.left -= 1;
            }
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            None => return Err(ApiError::failed("the engine has stopped")),
        }
    }
    let response = pending.head.whole(&texts, &reasons, pending.usage);
    Ok(Json(response).into_response())
}

/// A stream in the making.
struct Streamed {
    pending: Pending,
    with_usage: bool,
    /// Events that are ready.
    ready: VecDeque<String>,
    ended: bool,
}

/// Streams the texts as server-sent events.
fn streamed(pending: Pending, with_usage: bool) -> Response {
    let mut ready = VecDeque::new();
    for (index, begin) in pending.begin.iter().enumerate() {
        ready.extend(pending.head.first(index).map(|chunk| chunk.to_string()));
        if !begin.is_empty() {
            ready.push_back(pending.head.piece(index, begin).to_string());
        }
    }
    let state = Streamed {
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

impl Streamed {
    /// The next event's data; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        while self.ready.is_empty() && !self.ended {
            self.take().await;
        }
        self.ready.pop_front()
    }

    /// Takes output of the engine's thread.
    async fn take(&mut self) {
        let (head, usage) = (&self.pending.head, &mut self.pending.usage);
        match self.pending.out.recv().await {
            Some(Out::Started(cached)) => usage.cached += cached,
            Some(Out::Text { index, text }) => {
                self.ready.push_back(head.piece(index, &text).to_string());
            }
            Some(Out::Done {
                index,
                stopped,
                tokens,
            }) => {
                usage.completion += tokens;
                let last = head.last(index, reason(stopped));
                self.ready.push_back(last.to_string());
                self.pending.left -= 1;
                if self.pending.left == 0 {
                    if self.with_usage {
                        self.ready.push_back(head.usage(*usage).to_string());
                    }
                    self.ready.push_back("[DONE]".to_owned());
                    self.ended = true;
                }
            }
            Some(Out::Failed(why)) => self.fail(&why),
            None => self.fail("the engine has stopped"),
        }
    }

    fn fail(&mut self, why: &str) {
        self.ready
            .push_back(ApiError::failed(why).body().to_string());
        self.ended = true;
    }
}
