//! Grammar and schema fields of requests, as several servers name them.

use serde::Deserialize;
use serde_json::Value;

use super::super::error::ApiError;

/// Request fields.
#[derive(Debug, Default, Deserialize)]
pub struct ConstraintOptions {
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

/// A constraint on a text.
#[derive(Debug, Clone, PartialEq)]
pub enum Rules {
    /// JSON that is valid against a schema.
    Schema(Value),
    /// A grammar from the client: llguidance's dialect of Lark, or llama.cpp's GBNF.
    Grammar(String),
    /// A grammar written by the server, with bounded schemas.
    Written {
        /// With the special tokens of the model.
        grammar: String,
        /// With ordinary text in place of them, for the trial compilation.
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

    /// The constraint of a `response_format` object, or of `text.format` of the Responses API, in which the schema is
    /// not nested.
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

impl ConstraintOptions {
    /// The constraint, if there is one.
    ///
    /// # Errors
    /// More than one, or an invalid one.
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
                "only one of `response_format`, a schema, a grammar, a regular expression and a choice \
                 is allowed",
            )),
        }
    }
}
