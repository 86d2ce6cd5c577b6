//! Errors.

use std::fmt;

/// Kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// No library was found.
    Missing,
    /// A statically linked program cannot load libraries.
    Static,
    /// A library, provider or driver is unusable or failed.
    Broken,
}

impl Cause {
    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Static => "static",
            Self::Broken => "broken",
        }
    }
}

/// An error of the library or of a provider.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    /// Kind of error.
    pub cause: Cause,
    /// Message: the failure and the remedy.
    pub what: String,
}

impl Error {
    /// An error of kind [`Cause::Broken`].
    pub(crate) fn broken(what: impl Into<String>) -> Self {
        let (cause, what) = (Cause::Broken, what.into());
        Self { cause, what }
    }

    /// An error of the library; its message is joined to one line.
    pub(crate) fn of(e: impl fmt::Display) -> Self {
        let text = e.to_string();
        Self::broken(text.lines().collect::<Vec<_>>().join(" "))
    }
}
