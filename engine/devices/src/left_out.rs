//! Passes that are faster without devices.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Passes that are faster without devices.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Whether they have rows of prompts; otherwise all decode.
    #[serde(default)]
    pub prompt: bool,
    /// Rows of a pass.
    pub rows: usize,
    /// Median of the passes with devices in milliseconds.
    pub with_ms: f64,
    /// Median of those without.
    pub without_ms: f64,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match (self.prompt, self.rows) {
            (false, 1) => "decoding 1 text".to_owned(),
            (false, rows) => format!("decoding {rows} texts"),
            (true, rows) => format!("prompts in passes of {rows} rows"),
        };
        write!(
            f,
            "left out of {what}: {:.1} ms a pass without, {:.1} ms with",
            self.without_ms, self.with_ms
        )
    }
}
