//! Grammars of forced calls, and of texts with optional calls whose arguments are valid.

use emberflow_models::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::rules::{Rules, bounded};
use super::elements;
use super::form::{CallFormat, HARMONY, special};

/// Maximum calls in a text if they are forced.
const MAX_CALLS: usize = 8;

/// A tool, as needed for grammars.
pub struct Callable<'a> {
    pub name: &'a str,
    /// JSON schema of its arguments.
    pub parameters: Value,
}

/// Which calls a text may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// Exactly one call, and no other text.
    One,
    /// Calls, and no other text.
    Some,
    /// Any text and calls.
    Any,
}

/// The grammar of texts with calls of these tools.
///
/// # Errors
/// Too large schemas.
pub fn grammar(
    form: CallFormat,
    tokenizer: &Tokenizer,
    tools: Vec<Callable<'_>>,
    calls: Calls,
) -> Result<Rules, ApiError> {
    let mut rules = String::new();
    let schemas = tools.iter().map(|tool| tool.parameters.clone()).collect();
    let schemas = bounded(schemas).map_err(|e| ApiError::param("tools", e))?;
    let mut names = Vec::new();
    for (at, (tool, schema)) in tools.iter().zip(schemas).enumerate() {
        names.push(format!("f{at}"));
        let name = json!(tool.name).to_string();
        rules += &match form {
            CallFormat::Named => format!("f{at}: {} arguments a{at}\n", quoted(tool.name)),
            CallFormat::Elements => {
                let (arguments, of_them) =
                    elements::arguments(at, &schema).map_err(|e| ApiError::param("tools", e))?;
                let begin = quoted(&elements::begin(tool.name));
                format!("f{at}: {begin} {arguments} \"</function>\"\n{of_them}")
            }
            CallFormat::Harmony => {
                let begin = format!("commentary to=functions.{} ", tool.name);
                format!("f{at}: {} arguments a{at}\n", quoted(&begin))
            }
            _ => {
                let begin = format!("{{\"name\": {name}, \"{}\": ", form.arguments());
                format!("f{at}: {} a{at} \"}}\"\n", quoted(&begin))
            }
        };
        if form != CallFormat::Elements {
            rules += &format!("a{at}: %json {schema}\n");
        }
    }
    let one = names.join(" | ");
    // Special tokens need another notation, but do not change the grammar's size.
    let write = |sign: &dyn Fn(&str) -> String| {
        let arguments = match form {
            CallFormat::Named => format!("arguments: {}\n", sign(form.arguments())),
            CallFormat::Harmony => {
                let [_, _, constrain, message, _] = HARMONY.map(sign);
                format!("arguments: {constrain} \"json\" {message}\n")
            }
            CallFormat::Elements => elements::VALUE.to_owned(),
            _ => String::new(),
        };
        format!("{}one: {one}\n{arguments}{rules}", begin(form, calls, sign))
    };
    let token = |text: &str| match special(text, tokenizer) {
        Some(token) => format!("<[{token}]>"),
        None => quoted(text),
    };
    Ok(Rules::Written {
        grammar: write(&token),
        tried: write(&quoted),
    })
}

fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// The rules around `one`, a call.
fn begin(form: CallFormat, calls: Calls, sign: &dyn Fn(&str) -> String) -> String {
    let [open, close] = [form.open(), form.close()].map(sign);
    let more = format!("{{0,{}}}", MAX_CALLS - 1);
    // If the marker is ordinary text, free text ends as soon as it appears.
    let before = if open.starts_with('<') {
        format!("before: TEXT {open}\n")
    } else {
        format!("before[lazy]: TEXT {open}\n")
    };
    let text = "TEXT: /(?s:.)*/\n";
    match (form, calls) {
        (CallFormat::Tagged | CallFormat::Elements, Calls::Any) => format!(
            "start: (before \"\\n\"? one \"\\n\"? {close})* rest\n{before}rest: TEXT\n{text}"
        ),
        (CallFormat::Tagged | CallFormat::Elements, _) => {
            let again = match calls {
                Calls::Some => format!(" (\"\\n\" call){more}"),
                _ => String::new(),
            };
            format!("start: call{again}\ncall: {open} \"\\n\" one \"\\n\" {close}\n")
        }
        (CallFormat::Bare, Calls::Any) => {
            "start: one | OTHER?\nOTHER: /\\s*[^\\s\\x{7B}](?s:.)*/\n".to_owned()
        }
        (CallFormat::Bare, _) => "start: one\n".to_owned(),
        (CallFormat::Listed, Calls::Any) => format!(
            "start: before list | rest\nlist: \" \"? \"[\" one (\", \" one){more} {close}\n{before}rest: TEXT\n{text}"
        ),
        (CallFormat::Listed, Calls::Some) => {
            format!("start: {open} \"[\" one (\", \" one){more} {close}\n")
        }
        (CallFormat::Listed, Calls::One) => format!("start: {open} \"[\" one {close}\n"),
        (CallFormat::Named, Calls::Any) => {
            format!("start: before one ({open} one){more} | rest\n{before}rest: TEXT\n{text}")
        }
        (CallFormat::Named, Calls::Some) => format!("start: call call{more}\ncall: {open} one\n"),
        // A gpt-oss message ends with its call.
        (CallFormat::Harmony, _) => format!("start: {open} one\n"),
        (CallFormat::Named, Calls::One) => format!("start: {open} one\n"),
    }
}
