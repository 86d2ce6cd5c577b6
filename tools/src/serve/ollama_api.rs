//! Ollama's `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/ps` and `/api/version`.
//!
//! Generation requests are converted to OpenAI requests, which are then checked as such.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::api::{ChatRequest, CompletionRequest, Kind};
use super::app::{App, RequestPermits, now};
use super::error::{ApiError, Plain};
use super::fields::{self, on};
use super::http::{complete, converse, read, read_fields};
use super::ollama::{loaded, plain_name, written};
use super::reply::Head;
use super::thoughts::ReasoningFormat;

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/tags", get(tags))
        .route("/api/ps", get(tags))
        .route("/api/show", post(show))
        .route(
            "/api/version",
            get(|| async { Json(json!({"version": env!("CARGO_PKG_VERSION")})) }),
        )
}

/// Fields of both endpoints.
#[derive(Debug, Deserialize)]
struct OllamaCommon {
    model: Option<String>,
    stream: Option<bool>,
    format: Option<Value>,
    think: Option<Value>,
    #[serde(default)]
    options: Map<String, Value>,
}

/// `/api/chat`
#[derive(Debug, Deserialize)]
struct OllamaChatRequest {
    #[serde(default)]
    messages: Vec<OllamaMessage>,
    tools: Option<Value>,
    #[serde(flatten)]
    shared: OllamaCommon,
}

#[derive(Debug, Deserialize)]
struct OllamaMessage {
    role: String,
    content: Option<String>,
    images: Option<Vec<Value>>,
    thinking: Option<String>,
    tool_calls: Option<Vec<Value>>,
    tool_name: Option<String>,
}

/// `/api/generate`
#[derive(Debug, Deserialize)]
struct OllamaGenerateRequest {
    #[serde(default)]
    prompt: String,
    system: Option<String>,
    suffix: Option<String>,
    #[serde(default)]
    raw: bool,
    #[serde(flatten)]
    shared: OllamaCommon,
}

impl OllamaCommon {
    /// Fields of the OpenAI request.
    fn fields(&self) -> Result<Map<String, Value>, ApiError> {
        let mut fields: Map<String, Value> = fields::rewrite(on::OPTIONS, &self.options)?;
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        if let Some(model) = &self.model {
            set("model", plain_name(model).into());
        }
        set("stream", self.stream.unwrap_or(true).into());
        match &self.think {
            None | Some(Value::Null) => {}
            Some(Value::Bool(thinks)) => {
                set("enable_thinking", (*thinks).into());
            }
            Some(Value::String(effort)) => {
                set("enable_thinking", true.into());
                set("reasoning_effort", effort.clone().into());
            }
            Some(_) => {
                let message = "`think` must be true, false, \"low\", \"medium\" or \"high\"";
                return Err(ApiError::param("think", message));
            }
        }
        match &self.format {
            None | Some(Value::Null) => {}
            Some(Value::String(name)) if name.is_empty() => {}
            Some(Value::String(name)) if name == "json" => {
                set("response_format", json!({"type": "json_object"}));
            }
            Some(schema @ Value::Object(_)) => {
                let schema = json!({"name": "format", "schema": schema});
                let format = json!({"type": "json_schema", "json_schema": schema});
                set("response_format", format);
            }
            Some(_) => {
                let message = "`format` must be \"json\" or a JSON schema";
                return Err(ApiError::param("format", message));
            }
        }
        Ok(fields)
    }
}

async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Plain> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<OllamaChatRequest>(on::OLLAMA_CHAT, &app, body).await?;
    let held = RequestPermits { permit, reader };
    let mut fields = request.shared.fields()?;
    if request.messages.is_empty() {
        return Ok(load(&app, Kind::OllamaChat));
    }
    let mut messages = Vec::new();
    for message in &request.messages {
        if message
            .images
            .as_ref()
            .is_some_and(|images| !images.is_empty())
        {
            let why = "`images` is not supported: this model cannot process images";
            return Err(ApiError::param("messages", why).into());
        }
        messages.push(json!({
            "role": message.role,
            "content": message.content,
            "reasoning_content": message.thinking,
            "tool_calls": message.tool_calls,
            "name": message.tool_name,
        }));
    }
    fields.insert("messages".to_owned(), messages.into());
    fields.extend(request.tools.map(|tools| ("tools".to_owned(), tools)));
    let request: ChatRequest = fields::rewrite(on::CHAT, &fields)?;
    Ok(converse(app, &headers, request, Kind::OllamaChat, held).await?)
}

async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Plain> {
    let permit = app.permit()?;
    let (request, reader) =
        read_fields::<OllamaGenerateRequest>(on::OLLAMA_GENERATE, &app, body).await?;
    let held = RequestPermits { permit, reader };
    let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let kind = Kind::OllamaGenerate;
    let mut fields = request.shared.fields()?;
    if request.prompt.is_empty() {
        return Ok(load(&app, kind));
    }
    let gap = given(&request.suffix);
    if request.raw || gap || app.template.is_none() {
        if gap && given(&request.system) {
            let why = "`system` and `suffix` cannot be combined";
            return Err(ApiError::param("system", why).into());
        }
        fields.extend(
            request
                .suffix
                .map(|suffix| ("suffix".to_owned(), suffix.into())),
        );
        fields.insert("prompt".to_owned(), request.prompt.into());
        let request: CompletionRequest = fields::rewrite(on::TEXT, &fields)?;
        return Ok(complete(app, headers, request, kind, held).await?);
    }
    let system = request.system.filter(|system| !system.is_empty());
    let system = system.map(|text| json!({"role": "system", "content": text}));
    let user = json!({"role": "user", "content": request.prompt});
    let messages: Vec<Value> = system.into_iter().chain([user]).collect();
    fields.insert("messages".to_owned(), messages.into());
    let request: ChatRequest = fields::rewrite(on::CHAT, &fields)?;
    Ok(converse(app, &headers, request, kind, held).await?)
}

/// The response to a request that only loads the model.
fn load(app: &App, kind: Kind) -> Response {
    let head = Head {
        kind,
        id: String::new(),
        created: now(),
        model: app.model.clone(),
    };
    Json(loaded(&head)).into_response()
}

/// The model's entry in lists.
fn entry(app: &App) -> Value {
    json!({
        "name": app.model,
        "model": app.model,
        "modified_at": written(app.created),
        "size": app.size,
        "digest": "",
        "details": details(app),
    })
}

fn details(app: &App) -> Value {
    let family = &app.text.config().family;
    json!({"format": "ember", "family": family, "families": [family]})
}

async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": [entry(&app)]}))
}

#[derive(Deserialize)]
struct Show {
    #[serde(alias = "name")]
    model: String,
}

async fn show(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, Plain> {
    let _permit = app.permit()?;
    let request: Show = read(&app, body).await?;
    app.serves_model(plain_name(&request.model))?;
    let template = app.template.as_ref().map(|template| template.source(false));
    let thinks = template.is_some_and(|template| ReasoningFormat::of_template(template).is_some());
    let tools = app
        .template
        .as_ref()
        .is_some_and(|template| template.source(true).contains("tools"));
    let abilities = [("completion", true), ("tools", tools), ("thinking", thinks)];
    let abilities = abilities
        .into_iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| name);
    Ok(Json(json!({
        "template": template.unwrap_or_default(),
        "details": details(&app),
        "model_info": {"general.context_length": app.context},
        "capabilities": abilities.collect::<Vec<_>>(),
    })))
}
