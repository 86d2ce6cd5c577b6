//! `GET /v1/responses/{id}/input_items`: the conversation before a response.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::Uri;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::responses_api::stored;

/// Items of a page, and the most that it may have.
const USUAL: usize = 20;
const MOST: usize = 100;

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/responses/{id}/input_items", get(list))
        .route("/v1/responses/{id}/input_items", get(list))
}

/// The part of the list that is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    limit: usize,
    /// Whether the oldest item comes first.
    ascending: bool,
    /// Id of the item before the first one.
    after: Option<String>,
}

async fn list(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let _permit = app.permit()?;
    let page = Page::of(uri.query().unwrap_or_default())?;
    let stored = stored(&app.responses, &id)?;
    let _reader = app.reader().await?;
    let items = serde_json::from_str(&format!("[{}]", stored.input()));
    let items: Vec<Value> = items.map_err(ApiError::failed)?;
    let items = items.into_iter().enumerate();
    Ok(Json(page.of_items(
        items.map(|(at, item)| named(item, &id, at)).collect(),
    )?))
}

/// An input item of a response as it is listed: with an id and a type, and its text in parts.
fn named(mut item: Value, response: &str, at: usize) -> Value {
    let kind = item["type"].as_str().unwrap_or("message").to_owned();
    let prefix = match &kind[..] {
        "message" => "msg",
        "reasoning" => "rs",
        "function_call" => "fc",
        "function_call_output" => "fco",
        "custom_tool_call" => "ctc",
        _ => "ctco",
    };
    let part = match item["role"].as_str() {
        Some("assistant") => "output_text",
        _ => "input_text",
    };
    if let Value::String(text) = &item["content"] {
        item["content"] = json!([{"type": part, "text": text}]);
    }
    item["id"] = format!("{prefix}_{}_{at}", response.trim_start_matches("resp_")).into();
    item["type"] = kind.into();
    item["status"] = "completed".into();
    item
}

impl Page {
    /// The page that a query asks for.
    fn of(query: &str) -> Result<Self, ApiError> {
        let mut page = Self {
            limit: USUAL,
            ..Self::default()
        };
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match name {
                "limit" => {
                    let limit = value.parse().ok().filter(|n| (1..=MOST).contains(n));
                    let why = || ApiError::param("limit", format!("`limit` must be 1 to {MOST}"));
                    page.limit = limit.ok_or_else(why)?;
                }
                "order" => match value {
                    "asc" => page.ascending = true,
                    "desc" => page.ascending = false,
                    _ => return Err(ApiError::param("order", "`order` must be `asc` or `desc`")),
                },
                "after" => page.after = Some(value.to_owned()),
                _ => {}
            }
        }
        Ok(page)
    }

    /// The list of items, which are in the order of the conversation.
    fn of_items(self, mut items: Vec<Value>) -> Result<Value, ApiError> {
        if !self.ascending {
            items.reverse();
        }
        if let Some(after) = &self.after {
            let at = items.iter().position(|item| item["id"] == after.as_str());
            let why = || {
                ApiError::param(
                    "after",
                    "no input item of this response has the id in `after`",
                )
            };
            items.drain(..=at.ok_or_else(why)?);
        }
        let more = items.len() > self.limit;
        items.truncate(self.limit);
        let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
        let [first, last] = [id(items.first()), id(items.last())];
        Ok(json!({
            "object": "list",
            "data": items,
            "first_id": first,
            "last_id": last,
            "has_more": more,
        }))
    }
}
