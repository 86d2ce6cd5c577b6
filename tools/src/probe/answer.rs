//! What a child process says of a device.

use std::process::Command;
use std::time::{Duration, Instant};

use emberflow_devices::DeviceError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::child::{ChildBounds, ask};

/// Number of bytes of a child's output that are stored.
const BYTES: usize = 64 << 10;

/// Cause of a device's failure: the engine's causes, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// No library was found, or none with the provider.
    Missing,
    /// This program is statically linked and cannot load libraries.
    Static,
    /// A library, a provider or a driver is unusable, or fails.
    Broken,
}

/// A device that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unusable {
    /// Cause.
    pub cause: Cause,
    /// What failed, with a remedy.
    pub what: String,
}

impl Unusable {
    /// Of a library or driver that fails.
    pub(crate) fn broken(what: impl Into<String>) -> Self {
        let (cause, what) = (Cause::Broken, what.into());
        Self { cause, what }
    }

    /// The failure of a device.
    pub(crate) fn of(self, device: impl Into<String>) -> DeviceError {
        DeviceError {
            device: device.into(),
            what: self.what,
        }
    }
}

/// The line of JSON printed by a child process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer<T> {
    Found(T),
    Unusable(Unusable),
}

/// The answer of a child process that is never without progress for `limit`, and takes at most `total`.
///
/// # Errors
/// Its own, or it crashed or hung.
pub(crate) fn answer_of<T: DeserializeOwned>(
    program: Command,
    args: &[&str],
    [limit, total]: [Duration; 2],
) -> Result<T, Unusable> {
    if let Some(refused) = refused(cfg!(target_feature = "crt-static")) {
        return Err(refused);
    }
    let bounds = ChildBounds {
        bytes: BYTES,
        time: limit,
        total,
    };
    let start = Instant::now();
    let ended = ask(program, args, Vec::new(), bounds);
    let ended = ended.map_err(|e| Unusable::broken(format!("cannot start a process: {e}")))?;
    let [output, errors] =
        [&ended.output, &ended.errors].map(|bytes| String::from_utf8_lossy(bytes));
    match ended.status {
        None if start.elapsed() >= total => Err(Unusable::broken(format!(
            "took more than {} seconds: update its library or driver",
            total.as_secs()
        ))),
        None => Err(Unusable::broken(format!(
            "made no progress within {} seconds: its library or driver hangs; update it",
            limit.as_secs()
        ))),
        Some(status) if status.success() => match answer(&output) {
            Some(Answer::Found(found)) => Ok(found),
            Some(Answer::Unusable(unusable)) => Err(unusable),
            None => Err(Unusable::broken("ended without an answer")),
        },
        Some(status) if status.code().is_some() => {
            Err(Unusable::broken(error(&errors).unwrap_or_else(|| {
                format!("its process ended without a message ({status})")
            })))
        }
        Some(status) => Err(Unusable::broken(format!(
            "its library or driver crashed ({status}): update it"
        ))),
    }
}

/// The error of a program that is linked statically, for which no process is started.
fn refused(is_static: bool) -> Option<Unusable> {
    is_static.then(|| Unusable {
        cause: Cause::Static,
        what: "this program is linked statically and cannot load libraries of devices: use one that is linked \
               dynamically, as `cargo build --release` makes it (on a phone in Termux, docs/phone.md)"
            .into(),
    })
}

/// The last line with a result: libraries and drivers also print lines, some only at the end.
fn answer<T: DeserializeOwned>(output: &str) -> Option<Answer<T>> {
    let mut lines = output.lines().rev();
    lines.find_map(|line| serde_json::from_str(line).ok())
}

/// The message of a panic, or else the last line, if there is one.
fn error(text: &str) -> Option<String> {
    let panic = text
        .lines()
        .skip_while(|line| !line.contains(" panicked at "));
    let message = panic
        .skip(1)
        .take_while(|line| !line.starts_with("note: ") && !line.starts_with("stack backtrace:"));
    let message: Vec<&str> = message.collect();
    if !message.is_empty() {
        return Some(message.join(" "));
    }
    let last = text.lines().last()?;
    Some(last.trim_start_matches("emberflow: ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_program_names_the_build_that_can() {
        let refused = refused(true).unwrap();
        assert_eq!(refused.cause, Cause::Static);
        for words in [
            "linked statically",
            "cargo build --release",
            "docs/phone.md",
        ] {
            assert!(refused.what.contains(words), "{refused:?}");
        }
        assert!(!refused.what.contains("pip"), "{refused:?}");
        assert_eq!(super::refused(false), None);
    }

    #[test]
    fn errors_of_a_process_are_its_panic_or_its_last_line() {
        let panic = "one\nthread 'main' panicked at a.rs:1:\nfirst\nsecond\nnote: run with";
        assert_eq!(error(panic).as_deref(), Some("first second"));
        assert_eq!(error("one\nemberflow: two\n").as_deref(), Some("two"));
        assert_eq!(error(""), None);
    }
}
