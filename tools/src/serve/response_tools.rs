//! Tools of `/v1/responses`, as functions of a chat.
//!
//! A `custom` tool becomes a function with one string, `input`; the tools of a `namespace` become functions whose names
//! begin with it. Tools that only OpenAI's servers run, and that clients send without being asked, are left out.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::error::ApiError;
use super::whole_calls::input;

/// Tools that are left out: clients such as Codex always send them, and a model may do without.
const LEFT_OUT: [&str; 3] = ["web_search", "image_generation", "tool_search"];

/// Whether a tool of this type is left out. The types may end with `_preview` and a date, `web_search_preview_2025_03_11`.
fn is_left_out(kind: &str) -> bool {
    let known = LEFT_OUT.iter().find_map(|name| kind.strip_prefix(name));
    known.is_some_and(|version| {
        let date = version.strip_prefix("_preview").unwrap_or(version);
        let fits = |c: char| c.is_ascii_digit() || c == '_';
        date.is_empty() || date.starts_with('_') && date.chars().all(fits)
    })
}

/// What a response calls a function of the chat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Callee {
    /// Name of the tool.
    pub name: String,
    /// Namespace of the tool.
    pub namespace: Option<String>,
    /// Whether the tool takes a text instead of arguments.
    pub custom: bool,
}

/// The tools of a request.
#[derive(Debug, Default)]
pub struct ResponseTools {
    /// As the client gave them, without those that are left out.
    pub given: Vec<Value>,
    /// As functions of a chat.
    pub functions: Vec<Value>,
    callees: Callees,
}

/// The tools behind the functions of a chat, by name.
#[derive(Debug, Default)]
pub struct Callees(BTreeMap<String, Callee>);

impl Callees {
    /// The tool behind a function.
    pub fn get(&self, function: &str) -> Callee {
        let unknown = || Callee {
            name: function.to_owned(),
            ..Callee::default()
        };
        self.0.get(function).cloned().unwrap_or_else(unknown)
    }
}

impl ResponseTools {
    /// Converts the tools of a request.
    ///
    /// # Errors
    /// A tool that this server cannot run.
    pub fn of(given: Vec<Value>) -> Result<Self, ApiError> {
        let mut tools = Self::default();
        for tool in given {
            match tool["type"].as_str() {
                Some(kind) if is_left_out(kind) => continue,
                Some("namespace") => {
                    for inner in tool["tools"].as_array().into_iter().flatten() {
                        tools.add(inner, tool["name"].as_str())?;
                    }
                }
                _ => tools.add(&tool, None)?,
            }
            tools.given.push(tool);
        }
        Ok(tools)
    }

    fn add(&mut self, tool: &Value, namespace: Option<&str>) -> Result<(), ApiError> {
        let custom = match tool["type"].as_str() {
            Some("function") => false,
            Some("custom") => true,
            _ => {
                let message = format!(
                    "tools of type {} are not supported: this server runs no tools itself; use `function`, `custom` or `namespace`",
                    tool["type"]
                );
                return Err(ApiError::param("tools", message));
            }
        };
        let plain = tool["name"].as_str();
        let Some(plain) = plain.or(tool["function"]["name"].as_str()) else {
            return Err(ApiError::param("tools", "a tool has no `name`"));
        };
        let name = function_name(namespace, plain);
        let mut function = if custom {
            text_function(tool)
        } else {
            tool.clone()
        };
        match function.get_mut("function") {
            Some(nested) => nested["name"] = name.as_str().into(),
            None => function["name"] = name.as_str().into(),
        }
        self.functions.push(function);
        let callee = Callee {
            name: plain.to_owned(),
            namespace: namespace.map(str::to_owned),
            custom,
        };
        self.callees.0.insert(name, callee);
        Ok(())
    }

    /// The tools behind the functions.
    pub fn called(self) -> Callees {
        self.callees
    }

    /// Converts `tool_choice`, and keeps only the functions that it allows.
    ///
    /// # Errors
    /// A tool that is unknown or left out.
    pub fn choose(&mut self, choice: &Value) -> Result<Value, ApiError> {
        let wrong = |message: String| Err(ApiError::param("tool_choice", message));
        match choice["type"].as_str() {
            Some("custom" | "function") => match chosen_name(choice) {
                Some(name) => Ok(json!({"type": "function", "name": name})),
                None => wrong("`tool_choice` has no `name`".to_owned()),
            },
            Some("allowed_tools") => {
                let allowed = choice["tools"].as_array().into_iter().flatten();
                let allowed: Vec<String> = allowed.filter_map(chosen_name).collect();
                self.functions.retain(|function| {
                    let nested = function["function"]["name"].as_str();
                    let name = function["name"].as_str().or(nested);
                    name.is_some_and(|name| allowed.iter().any(|allowed| allowed == name))
                });
                match choice["mode"].as_str() {
                    Some(mode @ ("auto" | "required")) => Ok(mode.into()),
                    _ => wrong(
                        "the `mode` of `allowed_tools` must be `auto` or `required`".to_owned(),
                    ),
                }
            }
            Some(kind) => wrong(format!(
                "a tool of type `{kind}` cannot be called here; choose a `function` or `custom` tool"
            )),
            None => Ok(choice.clone()),
        }
    }
}

/// Name of the function for a tool.
pub fn function_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) if namespace.ends_with("__") => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}__{name}"),
        None => name.to_owned(),
    }
}

/// Arguments of the function for a custom tool.
pub fn arguments_of(input: &str) -> String {
    json!({"input": input}).to_string()
}

/// The input of a custom tool in the arguments of its function.
pub fn input_of(arguments: &str) -> String {
    let input = input(arguments);
    let input = input.as_ref().and_then(|input| input.get("input"));
    input
        .and_then(Value::as_str)
        .unwrap_or(arguments)
        .to_owned()
}

/// Name of the function that a choice names.
fn chosen_name(choice: &Value) -> Option<String> {
    let name = choice["name"].as_str();
    let name = name.or(choice["function"]["name"].as_str())?;
    Some(function_name(choice["namespace"].as_str(), name))
}

/// A function with the input of a custom tool. Its grammar becomes part of the description.
fn text_function(tool: &Value) -> Value {
    let mut description = tool["description"].as_str().unwrap_or_default().to_owned();
    let format = &tool["format"];
    if let (Some(syntax), Some(definition)) =
        (format["syntax"].as_str(), format["definition"].as_str())
    {
        let gap = if description.is_empty() { "" } else { "\n\n" };
        description += &format!("{gap}`input` must match this grammar ({syntax}):\n{definition}");
    }
    json!({
        "type": "function",
        "name": tool["name"],
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": false,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools() -> Vec<Value> {
        vec![
            json!({"type": "function", "name": "shell", "parameters": {"type": "object"}}),
            json!({"type": "web_search", "external_web_access": false}),
            json!({"type": "custom", "name": "apply_patch", "description": "Edits.", "format":
                {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}),
            json!({"type": "namespace", "name": "mcp__docs", "description": "", "tools":
                [{"type": "function", "name": "find"}]}),
        ]
    }

    #[test]
    fn tools_become_functions_and_back() {
        let mut tools = ResponseTools::of(tools()).unwrap();
        assert_eq!(tools.given.len(), 3, "without the search");
        let names: Vec<&str> = tools
            .functions
            .iter()
            .filter_map(|f| f["name"].as_str())
            .collect();
        assert_eq!(names, ["shell", "apply_patch", "mcp__docs__find"]);
        let patch = &tools.functions[1];
        assert_eq!(
            patch["description"],
            "Edits.\n\n`input` must match this grammar (lark):\nstart: /.+/"
        );
        assert_eq!(
            patch["parameters"]["properties"],
            json!({"input": {"type": "string"}})
        );
        let callee = |name: &str| {
            let Callee {
                name,
                namespace,
                custom,
            } = tools.callees.get(name);
            (name, namespace.unwrap_or_default(), custom)
        };
        assert_eq!(
            callee("apply_patch"),
            ("apply_patch".into(), "".into(), true)
        );
        assert_eq!(
            callee("mcp__docs__find"),
            ("find".into(), "mcp__docs".into(), false)
        );
        assert_eq!(callee("other"), ("other".into(), "".into(), false));
        let custom = tools
            .choose(&json!({"type": "custom", "name": "apply_patch"}))
            .unwrap();
        assert_eq!(custom, json!({"type": "function", "name": "apply_patch"}));
        assert_eq!(tools.choose(&json!("required")).unwrap(), "required");
        let searched = tools.choose(&json!({"type": "web_search_preview"}));
        assert_eq!(
            searched.unwrap_err().body()["error"]["param"],
            "tool_choice"
        );
        let allowed = json!({"type": "allowed_tools", "mode": "required", "tools":
            [{"type": "function", "name": "find", "namespace": "mcp__docs"}]});
        assert_eq!(tools.choose(&allowed).unwrap(), "required");
        assert_eq!(tools.functions.len(), 1);
    }

    #[test]
    fn dated_tools_are_left_out_too() {
        for kind in [
            "web_search",
            "web_search_preview",
            "web_search_preview_2025_03_11",
            "web_search_2025_08_26",
            "image_generation",
            "tool_search",
        ] {
            let tools = ResponseTools::of(vec![json!({"type": kind})]).unwrap();
            assert!(
                tools.given.is_empty() && tools.functions.is_empty(),
                "{kind}"
            );
        }
    }

    #[test]
    fn tools_that_others_run_are_refused() {
        for kind in [
            "web_searcher",
            "web_search_local",
            "file_search",
            "code_interpreter",
            "mcp",
            "computer_use_preview",
            "local_shell",
        ] {
            let error = ResponseTools::of(vec![json!({"type": kind})])
                .unwrap_err()
                .body();
            assert_eq!(error["error"]["param"], "tools");
            let message = error["error"]["message"].as_str().unwrap();
            assert!(message.contains(kind), "{message}");
        }
    }

    #[test]
    fn inputs_of_custom_tools_are_texts() {
        let patch = "*** Begin \"Patch\"\n\u{e9}\\";
        assert_eq!(input_of(&arguments_of(patch)), patch);
        let cut = "{\"input\": \"*** Begin Patch\\n+rm -rf /tmp/x";
        assert_eq!(input_of(cut), cut, "never repaired");
        assert_eq!(input_of("{\"other\": 1}"), "{\"other\": 1}");
    }
}
