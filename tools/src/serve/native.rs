//! Responses of llama.cpp's `/completion` and `/infill`: whole, or as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use emberflow_engine::{LogProb, LogProbs, Repetition};
use emberflow_models::tokenizer::Tokenizer;
use futures_util::stream;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::out::PromptProgress;
use super::submit::{PING, Pending};
use super::worker::{End, Out};

/// Options of the response.
#[derive(Debug, Default)]
pub struct NativeOptions {
    /// Include the tokens.
    pub tokens: bool,
    /// Include their probabilities.
    pub probabilities: bool,
    /// Include only these fields, as paths: `timings/predicted_ms`.
    pub fields: Vec<String>,
    /// The prompts as text.
    pub prompts: Vec<String>,
}

/// One text of a response.
#[derive(Debug)]
struct NativeText {
    content: String,
    tokens: Vec<LogProbs>,
    has_new_line: bool,
    cached: usize,
    /// Its slot; of several texts of a prompt, only the first one's is known.
    slot: Option<usize>,
    started: Instant,
    /// Time of the first token.
    first: Option<Instant>,
    end: Option<(End, usize)>,
    repetition: Option<Repetition>,
}

/// State of a response.
struct NativeReply {
    pending: Pending,
    wanted: NativeOptions,
    texts: Vec<NativeText>,
}

/// Waits for the texts, or streams them.
///
/// # Errors
/// The request failed.
pub async fn respond(
    pending: Pending,
    wanted: NativeOptions,
    streams: bool,
) -> Result<Response, ApiError> {
    let text = |_| NativeText {
        content: String::new(),
        tokens: Vec::new(),
        has_new_line: false,
        cached: 0,
        slot: None,
        started: Instant::now(),
        first: None,
        end: None,
        repetition: None,
    };
    let mut answer = NativeReply {
        texts: (0..pending.texts.len()).map(text).collect(),
        pending,
        wanted,
    };
    if streams {
        return Ok(streamed(answer));
    }
    while answer.pending.left > 0 {
        if let Some(piece) = answer.next().await? {
            let text = &mut answer.texts[piece.index];
            text.content.push_str(&piece.text);
            text.tokens.extend(piece.log_probs);
        }
    }
    let mut all: Vec<Value> = Vec::with_capacity(answer.texts.len());
    for index in 0..answer.texts.len() {
        let content = std::mem::take(&mut answer.texts[index].content);
        all.push(answer.chosen(answer.last(index, content)));
    }
    let body = match all.len() {
        1 => all.swap_remove(0),
        _ => all.into(),
    };
    Ok(Json(body).into_response())
}

/// A piece of a text, or its end.
struct NativePiece {
    index: usize,
    text: String,
    log_probs: Vec<LogProbs>,
    /// Tokens so far.
    tokens: usize,
    /// How much of the prompt is read, in a piece without text.
    progress: Option<PromptProgress>,
}

impl NativePiece {
    /// A piece without text.
    fn empty(index: usize) -> Self {
        Self {
            index,
            text: String::new(),
            log_probs: Vec::new(),
            tokens: 0,
            progress: None,
        }
    }
}

impl NativeReply {
    /// Handles one output of the engine thread; returns a piece of a text, or its end.
    async fn next(&mut self) -> Result<Option<NativePiece>, ApiError> {
        match self.pending.out.recv().await {
            Some(Out::Started {
                index,
                cached,
                slot,
            }) => {
                let text = &mut self.texts[index];
                (text.cached, text.started) = (cached, Instant::now());
                text.slot = Some(slot);
            }
            Some(Out::Text {
                index,
                text,
                log_probs,
                tokens,
            }) => {
                let of = &mut self.texts[index];
                of.first.get_or_insert_with(Instant::now);
                of.has_new_line |= text.contains('\n');
                return Ok(Some(NativePiece {
                    text,
                    log_probs,
                    tokens,
                    ..NativePiece::empty(index)
                }));
            }
            Some(Out::Progress { index, progress }) => {
                return Ok(Some(NativePiece {
                    progress: Some(progress),
                    ..NativePiece::empty(index)
                }));
            }
            Some(Out::Done {
                index,
                end,
                tokens,
                repetition,
            }) => {
                self.texts[index].end = Some((end, tokens));
                self.texts[index].repetition = repetition;
                self.pending.left -= 1;
                return Ok(Some(NativePiece::empty(index)));
            }
            Some(Out::Prompt { .. } | Out::Hidden(_)) => {}
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(Out::Refused(why)) => return Err(ApiError::invalid(why)),
            None => return Err(ApiError::failed("the engine has stopped")),
        }
        Ok(None)
    }

    /// A piece in a stream; the last one of a text has no content.
    fn event(&self, piece: &NativePiece) -> Value {
        if self.texts[piece.index].end.is_some() {
            return self.chosen(self.last(piece.index, String::new()));
        }
        let mut part = json!({
            "index": piece.index,
            "content": piece.text,
            "tokens": self.tokens(&piece.log_probs),
            "stop": false,
            "id_slot": self.texts[piece.index].id_slot(),
            "tokens_predicted": piece.tokens,
            "tokens_evaluated": self.pending.texts[piece.index].prompt,
        });
        if let Some(progress) = piece.progress {
            part["prompt_progress"] = json!(progress);
        }
        self.add_probabilities(&mut part, &piece.log_probs);
        part
    }

    fn tokens(&self, tokens: &[LogProbs]) -> Vec<u32> {
        if self.wanted.tokens {
            tokens.iter().map(|one| one.chosen.token).collect()
        } else {
            Vec::new()
        }
    }

    fn add_probabilities(&self, part: &mut Value, tokens: &[LogProbs]) {
        if self.wanted.probabilities && !tokens.is_empty() {
            let tokenizer = self.pending.tokenizer();
            let all: Vec<Value> = tokens.iter().map(|one| likely(tokenizer, one)).collect();
            part["completion_probabilities"] = all.into();
        }
    }

    /// The fields of the last event of a text.
    fn last(&self, index: usize, content: String) -> Value {
        let text = &self.texts[index];
        let prompt = self.pending.texts[index].prompt;
        let samples = self.texts.len() / self.wanted.prompts.len().max(1);
        let (end, predicted) = text
            .end
            .as_ref()
            .map_or((&End::Length, 0), |(e, n)| (e, *n));
        let (stop_type, word) = match end {
            End::Eos => ("eos", ""),
            End::Word(word) => ("word", &**word),
            End::Length => ("limit", ""),
        };
        let mut last = json!({
            "index": index,
            "content": content,
            "tokens": self.tokens(&text.tokens),
            "id_slot": text.id_slot(),
            "stop": true,
            "model": self.pending.head.model,
            "tokens_predicted": predicted,
            "tokens_evaluated": prompt,
            "generation_settings": self.settings(),
            "prompt": self.wanted.prompts.get(index / samples.max(1)),
            "has_new_line": text.has_new_line,
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": text.cached,
            "timings": text.timings(prompt, predicted),
        });
        if let Some(repetition) = text.repetition {
            last["repetition"] = json!(repetition);
        }
        self.add_probabilities(&mut last, &text.tokens);
        last
    }

    /// Selects the requested fields.
    fn chosen(&self, whole: Value) -> Value {
        if self.wanted.fields.is_empty() {
            return whole;
        }
        let mut chosen = Map::new();
        for path in &self.wanted.fields {
            if let Some(value) = whole.pointer(&format!("/{path}")) {
                chosen.insert(path.clone(), value.clone());
            }
        }
        chosen.into()
    }

    fn settings(&self) -> Value {
        let request = &self.pending.request;
        let sampling = &request.sampling;
        json!({
            "n_predict": request.max_tokens,
            "max_tokens": request.max_tokens,
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": request.ignore_eos,
        })
    }
}

impl NativeText {
    /// The number of its slot; -1 if it is not known.
    fn id_slot(&self) -> i64 {
        self.slot
            .and_then(|slot| slot.try_into().ok())
            .unwrap_or(-1)
    }

    /// Timings of the prompt and of the text, in milliseconds and tokens per second.
    fn timings(&self, prompt: usize, predicted: usize) -> Value {
        let first = self.first.unwrap_or(self.started);
        let computed = prompt - self.cached;
        let mut timings = Map::from_iter([("cache_n".to_owned(), self.cached.into())]);
        let mut add = |name: &str, count: usize, time: Duration| {
            let (ms, count) = (time.as_secs_f64() * 1e3, count as f64);
            let of = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
            timings.insert(format!("{name}_n"), (count as u64).into());
            timings.insert(format!("{name}_ms"), ms.into());
            timings.insert(format!("{name}_per_token_ms"), of(ms, count).into());
            timings.insert(format!("{name}_per_second"), of(count * 1e3, ms).into());
        };
        add("prompt", computed, first - self.started);
        add("predicted", predicted, first.elapsed());
        timings.into()
    }
}

/// A token with its most likely alternatives.
fn likely(tokenizer: &Tokenizer, one: &LogProbs) -> Value {
    let token = |entry: &LogProb| {
        let bytes = tokenizer.token_bytes(entry.token).unwrap_or_default();
        json!({
            "id": entry.token,
            "token": String::from_utf8_lossy(&bytes),
            "bytes": bytes,
            "logprob": entry.log_prob,
        })
    };
    let mut json = token(&one.chosen);
    json["top_logprobs"] = one.top.iter().map(token).collect();
    json
}

fn streamed(answer: NativeReply) -> Response {
    let state = (answer, VecDeque::new());
    let events = stream::unfold(state, |(mut answer, mut ready)| async move {
        while ready.is_empty() && answer.pending.left > 0 {
            match answer.next().await {
                Ok(Some(piece)) => ready.push_back(answer.event(&piece)),
                Ok(None) => {}
                Err(why) => {
                    answer.pending.left = 0;
                    ready.push_back(why.body());
                }
            }
        }
        let data: Value = ready.pop_front()?;
        let event = Event::default().data(data.to_string());
        Some((Ok::<_, Infallible>(event), (answer, ready)))
    });
    let keep = KeepAlive::new().interval(PING);
    Sse::new(events).keep_alive(keep).into_response()
}
