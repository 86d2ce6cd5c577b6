//! HTTP routes, limits and authentication.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use emberflow_engine::SamplingReport;
use emberflow_engine::meta::SamplingDefaults;
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::api::{ChatRequest, Common, CompletionRequest, Kind};
use super::app::{App, RequestPermits};
use super::calls::Plan;
use super::error::{ApiError, Plain, Typed};
use super::fields::{self, on};
use super::generate::respond;
use super::page;
use super::stats::{slots, stats};
use super::submit::GenerateRequest;
use super::thoughts::Opening;

/// Time for a body to arrive.
const BODY_TIME: Duration = Duration::from_secs(15);
/// Bytes that are read and dropped of a body that is too large, before it is rejected.
const DROPPED: usize = 64 << 20;
/// Header with the class of a request: `reactive` or `proactive`.
const CLASS: &str = "x-emberflow-class";

/// Paths that need no API key.
const PUBLIC: [&str; 6] = [
    "/",
    "/health",
    "/v1/health",
    "/models",
    "/v1/models",
    "/openapi.json",
];

/// All routes: those of OpenAI's API, and `more`.
pub fn router(app: Arc<App>, more: Router<Arc<App>>) -> Router {
    let v1 = Router::new()
        .route("/chat/completions", post(chat))
        .route("/completions", post(completion))
        .route("/rerank", post(rerank))
        .route("/reranking", post(rerank))
        .route("/models", get(models));
    Router::new()
        .merge(v1.clone())
        .nest("/v1", v1)
        .merge(more)
        .route("/v1/models/{name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/apply-template", post(apply_template))
        .route("/metrics", get(metrics))
        .route("/props", get(props))
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/version", get(version))
        .route(
            "/slots",
            get(|State(app): State<Arc<App>>| async move { Json(slots(&app)) }),
        )
        .route(
            "/stats",
            get(|State(app): State<Arc<App>>| async move { Json(stats(&app)) }),
        )
        .route("/openapi.json", get(description))
        .merge(page::routes())
        .fallback(|uri: Uri| async move {
            let message = "path not found; /openapi.json lists all paths";
            refused(&uri, ApiError::unknown(message))
        })
        .method_not_allowed_fallback(|uri: Uri| async move { refused(&uri, ApiError::method()) })
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

/// Routes for connections beyond the limit: health and metrics; everything else gets status 503.
pub fn crowded(app: Arc<App>) -> Router {
    let refuse = |uri: Uri, body: Body| async move {
        // Clients read no response before they have sent the whole body.
        let _ = collect(body, 0).await;
        refused(&uri, ApiError::crowded())
    };
    Router::new()
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(refuse)
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

/// An error in the format of the path's API.
fn refused(uri: &Uri, why: ApiError) -> Response {
    match uri.path() {
        path if path.starts_with("/v1/messages") => Typed::from(why).into_response(),
        path if path.starts_with("/api/") => Plain::from(why).into_response(),
        _ => why.into_response(),
    }
}

/// Checks the API key, host and origin, and answers CORS preflight requests.
async fn guard(State(app): State<Arc<App>>, request: HttpRequest, next: Next) -> Response {
    let headers = request.headers();
    let sent = headers.get(header::ORIGIN);
    let origin = sent.filter(|o| app.allows_origin(o, headers.get(header::HOST)));
    let foreign = sent.is_some() && origin.is_none();
    let host = headers
        .get(header::HOST)
        .filter(|host| !app.allows_host(host));
    let host = host.map(|host| ApiError::host(host.to_str().unwrap_or_default()));
    let origin = origin.cloned();
    let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let path = request.uri().path();
    let public = PUBLIC.contains(&path) || path.starts_with(page::FILES);
    let why = if host.is_some() {
        host
    } else if request.method() == Method::OPTIONS {
        None
    } else if foreign {
        Some(ApiError::origin())
    } else {
        (!public && !app.allows_key(sent_key(headers))).then(ApiError::key)
    };
    let mut response = match why {
        Some(why) => {
            let uri = request.uri().clone();
            // Clients read no response before they have sent the whole body.
            let _ = tokio::time::timeout(BODY_TIME, collect(request.into_body(), 0)).await;
            refused(&uri, why)
        }
        None if request.method() == Method::OPTIONS => StatusCode::OK.into_response(),
        None => next.run(request).await,
    };
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
        let methods = HeaderValue::from_static("GET, POST, DELETE");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        // Clients send custom headers, such as their system and version.
        if let Some(names) = wanted {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
        }
    }
    response
}

fn sent_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = || {
        let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        value.strip_prefix("Bearer ")
    };
    let plain = || headers.get("x-api-key")?.to_str().ok();
    bearer().or_else(plain)
}

/// Reads and parses a body.
pub async fn read<T: DeserializeOwned>(app: &App, body: Body) -> Result<T, ApiError> {
    let bytes = receive(app, body).await?;
    serde_json::from_slice(&bytes)
        .map_err(|e| ApiError::invalid(format!("invalid JSON in the request body: {e}")))
}

/// Reads the body of a request and checks its fields against the table (`fields::on`). The permit limits parsing;
/// hold it until the request is tokenized.
pub async fn read_fields<T: DeserializeOwned>(
    on: u16,
    app: &App,
    body: Body,
) -> Result<(T, OwnedSemaphorePermit), ApiError> {
    let bytes = receive(app, body).await?;
    let reader = app.reader().await?;
    Ok((fields::read(on, &fields::take(on, &bytes)?)?, reader))
}

async fn receive(app: &App, body: Body) -> Result<Vec<u8>, ApiError> {
    let bytes = tokio::time::timeout(BODY_TIME, collect(body, app.body_limit)).await;
    bytes.map_err(|_| ApiError::slow())?
}

/// Reads a body of at most `limit` bytes. The rest of a larger body is read and dropped, because clients read the
/// error only after they have sent everything.
async fn collect(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut pieces = body.into_data_stream();
    let (mut all, mut len) = (Vec::new(), 0);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(ApiError::invalid)?;
        len += piece.len();
        if len <= limit {
            all.extend_from_slice(&piece)
        } else {
            all = Vec::new()
        }
        if len > DROPPED {
            break;
        }
    }
    if len <= limit {
        Ok(all)
    } else {
        Err(ApiError::large(limit))
    }
}

async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let permit = app.permit()?;
    let (request, reader) = read_fields(on::CHAT, &app, body).await?;
    let held = RequestPermits { permit, reader };
    converse(app, &headers, request, Kind::Chat, held).await
}

/// Answers a chat.
async fn converse(
    app: Arc<App>,
    headers: &HeaderMap,
    request: ChatRequest,
    kind: Kind,
    held: RequestPermits,
) -> Result<Response, ApiError> {
    let asked = conversation(&app, headers, request, kind, held.reader).await?;
    respond(app, asked, held.permit).await
}

/// A parsed and tokenized chat.
pub struct Prepared {
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// How its tools are called.
    plan: Option<Plan>,
    /// How its reasoning begins.
    opening: Option<Opening>,
    /// Common fields.
    common: Common,
}

/// Renders and tokenizes a chat.
pub async fn prepared(app: &Arc<App>, request: ChatRequest) -> Result<Prepared, ApiError> {
    app.check(&request.common)?;
    let ours = app.clone();
    let prepared = app.compute(move || {
        let Some(template) = &ours.template else {
            let message = "this model has no chat template; use /v1/completions";
            return Err(ApiError::invalid(message));
        };
        let calls = &request.common.calls;
        let plan = calls.plan(&ours.calls, ours.text.tokenizer())?;
        let tools = plan.as_ref().map_or(&[][..], |plan| &plan.tools);
        let rendered = request.rendered(template, tools)?;
        let opening = Opening::behind(&rendered, template.source(!tools.is_empty()));
        let opening = opening.filter(|_| request.common.thoughts.separates());
        let mut prompt = request.tokens(&ours.text, &rendered)?;
        request.common.truncate(&mut prompt, ours.context)?;
        Ok(Prepared {
            common: request.common,
            plan,
            opening,
            prompt,
        })
    });
    prepared.await
}

/// Prepares a chat for generation.
pub async fn conversation(
    app: &Arc<App>,
    headers: &HeaderMap,
    request: ChatRequest,
    kind: Kind,
    reader: OwnedSemaphorePermit,
) -> Result<GenerateRequest, ApiError> {
    let Prepared {
        common,
        mut plan,
        opening,
        prompt,
    } = prepared(app, request).await?;
    drop(reader);
    let forced = plan.as_ref().is_some_and(|plan| plan.forced);
    let calls = plan.as_mut().and_then(|plan| plan.rules.take());
    let (preface, rules) = match (common.rules()?, calls) {
        (Some(_), Some(_)) if forced => {
            let message = "a forced tool call cannot be combined with a grammar or schema";
            return Err(ApiError::param("tool_choice", message));
        }
        (format, calls) => {
            let called = format.is_none() && calls.is_some();
            let tokenizer = app.text.tokenizer();
            let preface = opening.map(|opening| opening.preface(called, tokenizer));
            (preface, format.or(calls))
        }
    };
    let proactive = proactive(headers)?.unwrap_or(common.proactive());
    let texts = common.samples();
    Ok(GenerateRequest {
        kind,
        constraint: app.held(rules, preface, texts, proactive).await?,
        plan,
        opening,
        proactive,
        prompts: vec![prompt],
        echo: Vec::new(),
        ends: Vec::new(),
        default_tokens: app.context,
        common,
    })
}

async fn completion(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let permit = app.permit()?;
    let (request, reader) = read_fields(on::TEXT, &app, body).await?;
    let held = RequestPermits { permit, reader };
    complete(app, headers, request, Kind::Text, held).await
}

/// Answers a completion.
async fn complete(
    app: Arc<App>,
    headers: HeaderMap,
    request: CompletionRequest,
    kind: Kind,
    held: RequestPermits,
) -> Result<Response, ApiError> {
    let asked = continuation(&app, &headers, request, kind, held.reader).await?;
    respond(app, asked, held.permit).await
}

/// Prepares a completion for generation.
pub async fn continuation(
    app: &Arc<App>,
    headers: &HeaderMap,
    request: CompletionRequest,
    kind: Kind,
    reader: OwnedSemaphorePermit,
) -> Result<GenerateRequest, ApiError> {
    app.check(&request.common)?;
    let ours = app.clone();
    let proactive = proactive(headers)?.unwrap_or(request.common.proactive());
    if request.common.calls.is_given() {
        let message = "completions do not support tools; use /v1/chat/completions";
        return Err(ApiError::param("tools", message));
    }
    let rules = request.common.rules()?;
    let asked = app.compute(move || {
        let mut prompts = request.prompts(&ours.text)?;
        for prompt in &mut prompts {
            request.common.truncate(prompt, ours.context)?;
        }
        let mut echo = Vec::new();
        if request.echo == Some(true) {
            for prompt in &prompts {
                let text = ours.text.tokenizer().decode(prompt, true);
                echo.push(text.map_err(ApiError::invalid)?);
            }
        }
        Ok(GenerateRequest {
            kind,
            proactive,
            prompts,
            echo,
            ends: request.ends(&ours.text),
            plan: None,
            opening: None,
            constraint: None,
            default_tokens: match kind {
                Kind::Text => CompletionRequest::default_tokens(),
                _ => ours.context,
            },
            common: request.common,
        })
    });
    let mut asked = asked.await?;
    drop(reader);
    let texts = asked.prompts.len() * asked.common.samples();
    asked.constraint = app.held(rules, None, texts, proactive).await?;
    Ok(asked)
}

/// Generative models have no head that ranks documents.
async fn rerank(body: Body) -> ApiError {
    // Clients read no response before they have sent the whole body.
    let _ = tokio::time::timeout(BODY_TIME, collect(body, 0)).await;
    ApiError::unsupported(
        "this server cannot rerank: its model generates text and has no ranking head; compare the embeddings of query and documents (/v1/embeddings), or ask for a ranking in /v1/chat/completions",
    )
}

/// The class in the header, if any.
pub fn proactive(headers: &HeaderMap) -> Result<Option<bool>, ApiError> {
    match headers.get(CLASS).map(|value| value.as_bytes()) {
        None => Ok(None),
        Some(b"reactive") => Ok(Some(false)),
        Some(b"proactive") => Ok(Some(true)),
        Some(_) => Err(ApiError::invalid(
            "x-emberflow-class must be `reactive` or `proactive`",
        )),
    }
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [app.model_json()]}))
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.check_model(&name)?;
    Ok(Json(app.model_json()))
}

async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.check_ready()?;
    Ok(Json(json!({"status": "ok"})))
}

/// As in vLLM.
async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.shared.totals().text())
}

async fn description() -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "application/json")],
        super::openapi::description(),
    )
}

async fn props(State(app): State<Arc<App>>) -> Json<Value> {
    let totals = app.shared.totals();
    let none = SamplingDefaults::default();
    let sampling = app.text.chat_sampling(none);
    Json(json!({
        "model": app.model,
        "sampling": SamplingReport::new(sampling, none, app.text.meta().sampling),
        "context": app.context,
        "parallel": app.parallel,
        "queue": app.queue,
        "chat_template": app.template.is_some(),
        "processing": totals.processing,
        "waiting": totals.waiting,
        "build": env!("CARGO_PKG_VERSION"),
    }))
}

#[derive(Deserialize)]
struct Tokenize {
    content: String,
    #[serde(default)]
    add_special: bool,
}

async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let _permit = app.permit()?;
    let request: Tokenize = read(&app, body).await?;
    let ours = app.clone();
    let tokens = app.compute(move || {
        let tokens = if request.add_special {
            ours.text.encode(&request.content)
        } else {
            ours.text.tokens(&request.content)
        };
        tokens.map_err(ApiError::invalid)
    });
    Ok(Json(json!({"tokens": tokens.await?})))
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let _permit = app.permit()?;
    let request: Detokenize = read(&app, body).await?;
    app.check_tokens(&request.tokens)?;
    let text = app.text.tokenizer().decode(&request.tokens, false);
    Ok(Json(json!({"content": text.map_err(ApiError::invalid)?})))
}

async fn apply_template(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let _permit = app.permit()?;
    let (request, _reader) = read_fields::<ChatRequest>(on::CHAT, &app, body).await?;
    let ours = app.clone();
    let rendered = app.compute(move || {
        let Some(template) = &ours.template else {
            return Err(ApiError::invalid("this model has no chat template"));
        };
        let calls = &request.common.calls;
        let plan = calls.plan(&ours.calls, ours.text.tokenizer())?;
        request.rendered(template, plan.as_ref().map_or(&[][..], |plan| &plan.tools))
    });
    Ok(Json(json!({"prompt": rendered.await?})))
}
