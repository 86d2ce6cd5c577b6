//! What goes wrong.

use std::fmt;

/// An error of the library or of a provider.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

impl Error {
    /// An error of the library, in one line.
    pub(crate) fn of(e: impl fmt::Display) -> Self {
        let text = e.to_string();
        Self(text.lines().collect::<Vec<_>>().join(" "))
    }
}
