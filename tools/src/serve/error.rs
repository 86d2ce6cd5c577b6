//! Error responses in the formats of OpenAI, Anthropic and Ollama.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<&'static str>,
    size: Option<ContextSize>,
}

/// A prompt that exceeds the context.
#[derive(Debug, Clone, Copy)]
pub struct ContextSize {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Context length.
    pub context: usize,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl ToString) -> Self {
        Self {
            status,
            message: message.to_string(),
            kind,
            param: None,
            size: None,
        }
    }

    /// 400: invalid request.
    pub fn invalid(message: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: invalid or unsupported parameter.
    pub fn param(param: &'static str, message: impl ToString) -> Self {
        Self {
            param: Some(param),
            ..Self::invalid(message)
        }
    }

    /// 400: the prompt exceeds the context. Type and members are those of llama.cpp's server, so that clients know to
    /// shorten it.
    pub fn too_long(param: &'static str, size: ContextSize) -> Self {
        let ContextSize { prompt, context } = size;
        let message = format!(
            "the request ({prompt} tokens) exceeds the available context size ({context} tokens); shorten it, or start the server with a larger --context"
        );
        Self {
            kind: "exceed_context_size_error",
            size: Some(size),
            ..Self::param(param, message)
        }
    }

    /// 400: no model that this server runs can do this. Not 501, at which clients try again.
    pub fn unsupported(message: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "not_supported_error", message)
    }

    /// The same error, about this parameter.
    pub fn with_param(self, param: &'static str) -> Self {
        Self {
            param: Some(param),
            ..self
        }
    }

    /// The same error, with the parameter `to` instead of `from`.
    pub fn renamed(self, from: &str, to: &'static str) -> Self {
        let param = self
            .param
            .map(|param| if param == from { to } else { param });
        Self { param, ..self }
    }

    /// 401: missing or wrong API key.
    pub fn key() -> Self {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
    }

    /// 403: CORS origin not allowed.
    pub fn origin() -> Self {
        let message = "this origin is not allowed; see --allow-origin";
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 403: host name not allowed.
    pub fn host(name: &str) -> Self {
        let name: String = name.chars().take(100).collect();
        let message = format!(
            "host `{name}` is not allowed, to prevent DNS rebinding; \
             see --allow-host"
        );
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 404: not found.
    pub fn unknown(message: impl ToString) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// 405: method not allowed.
    pub fn method() -> Self {
        let message = "method not allowed; /openapi.json lists the methods of each path";
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            message,
        )
    }

    /// 408: the body did not arrive in time.
    pub fn slow() -> Self {
        let message = "the request body did not arrive in time";
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            message,
        )
    }

    /// 413: body too large.
    pub fn large(limit: usize) -> Self {
        let message = format!("the request body is larger than the limit of {limit} bytes");
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            message,
        )
    }

    /// 429: queue full.
    pub fn busy() -> Self {
        let message = "too many requests are waiting; try again later";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    /// 500: the request failed.
    pub fn failed(message: impl ToString) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 501: this server was not started for it.
    pub fn not_started(message: impl ToString) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message)
    }

    /// 507: no room on disk.
    pub fn full(message: impl ToString) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "server_error", message)
    }

    /// 503: starting or shutting down.
    pub fn unavailable(message: impl ToString) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable_error",
            message,
        )
    }

    /// 503: too many connections.
    pub fn crowded() -> Self {
        Self::unavailable("too many connections; try again later")
    }

    fn with(&self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        let again = [
            StatusCode::TOO_MANY_REQUESTS,
            StatusCode::SERVICE_UNAVAILABLE,
        ];
        if again.contains(&self.status) {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
        }
        response
    }

    /// The error object of Anthropic's API.
    pub fn typed(&self) -> Value {
        let kind = match self.status {
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::INTERNAL_SERVER_ERROR => "api_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            _ => self.kind,
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }

    /// The error object of OpenAI's API.
    pub fn body(&self) -> Value {
        let mut error = json!({
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status.as_u16(),
        });
        if let Some(size) = self.size {
            error["n_prompt_tokens"] = size.prompt.into();
            error["n_ctx"] = size.context.into();
        }
        json!({"error": error})
    }
}

/// An error in Ollama's format.
pub struct Plain(ApiError);

impl From<ApiError> for Plain {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Plain {
    fn into_response(self) -> Response {
        let body = json!({"error": self.0.message});
        self.0.with(body)
    }
}

/// An error in Anthropic's format.
pub struct Typed(ApiError);

impl From<ApiError> for Typed {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Typed {
    fn into_response(self) -> Response {
        let body = self.0.typed();
        self.0.with(body)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body();
        self.with(body)
    }
}
