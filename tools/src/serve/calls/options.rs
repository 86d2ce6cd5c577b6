//! Tools of requests.

use std::sync::Arc;

use emberflow_models::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::rules::{ParameterSchema, Rules, bounded};
use super::format::CallFormat;
use super::grammar::{Calls, grammar};
use super::header::Callee;
use super::reader::CallReader;
use super::types::KindFinder;

/// Maximum tools of a request.
const MAX_TOOLS: usize = 128;
/// Maximum length of a tool's name.
const MAX_NAME: usize = 128;

/// Request fields.
#[derive(Debug, Default, Deserialize)]
pub struct ToolOptions {
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
}

/// How a request's tools are handled.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    format: CallFormat,
    callees: Arc<[Callee]>,
    /// Whether only the first call counts.
    single: bool,
    /// Tools for the chat template.
    pub tools: Vec<Value>,
    /// Grammar of the text, if calls are constrained.
    pub rules: Option<Rules>,
    /// Whether the text must be a call.
    pub forced: bool,
    /// Special tokens shown as text: markers of calls.
    pub signs: Arc<[u32]>,
}

impl Plan {
    /// A parser of calls.
    pub fn reader(&self) -> CallReader {
        CallReader::new(
            self.format.frames.clone(),
            self.callees.clone(),
            self.single,
        )
    }
}

/// Which tools must be called.
enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

impl ToolOptions {
    /// Whether there are tools.
    pub fn is_given(&self) -> bool {
        self.tools.as_ref().is_some_and(|tools| !tools.is_empty())
    }

    /// The plan for a model with this format of calls; `None` without tools or if none may be called.
    ///
    /// # Errors
    /// Invalid, too many or too large tools.
    pub fn plan(
        &self,
        format: &CallFormat,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Plan>, ApiError> {
        let choice = self.choice()?;
        let tools = self.checked()?;
        if tools.is_empty() {
            return match choice {
                ToolChoice::None | ToolChoice::Auto => Ok(None),
                _ => Err(ApiError::param(
                    "tool_choice",
                    "`tools` is missing or empty",
                )),
            };
        }
        let forced: Vec<&Tool> = match &choice {
            ToolChoice::None => return Ok(None),
            ToolChoice::Auto => Vec::new(),
            ToolChoice::Required => tools.iter().collect(),
            ToolChoice::Named(name) => {
                let found = tools.iter().find(|tool| &tool.name == name);
                let message = || format!("no tool has the name `{name}`");
                vec![found.ok_or_else(|| ApiError::param("tool_choice", message()))?]
            }
        };
        let is_forced = !forced.is_empty();
        let single = self.parallel_tool_calls == Some(false);
        let calls = match &choice {
            ToolChoice::Required if !single => Some(Calls::Some),
            _ if is_forced => Some(Calls::One),
            _ if !tools.iter().any(|tool| tool.strict) => None,
            // Text outside of calls uses special tokens, which the grammar cannot express.
            _ if format.harmony || format.frames.is_empty() => {
                let schemas = tools.iter().map(|tool| tool.schema(false));
                bounded(schemas.collect()).map_err(|e| ApiError::param("tools", e))?;
                None
            }
            _ => Some(Calls::Any),
        };
        let callable = if is_forced {
            forced
        } else {
            tools.iter().collect()
        };
        let callable = callable.iter().map(|tool| tool.schema(is_forced));
        let format = match is_forced {
            true => format.forced(tokenizer),
            false => format.clone(),
        };
        let rules = calls.map(|calls| grammar(&format, tokenizer, callable.collect(), calls));
        Ok(Some(Plan {
            callees: tools.iter().map(Tool::callee).collect(),
            single,
            rules: rules.transpose()?,
            forced: is_forced,
            signs: format.signs.clone(),
            format,
            tools: tools.into_iter().map(|tool| tool.nested).collect(),
        }))
    }

    /// The tools.
    fn checked(&self) -> Result<Vec<Tool>, ApiError> {
        let given = self.tools.as_deref().unwrap_or_default();
        if given.len() > MAX_TOOLS {
            let message = format!("{} tools; at most {MAX_TOOLS} are supported", given.len());
            return Err(ApiError::param("tools", message));
        }
        let tools: Vec<Tool> = given.iter().map(Tool::read).collect::<Result<_, _>>()?;
        for (at, tool) in tools.iter().enumerate() {
            if tools[..at].iter().any(|other| other.name == tool.name) {
                let message = format!("two tools have the name `{}`", tool.name);
                return Err(ApiError::param("tools", message));
            }
        }
        Ok(tools)
    }

    /// A parser of calls of these tools in this format; `None` without tools.
    ///
    /// # Errors
    /// Invalid or too many tools.
    pub fn reader(&self, format: &CallFormat) -> Result<Option<CallReader>, ApiError> {
        let tools = self.checked()?;
        let callees = tools.iter().map(Tool::callee).collect();
        let single = self.parallel_tool_calls == Some(false);
        Ok((!tools.is_empty()).then(|| CallReader::new(format.frames.clone(), callees, single)))
    }

    fn choice(&self) -> Result<ToolChoice, ApiError> {
        let choice = self.tool_choice.as_ref().unwrap_or(&Value::Null);
        match choice {
            Value::Null => return Ok(ToolChoice::Auto),
            Value::String(word) => match word.as_str() {
                "none" => return Ok(ToolChoice::None),
                "auto" => return Ok(ToolChoice::Auto),
                "required" | "any" => return Ok(ToolChoice::Required),
                _ => {}
            },
            Value::Object(named) if named.get("type") == Some(&json!("function")) => {
                // The name is nested in chats, but not in responses.
                let name = choice["function"]["name"]
                    .as_str()
                    .or(choice["name"].as_str());
                if let Some(name) = name {
                    return Ok(ToolChoice::Named(name.to_owned()));
                }
            }
            _ => {}
        }
        Err(ApiError::param(
            "tool_choice",
            "`tool_choice` must be `none`, `auto`, `required` or {\"type\": \"function\", \"function\": {\"name\": …}}",
        ))
    }
}

/// A tool.
struct Tool {
    name: String,
    /// JSON schema of its arguments.
    parameters: Value,
    /// Whether arguments must match the schema even if calls are not forced.
    strict: bool,
    /// In the format of chats, as templates expect.
    nested: Value,
}

impl Tool {
    fn read(given: &Value) -> Result<Self, ApiError> {
        let refuse = |message: String| Err(ApiError::param("tools", message));
        if given["type"] != "function" {
            return refuse(format!(
                "tools of type {} are not supported; use `function`",
                given["type"]
            ));
        }
        // The function is nested in chats, but not in responses.
        let function = match given.get("function") {
            Some(function) => function.clone(),
            None => {
                let mut function = given.clone();
                function.as_object_mut().map(|map| map.shift_remove("type"));
                function
            }
        };
        let Some(name) = function["name"].as_str() else {
            return refuse("a function has no `name`".to_owned());
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(fits) {
            return refuse(format!(
                "a function name must have 1 to {MAX_NAME} letters, digits, `_`, `-` or `.`"
            ));
        }
        let parameters = match function.get("parameters") {
            None | Some(Value::Null) => json!({"properties": {}, "additionalProperties": false}),
            Some(parameters) => parameters.clone(),
        };
        let mut parameters = parameters;
        let kind = parameters.as_object_mut().map(|map| {
            // Without a type the arguments could be any value.
            map.entry("type").or_insert_with(|| json!("object")).clone()
        });
        if kind != Some(json!("object")) {
            return refuse(format!(
                "the `parameters` of `{name}` are not a schema of an object"
            ));
        }
        Ok(Self {
            name: name.to_owned(),
            parameters,
            strict: function["strict"] == true,
            nested: json!({"type": "function", "function": function}),
        })
    }

    /// As needed for parsing.
    fn callee(&self) -> Callee {
        let properties = self.parameters["properties"].as_object();
        let all = properties.into_iter().flatten();
        let mut finder = KindFinder::new(&self.parameters);
        let kinds = all.map(|(key, schema)| (key.clone(), finder.kinds(schema)));
        Callee {
            name: self.name.clone(),
            parameters: kinds.collect(),
        }
    }

    /// The schema of arguments in grammars.
    fn schema(&self, forced: bool) -> ParameterSchema<'_> {
        ParameterSchema {
            name: &self.name,
            schema: if forced || self.strict {
                self.parameters.clone()
            } else {
                json!({"type": "object"})
            },
            strict: self.strict,
        }
    }
}
