//! What all handlers see.

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
use super::error::ApiError;
use super::rules::{Compiler, Preface, Rules};
use super::shared::Shared;
use super::worker::Job;
use crate::template::Renderer;

/// State of the HTTP side.
pub struct App {
    /// Shared with the engine's thread.
    pub shared: Arc<Shared>,
    /// To the engine's thread.
    pub jobs: Sender<Job>,
    /// Tokenizer and metadata.
    pub text: Text,
    /// The chat template, if the model has one.
    pub template: Option<Renderer>,
    /// Name of the model.
    pub model: String,
    /// Bytes of its file.
    pub size: u64,
    /// Positions of a request.
    pub context: usize,
    /// Texts at once.
    pub parallel: usize,
    /// Requests that may wait beside.
    pub queue: usize,
    /// Compiles what texts are held to, if there is memory for it.
    pub compiler: Option<Arc<Compiler>>,
    /// Requests that are being served or wait.
    pub permits: Arc<Semaphore>,
    /// Requests that are read or made into tokens now: parsed JSON takes many times its bytes.
    pub readers: Arc<Semaphore>,
    /// Most bytes of a body.
    pub body_limit: usize,
    /// The key that clients must send.
    pub key: Option<String>,
    /// Origin that browsers may send beside those of this machine.
    pub origin: Option<String>,
    /// Names under which clients may ask beside those that nobody can register.
    pub hosts: Vec<String>,
    /// Whether requests that name another model are refused.
    pub strict_model: bool,
    /// Seconds since 1970 at the start.
    pub created: u64,
    /// When it started.
    pub started: Instant,
    /// Number of responses so far.
    pub count: AtomicU64,
}

/// What a request holds while it is read.
#[derive(Debug)]
pub struct Held {
    /// Its place among all requests.
    pub permit: OwnedSemaphorePermit,
    /// Its place among those that are read; given back when its tokens are known.
    pub reader: OwnedSemaphorePermit,
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

impl App {
    /// Permission for one more request.
    pub fn permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.check_ready()?;
        let permit = self.permits.clone().try_acquire_owned();
        permit.map_err(|_| ApiError::busy())
    }

    /// Waits for a place among the requests that are read.
    pub async fn reader(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let reader = self.readers.clone().acquire_owned().await;
        reader.map_err(|_| ApiError::unavailable("the server is shutting down"))
    }

    /// Whether requests are served now.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        if self.shared.closing() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        match self.shared.ready() {
            true => Ok(()),
            false => Err(ApiError::unavailable("Loading model")),
        }
    }

    /// Checks the fields that both kinds of request share.
    pub fn check(&self, common: &Common) -> Result<(), ApiError> {
        self.serves_model(common.model.as_deref().unwrap_or_default())?;
        common.check()
    }

    /// Checks the name of a model that a request asks: the only one there is serves every name, unless
    /// it is to be strict.
    pub fn serves_model(&self, name: &str) -> Result<(), ApiError> {
        match self.strict_model {
            true => self.check_model(name),
            false => Ok(()),
        }
    }

    /// Whether there is a model of this name.
    pub fn check_model(&self, name: &str) -> Result<(), ApiError> {
        match name.is_empty() || name == self.model {
            true => Ok(()),
            false => Err(ApiError::unknown(format!(
                "there is no model `{name}`; this server has `{}`",
                self.model
            ))),
        }
    }

    /// Hands a job to the engine's thread.
    pub fn submit(&self, job: Job) -> Result<(), ApiError> {
        let reactive = !job.proactive;
        let sent = self.jobs.send(job);
        sent.map_err(|_| ApiError::unavailable("the server is shutting down"))?;
        if reactive {
            self.shared.interrupt();
        }
        Ok(())
    }

    /// Checks tokens that a client sent.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), ApiError> {
        let vocab = self.text.config().vocab;
        match tokens.iter().find(|&&token| token >= vocab) {
            None => Ok(()),
            Some(token) => Err(ApiError::invalid(format!(
                "token {token} is not one of the vocabulary's {vocab}"
            ))),
        }
    }

    /// Runs work that takes long apart from the connections.
    pub async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|e| Err(ApiError::failed(e)))
    }

    /// What each of `texts` texts is held to, once there is memory for it.
    ///
    /// # Errors
    /// Rules that are wrong or too large, or more texts than may be held.
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
            let message = "this server holds texts to no grammar, schema or tool (see --grammars)";
            ApiError::invalid(message)
        };
        let compiler = self.compiler.as_ref().ok_or_else(refused)?;
        let room = compiler.room(texts, proactive).await?;
        let compiler = compiler.clone();
        let held = self.compute(move || compiler.check(&rules, preface.as_ref(), room));
        Ok(Some(Box::new(held.await?)))
    }

    /// The entry of `/v1/models`.
    pub fn model_json(&self) -> Value {
        json!({
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "emberflow",
            "context_length": self.context,
        })
    }

    /// Number of this response.
    pub fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether `key` may use the server. Takes the same time for every wrong key of equal length.
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

    /// Whether requests to `host` are answered. A page can make its own name lead to this address and then
    /// read what is here; addresses and names that nobody can register are not such names.
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

    /// Whether pages from `origin` may use the server, which they know as `host`: those of this machine,
    /// its own page, and the one that was named. A name that is not this machine's own does not count
    /// as its own page: somebody else's name may lead here.
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
