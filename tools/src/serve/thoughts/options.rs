//! Reasoning fields of requests, as several servers name them.

use serde::Deserialize;
use serde_json::{Map, Value};

/// Request fields.
#[derive(Debug, Default, Deserialize)]
pub struct ReasoningOptions {
    chat_template_kwargs: Option<Map<String, Value>>,
    enable_thinking: Option<bool>,
    reasoning_effort: Option<String>,
    reasoning: Option<Reasoning>,
    reasoning_format: Option<String>,
}

/// `reasoning` of the Responses API.
#[derive(Debug, Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

impl ReasoningOptions {
    /// Variables of the chat template. `chat_template_kwargs` takes precedence.
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
        // Model families use either name.
        set("enable_thinking", thinks.map(Value::from));
        set("thinking", thinks.map(Value::from));
        all
    }

    /// Whether reasoning is separated from the answer.
    pub fn separates(&self) -> bool {
        self.reasoning_format.as_deref() != Some("none")
    }
}
