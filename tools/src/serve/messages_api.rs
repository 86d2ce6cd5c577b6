//! Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.
//!
//! Requests are converted to OpenAI chats, which are then checked as such.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::api::{ChatRequest, Kind};
use super::app::App;
use super::error::{ApiError, Typed};
use super::fields::{self, on};
use super::http::{conversation, prepared, read_fields};
use super::messages::respond;
use super::peer::{COMMENT, json_with_probes, stream_with_probes};
use super::submit::submit;

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
}

/// `/v1/messages`
#[derive(Debug, Deserialize)]
struct MessagesRequest {
    messages: Vec<MessageParam>,
    system: Option<BlockContent>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    stop_sequences: Option<Value>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    output_format: Option<Value>,
    /// Fields that chats have too.
    #[serde(flatten)]
    same: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct MessageParam {
    role: String,
    content: BlockContent,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "`content` must be a string or a list of blocks")]
enum BlockContent {
    Text(String),
    Blocks(Vec<Value>),
}

async fn messages(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Typed> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<MessagesRequest>(on::MESSAGE, &app, body).await?;
    let request = request.chat()?;
    let streams = request.common.stream == Some(true);
    let asked = conversation(&app, &headers, request, Kind::Message, reader).await?;
    let answer = respond(submit(&app, asked, permit)?, streams);
    if streams {
        Ok(stream_with_probes(answer.await?, COMMENT))
    } else {
        json_with_probes(answer, Typed::into_response).await
    }
}

async fn count_tokens(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, Typed> {
    let _permit = app.permit()?;
    let (request, _reader) = read_fields::<MessagesRequest>(on::MESSAGE, &app, body).await?;
    let prepared = prepared(&app, request.chat()?).await?;
    Ok(Json(json!({"input_tokens": prepared.prompt.len()})))
}

impl MessagesRequest {
    /// Converts the request to a chat.
    fn chat(self) -> Result<ChatRequest, ApiError> {
        fields::rewrite(on::CHAT, &self.fields()?)
    }

    /// The fields of the chat.
    fn fields(self) -> Result<Map<String, Value>, ApiError> {
        let mut fields = self.same;
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            let text = system.text()?;
            messages.extend((!text.is_empty()).then(|| json!({"role": "system", "content": text})));
        }
        for turn in self.messages {
            turn.say(&mut messages)?;
        }
        set("messages", messages.into());
        if let Some(stops) = self.stop_sequences {
            set("stop", stops);
        }
        if let Some(tools) = self.tools.filter(|tools| !tools.is_empty()) {
            let tools: Result<Vec<Value>, ApiError> = tools.into_iter().map(tool).collect();
            set("tools", tools?.into());
        }
        if let Some(choice) = self.tool_choice {
            set("tool_choice", chosen(&choice)?);
            if choice["disable_parallel_tool_use"] == true {
                set("parallel_tool_calls", false.into());
            }
        }
        if let Some(thinking) = self.thinking.as_ref().and_then(|t| t["type"].as_str()) {
            set("enable_thinking", (thinking != "disabled").into());
        }
        let config = self.output_config.unwrap_or_default();
        let format = self.output_format.unwrap_or(config["format"].clone());
        if format["type"] == "json_schema" {
            let schema = json!({"name": "output", "schema": format["schema"]});
            let format = json!({"type": "json_schema", "json_schema": schema});
            set("response_format", format);
        }
        Ok(fields)
    }
}

/// Converts a tool.
fn tool(mut tool: Value) -> Result<Value, ApiError> {
    match tool["type"].as_str() {
        None | Some("custom") => {
            let names = ["name", "description", "input_schema", "strict"];
            let given = names.map(|name| Some((name, tool.get_mut(name)?.take())));
            let function = given.into_iter().flatten().map(|(name, value)| match name {
                "input_schema" => ("parameters".to_owned(), value),
                name => (name.to_owned(), value),
            });
            let function: Map<String, Value> = function.collect();
            Ok(json!({"type": "function", "function": function}))
        }
        Some(kind) => {
            let message =
                format!("tools of type `{kind}` are not supported; only client tools are");
            Err(ApiError::param("tools", message))
        }
    }
}

/// Converts `tool_choice`.
fn chosen(choice: &Value) -> Result<Value, ApiError> {
    match (choice["type"].as_str(), &choice["name"]) {
        (Some(word @ ("auto" | "none")), _) => Ok(word.into()),
        (Some("any"), _) => Ok("required".into()),
        (Some("tool"), Value::String(name)) => {
            Ok(json!({"type": "function", "function": {"name": name}}))
        }
        _ => {
            let message =
                "`tool_choice` must have type `auto`, `any`, `none`, or `tool` with a `name`";
            Err(ApiError::param("tool_choice", message))
        }
    }
}

/// Error for an unsupported block type.
fn unknown(kind: &Value) -> ApiError {
    let message = format!("content of type {kind} is not supported here");
    ApiError::param("messages", message)
}

impl BlockContent {
    fn blocks(self) -> Vec<Value> {
        match self {
            Self::Text(text) => vec![json!({"type": "text", "text": text})],
            Self::Blocks(blocks) => blocks,
        }
    }

    /// Its text, if all blocks are text.
    fn text(self) -> Result<String, ApiError> {
        let mut all = String::new();
        for block in self.blocks() {
            match (block["type"].as_str(), block["text"].as_str()) {
                (Some("text"), Some(text)) => all.push_str(text),
                _ => return Err(unknown(&block["type"])),
            }
        }
        Ok(all)
    }
}

impl MessageParam {
    /// Appends the message to the conversation. Tool results become separate messages.
    fn say(self, messages: &mut Vec<Value>) -> Result<(), ApiError> {
        let (mut text, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
        let message = |text: String| json!({"role": self.role, "content": text});
        let before = messages.len();
        for mut block in self.content.blocks() {
            match (block["type"].as_str(), &*self.role) {
                (Some("text"), _) => text += block["text"].as_str().unwrap_or_default(),
                (Some("tool_use"), "assistant") => calls.push(json!({
                    "id": block["id"].take(),
                    "type": "function",
                    "function": {"name": block["name"].take(), "arguments": block["input"].take()},
                })),
                (Some("tool_result"), "user") => {
                    if !text.is_empty() {
                        messages.push(message(std::mem::take(&mut text)));
                    }
                    messages.push(json!({
                        "role": "tool",
                        "tool_call_id": block["tool_use_id"].take(),
                        "content": result(block["content"].take())?,
                    }));
                }
                (Some("thinking"), "assistant") => {
                    thoughts += block["thinking"].as_str().unwrap_or_default();
                }
                // Encrypted reasoning of other servers is skipped.
                (Some("redacted_thinking"), "assistant") => {}
                _ => return Err(unknown(&block["type"])),
            }
        }
        if !text.is_empty() || !calls.is_empty() || messages.len() == before {
            let mut last = message(text);
            if !thoughts.is_empty() {
                last["reasoning_content"] = thoughts.into();
            }
            if !calls.is_empty() {
                last["tool_calls"] = calls.into();
            }
            messages.push(last);
        }
        Ok(())
    }
}

/// Text of a tool result.
fn result(content: Value) -> Result<String, ApiError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text),
        Value::Array(blocks) => BlockContent::Blocks(blocks).text(),
        _ => Err(unknown(&content["type"])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As converted by llama.cpp's server (`convert_anthropic_to_oai`), with texts joined.
    #[test]
    fn a_message_is_a_chat() {
        let message = json!({
            "model": "demo",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            "stop_sequences": ["END"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "messages": [
                {"role": "user", "content": "What is a vector?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"kind": "struct"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a type"}]},
                    {"type": "text", "text": "And?"},
                ]},
            ],
            "tools": [{"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "look_up", "disable_parallel_tool_use": true},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        });
        let request: MessagesRequest = serde_json::from_value(message).unwrap();
        let arguments = json!({"kind": "struct"});
        let call = json!({"name": "look_up", "arguments": arguments});
        let wanted = json!({
            "model": "demo",
            "max_tokens": 9,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is a vector?"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [{"id": "t1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "a type"},
                {"role": "user", "content": "And?"},
            ],
            "stop": ["END"],
            "enable_thinking": true,
            "tools": [{"type": "function", "function": {
                "name": "look_up",
                "description": "Looks up.",
                "parameters": {"type": "object"},
            }}],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
            "parallel_tool_calls": false,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": {"type": "object"}},
            },
        });
        assert_eq!(Value::Object(request.fields().unwrap()), wanted);
    }
}
