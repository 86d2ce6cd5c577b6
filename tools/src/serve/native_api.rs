//! llama.cpp's `/completion` and `/infill`.
//!
//! Requests are converted to OpenAI completions, which are then checked as such.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use emberflow_engine::Text;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::api::Kind;
use super::app::{App, RequestPermits};
use super::error::ApiError;
use super::fields::{self, on};
use super::http::{continuation, read_fields};
use super::infill::{self, File, Infill};
use super::native::{NativeOptions, respond};
use super::peer::{COMMENT, json_with_probes, stream_with_probes};
use super::submit::{check_prompts, submit};

/// Routes.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/completion", post(completion))
        .route("/infill", post(infill))
}

/// `/completion`
#[derive(Debug, Deserialize)]
struct NativeRequest {
    prompt: Value,
    #[serde(flatten)]
    shared: NativeCommon,
}

/// `/infill`
#[derive(Debug, Deserialize)]
struct InfillRequest {
    input_prefix: String,
    input_suffix: String,
    #[serde(default)]
    input_extra: Vec<Extra>,
    #[serde(default)]
    prompt: String,
    #[serde(flatten)]
    shared: NativeCommon,
}

#[derive(Debug, Deserialize)]
struct Extra {
    #[serde(default)]
    filename: Option<String>,
    #[serde(default)]
    text: String,
}

/// Fields of both endpoints.
#[derive(Debug, Deserialize)]
struct NativeCommon {
    /// Maximum tokens; `None` for no limit.
    max_tokens: Option<usize>,
    n_probs: Option<usize>,
    return_tokens: Option<bool>,
    response_fields: Option<Vec<String>>,
    /// Fields that completions have too.
    #[serde(flatten)]
    same: Map<String, Value>,
}

async fn completion(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<NativeRequest>(on::NATIVE, &app, body).await?;
    let held = RequestPermits { permit, reader };
    let ours = app.clone();
    let prompts = app.compute(move || prompts(&ours.text, request.prompt));
    let prompts = prompts.await?;
    respond_completion(app, headers, request.shared, prompts, Vec::new(), held).await
}

async fn infill(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let permit = app.permit()?;
    let (request, reader) = read_fields::<InfillRequest>(on::INFILL, &app, body).await?;
    let held = RequestPermits { permit, reader };
    // Reserve at most half of the context for the text.
    let text = request.shared.max_tokens.unwrap_or(app.context / 4);
    let most = app.context - text.min(app.context / 2);
    let ours = app.clone();
    let prompt = app.compute(move || {
        let files = request.input_extra.into_iter().map(|extra| File {
            name: extra.filename.unwrap_or_else(|| "tmp".to_owned()),
            text: extra.text,
        });
        let files: Vec<File> = files.collect();
        let before = request.input_prefix + &request.prompt;
        let infill = Infill::of(&ours.text, "input_prefix")?;
        infill.in_repository(&before, &request.input_suffix, &files, most)
    });
    let prompt = prompt.await?;
    let ends = infill::ends(&app.text);
    respond_completion(app, headers, request.shared, vec![prompt], ends, held).await
}

/// Continues prompts; each text ends at one of `ends`.
async fn respond_completion(
    app: Arc<App>,
    headers: HeaderMap,
    shared: NativeCommon,
    prompts: Vec<Vec<u32>>,
    ends: Vec<String>,
    held: RequestPermits,
) -> Result<Response, ApiError> {
    let mut wanted = NativeOptions {
        tokens: shared.return_tokens == Some(true),
        probabilities: shared.n_probs.is_some_and(|n| n > 0),
        fields: shared.response_fields.unwrap_or_default(),
        prompts: Vec::new(),
    };
    check_prompts(&app, Kind::Native, &prompts)?;
    for prompt in &prompts {
        let text = app.text.tokenizer().decode(prompt, false);
        wanted.prompts.push(text.map_err(ApiError::invalid)?);
    }
    let mut fields = shared.same;
    fields.extend(
        shared
            .max_tokens
            .map(|most| ("max_tokens".to_owned(), most.into())),
    );
    fields.insert("prompt".to_owned(), json!(prompts));
    if wanted.tokens || wanted.probabilities {
        fields.insert("logprobs".to_owned(), shared.n_probs.unwrap_or(0).into());
    }
    let request = fields::rewrite(on::TEXT, &fields)?;
    let mut asked = continuation(&app, &headers, request, Kind::Native, held.reader).await?;
    asked.ends = ends;
    let streams = asked.common.stream == Some(true);
    let answer = respond(submit(&app, asked, held.permit)?, wanted, streams);
    if streams {
        Ok(stream_with_probes(answer.await?, COMMENT))
    } else {
        json_with_probes(answer, ApiError::into_response).await
    }
}

/// Tokens of one or several prompts: a string, a list of tokens and strings that form one prompt, or a list of
/// prompts.
fn prompts(text: &Text, given: Value) -> Result<Vec<Vec<u32>>, ApiError> {
    match given {
        Value::Array(list) if !list.iter().any(Value::is_number) => {
            list.iter().map(|one| prompt(text, one)).collect()
        }
        one => Ok(vec![prompt(text, &one)?]),
    }
}

/// Tokens of a prompt; BOS precedes a leading string.
fn prompt(text: &Text, given: &Value) -> Result<Vec<u32>, ApiError> {
    let wrong = || {
        let message =
            "`prompt` must be a string, a list of tokens and strings, or a list of such prompts";
        ApiError::param("prompt", message)
    };
    let parts = match given {
        Value::String(_) => std::slice::from_ref(given),
        Value::Array(parts) => parts,
        _ => return Err(wrong()),
    };
    let mut all = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        match part {
            Value::String(part) if at == 0 => {
                all.extend(text.encode(part).map_err(ApiError::invalid)?);
            }
            Value::String(part) => all.extend(text.tokens(part).map_err(ApiError::invalid)?),
            part => {
                let token = part.as_u64().and_then(|token| u32::try_from(token).ok());
                all.push(token.ok_or_else(wrong)?);
            }
        }
    }
    Ok(all)
}
