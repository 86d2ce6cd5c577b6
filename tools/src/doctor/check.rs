//! One thing that was looked at, and how it came out.

use serde::Serialize;
use serde_json::{Map, Value};

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Ok,
    /// Something can be better.
    Advice,
    /// The system did not say.
    Unknown,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    #[serde(skip)]
    pub(super) name: &'static str,
    pub(super) status: Status,
    /// What is there, in words.
    pub(super) found: String,
    /// What to change.
    pub(super) advice: Option<String>,
    /// The same as `found` for programs.
    #[serde(flatten)]
    pub(super) data: Map<String, Value>,
}

impl Check {
    pub(super) fn new(name: &'static str, status: Status, found: impl Into<String>) -> Self {
        Self {
            name,
            status,
            found: found.into(),
            advice: None,
            data: Map::new(),
        }
    }

    pub(super) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self::new(name, Status::Ok, found)
    }

    pub(super) fn unknown(name: &'static str, why: impl Into<String>) -> Self {
        Self::new(name, Status::Unknown, why)
    }

    pub(super) fn advise(mut self, advice: impl Into<String>) -> Self {
        self.status = Status::Advice;
        self.advice = Some(advice.into());
        self
    }

    pub(super) fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.data.insert(key.into(), value.into());
        self
    }
}
