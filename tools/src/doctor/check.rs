//! The result of one check.

use serde::Serialize;
use serde_json::{Map, Value};

/// Status of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Ok,
    /// Something can be improved.
    Advice,
    /// Not reported by the system.
    Unknown,
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    #[serde(skip)]
    pub(super) name: &'static str,
    pub(super) status: Status,
    /// The finding.
    pub(super) found: String,
    /// Suggested change.
    pub(super) advice: Option<String>,
    /// The finding as data, for JSON.
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
