//! Input items of `/v1/responses`, as messages of a chat.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::ApiError;
use super::response_tools::{arguments_of, function_name};

/// Items of tools that this server leaves out, from a conversation with another server. Their results are in the
/// messages after them.
const LEFT_OUT: [&str; 4] = [
    "web_search_call",
    "image_generation_call",
    "tool_search_call",
    "tool_search_output",
];

/// An input item.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub struct InItem {
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Value>,
}

impl InItem {
    /// Reads an item, number `at` of the input; `None` if it is left out.
    ///
    /// # Errors
    /// A member of another type.
    pub fn read(at: usize, item: Value) -> Result<Option<Self>, ApiError> {
        if (item["type"].as_str()).is_some_and(|kind| LEFT_OUT.contains(&kind)) {
            return Ok(None);
        }
        let item = Self::deserialize(item);
        item.map(Some).map_err(|why| {
            let message = format!("item {at} of `input` (the first is 0) is not valid: {why}");
            ApiError::param("input", message)
        })
    }

    /// A user's message.
    pub fn user(text: String) -> Self {
        Self {
            kind: None,
            role: Some("user".to_owned()),
            content: Some(text.into()),
            call_id: None,
            name: None,
            namespace: None,
            arguments: None,
            input: None,
            output: None,
            summary: None,
        }
    }

    /// Appends the item to the messages of a chat.
    ///
    /// # Errors
    /// An unknown kind of item.
    pub fn say(self, messages: &mut Vec<Value>) -> Result<(), ApiError> {
        match (self.kind.as_deref(), self.role.as_deref()) {
            (None | Some("message"), Some(role)) => match messages.last_mut() {
                Some(last) if role == "assistant" && only_reasons(last) => {
                    last["content"] = self.content.into();
                }
                _ => messages.push(json!({"role": role, "content": self.content})),
            },
            (Some("function_call" | "custom_tool_call"), _) => {
                let call = self.call();
                match messages.last_mut() {
                    // The items of one answer are one message.
                    Some(last) if last["role"] == "assistant" => match &mut last["tool_calls"] {
                        Value::Array(calls) => calls.push(call),
                        calls => *calls = json!([call]),
                    },
                    _ => messages
                        .push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
                }
            }
            (Some("function_call_output" | "custom_tool_call_output"), _) => messages.push(
                json!({"role": "tool", "tool_call_id": self.call_id, "content": self.output}),
            ),
            (Some("reasoning"), _) => {
                let text = match joined(self.content.as_ref()) {
                    text if text.is_empty() => joined(self.summary.as_ref()),
                    text => text,
                };
                // It belongs to the message that follows. Encrypted reasoning of other servers has no text.
                if !text.is_empty() {
                    messages.push(json!({"role": "assistant", "reasoning_content": text}));
                }
            }
            (kind, _) => {
                let message = format!(
                    "an item of type `{}` is not supported; messages, reasoning, calls of functions and custom tools, and their outputs are",
                    kind.unwrap_or("message without a role")
                );
                return Err(ApiError::param("input", message));
            }
        }
        Ok(())
    }

    /// The call in the format of chats.
    fn call(self) -> Value {
        let name = self.name.unwrap_or_default();
        let name = function_name(self.namespace.as_deref(), &name);
        let input = self
            .input
            .as_deref()
            .map(|input| arguments_of(input).into());
        let function = json!({"name": name, "arguments": self.arguments.or(input)});
        json!({"id": self.call_id, "type": "function", "function": function})
    }
}

/// Whether a message has reasoning only, so that it continues with the next item.
fn only_reasons(message: &Value) -> bool {
    let given = |name: &str| message.get(name).is_some_and(|value| !value.is_null());
    message["role"] == "assistant"
        && given("reasoning_content")
        && !given("content")
        && !given("tool_calls")
}

/// The text of a reasoning item's parts.
fn joined(parts: Option<&Value>) -> String {
    match parts {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(items: Value) -> Result<Value, ApiError> {
        let mut messages = Vec::new();
        for (at, item) in items.as_array().unwrap().iter().enumerate() {
            if let Some(item) = InItem::read(at, item.clone())? {
                item.say(&mut messages)?;
            }
        }
        Ok(messages.into())
    }

    /// A turn of Codex: reasoning, a text and two calls are one message.
    #[test]
    fn the_items_of_an_answer_are_one_message() {
        let items = json!([
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": "Fix it."},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": null},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "tool_search_call", "call_id": null, "execution": "server", "arguments": {"query": "docs", "limit": 8}},
            {"type": "function_call", "call_id": "c1", "name": "find", "namespace": "mcp__docs", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "a\n\"b\""},
            {"type": "function_call_output", "call_id": "c1", "output": "none"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        ]);
        let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let wanted = json!([
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": "Fix it."},
            {
                "role": "assistant",
                "reasoning_content": "Hm.",
                "content": [{"type": "output_text", "text": "I look."}],
                "tool_calls": [
                    call("c1", "mcp__docs__find", "{}"),
                    call("c2", "apply_patch", r#"{"input":"a\n\"b\""}"#),
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "none"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "input_text", "text": "done"}]},
        ]);
        assert_eq!(messages(items).unwrap(), wanted);
    }

    #[test]
    fn reasoning_without_text_is_skipped_and_unknown_items_are_named() {
        let encrypted = json!([{"type": "reasoning", "summary": [], "encrypted_content": "x"}]);
        assert_eq!(messages(encrypted).unwrap(), json!([]));
        let summary = json!([{"type": "reasoning", "content": null, "summary": [{"type": "summary_text", "text": "S"}]}]);
        assert_eq!(messages(summary).unwrap()[0]["reasoning_content"], "S");
        for kind in ["item_reference", "local_shell_call"] {
            let error = messages(json!([{"type": kind, "id": "x"}]))
                .unwrap_err()
                .body();
            assert_eq!(error["error"]["param"], "input");
            assert!(error["error"]["message"].as_str().unwrap().contains(kind));
        }
    }

    #[test]
    fn items_that_are_not_valid_are_named_by_their_index() {
        let items = json!([
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": 7, "name": "find", "arguments": "{}"},
        ]);
        let error = messages(items).unwrap_err().body();
        assert_eq!(error["error"]["param"], "input");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("item 1 of `input`"), "{message}");
        assert!(message.contains("expected a string"), "{message}");
        let text = messages(json!(["Hi"])).unwrap_err().body();
        let message = text["error"]["message"].as_str().unwrap();
        assert!(message.contains("item 0 of `input`"), "{message}");
    }
}
