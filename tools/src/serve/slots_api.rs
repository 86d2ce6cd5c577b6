//! llama.cpp's actions on slots: the state of a conversation is saved under a name, read again, or removed from memory.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::app::App;
use super::error::ApiError;
use super::http::read;
use super::peer::json_with_probes;
use super::slot_order::{SlotAction, SlotDone, SlotOrder};
use super::worker::Work;
use crate::states::SlotName;

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new().route("/slots/{id}", post(act))
}

#[derive(Debug, Deserialize)]
struct SlotFile {
    filename: String,
}

/// `POST /slots/{id}?action=ACTION`
async fn act(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    uri: Uri,
    body: Body,
) -> Result<Response, ApiError> {
    // A slot that is in use is waited for, but not for a client that has gone.
    let answer = async move {
        let done = done(app, &id, uri.query().unwrap_or_default(), body).await;
        done.map(IntoResponse::into_response)
    };
    json_with_probes(answer, ApiError::into_response).await
}

/// Runs an action that `query` names on the slot `id`.
async fn done(app: Arc<App>, id: &str, query: &str, body: Body) -> Result<Json<Value>, ApiError> {
    let _permit = app.permit()?;
    if !app.saves_state {
        return Err(ApiError::not_started(
            "this server does not support slots action; start it with `--state-dir`",
        ));
    }
    let slot = id.parse().ok().filter(|&slot: &usize| slot < app.parallel);
    let Some(slot) = slot else {
        let message = format!("invalid slot id: slots are 0 to {}", app.parallel - 1);
        return Err(ApiError::invalid(message));
    };
    let action = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("action="));
    if action == Some("erase") {
        let done = ask(&app, slot, SlotAction::Erase).await?;
        return Ok(Json(json!({"id_slot": slot, "n_erased": done.tokens})));
    }
    let saves = match action {
        Some("save") => true,
        Some("restore") => false,
        _ => {
            let message = "invalid action: expected `save`, `restore` or `erase`";
            return Err(ApiError::invalid(message));
        }
    };
    let SlotFile { filename } = read(&app, body).await?;
    let Some(name) = SlotName::new(&filename) else {
        let message = "invalid filename: it must be a plain name of at most 200 bytes, not a path";
        return Err(ApiError::param("filename", message));
    };
    if saves {
        let done = ask(&app, slot, SlotAction::Save(name)).await?;
        return Ok(Json(json!({
            "id_slot": slot,
            "filename": filename,
            "n_saved": done.tokens,
            "n_written": done.bytes,
            "timings": {"save_ms": done.time.as_secs_f64() * 1e3},
        })));
    }
    let done = ask(&app, slot, SlotAction::Restore(name)).await?;
    Ok(Json(json!({
        "id_slot": slot,
        "filename": filename,
        "n_restored": done.tokens,
        "n_read": done.bytes,
        "timings": {"restore_ms": done.time.as_secs_f64() * 1e3},
    })))
}

/// Waits for an action.
async fn ask(app: &App, slot: usize, action: SlotAction) -> Result<SlotDone, ApiError> {
    let (reply, done) = oneshot::channel();
    let order = SlotOrder::new(slot, action, reply);
    let ending = || ApiError::unavailable("the server is shutting down");
    (app.jobs.send(Work::Slot(order))).map_err(|_| ending())?;
    done.await.unwrap_or_else(|_| Err(ending()))
}
