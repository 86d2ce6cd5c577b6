//! Errors as clients of OpenAI's interface expect them.

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

/// A prompt that is longer than the context.
#[derive(Debug, Clone, Copy)]
pub struct ContextSize {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Positions of the context.
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

    /// 400: the request is wrong.
    pub fn invalid(message: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: this parameter is wrong, or not supported.
    pub fn param(param: &'static str, message: impl ToString) -> Self {
        Self {
            param: Some(param),
            ..Self::invalid(message)
        }
    }

    /// 400: the text of this parameter is longer than the context. Type and members are those of
    /// llama.cpp's server, by which clients know that they must shorten.
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

    /// 401: no key, or a wrong one.
    pub fn key() -> Self {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
    }

    /// 403: a web page from elsewhere.
    pub fn origin() -> Self {
        let message = "web pages from this origin may not ask; --allow-origin names one that may";
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 403: a name that may be somebody else's.
    pub fn host(name: &str) -> Self {
        let name: String = name.chars().take(100).collect();
        let message = format!(
            "requests to `{name}` are not answered: pages of whoever owns that name could read what is here; \
             --allow-host names one that may be asked"
        );
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 404: there is no such thing.
    pub fn unknown(message: impl ToString) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// 405: not with this method.
    pub fn method() -> Self {
        let message = "this path does not take this method; /openapi.json says which it takes";
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            message,
        )
    }

    /// 408: the body did not come.
    pub fn slow() -> Self {
        let message = "the body did not arrive in time";
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "invalid_request_error",
            message,
        )
    }

    /// 413: the body is too large.
    pub fn large(limit: usize) -> Self {
        let message = format!("the body is larger than {limit} bytes, more than the context holds");
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            message,
        )
    }

    /// 429: too many requests at once.
    pub fn busy() -> Self {
        let message = "too many requests wait; try again in a while";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    /// 500: a request that failed.
    pub fn failed(message: impl ToString) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: not yet, or not any more.
    pub fn unavailable(message: impl ToString) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable_error",
            message,
        )
    }

    /// 503: all connections are taken.
    pub fn crowded() -> Self {
        Self::unavailable("all connections of this server are taken; try again in a while")
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

    /// The error object of Anthropic's interface.
    pub fn typed(&self) -> Value {
        let kind = match self.status {
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::INTERNAL_SERVER_ERROR => "api_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            _ => self.kind,
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }

    /// The error object.
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

/// An error as Ollama's clients expect it.
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

/// An error as Anthropic's clients expect it.
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
