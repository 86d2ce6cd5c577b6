//! What goes wrong.

use std::fmt;

/// What an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// There is no library where it is looked for.
    Missing,
    /// A program that is linked statically cannot load libraries.
    Static,
    /// A library, a provider or a driver that cannot be used, or that fails.
    Broken,
}

impl Cause {
    /// Its name, in lower case.
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
    /// What it is about.
    pub cause: Cause,
    /// What failed, and what to do.
    pub what: String,
}

impl Error {
    /// Something that cannot be used, or that failed.
    pub(crate) fn broken(what: impl Into<String>) -> Self {
        let (cause, what) = (Cause::Broken, what.into());
        Self { cause, what }
    }

    /// An error of the library, in one line.
    pub(crate) fn of(e: impl fmt::Display) -> Self {
        let text = e.to_string();
        Self::broken(text.lines().collect::<Vec<_>>().join(" "))
    }
}
