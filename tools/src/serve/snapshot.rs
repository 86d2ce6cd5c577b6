//! Engine state that is only collected on request.

use emberflow_engine::LayerResidency;
use serde_json::{Value, json};

/// State of the engine and its sequences.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Running sequences.
    pub slots: Vec<Slot>,
    /// Sequences that wait for a request that continues them.
    pub idle: Vec<IdleSlot>,
    /// Resident neurons per layer.
    pub layers: Vec<LayerResidency>,
    /// Memory by purpose.
    pub memory: Vec<MemoryPart>,
    /// Memory budget.
    pub budget: u64,
}

/// One entry of the memory budget.
#[derive(Debug, Clone, Copy)]
pub struct MemoryPart {
    /// Purpose.
    pub name: &'static str,
    /// Size.
    pub bytes: u64,
}

/// A running sequence.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Number of its place, below `--parallel`.
    pub id: usize,
    /// Background request.
    pub proactive: bool,
    /// Prompt tokens.
    pub prompt: usize,
    /// Generated tokens.
    pub tokens: usize,
    /// Whether it is preempted.
    pub aside: bool,
}

impl Slot {
    /// Its entry in `/slots`.
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
            "is_processing": true,
        })
    }
}

/// A sequence of a finished request.
#[derive(Debug, Clone, Copy)]
pub struct IdleSlot {
    /// Number of its place.
    pub id: usize,
    /// Tokens in it.
    pub tokens: usize,
}

impl IdleSlot {
    /// Its entry in `/slots`.
    pub fn json(&self) -> Value {
        json!({
            "id": self.id,
            "tokens": self.tokens,
            "state": "idle",
            "is_processing": false,
        })
    }
}
