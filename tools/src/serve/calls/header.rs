//! The beginning of a call: what precedes its arguments.

use super::frame::{Begins, CallFrame, FUNCTIONS, Lead, Notation, begins};
use super::json::{Object, Wanted, object};
use super::tagged::{Follows, Framed};
use super::types::Kinds;

/// Maximum bytes of an identifier between a name and its arguments, or before a name.
const MAX_ID: usize = 80;
/// Maximum bytes of the beginning of a call.
const MAX_HEADER: usize = 512;

/// A tool, as needed for parsing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Callee {
    /// Its name.
    pub name: String,
    /// The kinds of its parameters, by name.
    pub parameters: Vec<(String, Kinds)>,
}

/// Result of parsing the beginning of a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Header {
    /// A call of this tool (an index) whose arguments begin at offset `at`.
    Call {
        /// The tool.
        tool: usize,
        /// The offset.
        at: usize,
    },
    /// A whole call that ends at offset `end`.
    Whole {
        /// The tool.
        tool: usize,
        /// Its arguments as JSON text.
        arguments: String,
        /// The offset.
        end: usize,
    },
    /// Not a call.
    Other,
    /// More text is needed.
    Unclear,
}

/// Parses the beginning of a call that starts with number `from` of the format's lead.
pub fn header(frame: &CallFrame, text: &str, from: usize, tools: &[Callee]) -> Header {
    let lead = frame.lead();
    let at = match after_lead(text, &lead[from.min(lead.len())..]) {
        Begins::With(at) => at,
        Begins::Unclear if text.len() > MAX_HEADER => return Header::Other,
        Begins::Unclear => return Header::Unclear,
        Begins::Not => return Header::Other,
    };
    let position = |name: &str| tools.iter().position(|tool| tool.name == name);
    let Some(members) = &frame.members else {
        let found = named(frame, &text[at..], tools);
        return match found {
            Header::Call { tool, at: more } => Header::Call {
                tool,
                at: at + more,
            },
            Header::Unclear if text.len() > MAX_HEADER => Header::Other,
            other => other,
        };
    };
    let rest = &text[at..];
    let start = rest.trim_start_matches(|c: char| c.is_whitespace() || "[,;".contains(c));
    let skipped = at + rest.len() - start.len();
    let wanted = Wanted {
        members,
        is_tool: &|name| position(name).is_some(),
        bare: frame.is_bare(),
    };
    match object(start, &wanted) {
        Object::Open { name, at } => Header::Call {
            tool: position(&name).unwrap_or(0),
            at: skipped + at,
        },
        Object::Whole {
            name,
            arguments,
            end,
        } => Header::Whole {
            tool: position(&name).unwrap_or(0),
            arguments,
            end: skipped + end,
        },
        Object::Other => Header::Other,
        Object::Unclear => Header::Unclear,
    }
}

/// Whether a text begins with a lead.
fn after_lead(text: &str, lead: &[Lead<'_>]) -> Begins {
    let mut at = 0;
    let mut id = false;
    for part in lead {
        let Lead::Chunk(chunk) = part else {
            id = true;
            continue;
        };
        let rest = &text[at..];
        if id {
            match rest.find(chunk) {
                Some(end) if end <= MAX_ID => at += end + chunk.len(),
                None if rest.len() <= MAX_ID => return Begins::Unclear,
                _ => return Begins::Not,
            }
            id = false;
            continue;
        }
        match begins(rest, chunk) {
            Begins::With(length) => at += length,
            other => return other,
        }
    }
    Begins::With(at)
}

/// Parses a name and what stands between it and the arguments.
fn named(frame: &CallFrame, text: &str, tools: &[Callee]) -> Header {
    let start = text.trim_start();
    let in_name = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let after = start.trim_start_matches(in_name);
    let name = &start[..start.len() - after.len()];
    if after.is_empty() {
        return Header::Unclear;
    }
    let position = |name: &str| tools.iter().position(|tool| tool.name == name);
    let short = || name.strip_prefix(FUNCTIONS).and_then(position);
    let Some(tool) = position(name).or_else(short) else {
        return Header::Other;
    };
    let rest = match behind(after, frame.before_arguments()) {
        Begins::With(length) => &after[length..],
        Begins::Unclear => return Header::Unclear,
        Begins::Not => return Header::Other,
    };
    let open = match &frame.arguments {
        Notation::Json | Notation::Bare { .. } => "{",
        Notation::Python => "(",
        Notation::Tags(tags) => {
            let framed = Framed {
                frame,
                tags,
                parameters: &tools[tool].parameters,
            };
            return match framed.follows(rest, false) {
                Follows::Key(_) | Follows::End => Header::Call {
                    tool,
                    at: text.len() - rest.len(),
                },
                Follows::Unclear => Header::Unclear,
                Follows::Other => Header::Other,
            };
        }
    };
    match begins(rest, open) {
        Begins::With(length) => Header::Call {
            tool,
            at: text.len() - rest.len() + length - open.len(),
        },
        Begins::Unclear => Header::Unclear,
        Begins::Not => Header::Other,
    }
}

/// Finds `last`, the last text before the arguments, behind a name; identifiers may stand before it.
fn behind(text: &str, last: &str) -> Begins {
    if last.is_empty() {
        return Begins::With(0);
    }
    let start = text.trim_start();
    let skipped = text.len() - start.len();
    let in_id = |text: &str| text.len() <= MAX_ID && !text.contains(['<', '{', '\n']);
    match start.find(last) {
        Some(at) if in_id(&start[..at]) => Begins::With(skipped + at + last.len()),
        Some(_) => Begins::Not,
        None => {
            let begun = super::frame::begun(start, last);
            match in_id(&start[..start.len() - begun]) {
                true => Begins::Unclear,
                false => Begins::Not,
            }
        }
    }
}
