//! `/v1/embeddings`, Ollama's `/api/embed` and `/api/embeddings`: mean of the last hidden states.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use emberflow_engine::Request;
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::api::{Kind, PromptInput};
use super::app::App;
use super::error::{ApiError, Plain};
use super::fields::on;
use super::http::{proactive, read_fields};
use super::ollama::plain_name;
use super::peer::json_with_probes;
use super::submit::{RESULT_BYTES, check_prompts};
use super::worker::{Job, Out};

/// Maximum inputs of a request.
const MAX_INPUTS: usize = 2048;

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/embeddings", post(openai))
        .route("/v1/embeddings", post(openai))
        .route("/api/embed", post(ollama))
        .route("/api/embeddings", post(ollama_one))
}

/// `/v1/embeddings`
#[derive(Debug, Deserialize)]
struct EmbeddingsRequest {
    model: Option<String>,
    input: PromptInput,
    encoding_format: Option<String>,
    dimensions: Option<usize>,
    priority: Option<i64>,
}

/// `/api/embed`
#[derive(Debug, Deserialize)]
struct EmbedRequest {
    model: Option<String>,
    #[serde(default)]
    input: EmbeddingInputs,
    truncate: Option<bool>,
    dimensions: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`input` must be a string or a list of strings")]
enum EmbeddingInputs {
    One(String),
    Many(Vec<String>),
}

impl Default for EmbeddingInputs {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

/// `/api/embeddings`
#[derive(Debug, Deserialize)]
struct OldEmbedRequest {
    model: Option<String>,
    #[serde(default)]
    prompt: String,
}

/// An embedding in a response.
#[derive(Serialize)]
#[serde(untagged)]
enum Values<'a> {
    Numbers(&'a [f32]),
    /// Of the little-endian f32 bytes.
    Base64(String),
}

/// Embeddings of the inputs of a request.
struct Embedded {
    /// In the order of the inputs.
    all: Vec<Vec<f32>>,
    /// Total tokens.
    tokens: usize,
    /// Held until the response is sent.
    permit: OwnedSemaphorePermit,
}

async fn openai(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<EmbeddingsRequest>(on::EMBEDDING, &app, body).await?;
    app.serves_model(request.model.as_deref().unwrap_or_default())?;
    let base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            let message = "`encoding_format` must be `float` or `base64`";
            return Err(ApiError::param("encoding_format", message));
        }
    };
    let background = request.priority.is_some_and(|priority| priority > 0);
    let background = proactive(&headers)?.unwrap_or(background);
    let ours = app.clone();
    let (input, dimensions) = (request.input, request.dimensions);
    let prompts = app.compute(move || input.tokens(&ours.text, true)).await?;
    drop(reader);
    let answer = async move {
        let mut found = embed(&app, prompts, background, permit).await?;
        found.normalize(dimensions)?;
        let model = json!(app.model);
        let tokens = found.tokens;
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        let head = "{\"object\":\"list\",\"data\":[".to_owned();
        let tail = format!("],\"model\":{model},\"usage\":{usage}}}");
        Ok(found.written(head, tail, move |index, values| {
            let values = if base64 {
                Values::Base64(base64::encode(bytes(values)))
            } else {
                Values::Numbers(values)
            };
            let values = serde_json::to_string(&values).unwrap_or_default();
            format!("{{\"object\":\"embedding\",\"index\":{index},\"embedding\":{values}}}")
        }))
    };
    json_with_probes(answer, ApiError::into_response).await
}

async fn ollama(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Plain> {
    let start = Instant::now();
    let permit = app.permit()?;
    let (request, reader) = read_fields::<EmbedRequest>(on::OLLAMA_EMBED, &app, body).await?;
    app.serves_model(plain_name(request.model.as_deref().unwrap_or_default()))?;
    let texts = match request.input {
        EmbeddingInputs::One(text) if text.is_empty() => Vec::new(),
        EmbeddingInputs::One(text) => vec![text],
        EmbeddingInputs::Many(texts) => texts,
    };
    let most = match request.truncate {
        Some(false) => usize::MAX,
        _ => app.context,
    };
    let prompts = encoded(&app, texts, most).await?;
    drop(reader);
    let background = proactive(&headers)?.unwrap_or(false);
    let dimensions = request.dimensions;
    let answer = async move {
        let mut found = embed(&app, prompts, background, permit).await?;
        found.normalize(dimensions)?;
        let head = format!("{{\"model\":{},\"embeddings\":[", json!(app.model));
        let tail = format!(
            "],\"total_duration\":{},\"load_duration\":0,\"prompt_eval_count\":{}}}",
            start.elapsed().as_nanos(),
            found.tokens
        );
        Ok(found.written(head, tail, |_, values| {
            serde_json::to_string(values).unwrap_or_default()
        }))
    };
    json_with_probes(answer, Plain::into_response).await
}

/// The older endpoint: one input; its mean is not normalized.
async fn ollama_one(State(app): State<Arc<App>>, body: Body) -> Result<Response, Plain> {
    let permit = app.permit()?;
    let (request, reader) =
        read_fields::<OldEmbedRequest>(on::OLLAMA_EMBEDDING, &app, body).await?;
    app.serves_model(plain_name(request.model.as_deref().unwrap_or_default()))?;
    let texts = Some(request.prompt).filter(|text| !text.is_empty());
    let prompts = encoded(&app, texts.into_iter().collect(), app.context).await?;
    drop(reader);
    let answer = async move {
        let found = embed(&app, prompts, false, permit).await?;
        let values = found.all.first().map_or(&[][..], |values| values);
        Ok(Json(Single { embedding: values }).into_response())
    };
    json_with_probes(answer, Plain::into_response).await
}

#[derive(Serialize)]
struct Single<'a> {
    embedding: &'a [f32],
}

/// Tokenizes the inputs; truncates each to `most` tokens.
async fn encoded(
    app: &Arc<App>,
    texts: Vec<String>,
    most: usize,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let ours = app.clone();
    let all = app.compute(move || {
        let mut all = PromptInput::Texts(texts).tokens(&ours.text, true)?;
        all.iter_mut().for_each(|tokens| tokens.truncate(most));
        Ok(all)
    });
    all.await
}

/// Little-endian bytes.
fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Computes the mean of the last hidden states of each prompt. Only a few prompts are queued at a time, so that other
/// requests get through and memory stays small.
async fn embed(
    app: &Arc<App>,
    prompts: Vec<Vec<u32>>,
    background: bool,
    permit: OwnedSemaphorePermit,
) -> Result<Embedded, ApiError> {
    let count = prompts.len();
    let width = app.text.config().d_model as usize;
    let most = MAX_INPUTS.min(RESULT_BYTES / (4 * width)).max(1);
    if count > most {
        let message = format!("{count} inputs; at most {most} are allowed for this model");
        return Err(ApiError::param("input", message));
    }
    check_prompts(app, Kind::Embedding, &prompts)?;
    let tokens = prompts.iter().map(Vec::len).sum();
    let (mut all, mut running) = (Vec::with_capacity(count), VecDeque::new());
    for prompt in prompts {
        // As many as run at once, plus as many again in the queue.
        if running.len() == 2 * app.parallel
            && let Some(out) = running.pop_front()
        {
            all.push(mean(out).await?);
        }
        let (sender, out) = unbounded_channel();
        app.submit(Job {
            request: Request {
                max_tokens: 0,
                mean_hidden: true,
                ..Request::default()
            },
            proactive: background,
            ..Job::new(prompt, sender)
        })?;
        running.push_back(out);
    }
    for out in running {
        all.push(mean(out).await?);
    }
    if !all.iter().flatten().all(|value| value.is_finite()) {
        return Err(ApiError::failed("a hidden state is not finite"));
    }
    Ok(Embedded {
        all,
        tokens,
        permit,
    })
}

/// Waits for the mean of a prompt.
async fn mean(mut out: UnboundedReceiver<Out>) -> Result<Vec<f32>, ApiError> {
    let mut found = Vec::new();
    loop {
        match out.recv().await {
            Some(Out::Hidden(mean)) => found = mean,
            Some(Out::Done { .. }) => return Ok(found),
            Some(Out::Failed(why)) => return Err(ApiError::failed(why)),
            Some(Out::Refused(why)) => return Err(ApiError::invalid(why)),
            Some(
                Out::Started { .. } | Out::Progress { .. } | Out::Prompt { .. } | Out::Text { .. },
            ) => {}
            None => return Err(ApiError::failed("the engine has stopped")),
        }
    }
}

impl Embedded {
    /// Truncates each embedding to `dimensions` and normalizes it to length 1.
    fn normalize(&mut self, dimensions: Option<usize>) -> Result<(), ApiError> {
        let width = self.all.first().map_or(0, Vec::len);
        if dimensions.is_some_and(|most| most == 0 || (width > 0 && most > width)) {
            let message = format!("`dimensions` must be between 1 and {width} for this model");
            return Err(ApiError::param("dimensions", message));
        }
        for values in &mut self.all {
            values.truncate(dimensions.unwrap_or(width));
            let squares = values.iter().map(|&value| f64::from(value).powi(2));
            let length = squares.sum::<f64>().sqrt();
            if length > 0.0 {
                (values.iter_mut()).for_each(|value| *value = (f64::from(*value) / length) as f32);
            }
        }
        Ok(())
    }

    /// Streams the response: `head`, each embedding as formatted by `item`, `tail`. The JSON text takes several times
    /// the memory of the embeddings.
    fn written(
        self,
        head: String,
        tail: String,
        item: impl Fn(usize, &[f32]) -> String + Send + 'static,
    ) -> Response {
        let permit = self.permit;
        let items = self
            .all
            .into_iter()
            .enumerate()
            .map(move |(index, values)| {
                let _held = &permit;
                let comma = if index > 0 { "," } else { "" };
                format!("{comma}{}", item(index, &values))
            });
        let pieces = [head].into_iter().chain(items).chain([tail]);
        let pieces = stream::iter(pieces.map(Ok::<_, Infallible>));
        let kind = [(header::CONTENT_TYPE, "application/json")];
        (kind, Body::from_stream(pieces)).into_response()
    }
}
