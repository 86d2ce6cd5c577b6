//! From a checked request to its response.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::header;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use emberflow_engine::{LogProbs, Request};
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::api::{Common, Kind};
use super::app::{App, now};
use super::error::ApiError;
use super::log_probs::{LogProbsJson, Piece, Writer};
use super::reply::{Choice, Head, Usage, reason};
use super::worker::{Job, Out};

/// Time between comments while a stream has nothing to say.
const PING: Duration = Duration::from_secs(10);
/// Most texts of one request.
const MAX_TEXTS: usize = 128;
/// Most log-probabilities of one response.
pub const MAX_ENTRIES: usize = 4608;
/// Bytes that one of them takes until the response is sent.
pub const ENTRY_BYTES: u64 = 256;

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
    app: Arc<App>,
    out: UnboundedReceiver<Out>,
    head: Head,
    usage: Usage,
    /// Texts that have not ended.
    left: usize,
    texts: Vec<Text>,
    /// Held until the response is complete.
    _permit: OwnedSemaphorePermit,
}

/// One text of a response.
#[derive(Debug, Clone, Default)]
struct Text {
    /// What it begins with.
    begin: String,
    /// The prompt's first token, if log-probabilities begin with the prompt.
    first: Option<u32>,
    /// Characters whose log-probabilities were sent.
    offset: usize,
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
fn submit(app: &Arc<App>, asked: Asked, permit: OwnedSemaphorePermit) -> Result<Pending, ApiError> {
    let samples = asked.common.samples();
    let texts = asked.prompts.len() * samples;
    if texts == 0 || texts > MAX_TEXTS {
        let message = format!("a request has 1 to {MAX_TEXTS} texts, and this one {texts}");
        return Err(ApiError::param("prompt", message));
    }
    check_prompts(app, &asked.prompts)?;
    let number = app.next();
    let seed = now().wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let mut request = (asked.common).request(&app.text, asked.default_tokens, seed)?;
    let echoes = !asked.echo.is_empty();
    request.prompt_log_probs = echoes && request.log_probs.is_some();
    check_log_probs(&asked, &request)?;
    let stops = asked.common.stops()?;
    let bias = asked.common.bias(app.text.config().vocab)?;
    let (sender, out) = unbounded_channel();
    let mut usage = Usage::default();
    let mut all = vec![Text::default(); texts];
    for (at, prompt) in asked.prompts.into_iter().enumerate() {
        usage.prompt += prompt.len();
        for text in &mut all[at * samples..][..samples] {
            text.begin = asked.echo.get(at).cloned().unwrap_or_default();
            text.first = prompt.first().copied().filter(|_| request.prompt_log_probs);
        }
        let job = Job {
            prompt,
            request,
            first: at * samples,
            samples,
            stops: stops.clone(),
            bias: bias.clone(),
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
    Ok(Pending {
        app: app.clone(),
        out,
        head: Head {
            kind: asked.kind,
            id: format!("{prefix}-{:x}-{number:x}", app.created),
            created: now(),
            model: app.model.clone(),
        },
        usage,
        left: texts,
        texts: all,
        _permit: permit,
    })
}

/// Whether prompts fit the model and the context.
fn check_prompts(app: &App, prompts: &[Vec<u32>]) -> Result<(), ApiError> {
    for prompt in prompts {
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
    Ok(())
}

/// Whether the log-probabilities that are asked for can be told.
fn check_log_probs(asked: &Asked, request: &Request) -> Result<(), ApiError> {
    let Some(top) = request.log_probs else {
        return Ok(());
    };
    let refuse = |message: String| Err(ApiError::param("logprobs", message));
    if request.prompt_log_probs && (asked.common.samples() > 1 || asked.common.stream == Some(true))
    {
        return refuse(
            "those of the prompt are told whole and for one text: no `n`, no `stream`".into(),
        );
    }
    let prompts = asked
        .prompts
        .iter()
        .map(|prompt| match request.prompt_log_probs {
            true => prompt.len() + request.max_tokens,
            false => request.max_tokens * asked.common.samples(),
        });
    let entries = prompts.sum::<usize>().saturating_mul(top + 1);
    match entries <= MAX_ENTRIES {
        true => Ok(()),
        false => refuse(format!(
            "these would be up to {entries} log-probabilities, and a response has room for \
             {MAX_ENTRIES}; ask for fewer tokens (`max_tokens`) or fewer beside each"
        )),
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
    let mut asked = pending.texts.iter().any(|text| text.first.is_some());
    while pending.left > 0 {
        match pending.out.recv().await {
            Some(Out::Started(cached)) => pending.usage.cached += cached,
            Some(Out::Prompt {
                index,
                log_probs: more,
            }) => log_probs[index].extend(more),
            Some(Out::Text {
                index,
                text,
                log_probs: more,
            }) => {
                choices[index].text.push_str(&text);
                asked |= !more.is_empty();
                log_probs[index].extend(more);
            }
            Some(Out::Done {
                index,
                stopped,
                tokens,
            }) => {
                choices[index].reason = Some(reason(stopped));
                pending.usage.completion += tokens;
                pending.left -= 1;
            }
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            None => return Err(ApiError::failed("the engine has stopped")),
        }
    }
    if asked {
        for (choice, tokens) in choices.iter_mut().zip(&log_probs) {
            choice.log_probs = Some(pending.log_probs(choice.index, tokens));
        }
    }
    let body = pending.head.whole(&choices, pending.usage);
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

impl Pending {
    /// Log-probabilities of the next piece of a text.
    fn log_probs(&mut self, index: usize, tokens: &[LogProbs]) -> LogProbsJson {
        let writer = Writer {
            kind: self.head.kind,
            tokenizer: self.app.text.tokenizer(),
        };
        let text = &mut self.texts[index];
        let first = text.first.take();
        writer.write(Piece { first, tokens }, &mut text.offset)
    }
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
        match self.pending.out.recv().await {
            Some(Out::Started(cached)) => self.pending.usage.cached += cached,
            // Not asked for in streams.
            Some(Out::Prompt { .. }) => {}
            Some(Out::Text {
                index,
                text,
                log_probs,
            }) => {
                let asked = !log_probs.is_empty();
                let log_probs = asked.then(|| self.pending.log_probs(index, &log_probs));
                self.ready.push_back(self.pending.head.piece(&Choice {
                    index,
                    text,
                    log_probs,
                    reason: None,
                }));
            }
            Some(Out::Done {
                index,
                stopped,
                tokens,
            }) => self.end(index, reason(stopped), tokens),
            Some(Out::Failed(why)) => self.fail(&why),
            None => self.fail("the engine has stopped"),
        }
    }

    /// Ends a text, and after the last one the stream.
    fn end(&mut self, index: usize, reason: &'static str, tokens: usize) {
        let Pending {
            head, usage, left, ..
        } = &mut self.pending;
        usage.completion += tokens;
        *left -= 1;
        self.ready.push_back(head.piece(&Choice {
            index,
            reason: Some(reason),
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

    fn fail(&mut self, why: &str) {
        self.ready
            .push_back(ApiError::failed(why).body().to_string());
        self.ended = true;
    }
}
