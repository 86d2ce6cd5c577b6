//! State of the engine that is only told when somebody asks.

use emberflow_engine::LayerResidency;
use serde_json::{Value, json};

/// The engine and its texts.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Texts that run.
    pub slots: Vec<Slot>,
    /// What is in memory of each layer.
    pub layers: Vec<LayerResidency>,
    /// The budget's entries by purpose.
    pub memory: Vec<Part>,
    /// The budget.
    pub budget: u64,
}

/// Bytes of the budget.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// What for.
    pub name: &'static str,
    /// How many.
    pub bytes: u64,
}

/// A text that runs.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Its number since the start.
    pub id: u64,
    /// Background work.
    pub proactive: bool,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Generated tokens.
    pub tokens: usize,
    /// Set aside for others.
    pub aside: bool,
}

impl Slot {
    /// Its entry of `/slots`.
    pub fn json(&self) -> Value {
        let state = match (self.aside, self.tokens) {
            (true, _) => "set aside",
            (false, 0) => "prompt",
            (false, _) => "decoding",
        };
        json!({
            "id": self.id,
            "class": if self.proactive { "proactive" } else { "reactive" },
            "prompt_tokens": self.prompt,
            "tokens": self.tokens,
            "state": state,
        })
    }
}
