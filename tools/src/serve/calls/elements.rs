//! Calls whose arguments are elements: `<function=NAME>`, then `<parameter=KEY>`, a value and `</parameter>` for
//! each argument, then `</function>`.

use serde_json::{Value, json};

use super::super::rules::MAX_SOURCE;

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const END_OF_PARAMETER: &str = "</parameter>";
const END_OF_FUNCTION: &str = "</function>";

/// The next element of the held text.
#[derive(Debug, PartialEq, Eq)]
pub enum Element {
    /// More text is needed.
    Unclear,
    /// Something else.
    Other,
    /// A call of this function, and the length of its tag.
    Function(String, usize),
    /// An argument, its value, and the length of both.
    Argument(String, String, usize),
    /// The end of the call, and its length.
    End(usize),
}

/// The tag of a call.
pub fn function(text: &str) -> Element {
    let start = text.trim_start();
    let skipped = text.len() - start.len();
    match start.strip_prefix(FUNCTION) {
        None if FUNCTION.starts_with(start) => Element::Unclear,
        None => Element::Other,
        Some(rest) => match rest.find('>') {
            None => Element::Unclear,
            Some(at) => {
                let name = rest[..at].trim().to_owned();
                Element::Function(name, skipped + FUNCTION.len() + at + 1)
            }
        },
    }
}

/// An argument, or the end of the call.
pub fn argument(text: &str) -> Element {
    let start = text.trim_start();
    let skipped = text.len() - start.len();
    if start.starts_with(END_OF_FUNCTION) {
        return Element::End(skipped + END_OF_FUNCTION.len());
    }
    let Some(rest) = start.strip_prefix(PARAMETER) else {
        let begun = [PARAMETER, END_OF_FUNCTION]
            .iter()
            .any(|tag| tag.starts_with(start));
        return if begun {
            Element::Unclear
        } else {
            Element::Other
        };
    };
    let parts = rest.split_once('>').and_then(|(key, rest)| {
        let (value, _) = rest.split_once(END_OF_PARAMETER)?;
        Some((key, value))
    });
    let Some((key, value)) = parts else {
        return Element::Unclear;
    };
    let length = PARAMETER.len() + key.len() + 1 + value.len() + END_OF_PARAMETER.len();
    // one line break after the tag and one before its end are not part of the value
    let value = value.strip_prefix('\n').unwrap_or(value);
    let value = value.strip_suffix('\n').unwrap_or(value);
    Element::Argument(key.trim().to_owned(), value.to_owned(), skipped + length)
}

/// The JSON text of an argument: `"key": value`. A value that is not a string is already JSON.
pub fn member(key: &str, value: &str, is_text: bool) -> String {
    let parsed = if is_text {
        None
    } else {
        serde_json::from_str::<Value>(value.trim()).ok()
    };
    format!("{}: {}", json!(key), parsed.unwrap_or_else(|| json!(value)))
}

/// Whether a parameter with this schema has string values.
pub fn is_text(schema: &Value) -> bool {
    match (&schema["type"], &schema["enum"]) {
        (Value::String(kind), _) => kind == "string",
        (Value::Null, Value::Array(values)) => values.iter().all(Value::is_string),
        _ => false,
    }
}

/// Grammar rules of the arguments of tool number `at`, whose schema is `schema`: the expression of all of them, and
/// the rules it needs in addition to [`VALUE`].
///
/// # Errors
/// Together with the definitions that each schema may refer to, they are too long.
pub fn arguments(at: usize, schema: &Value) -> Result<(String, String), String> {
    let Some(properties) = schema["properties"].as_object() else {
        return Ok(("any*".to_owned(), String::new()));
    };
    let required = |key: &String| {
        let required = schema["required"].as_array();
        required.is_some_and(|all| all.iter().any(|other| other == key))
    };
    let (mut all, mut rules) = (String::new(), String::new());
    for (number, (key, of)) in properties.iter().enumerate() {
        let name = format!("p{at}_{number}");
        let tag = json!(format!("{PARAMETER}{key}>\n"));
        let one = match (&of["enum"], is_text(of)) {
            (Value::Array(values), true) if values.iter().any(Value::is_string) => {
                let words = values.iter().filter(|value| value.is_string());
                let words: Vec<String> = words.map(Value::to_string).collect();
                format!("({}) \"\\n{END_OF_PARAMETER}\\n\"", words.join(" | "))
            }
            (_, true) => "value".to_owned(),
            (_, false) => {
                let mut of = of.clone();
                for key in ["$defs", "definitions", "x-guidance"] {
                    if let (Some(map), Some(defs)) = (of.as_object_mut(), schema.get(key)) {
                        map.entry(key).or_insert_with(|| defs.clone());
                    }
                }
                rules += &format!("j{at}_{number}: %json {of}\n");
                format!("j{at}_{number} \"\\n{END_OF_PARAMETER}\\n\"")
            }
        };
        rules += &format!("{name}: {tag} {one}\n");
        if rules.len() > MAX_SOURCE {
            return Err(format!(
                "the parameters of a function may have {} KiB of schemas",
                MAX_SOURCE >> 10
            ));
        }
        all += &format!("{name}{} ", if required(key) { "" } else { "?" });
    }
    Ok((all, rules))
}

/// Rules of string values, and of arbitrary arguments.
pub const VALUE: &str = "value[lazy]: /(?s:.)*/ \"\\n</parameter>\\n\"\n\
    any: \"<parameter=\" /[^>\\n]+/ \">\\n\" value\n";

/// The text before the arguments of a call.
pub fn begin(name: &str) -> String {
    format!("{FUNCTION}{name}>\n")
}
