//! State shared by all HTTP handlers.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::http::HeaderValue;
use emberflow_engine::{Constraint, Text};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::api::Common;
use super::calls::CallFormat;
use super::error::ApiError;
use super::rules::{Compiler, Preface, Rules};
use super::shared::Shared;
use super::stored::ResponseStore;
use super::worker::{Job, Work};
use crate::template::Renderer;

/// State of the HTTP side.
pub struct App {
    /// State shared with the engine thread.
    pub shared: Arc<Shared>,
    /// Sends jobs to the engine thread.
    pub jobs: Sender<Work>,
    /// Whether state is saved (`--state-dir`).
    pub saves_state: bool,
    /// Tokenizer and metadata.
    pub text: Text,
    /// The chat template, if the model has one.
    pub template: Option<Renderer>,
    /// How the model writes tool calls.
    pub calls: CallFormat,
    /// Model name.
    pub model: String,
    /// Size of the model file in bytes.
    pub size: u64,
    /// Format of the model file, as Ollama's clients expect one.
    pub format: &'static str,
    /// Context length of a request.
    pub context: usize,
    /// Maximum number of concurrent sequences.
    pub parallel: usize,
    /// Maximum number of waiting requests.
    pub queue: usize,
    /// Compiles grammars and schemas; `None` with `--grammars 0`.
    pub compiler: Option<Arc<Compiler>>,
    /// Limits the number of running and waiting requests.
    pub permits: Arc<Semaphore>,
    /// Limits the number of requests being parsed and tokenized: parsed JSON takes many times its bytes.
    pub readers: Arc<Semaphore>,
    /// Maximum bytes of a body.
    pub body_limit: usize,
    /// Finished responses.
    pub responses: Arc<ResponseStore>,
    /// A hash of the model file, as Ollama's clients expect one.
    pub digest: String,
    /// API key.
    pub key: Option<String>,
    /// Additional CORS origin.
    pub origin: Option<String>,
    /// Additional allowed host names.
    pub hosts: Vec<String>,
    /// Whether requests that name another model are rejected.
    pub strict_model: bool,
    /// Start time, Unix seconds.
    pub created: u64,
    /// Start time.
    pub started: Instant,
    /// Number of responses.
    pub count: AtomicU64,
}

/// Semaphore permits of a request.
#[derive(Debug)]
pub struct RequestPermits {
    /// One of all running and waiting requests.
    pub permit: OwnedSemaphorePermit,
    /// One of those being parsed; released after tokenization.
    pub reader: OwnedSemaphorePermit,
}

/// Current Unix time in seconds.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

impl App {
    /// A permit for one more request.
    pub fn permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.check_ready()?;
        let permit = self.permits.clone().try_acquire_owned();
        permit.map_err(|_| ApiError::busy())
    }

    /// Waits for a permit to parse a request.
    pub async fn reader(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let reader = self.readers.clone().acquire_owned().await;
        reader.map_err(|_| ApiError::unavailable("the server is shutting down"))
    }

    /// Checks that the model is loaded and the server is not shutting down.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        if self.shared.closing() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        if self.shared.ready() {
            Ok(())
        } else {
            Err(ApiError::unavailable("Loading model"))
        }
    }

    /// Checks the common fields.
    pub fn check(&self, common: &Common) -> Result<(), ApiError> {
        self.serves_model(common.model.as_deref().unwrap_or_default())?;
        common.check()
    }

    /// Checks the requested model name. Every name is accepted unless `--strict-model` is given.
    pub fn serves_model(&self, name: &str) -> Result<(), ApiError> {
        if self.strict_model {
            self.check_model(name)
        } else {
            Ok(())
        }
    }

    /// Checks that the model has this name.
    pub fn check_model(&self, name: &str) -> Result<(), ApiError> {
        if name.is_empty() || name == self.model {
            Ok(())
        } else {
            Err(ApiError::unknown(format!(
                "model `{name}` not found; this server has `{}`",
                self.model
            )))
        }
    }

    /// Sends a job to the engine thread.
    pub fn submit(&self, job: Job) -> Result<(), ApiError> {
        let reactive = !job.proactive;
        let sent = self.jobs.send(Work::Texts(Box::new(job)));
        sent.map_err(|_| ApiError::unavailable("the server is shutting down"))?;
        if reactive {
            self.shared.interrupt();
        }
        Ok(())
    }

    /// Checks that tokens sent by a client exist.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), ApiError> {
        let vocab = self.text.config().vocab;
        match tokens.iter().find(|&&token| token >= vocab) {
            None => Ok(()),
            Some(token) => Err(ApiError::invalid(format!(
                "token {token} is outside the vocabulary of {vocab}"
            ))),
        }
    }

    /// Runs long computations on a blocking thread.
    pub async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|e| Err(ApiError::failed(e)))
    }

    /// Waits for a grammar slot and compiles the constraint of `texts` texts.
    ///
    /// # Errors
    /// Invalid or too large grammars, or more texts than slots.
    pub async fn held(
        self: &Arc<Self>,
        rules: Option<Rules>,
        preface: Option<Preface>,
        texts: usize,
        proactive: bool,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let Some(rules) = rules else {
            return Ok(None);
        };
        let refused = || {
            let message = "grammars, JSON schemas and forced tool calls are disabled on this server (--grammars 0)";
            ApiError::invalid(message)
        };
        let compiler = self.compiler.as_ref().ok_or_else(refused)?;
        let room = compiler.room(texts, proactive).await?;
        let compiler = compiler.clone();
        let held = self.compute(move || compiler.check(&rules, preface.as_ref(), room));
        Ok(Some(Box::new(held.await?)))
    }

    /// The model's entry in `/v1/models`.
    pub fn model_json(&self) -> Value {
        json!({
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "emberflow",
            "context_length": self.context,
        })
    }

    /// A new response number.
    pub fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether `key` is the API key. The comparison takes constant time for keys of equal length.
    pub fn allows_key(&self, key: Option<&str>) -> bool {
        let Some(wanted) = &self.key else {
            return true;
        };
        let key = key.unwrap_or_default();
        let differs = wanted
            .bytes()
            .zip(key.bytes())
            .fold(0, |d, (a, b)| d | (a ^ b));
        wanted.len() == key.len() && differs == 0
    }

    /// Whether the Host header is allowed. This prevents DNS rebinding: a web page can make its own domain resolve to
    /// this server. IP addresses and names that cannot be registered are safe.
    pub fn allows_host(&self, host: &HeaderValue) -> bool {
        const RESERVED: [&str; 4] = [".localhost", ".local", ".internal", ".home.arpa"];
        let Ok(host) = host.to_str() else {
            return false;
        };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.parse::<u16>().is_ok() => name,
            _ => host,
        };
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        let named = |other: &String| other == "*" || other.eq_ignore_ascii_case(&name);
        address
            || !name.contains('.')
            || RESERVED.iter().any(|end| name.ends_with(end))
            || self.hosts.iter().any(named)
    }

    /// Whether the CORS origin is allowed: pages from this machine, this server's own page (same `host`), and the
    /// configured origin. A host name counts as the server's own only if it passes the rebinding check.
    pub fn allows_origin(&self, origin: &HeaderValue, host: Option<&HeaderValue>) -> bool {
        let Ok(origin) = origin.to_str() else {
            return false;
        };
        if self.origin.as_deref() == Some(origin) || self.origin.as_deref() == Some("*") {
            return true;
        }
        let at = origin.strip_prefix("http://").unwrap_or_default();
        let name = match at.rsplit_once(':') {
            Some((name, port)) if port.parse::<u16>().is_ok() => name,
            _ => at,
        };
        let address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        let ours = address && host.is_some_and(|host| host.as_bytes() == at.as_bytes());
        ours || ["localhost", "127.0.0.1", "[::1]"].contains(&name)
    }
}
