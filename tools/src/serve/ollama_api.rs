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
use emberflow_storage::container::Container;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::api::{ChatRequest, CompletionRequest, Kind};
use super::app::{App, now};
use super::error::{ApiError, Plain};
use super::fields::{self, on};
use super::http::{continuation, conversation, read, read_fields};
use super::infill::Infill;
use super::ollama::{History, loaded, plain_name, respond, written};
use super::peer::{json_with_probes, stream_with_probes};
use super::reply::Head;
use super::submit::{GenerateRequest, submit};
use super::thoughts::ReasoningFormat;

/// The version of Ollama whose API this is. Clients compare it with the least one that they need.
const VERSION: &str = "0.12.11";
/// When a loaded model is unloaded: never.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/tags", get(tags))
        .route("/api/ps", get(running))
        .route("/api/show", post(show))
        .route(
            "/api/version",
            get(|| async { Json(json!({"version": VERSION})) }),
        )
}

/// Fields of both endpoints.
#[derive(Debug, Deserialize)]
struct OllamaCommon {
    model: Option<String>,
    stream: Option<bool>,
    format: Option<Value>,
    think: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
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
    #[serde(default)]
    context: Vec<u32>,
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

    /// Number of log-probabilities per token besides the token's own, if any are requested.
    fn log_probs(&self) -> Option<usize> {
        let top = self.top_logprobs.unwrap_or(0);
        (self.logprobs == Some(true)).then_some(top)
    }

    /// Fields of a chat.
    fn chat(&self) -> Result<Map<String, Value>, ApiError> {
        let mut fields = self.fields()?;
        if let Some(top) = self.log_probs() {
            fields.insert("logprobs".to_owned(), true.into());
            fields.insert("top_logprobs".to_owned(), top.into());
        }
        Ok(fields)
    }

    /// Fields of a completion.
    fn completion(&self) -> Result<Map<String, Value>, ApiError> {
        let mut fields = self.fields()?;
        let top = self.log_probs();
        fields.extend(top.map(|top| ("logprobs".to_owned(), top.into())));
        Ok(fields)
    }
}

/// Answers a request; `history`: returns the tokens of the conversation.
async fn answer(
    app: &Arc<App>,
    asked: GenerateRequest,
    history: bool,
    permit: OwnedSemaphorePermit,
) -> Result<Response, Plain> {
    let streams = asked.common.stream == Some(true);
    let history = history.then(|| History {
        prompt: asked.prompts.first().cloned().unwrap_or_default(),
        said: String::new(),
    });
    let answer = respond(submit(app, asked, permit)?, history, streams);
    // White space is ignored between lines of JSON.
    let probe = b" ";
    if streams {
        Ok(stream_with_probes(answer.await?, probe))
    } else {
        let answer = json_with_probes(answer, |why| Plain::from(why).into_response());
        Ok(answer.await?)
    }
}

async fn chat(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Plain> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<OllamaChatRequest>(on::OLLAMA_CHAT, &app, body).await?;
    let mut fields = request.shared.chat()?;
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
    let asked = conversation(&app, &headers, request, Kind::OllamaChat, reader).await?;
    answer(&app, asked, false, permit).await
}

async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Plain> {
    let permit = app.permit()?;
    let (mut request, reader) =
        read_fields::<OllamaGenerateRequest>(on::OLLAMA_GENERATE, &app, body).await?;
    if request.prompt.is_empty() {
        return Ok(load(&app, Kind::OllamaGenerate));
    }
    let raw = request.raw;
    let context = std::mem::take(&mut request.context);
    let mut asked = generation(&app, &headers, request, reader).await?;
    if !context.is_empty() {
        let bos = app.text.config().bos;
        for prompt in &mut asked.prompts {
            // The conversation has its first token already.
            let again = prompt.first().copied() == bos && bos.is_some();
            prompt.splice(..usize::from(again), context.iter().copied());
        }
    }
    answer(&app, asked, !raw, permit).await
}

/// Prepares a prompt for generation.
async fn generation(
    app: &Arc<App>,
    headers: &HeaderMap,
    request: OllamaGenerateRequest,
    reader: OwnedSemaphorePermit,
) -> Result<GenerateRequest, ApiError> {
    let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let kind = Kind::OllamaGenerate;
    let gap = given(&request.suffix);
    if request.raw || gap || app.template.is_none() {
        let mut fields = request.shared.completion()?;
        if gap && given(&request.system) {
            let why = "`system` and `suffix` cannot be combined";
            return Err(ApiError::param("system", why));
        }
        fields.extend(
            request
                .suffix
                .map(|suffix| ("suffix".to_owned(), suffix.into())),
        );
        fields.insert("prompt".to_owned(), request.prompt.into());
        let request: CompletionRequest = fields::rewrite(on::TEXT, &fields)?;
        return continuation(app, headers, request, kind, reader).await;
    }
    let mut fields = request.shared.chat()?;
    let system = request.system.filter(|system| !system.is_empty());
    let system = system.map(|text| json!({"role": "system", "content": text}));
    let user = json!({"role": "user", "content": request.prompt});
    let messages: Vec<Value> = system.into_iter().chain([user]).collect();
    fields.insert("messages".to_owned(), messages.into());
    let request: ChatRequest = fields::rewrite(on::CHAT, &fields)?;
    conversation(app, headers, request, kind, reader).await
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
        "digest": app.digest,
        "details": details(app),
    })
}

fn details(app: &App) -> Value {
    let family = &app.text.config().family;
    let quant = &app.text.meta().quant;
    json!({
        "format": app.format,
        "family": family,
        "families": [family],
        "quantization_level": quant.whole.as_ref().unwrap_or(&quant.ffn),
    })
}

/// Format of the files of a model.
pub fn format(container: &Container) -> &'static str {
    let path = container.path();
    let is_safetensors = || path.is_dir() || path.extension().is_some_and(|e| e == "safetensors");
    match container.is_outside() {
        false => "ember",
        true if is_safetensors() => "safetensors",
        true => "gguf",
    }
}

/// A digest in Ollama's format, 64 hexadecimal digits, of a container's identity.
pub fn digest(identity: u128) -> String {
    format!("{identity:032x}{:032x}", identity.swap_bytes())
}

/// Properties of the model under the names of GGUF files. The context length is that of this server.
fn model_info(app: &App) -> Value {
    let config = app.text.config();
    let arch = &config.family;
    let mut info = Map::new();
    info.insert("general.architecture".to_owned(), arch.as_str().into());
    info.insert("general.basename".to_owned(), app.model.as_str().into());
    info.insert("general.name".to_owned(), config.name.as_str().into());
    let mut add = |name: &str, value: usize| info.insert(format!("{arch}.{name}"), value.into());
    add("context_length", app.context);
    for (name, value) in [
        ("embedding_length", config.d_model),
        ("block_count", config.layers),
        ("feed_forward_length", config.ffn),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("vocab_size", config.vocab),
    ] {
        add(name, value as usize);
    }
    if let Some(mixture) = &config.mixture {
        add("expert_count", config.experts as usize);
        add("expert_used_count", mixture.chosen as usize);
    }
    info.into()
}

async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": [entry(&app)]}))
}

async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    let mut model = entry(&app);
    model["expires_at"] = NEVER.into();
    model["size_vram"] = 0.into();
    model["context_length"] = app.context.into();
    Json(json!({"models": [model]}))
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
    let fills = Infill::of(&app.text, "suffix").is_ok();
    let abilities = [
        ("completion", true),
        ("insert", fills),
        ("tools", app.calls.harmony || !app.calls.frames.is_empty()),
        ("thinking", thinks),
    ];
    let abilities = abilities
        .into_iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| name);
    Ok(Json(json!({
        "modified_at": written(app.created),
        "template": template.unwrap_or_default(),
        "details": details(&app),
        "model_info": model_info(&app),
        "capabilities": abilities.collect::<Vec<_>>(),
    })))
}
