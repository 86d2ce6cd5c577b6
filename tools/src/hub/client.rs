//! Requests to a hub: what is asked again, and what an answer without success means.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, Uri, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::name::ModelName;
use super::repo::{RemoteFile, Repo};
use super::stores::{hugging_face_home, path_in};
use crate::Failure;
use crate::tell::tell;

/// The hub, unless HF_ENDPOINT names another.
const HUB: &str = "https://huggingface.co";

/// Bytes of a list of files, at most.
const LIST: u64 = 32 << 20;

/// Bytes read at once.
const BUFFER: usize = 1 << 16;

/// When to ask again.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Time without a byte after which a connection is given up.
    pub silence: Duration,
    /// Wait after the first failure; it doubles with each that follows.
    pub wait: Duration,
    /// Failures in a row, without a byte of progress, after which to stop.
    pub attempts: u32,
}

impl Patience {
    /// For people: together about a minute of waiting.
    pub const USUAL: Self = Self {
        silence: Duration::from_secs(30),
        wait: Duration::from_secs(1),
        attempts: 7,
    };

    /// The longest wait that a hub may ask for.
    const MOST: Duration = Duration::from_secs(300);

    /// How long to wait after this many failures in a row.
    fn after(&self, failures: u32, asked: Option<Duration>) -> Duration {
        let usual = self.wait * 2u32.pow(failures.saturating_sub(1).min(5));
        asked
            .map_or(usual, |asked| asked.max(usual))
            .min(Self::MOST)
    }
}

/// Why a request failed.
#[derive(Debug)]
pub enum Refused {
    /// It may succeed later, as soon as the hub asks.
    Now(String, Option<Duration>),
    /// There is no connection.
    NoConnection(String),
    /// It would fail again.
    Finally(Failure),
}

/// A hub of models with Hugging Face's addresses.
#[derive(Debug)]
pub struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    /// When to ask again.
    pub patience: Patience,
}

impl Hub {
    /// The hub of HF_ENDPOINT, with the token of HF_TOKEN or the file that `hf auth login` writes.
    ///
    /// # Errors
    /// An address that is none, or HF_HUB_OFFLINE.
    pub fn from_env() -> Result<Self, Failure> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let yes = |value: String| {
            ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
        };
        if set("HF_HUB_OFFLINE").is_some_and(yes) {
            return Err(Failure::Unreachable(
                "HF_HUB_OFFLINE is set, so nothing is downloaded; 'emberflow list' shows the models on this machine".into(),
            ));
        }
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| HUB.to_owned());
        let token = set("HF_TOKEN").map(|token| token.trim().to_owned());
        Self::at(&endpoint, token.or_else(saved_token), Patience::USUAL)
    }

    /// The hub at an address.
    ///
    /// # Errors
    /// An address that is none.
    pub fn at(endpoint: &str, token: Option<String>, patience: Patience) -> Result<Self, Failure> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let uri = endpoint.parse::<Uri>().ok();
        let scheme = uri.as_ref().and_then(Uri::scheme_str);
        let host = uri.as_ref().and_then(Uri::host);
        let (Some(scheme @ ("http" | "https")), Some(host)) = (scheme, host) else {
            return Err(Failure::usage(format!(
                "HF_ENDPOINT={endpoint:?} is not a URL, such as {HUB}"
            )));
        };
        // It would be printed and saved.
        if uri
            .as_ref()
            .and_then(Uri::authority)
            .is_some_and(|of| of.as_str().contains('@'))
        {
            return Err(Failure::usage(
                "HF_ENDPOINT has a user's name or password; set HF_TOKEN instead",
            ));
        }
        let here = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
        let secure = scheme == "https";
        let roots = match cfg!(target_os = "android") {
            // The system's certificates can be reached from an app only.
            true => RootCerts::WebPki,
            false => RootCerts::PlatformVerifier,
        };
        let mut agent = Agent::config_builder()
            .http_status_as_error(false)
            // A redirect must not lead from TLS to a connection that anyone can read and change.
            .https_only(secure)
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            // The hub redirects to itself, too: texts, and repositories with a new name.
            .redirect_auth_headers(match secure {
                true => RedirectAuthHeaders::SameHost,
                false => RedirectAuthHeaders::Never,
            })
            .timeout_connect(Some(patience.silence))
            .timeout_recv_response(Some(patience.silence))
            .timeout_per_read(Some(patience.silence))
            .user_agent(concat!("emberflow/", env!("CARGO_PKG_VERSION")));
        if here {
            // A proxy would look for the hub on its own machine.
            agent = agent.proxy(None);
        }
        let agent = agent.build().new_agent();
        Ok(Self {
            agent,
            // Others could read it.
            token: token.filter(|_| secure || here),
            endpoint,
            patience,
        })
    }

    /// Its address.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Its address without `https://`, for messages.
    pub fn host(&self) -> &str {
        self.endpoint
            .split_once("://")
            .map_or(&self.endpoint, |(_, host)| host)
    }

    /// The files of a repository.
    ///
    /// # Errors
    /// No such repository, no access to it, no connection.
    pub fn repo(&self, name: &ModelName) -> Result<Repo, Failure> {
        let address = format!(
            "{}/api/models/{}/revision/main?blobs=true",
            self.endpoint,
            name.repo()
        );
        self.again(|| {
            let answer = self.get(&address, None, name)?;
            let listed = serde_json::from_slice(&self.body(answer, LIST)?);
            let listed = listed.map_err(|e| {
                let what = format!(
                    "{} does not answer as a hub of models does: {e}",
                    self.host()
                );
                Refused::Finally(Failure::Network(what))
            })?;
            Repo::new(listed).map_err(|what| {
                Refused::Finally(Failure::Network(format!("{}: {name}: {what}", self.host())))
            })
        })
    }

    /// The bytes of a file from `from` on, to `to` (exclusive) or its end.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn open(
        &self,
        name: &ModelName,
        repo: &Repo,
        file: &RemoteFile,
        from: u64,
        to: Option<u64>,
    ) -> Result<Response<Body>, Refused> {
        let address = format!(
            "{}/{}/resolve/{}/{}",
            self.endpoint,
            name.repo(),
            repo.commit,
            escaped(&file.path)
        );
        let range = match (from, to) {
            (0, None) => None,
            (from, None) => Some(format!("bytes={from}-")),
            (from, Some(to)) => Some(format!("bytes={from}-{}", to.saturating_sub(1))),
        };
        self.get(&address, range, name)
    }

    /// A request whose answer is a success.
    fn get(
        &self,
        address: &str,
        range: Option<String>,
        name: &ModelName,
    ) -> Result<Response<Body>, Refused> {
        let mut request = self.agent.get(address);
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(range) = range {
            request = request.header(header::RANGE, range);
        }
        let answer = request.call().map_err(|error| self.no_answer(&error))?;
        let status = answer.status().as_u16();
        if answer.status().is_success() {
            return Ok(answer);
        }
        let seconds = answer.headers().get(header::RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Err(self.refusal(status, seconds.map(Duration::from_secs), name))
    }

    /// The bytes of an answer, at most `most`.
    ///
    /// # Errors
    /// [`Refused`]: a connection that broke off, or that takes too long.
    pub fn body(&self, answer: Response<Body>, most: u64) -> Result<Vec<u8>, Refused> {
        let mut body = answer.into_body().into_reader().take(most);
        let (mut bytes, mut buffer) = (Vec::new(), vec![0; BUFFER]);
        let until = Instant::now() + self.patience.silence * 4;
        loop {
            match body.read(&mut buffer) {
                Ok(0) => return Ok(bytes),
                Ok(read) => bytes.extend_from_slice(&buffer[..read]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Refused::Now(self.lost(&e), None)),
            }
            if Instant::now() > until {
                return Err(Refused::Now(
                    format!("{} sends too slowly", self.host()),
                    None,
                ));
            }
        }
    }

    /// What a status means.
    fn refusal(&self, status: u16, asked: Option<Duration>, name: &ModelName) -> Refused {
        let host = self.host();
        let repo = name.repo();
        let search = format!("{}/models?search={}", self.endpoint, name.name);
        let finally = |what: String| Refused::Finally(Failure::Network(what));
        match status {
            401 | 403 if self.token.is_some() => finally(format!(
                "{host} does not give {repo} to the owner of this token (status {status}): the token may be wrong or \
                 expired, the model may not exist, or its terms have to be accepted at {}/{repo}",
                self.endpoint
            )),
            // The hub answers so for what does not exist, too.
            401 | 403 => finally(format!(
                "{host} has no model {repo}, or not for everyone (status {status}): look for its name at {search}, or, if it \
                 needs an account, accept its terms at {}/{repo} and set HF_TOKEN",
                self.endpoint
            )),
            404 => finally(format!(
                "{host} has no model {repo}, or not all of its files (status 404): look for its name at {search}"
            )),
            429 => Refused::Now(format!("{host} limits requests (status 429)"), asked),
            408 | 425 | 500..=599 => {
                Refused::Now(format!("{host} fails with status {status}"), asked)
            }
            _ => finally(format!("{host} refuses {repo} with status {status}")),
        }
    }

    /// Why there is no answer.
    fn no_answer(&self, error: &ureq::Error) -> Refused {
        let host = self.host();
        match error {
            ureq::Error::TooManyRedirects => {
                Refused::Finally(Failure::Network(format!("{host} redirects in a circle")))
            }
            ureq::Error::RedirectFailed => Refused::Finally(Failure::Network(format!(
                "{host} redirects to an address that is none"
            ))),
            ureq::Error::RequireHttpsOnly(to) => Refused::Finally(Failure::Network(format!(
                "{host} redirects to {to}, a connection without encryption, which is refused"
            ))),
            ureq::Error::Http(_) | ureq::Error::BadUri(_) | ureq::Error::InvalidProxyUrl => {
                Refused::Finally(Failure::Network(format!("{host}: {error}")))
            }
            ureq::Error::HostNotFound => Refused::Finally(Failure::Unreachable(format!(
                "{host} is not found: is there a connection to the network?"
            ))),
            ureq::Error::Rustls(e) => self.insecure(e),
            // Also of TLS: a certificate that is not trusted, or no TLS at all.
            ureq::Error::Io(e) if e.kind() == io::ErrorKind::InvalidData => self.insecure(e),
            _ => Refused::NoConnection(format!("cannot reach {host}: {error}")),
        }
    }

    fn insecure(&self, error: &dyn std::error::Error) -> Refused {
        Refused::Finally(Failure::Network(format!(
            "no secure connection to {}: {error}; SSL_CERT_FILE names a file of certificates to trust",
            self.host()
        )))
    }

    /// A connection that broke off.
    pub fn lost(&self, error: &io::Error) -> String {
        format!("the connection to {} broke off: {error}", self.host())
    }

    /// Asks until there is an answer.
    ///
    /// # Errors
    /// A final refusal, or as many others as patience allows.
    pub fn again<T>(&self, mut ask: impl FnMut() -> Result<T, Refused>) -> Result<T, Failure> {
        let mut failures = 0;
        loop {
            match ask() {
                Ok(answer) => return Ok(answer),
                // Nothing has begun: after a second try, people want to know.
                Err(Refused::NoConnection(why)) if failures > 0 => {
                    return Err(Failure::Unreachable(format!(
                        "{why}; check the network and HF_ENDPOINT ('emberflow list' shows the models on this machine)"
                    )));
                }
                Err(refused) => self.wait(refused, &mut failures)?,
            }
        }
    }

    /// Waits after a refusal. `failures` counts those in a row.
    ///
    /// # Errors
    /// The refusal, if it is final or the last that patience allows.
    pub fn wait(&self, refused: Refused, failures: &mut u32) -> Result<(), Failure> {
        let (why, asked) = match refused {
            Refused::Finally(failure) => return Err(failure),
            Refused::Now(why, asked) => (why, asked),
            Refused::NoConnection(why) => (why, None),
        };
        *failures += 1;
        if *failures >= self.patience.attempts {
            return Err(Failure::Unreachable(format!(
                "{why}; tried {failures} times"
            )));
        }
        let pause = self.patience.after(*failures, asked);
        tell(format_args!(
            "emberflow: {why}; trying again in {} s",
            pause.as_secs_f64().ceil()
        ));
        std::thread::sleep(pause);
        Ok(())
    }
}

/// The token that Hugging Face's programs save.
fn saved_token() -> Option<String> {
    let path = path_in("HF_TOKEN_PATH").or_else(|| Some(hugging_face_home()?.join("token")));
    let text = std::fs::read_to_string(path?).ok()?;
    let token = text.trim();
    let sane =
        !token.is_empty() && token.len() < 512 && token.bytes().all(|b| b.is_ascii_graphic());
    sane.then(|| token.to_owned())
}

/// A path as part of an address.
fn escaped(path: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~/".contains(&b);
    let bytes = path.bytes().map(|b| match plain(b) {
        true => char::from(b).to_string(),
        false => format!("%{b:02X}"),
    });
    bytes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_follow_the_hub_within_reason() {
        let patience = Patience::USUAL;
        let after = |failures, asked: Option<u64>| {
            patience
                .after(failures, asked.map(Duration::from_secs))
                .as_secs()
        };
        assert_eq!(
            [1, 2, 3, 4, 9].map(|failures| after(failures, None)),
            [1, 2, 4, 8, 32]
        );
        assert_eq!(after(1, Some(20)), 20);
        assert_eq!(after(1, Some(0)), 1);
        assert_eq!(after(1, Some(1 << 40)), 300);
    }

    #[test]
    fn tokens_are_sent_only_where_nobody_listens() {
        let token = |endpoint: &str| {
            let hub = Hub::at(endpoint, Some("t".into()), Patience::USUAL);
            hub.map(|hub| hub.token.is_some())
                .map_err(|e| e.to_string())
        };
        assert_eq!(token("https://example.org/"), Ok(true));
        assert_eq!(token("http://example.org"), Ok(false));
        assert_eq!(token("http://127.0.0.1:80"), Ok(true));
        assert!(token("example.org").is_err() && token("ftp://a").is_err() && token("").is_err());
    }

    #[test]
    fn paths_are_escaped() {
        assert_eq!(escaped("a/b c#?ü.gguf"), "a/b%20c%23%3F%C3%BC.gguf");
    }
}
