//! What requests say about their rules, in the fields of several servers.

use serde::Deserialize;
use serde_json::Value;

use super::super::error::ApiError;

/// The fields of a request.
#[derive(Debug, Default, Deserialize)]
pub struct Asked {
    response_format: Option<Value>,
    json_schema: Option<Value>,
    grammar: Option<String>,
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    structured_outputs: Option<Structured>,
}

/// vLLM's newer names.
#[derive(Debug, Default, Deserialize)]
struct Structured {
    json: Option<Value>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
}

/// What a text is held to.
#[derive(Debug, Clone, PartialEq)]
pub enum Rules {
    /// JSON that is valid against a schema.
    Schema(Value),
    /// A grammar in llguidance's form of Lark, or in llama.cpp's, written by the client.
    Grammar(String),
    /// A grammar that the server wrote; its schemas are bounded.
    Written {
        /// For the model's tokens.
        grammar: String,
        /// The same without tokens that only this model has.
        tried: String,
    },
    /// A regular expression for the whole text.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
}

impl Rules {
    /// Any JSON object.
    pub fn object() -> Self {
        Self::Schema(serde_json::json!({"type": "object"}))
    }

    /// What a `response_format` object asks for, or the `format` of a response's `text`, in which the
    /// schema is not wrapped once more.
    pub fn of_format(format: &Value, field: &'static str) -> Result<Option<Self>, ApiError> {
        let refuse = |message: String| Err(ApiError::param(field, message));
        match format["type"].as_str() {
            Some("text") => Ok(None),
            Some("json_object") => {
                let schema = format.get("schema").cloned();
                Ok(Some(schema.map_or_else(Self::object, Self::Schema)))
            }
            Some("json_schema") => {
                let inner = format.get("json_schema").unwrap_or(format);
                match inner.get("schema") {
                    Some(schema) if !schema.is_null() => Ok(Some(Self::Schema(schema.clone()))),
                    _ => refuse(format!("`{field}` has no `schema`")),
                }
            }
            Some(other) => refuse(format!(
                "type `{other}` is not supported; use `text`, `json_object` or `json_schema`"
            )),
            None => refuse(format!("`{field}` has no `type`")),
        }
    }
}

impl Asked {
    /// Sets what a response's `text.format` asks for.
    pub fn set_format(&mut self, format: Value) {
        self.response_format = Some(format);
    }

    /// The rules, if there are any.
    ///
    /// # Errors
    /// More than one kind, or a malformed one.
    pub fn rules(&self) -> Result<Option<Rules>, ApiError> {
        let none = Structured::default();
        let newer = self.structured_outputs.as_ref().unwrap_or(&none);
        let format = self.response_format.as_ref().filter(|f| !f.is_null());
        let format = format.map(|f| Rules::of_format(f, "response_format"));
        let schemas = [&self.json_schema, &self.guided_json, &newer.json];
        let schemas = schemas.into_iter().flatten().filter(|s| !s.is_null());
        let grammars = [&self.grammar, &self.guided_grammar, &newer.grammar];
        let grammars = grammars.into_iter().flatten().filter(|g| !g.is_empty());
        let regexes = [&self.guided_regex, &newer.regex].into_iter().flatten();
        let choices = [&self.guided_choice, &newer.choice].into_iter().flatten();
        let object = newer.json_object.filter(|&wanted| wanted);
        let mut all: Vec<Rules> = format.transpose()?.flatten().into_iter().collect();
        all.extend(schemas.cloned().map(Rules::Schema));
        all.extend(grammars.cloned().map(Rules::Grammar));
        all.extend(regexes.cloned().map(Rules::Regex));
        all.extend(choices.cloned().map(Rules::Choice));
        all.extend(object.map(|_| Rules::object()));
        match all.len() {
            0 | 1 => Ok(all.pop()),
            _ => Err(ApiError::invalid(
                "a text is held to one thing: `response_format`, a schema, a grammar, an expression or \
                 a choice",
            )),
        }
    }
}
