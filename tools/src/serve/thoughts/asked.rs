//! What requests say about thoughts, in the fields of several servers.

use serde::Deserialize;
use serde_json::{Map, Value};

/// The fields of a request.
#[derive(Debug, Default, Deserialize)]
pub struct Asked {
    chat_template_kwargs: Option<Map<String, Value>>,
    enable_thinking: Option<bool>,
    reasoning_effort: Option<String>,
    reasoning: Option<Reasoning>,
    reasoning_format: Option<String>,
}

/// As the responses interface asks.
#[derive(Debug, Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

impl Asked {
    /// Variables of the chat template. What `chat_template_kwargs` says comes first.
    pub fn variables(&self) -> Map<String, Value> {
        let nested = self.reasoning.as_ref().and_then(|r| r.effort.as_ref());
        let effort = self.reasoning_effort.as_ref().or(nested);
        let thinks = match effort.map(|effort| &**effort) {
            Some("none") => self.enable_thinking.or(Some(false)),
            _ => self.enable_thinking,
        };
        let mut all = self.chat_template_kwargs.clone().unwrap_or_default();
        let effort = effort.filter(|effort| *effort != "none");
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                all.entry(name).or_insert(value);
            }
        };
        set(
            "reasoning_effort",
            effort.map(|effort| effort.clone().into()),
        );
        // Families have either name.
        set("enable_thinking", thinks.map(Value::from));
        set("thinking", thinks.map(Value::from));
        all
    }

    /// Whether thoughts are told apart from the answer.
    pub fn separates(&self) -> bool {
        self.reasoning_format.as_deref() != Some("none")
    }
}
