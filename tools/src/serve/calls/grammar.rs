//! Grammars of forced calls, and of texts with optional calls whose arguments are valid.

use emberflow_models::tokenizer::Tokenizer;

use super::super::error::ApiError;
use super::super::rules::{MAX_SOURCE, ParameterSchema, Rules, bounded};
use super::format::CallFormat;
use super::frame::{CallFrame, Lead, Piece};
use super::values::ToolParameters;
use super::writer::{Sign, TEXT, Writer, quoted};

/// Maximum calls in a text if they are forced.
const MAX_CALLS: usize = 8;

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

/// The grammar of texts with calls of these tools in a format.
///
/// # Errors
/// Schemas that are too large or cannot be expressed.
pub fn grammar(
    form: &CallFormat,
    tokenizer: &Tokenizer,
    tools: Vec<ParameterSchema<'_>>,
    calls: Calls,
) -> Result<Rules, ApiError> {
    let refuse = |why: String| ApiError::param("tools", why);
    let Some(frame) = form.frames.first() else {
        return Err(ApiError::param(
            "tool_choice",
            "the model's chat template has no format of calls",
        ));
    };
    let tools = bounded(tools).map_err(refuse)?;
    let signs = form.signs.iter().filter_map(|&token| {
        let text = String::from_utf8(tokenizer.token_bytes(token)?).ok()?;
        Some(Sign { text, token })
    });
    let signs: Vec<Sign> = signs.collect();
    Ok(Rules::Written {
        grammar: write(frame, &signs, &tools, calls).map_err(refuse)?,
        tried: write(frame, &[], &tools, calls).map_err(refuse)?,
    })
}

fn write(
    frame: &CallFrame,
    signs: &[Sign],
    tools: &[ParameterSchema<'_>],
    calls: Calls,
) -> Result<String, String> {
    let writer = Writer::new(signs, 2 * MAX_SOURCE);
    let (middle, tail) = (pieces(&frame.middle, &writer), pieces(&frame.tail, &writer));
    let mut names = Vec::new();
    for (at, tool) in tools.iter().enumerate() {
        let name = format!("f{at}");
        let parameters = ToolParameters {
            name: &format!("a{at}"),
            schema: &tool.schema,
            strict: tool.strict,
        };
        let arguments = parameters.write(&frame.arguments, &writer);
        let arguments =
            arguments.map_err(|why| format!("the parameters of `{}`: {why}", tool.name))?;
        let expression = format!("{} {middle} a{at} {tail}", quoted(tool.name));
        writer.rule(&format!("a{at}"), &arguments);
        writer.rule(&name, &expression);
        names.push(name);
        if writer.is_full() {
            return Err(format!(
                "the parameters of all functions may have {} KiB of schemas",
                MAX_SOURCE >> 10
            ));
        }
    }
    writer.rule("one", &names.join(" | "));
    writer.rule("call", &format!("{} one", pieces(&frame.head, &writer)));
    let start = start(frame, &writer, calls);
    Ok(format!("start: {start}\n{}", writer.finish()))
}

/// The expression of the text.
fn start(frame: &CallFrame, writer: &Writer<'_>, calls: Calls) -> String {
    let text = |text: &str| match text {
        "" => String::new(),
        text => writer.text(text),
    };
    let close = text(&frame.close);
    let more = match &frame.between {
        Some(between) if calls != Calls::One => {
            format!("({} call){{0,{}}}", text(between), MAX_CALLS - 1)
        }
        _ => String::new(),
    };
    match calls {
        Calls::One | Calls::Some => format!("{} call {more} {close}", text(&frame.open)),
        Calls::Any => {
            // What begins a call ends the text before it; the rest of it is written.
            let lead = frame.lead();
            let first = match (lead.first(), frame.head.first()) {
                (Some(Lead::Chunk(first)), _) => first,
                (None, Some(Piece::Text(first))) => &first[..],
                _ => "",
            };
            let (in_open, rest) = match frame.open.is_empty() {
                true => (false, rest_of(&frame.head, first)),
                false => (true, Vec::new()),
            };
            let first_call = match in_open {
                true => format!("{} call", text(after(&frame.open, first))),
                false => format!("{} one", pieces(&rest, writer)),
            };
            // Calls that nothing surrounds are apart in the text.
            let more = if in_open { more } else { String::new() };
            let before = writer.until("before", TEXT, first);
            format!("({before} {first_call} {more} {close})* {TEXT}")
        }
    }
}

/// What follows the first occurrence of `first`.
fn after<'a>(text: &'a str, first: &str) -> &'a str {
    text.split_once(first).map_or(text, |(_, rest)| rest)
}

/// Pieces without the text with which they begin.
fn rest_of(head: &[Piece], first: &str) -> Vec<Piece> {
    let mut rest = head.to_vec();
    if let Some(Piece::Text(text)) = rest.first_mut() {
        *text = after(text, first).to_owned();
    }
    rest
}

fn pieces(all: &[Piece], writer: &Writer<'_>) -> String {
    let written = all.iter().map(|piece| match piece {
        Piece::Text(text) if text.is_empty() => String::new(),
        Piece::Text(text) => writer.text(text),
        Piece::Id => {
            writer.rule("ID", "/[a-zA-Z0-9]{9}/");
            "ID".to_owned()
        }
        Piece::Index => {
            writer.rule("INDEX", "/[0-9]{1,2}/");
            "INDEX".to_owned()
        }
    });
    written.collect::<Vec<_>>().join(" ")
}
