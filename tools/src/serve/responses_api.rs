//! OpenAI's `/v1/responses`.
//!
//! Requests are converted to chats, which are then checked as such. Finished responses are kept in memory, so that a
//! request can continue one ([`ResponseStore`]).

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::api::{ChatRequest, Kind};
use super::app::App;
use super::error::ApiError;
use super::fields::{self, on};
use super::http::{conversation, read_fields};
use super::peer::{COMMENT, json_with_probes, stream_with_probes};
use super::response_items::InItem;
use super::response_tools::ResponseTools;
use super::responses::{Keep, ResponseContext, respond};
use super::stored::{ResponseStore, StoredResponse};
use super::submit::submit;

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/responses", post(create))
        .route("/v1/responses", post(create))
        .route("/responses/{id}", get(retrieve).delete(remove))
        .route("/v1/responses/{id}", get(retrieve).delete(remove))
}

/// The value of `include` that asks for log-probabilities.
const LOG_PROBS: &str = "message.output_text.logprobs";

/// `/v1/responses`
#[derive(Debug, Deserialize)]
struct ResponsesRequest {
    input: ResponsesInput,
    instructions: Option<String>,
    text: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    include: Option<Vec<String>>,
    top_logprobs: Option<usize>,
    /// Fields that chats have too, and those that the response only returns.
    #[serde(flatten)]
    same: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`input` must be a string or a list of items")]
enum ResponsesInput {
    Text(String),
    Items(Vec<Value>),
}

async fn create(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<ResponsesRequest>(on::RESPONSE, &app, body).await?;
    let (chat, context) = request.chat(&app.responses, app.body_limit)?;
    let streams = chat.common.stream == Some(true);
    let asked = conversation(&app, &headers, chat, Kind::Response, reader).await;
    let asked = asked.map_err(|why| why.renamed("messages", "input"))?;
    let answer = respond(submit(&app, asked, permit)?, context, streams);
    if streams {
        Ok(stream_with_probes(answer.await?, COMMENT))
    } else {
        json_with_probes(answer, ApiError::into_response).await
    }
}

async fn retrieve(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let _permit = app.permit()?;
    let stored = stored(&app.responses, &id)?;
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Ok((kind, stored.object.to_string()).into_response())
}

/// The stored response with this id.
///
/// # Errors
/// There is none.
pub fn stored(store: &ResponseStore, id: &str) -> Result<StoredResponse, ApiError> {
    store.get(id).ok_or_else(|| unknown(store, id))
}

async fn remove(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if app.responses.remove(&id) {
        Ok(Json(
            json!({"id": id, "object": "response", "deleted": true}),
        ))
    } else {
        Err(unknown(&app.responses, &id))
    }
}

/// Error for an id that no stored response has.
fn unknown(store: &ResponseStore, id: &str) -> ApiError {
    let id: String = id.chars().take(100).collect();
    ApiError::unknown(format!(
        "there is no response `{id}`: this server keeps the last responses, up to {} KiB (more, also of earlier runs, with --state-dir), except those with `store` false; send the whole conversation as `input`",
        store.limit() >> 10
    ))
}

impl ResponsesRequest {
    /// Converts the request to a chat. A conversation may have at most `limit` bytes.
    fn chat(
        mut self,
        store: &Arc<ResponseStore>,
        limit: usize,
    ) -> Result<(ChatRequest, ResponseContext), ApiError> {
        let mut tools = ResponseTools::of(self.tools.take().unwrap_or_default())?;
        let text = self.text()?;
        let echo = self.echo(&text, &tools).to_string();
        let (items, written) = self.items(store, limit)?;
        let fields = self.fields(text, items, &mut tools)?;
        let keeps = self.store != Some(false);
        let context = ResponseContext {
            echo,
            tools: tools.called(),
            keep: keeps.then(|| Keep {
                store: store.clone(),
                items: written,
            }),
        };
        let chat = fields::rewrite(on::CHAT, &fields);
        Ok((
            chat.map_err(|why| why.renamed("messages", "input"))?,
            context,
        ))
    }

    /// `text` with its default format.
    fn text(&mut self) -> Result<Map<String, Value>, ApiError> {
        let mut text = self.text.take().unwrap_or_default();
        if text.get("format").is_none_or(Value::is_null) {
            text.insert("format".to_owned(), json!({"type": "text"}));
        }
        match text.get("verbosity").unwrap_or(&Value::Null) {
            Value::Null => Ok(text),
            Value::String(word) if ["low", "medium", "high"].contains(&&**word) => Ok(text),
            _ => {
                let message = "`text.verbosity` must be `low`, `medium` or `high`";
                Err(ApiError::param("text", message))
            }
        }
    }

    /// The members of the response that only depend on the request.
    fn echo(&self, text: &Map<String, Value>, tools: &ResponseTools) -> Value {
        let given = |name: &str| self.same.get(name).cloned().unwrap_or_default();
        let or = |value: Value, default: Value| if value.is_null() { default } else { value };
        let reasoning = given("reasoning");
        json!({
            "background": false,
            "instructions": self.instructions,
            "max_output_tokens": or(given("max_completion_tokens"), given("max_tokens")),
            "max_tool_calls": given("max_tool_calls"),
            "metadata": or(given("metadata"), json!({})),
            "parallel_tool_calls": or(given("parallel_tool_calls"), true.into()),
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": given("prompt_cache_key"),
            "reasoning": {
                "effort": or(given("reasoning_effort"), reasoning["effort"].clone()),
                "summary": null,
            },
            "safety_identifier": given("safety_identifier"),
            "service_tier": "default",
            "store": self.store != Some(false),
            "text": text,
            "tool_choice": self.tool_choice.as_ref().unwrap_or(&json!("auto")),
            "tools": tools.given,
            "top_logprobs": self.top_logprobs.unwrap_or(0),
            "truncation": "disabled",
            "user": given("user"),
        })
    }

    /// The items of the conversation, and as they are kept.
    fn items(
        &mut self,
        store: &ResponseStore,
        limit: usize,
    ) -> Result<(Vec<InItem>, String), ApiError> {
        let empty = ResponsesInput::Items(Vec::new());
        let own = match std::mem::replace(&mut self.input, empty) {
            ResponsesInput::Text(text) => vec![InItem::user(text)],
            ResponsesInput::Items(items) => {
                let items = items.into_iter().enumerate();
                let read = items.filter_map(|(at, item)| InItem::read(at, item).transpose());
                read.collect::<Result<_, _>>()?
            }
        };
        let mut written =
            listed(&serde_json::to_string(&own).map_err(ApiError::failed)?).to_owned();
        let Some(id) = &self.previous_response_id else {
            return Ok((own, written));
        };
        let field = "previous_response_id";
        let before = stored(store, id)
            .map_err(|why| why.with_param(field))?
            .items;
        if before.len() + written.len() > limit {
            let message = format!(
                "the conversation has more than {limit} bytes; send its last part as `input`, without `{field}`"
            );
            return Err(ApiError::param(field, message));
        }
        let all = serde_json::from_str(&format!("[{before}]"));
        let mut all: Vec<InItem> = all.map_err(ApiError::failed)?;
        all.extend(own);
        if written.is_empty() {
            written = before.to_string();
        } else {
            written = format!("{before},{written}");
        }
        Ok((all, written))
    }

    /// The fields of the chat.
    fn fields(
        &mut self,
        mut text: Map<String, Value>,
        items: Vec<InItem>,
        tools: &mut ResponseTools,
    ) -> Result<Map<String, Value>, ApiError> {
        let mut fields = std::mem::take(&mut self.same);
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.take() {
            messages.push(json!({"role": "system", "content": instructions}));
        }
        for item in items {
            item.say(&mut messages)?;
        }
        set("messages", messages.into());
        if let Some(format) = text
            .get_mut("format")
            .filter(|format| format["type"] != "text")
        {
            set("response_format", format.take());
        }
        if let Some(choice) = &self.tool_choice {
            set("tool_choice", tools.choose(choice)?);
        }
        set("tools", std::mem::take(&mut tools.functions).into());
        let top = self.top_logprobs.unwrap_or(0);
        let include = self.include.as_deref().unwrap_or_default();
        if top > 0 || include.iter().any(|name| name == LOG_PROBS) {
            set("logprobs", true.into());
            set("top_logprobs", top.into());
        }
        Ok(fields)
    }
}

/// The elements of a JSON list, without its brackets.
fn listed(list: &str) -> &str {
    let list = list.strip_prefix('[').unwrap_or(list);
    list.strip_suffix(']').unwrap_or(list)
}
