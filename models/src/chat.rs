//! Chat templates: render a conversation as the text format a model was trained on.
//!
//! Templates are Jinja as in Hugging Face's `apply_chat_template`: block tags swallow their line; values are
//! formatted as in Python; Python's methods, jinja2's filters and tests, `raise_exception`, `strftime_now`, a
//! `tojson` that does not escape HTML, `break` and `continue` exist; `documents` is `None`, and so is `tools`
//! without tools. A template is code from a file: it can compute, but cannot access files, and its number of
//! steps is bounded.

pub mod date;
mod filters;
mod json;
mod methods;
mod python;
mod source;

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::Error;

/// Maximum steps per rendering. A long conversation needs some hundred thousand; a triply nested
/// loop is stopped within a second or two.
const MAX_STEPS: u64 = 10_000_000;

/// Names of a message's reasoning in clients and templates. The first one is the standard.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One message of a conversation: an object as clients of OpenAI's interface send it, but with the arguments
/// of calls as objects. Templates see all of its members; null members are undefined.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Message(Map<String, Json>);

impl Message {
    /// A message of `system`, `user`, `assistant`, or another role of the template, with its text.
    pub fn new(role: &str, content: &str) -> Self {
        let mut message = Self::default();
        message.set("role", role.into());
        message.set("content", content.into());
        message
    }

    /// Sets a member.
    pub fn set(&mut self, name: &str, value: Json) {
        self.0.insert(name.to_owned(), value);
    }

    /// A member, if it is there and not null.
    pub fn get(&self, name: &str) -> Option<&Json> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// The form that templates see. Reasoning has all of its names.
    fn value(&self) -> Value {
        let reasoning = REASONING.iter().find_map(|name| self.get(name));
        let named = |name: &&str| Some(((*name).to_owned(), reasoning?.clone()));
        // A name that the message has stays in its place.
        let others = REASONING[1..]
            .iter()
            .filter(|name| self.get(name).is_none());
        let mut all: Map<String, Json> = others.filter_map(&named).collect();
        let given = self.0.iter().filter(|(_, value)| !value.is_null());
        all.extend(given.map(|(name, value)| (name.clone(), value.clone())));
        all.extend(named(&REASONING[0]));
        json::value(&Json::Object(all))
    }

    /// The same with the arguments of calls as JSON text.
    fn with_text_arguments(&self) -> Self {
        let mut message = self.clone();
        let calls = message.0.get_mut("tool_calls").and_then(Json::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && arguments.is_object()
            {
                *arguments = json::text(arguments).into();
            }
        }
        message
    }
}

/// Input of a template.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// The messages.
    pub messages: Vec<Message>,
    /// Tools that the model may call: objects as clients of OpenAI's interface send them. Templates without
    /// tool support ignore them.
    pub tools: Vec<Json>,
    /// Whether to open the assistant's next message.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Json>,
}

/// Compiled chat templates with the special tokens they may write.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    tool_source: Option<String>,
    tokens: Vec<(String, String)>,
}

/// Names of the two templates.
const CHAT: &str = "chat";
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Compiles `template`. `tokens`: names and texts of special tokens, such as `bos_token`; tokens that the
    /// tokenizer lacks are left out.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template does not parse.
    pub fn new(template: &str, tokens: &[(&str, &str)]) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(explain)?);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_formatter(|out, _, value| Ok(python::write(out, value)?));
        environment.set_unknown_method_callback(methods::call);
        filters::add(&mut environment);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        let mut compiled = Self {
            environment,
            source: template.to_owned(),
            tool_source: None,
            tokens: tokens
                .iter()
                .map(|&(name, text)| (name.to_owned(), text.to_owned()))
                .collect(),
        };
        compiled.add(CHAT, template)?;
        compiled.set_clock(None);
        Ok(compiled)
    }

    /// The same with a separate template for conversations with tools.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_tool_use(mut self, template: Option<&str>) -> Result<Self, Error> {
        if let Some(template) = template {
            self.add(TOOL_USE, template)?;
            self.tool_source = Some(template.to_owned());
        }
        Ok(self)
    }

    fn add(&mut self, name: &'static str, template: &str) -> Result<(), Error> {
        let added = self
            .environment
            .add_template_owned(name, source::prepared(template));
        added.map_err(explain)
    }

    /// The template's text; with tools, that of the template for them.
    pub fn source(&self, with_tools: bool) -> &str {
        match &self.tool_source {
            Some(source) if with_tools => source,
            _ => &self.source,
        }
    }

    /// Text of the template for conversations with tools, if separate.
    pub fn tool_source(&self) -> Option<&str> {
        self.tool_source.as_deref()
    }

    /// Names and texts of the special tokens.
    pub fn tokens(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tokens.iter().map(|(name, text)| (&**name, &**text))
    }

    /// Fixes the time for `strftime_now`, in seconds since 1970 (UTC); `None` uses the system
    /// clock. A template that writes the date gives another prompt tomorrow, so set a time to
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

    /// Renders the prompt for a conversation. The text contains its own special tokens: tokenise it without
    /// adding more.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template rejects the conversation (its `raise_exception`),
    /// uses something unknown, or does not terminate.
    pub fn render(&self, conversation: &Conversation) -> Result<String, Error> {
        let messages = &conversation.messages;
        let rendered = self.render_messages(messages, conversation);
        if rendered.is_ok() {
            return rendered;
        }
        // Some templates join the arguments of calls to other text, as DeepSeek V3's.
        let texts: Vec<Message> = messages.iter().map(Message::with_text_arguments).collect();
        if texts == *messages {
            return rendered;
        }
        self.render_messages(&texts, conversation).or(rendered)
    }

    fn render_messages(
        &self,
        messages: &[Message],
        conversation: &Conversation,
    ) -> Result<String, Error> {
        let tools = &conversation.tools;
        let name = match &self.tool_source {
            Some(_) if !tools.is_empty() => TOOL_USE,
            _ => CHAT,
        };
        let messages: Vec<Value> = messages.iter().map(Message::value).collect();
        let tools = match &tools[..] {
            [] => Value::from(()),
            tools => tools.iter().map(json::value).collect(),
        };
        // later members take precedence
        let tokens = self.tokens().map(|(name, text)| (name, Value::from(text)));
        let variables = conversation.variables.iter();
        let variables = variables.map(|(name, value)| (&**name, json::value(value)));
        let generation = Value::from(conversation.add_generation_prompt);
        let context = [("documents", Value::from(()))]
            .into_iter()
            .chain(tokens)
            .chain(variables)
            .chain([
                ("messages", Value::from(messages)),
                ("add_generation_prompt", generation),
                ("tools", tools),
            ]);
        let template = self.environment.get_template(name).map_err(explain)?;
        let context = Value::from_pairs(context);
        template.render(context).map_err(explain)
    }
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

#[cfg(test)]
mod tests;
