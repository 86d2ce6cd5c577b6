//! Chat templates: render a conversation as the text format a model was trained on.
//!
//! Templates are Jinja as in Hugging Face's `apply_chat_template`: block tags swallow their line;
//! Python's string methods, `raise_exception`, `strftime_now`, a `tojson` that does not escape
//! HTML, `break` and `continue` exist; `documents` is `None`, and `tools` where there are none. A template is code from
//! a file: it can compute, but cannot access files, and its number of steps is bounded.

pub mod date;
mod json;
mod methods;

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Maximum steps per rendering. A long conversation needs some hundred thousand; a triply nested
/// loop is stopped within a second or two.
const MAX_STEPS: u64 = 10_000_000;

/// One turn of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// The text.
    pub content: String,
    /// Calls of tools that the assistant made, as clients of OpenAI's interface write them, but with
    /// arguments as objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<serde_json::Value>,
    /// The call that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of who speaks, or of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A compiled chat template with the special tokens it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles `template`. `bos` and `eos` are the texts of the tokens, empty if the tokenizer has
    /// none.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template does not parse.
    pub fn new(template: &str, bos: &str, eos: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(explain)?);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_unknown_method_callback(methods::call);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment
            .add_template_owned("chat", without_generation_tags(template))
            .map_err(explain)?;
        let mut compiled = Self {
            environment,
            source: template.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            tokens: BTreeMap::new(),
        };
        compiled.set_clock(None);
        Ok(compiled)
    }

    /// Defines special tokens by name (`pad_token`, `unk_token` and others). They go before the two
    /// that [`new`](Self::new) was given.
    #[must_use]
    pub fn with_tokens(self, tokens: BTreeMap<String, String>) -> Self {
        Self { tokens, ..self }
    }

    /// The special tokens by name.
    pub fn tokens(&self) -> &BTreeMap<String, String> {
        &self.tokens
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Text of the token that begins a text.
    pub fn bos(&self) -> &str {
        &self.bos
    }

    /// Text of the token that ends a text.
    pub fn eos(&self) -> &str {
        &self.eos
    }

    /// Fixes the time for `strftime_now`, in seconds since 1970 (UTC); `None` uses the system
    /// clock. A template that writes today's date gives another prompt tomorrow, so set a time to
    /// compare prompts.
    pub fn set_clock(&mut self, unix_seconds: Option<i64>) {
        let now = move |format: &str| -> Result<String, minijinja::Error> {
            let seconds = unix_seconds.unwrap_or_else(|| {
                let since = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default();
                i64::try_from(since.as_secs()).unwrap_or(0)
            });
            date::strftime(format, seconds)
                .map_err(|reason| minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        };
        self.environment.add_function("strftime_now", now);
    }

    /// Renders the prompt for `messages`. `add_generation_prompt` also opens the assistant's next
    /// turn. The text contains its own special tokens: tokenise it without adding more.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template rejects the conversation (its `raise_exception`),
    /// uses something unknown, or does not terminate.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        self.render_with_tools(messages, &[], add_generation_prompt)
    }

    /// As [`render`](Self::render); the model may call `tools`, objects as clients of OpenAI's
    /// interface send them. A template that does not know tools does not show them.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let messages: Vec<Value> = messages.iter().map(turn).collect();
        let tools = match tools {
            [] => Value::from(()),
            tools => tools.iter().map(json::value).collect(),
        };
        let tokens = self.tokens.iter();
        let named = tokens.map(|(name, text)| (name.as_str(), Value::from(text.as_str())));
        let context = [
            ("bos_token", Value::from(self.bos.as_str())),
            ("eos_token", Value::from(self.eos.as_str())),
        ];
        // What comes later goes before.
        let context = Value::from_pairs(context.into_iter().chain(named).chain([
            ("messages", Value::from(messages)),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", tools),
            ("documents", Value::from(())),
        ]));
        let template = self.environment.get_template("chat").map_err(explain)?;
        template.render(context).map_err(explain)
    }
}

/// A message as templates see it: what it does not have is not defined.
fn turn(message: &Message) -> Value {
    let (role, content) = (message.role.as_str(), message.content.as_str());
    let mut all = vec![
        ("role", Value::from(role)),
        ("content", Value::from(content)),
    ];
    let calls = message.tool_calls.as_ref().map(json::value);
    all.extend(calls.map(|calls| ("tool_calls", calls)));
    let texts = [
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ];
    for (key, text) in texts {
        all.extend(text.as_deref().map(|text| (key, Value::from(text))));
    }
    Value::from_pairs(all)
}

/// `raise_exception(message)`: an error raised by the template.
fn raise_exception(message: &str) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(
        ErrorKind::InvalidOperation,
        format!("refused by the template: {message}"),
    ))
}

fn explain(error: minijinja::Error) -> Error {
    let mut reason = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    if let Some(line) = error.line() {
        reason.push_str(&format!(" (line {line})"));
    }
    Error::ChatTemplate { reason }
}

/// Replaces `{% generation %}`, which marks the assistant's words for training and writes nothing.
/// The engine has no such tag; an `if` that always holds has the same effect.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let inner = tag.trim_start_matches("{%").trim_end_matches("%}");
        let name = inner.trim_matches(['-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag.replace(name, "if true")),
            "endgeneration" => out.push_str(&tag.replace(name, "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
