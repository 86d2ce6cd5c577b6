//! Incremental parser of tool calls in generated text.

use std::sync::Arc;

use super::elements::{self, Element};
use super::form::CallFormat;

/// Maximum bytes of a call before its arguments.
const MAX_HEADER: usize = 512;

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text outside of calls.
    Text(String),
    /// Reasoning.
    Thought(String),
    /// Start of a call: the tool's name. Its arguments follow.
    Call(String),
    /// More of the last call's arguments, as JSON text.
    Arguments(String),
}

/// State of the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallState {
    /// In text that a call may follow.
    Text,
    /// In text that no call can follow.
    Plain,
    /// Before the arguments of a call.
    Header,
    Arguments(Scan),
    /// Among the elements of the arguments; the number read so far.
    Elements(usize),
    /// After the arguments.
    After,
}

/// Finds the end of a JSON object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Scan {
    depth: usize,
    text: bool,
    escaped: bool,
}

impl Scan {
    /// Length of the text that belongs to the object, if it ends in `text`.
    fn take(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.text => self.escaped = true,
                b'"' => self.text = !self.text,
                _ if self.text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// Parser of one text.
#[derive(Debug, Clone)]
pub struct CallReader {
    form: CallFormat,
    names: Arc<[String]>,
    /// The parameters with string values, by tool.
    texts: Arc<[Vec<String>]>,
    /// Index of the called tool in `names`.
    tool: usize,
    state: CallState,
    /// Text that cannot be classified yet.
    held: String,
    calls: usize,
}

impl CallReader {
    /// A parser for calls of the tools `names`, with the parameters with string values of each.
    pub fn new(form: CallFormat, names: Arc<[String]>, texts: Arc<[Vec<String>]>) -> Self {
        Self {
            form,
            names,
            texts,
            tool: 0,
            state: CallState::Text,
            held: String::new(),
            calls: 0,
        }
    }

    /// Tool names.
    pub fn names(&self) -> Arc<[String]> {
        self.names.clone()
    }

    /// Number of calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Parses the next piece.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while !self.held.is_empty() && self.step(&mut parts) {}
        parts
    }

    /// Parses the rest at the end of the text. If the text was `cut` by its length limit, an incomplete call is
    /// dropped rather than returned as text.
    pub fn finish(&mut self, cut: bool) -> Vec<Part> {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            CallState::Text if self.calls > 0 && rest.trim().is_empty() => Vec::new(),
            CallState::Text if cut && self.form.open().starts_with(rest.trim_start()) => Vec::new(),
            CallState::Text | CallState::Plain if rest.is_empty() => Vec::new(),
            CallState::Text | CallState::Plain => vec![Part::Text(rest)],
            CallState::Header if cut && self.form != CallFormat::Bare => Vec::new(),
            CallState::Header if self.calls > 0 && self.form == CallFormat::Listed => {
                let text = (!rest.trim().is_empty()).then_some(Part::Text(rest));
                text.into_iter().collect()
            }
            CallState::Header => vec![Part::Text(self.form.open().to_owned() + &rest)],
            CallState::Elements(count) if !cut => {
                let end = if count == 0 { "{}" } else { "}" };
                vec![Part::Arguments(end.to_owned())]
            }
            CallState::Arguments(_) | CallState::Elements(_) | CallState::After => Vec::new(),
        }
    }

    /// Handles what can be classified; returns whether to continue.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            CallState::Text => self.text(parts),
            CallState::Plain => {
                parts.push(Part::Text(std::mem::take(&mut self.held)));
                false
            }
            CallState::Header => self.header(parts),
            CallState::Arguments(mut scan) => {
                let end = scan.take(&self.held);
                let rest = self.held.split_off(end.unwrap_or(self.held.len()));
                parts.push(Part::Arguments(std::mem::replace(&mut self.held, rest)));
                self.state = match end {
                    Some(_) => CallState::After,
                    None => CallState::Arguments(scan),
                };
                true
            }
            CallState::Elements(count) => self.element(count, parts),
            CallState::After => self.after(),
        }
    }

    /// One argument among elements, or their end.
    fn element(&mut self, count: usize, parts: &mut Vec<Part>) -> bool {
        let begin = if count == 0 { "{" } else { ", " };
        let (text, read) = match elements::argument(&self.held) {
            Element::Argument(key, value, length) => {
                let texts = self.texts.get(self.tool);
                let is_text = texts.is_some_and(|texts| texts.contains(&key));
                self.state = CallState::Elements(count + 1);
                (
                    begin.to_owned() + &elements::member(&key, &value, is_text),
                    length,
                )
            }
            Element::Unclear => return false,
            // a call that continues differently ends here
            found => {
                self.state = CallState::After;
                let length = match found {
                    Element::End(length) => length,
                    _ => 0,
                };
                let end = if count == 0 { "{}" } else { "}" };
                (end.to_owned(), length)
            }
        };
        self.held.drain(..read);
        parts.push(Part::Arguments(text));
        true
    }

    fn text(&mut self, parts: &mut Vec<Part>) -> bool {
        let open = self.form.open();
        if open.is_empty() {
            let between = |c: char| c.is_whitespace() || (self.calls > 0 && ";,".contains(c));
            let start = self.held.trim_start_matches(between);
            if start.is_empty() {
                return false;
            }
            if start.starts_with('{') {
                self.held = start.to_owned();
                self.state = CallState::Header;
            } else {
                self.state = CallState::Plain;
            }
            return true;
        }
        let found = self.held.find(open);
        let clear = found.unwrap_or_else(|| self.held.len() - begun(&self.held, open));
        let rest = self.held.split_off(clear);
        let before = std::mem::replace(&mut self.held, rest);
        if self.calls > 0 && before.trim().is_empty() {
            // White space between two calls.
        } else if !before.is_empty() {
            parts.push(Part::Text(before));
        }
        if found.is_some() {
            self.held.drain(..open.len());
            self.state = CallState::Header;
        }
        found.is_some()
    }

    fn header(&mut self, parts: &mut Vec<Part>) -> bool {
        let found = match self.form {
            CallFormat::Tagged | CallFormat::Bare => header(&self.held),
            CallFormat::Elements => match elements::function(&self.held) {
                Element::Function(name, at) => Header::Call { name, at },
                Element::Unclear => Header::Unclear,
                _ => Header::Other,
            },
            CallFormat::Listed => listed_header(&self.held),
            CallFormat::Named | CallFormat::Harmony => named_header(&self.held),
        };
        match found {
            Header::Unclear if self.held.len() <= MAX_HEADER => false,
            Header::Call { name, at } if self.names.contains(&name) => {
                self.held.drain(..at);
                self.tool = (self.names.iter().position(|other| *other == name)).unwrap_or(0);
                parts.push(Part::Call(name));
                self.calls += 1;
                self.state = match self.form {
                    CallFormat::Elements => CallState::Elements(0),
                    _ => CallState::Arguments(Scan::default()),
                };
                true
            }
            // Only looks like a call.
            _ => {
                let held = std::mem::take(&mut self.held);
                let open = match self.form {
                    // The opening marker precedes only the first call of a list.
                    CallFormat::Listed if self.calls > 0 => "",
                    form => form.open(),
                };
                parts.push(Part::Text(open.to_owned() + &held));
                self.state = match self.form {
                    CallFormat::Bare => CallState::Plain,
                    _ => CallState::Text,
                };
                false
            }
        }
    }

    /// After the arguments in a list: the end of the call, then another call or the end of the list.
    fn after_listed(&mut self) -> bool {
        let Some(at) = self.held.find('}') else {
            return false;
        };
        let next = self.held[at + 1..].trim_start();
        let Some(sign) = next.chars().next() else {
            return false;
        };
        let left = next.trim_start_matches([',', ']']).len();
        self.held.drain(..self.held.len() - left);
        self.state = match sign {
            ',' => CallState::Header,
            _ => CallState::Text,
        };
        true
    }

    fn after(&mut self) -> bool {
        let close = match self.form {
            CallFormat::Tagged | CallFormat::Elements => self.form.close(),
            CallFormat::Bare => "}",
            CallFormat::Listed => return self.after_listed(),
            CallFormat::Named | CallFormat::Harmony => {
                self.state = CallState::Text;
                return true;
            }
        };
        let Some(at) = self.held.find(close) else {
            return false;
        };
        self.held.drain(..at + close.len());
        self.state = CallState::Text;
        true
    }
}

/// Parses the text before the arguments in a list: `[` or `,`, then as in other forms.
fn listed_header(text: &str) -> Header {
    let between = |c: char| c.is_whitespace() || "[,".contains(c);
    let start = text.trim_start_matches(between);
    let skipped = text.len() - start.len();
    match header(start) {
        Header::Call { name, at } => Header::Call {
            name,
            at: at + skipped,
        },
        other => other,
    }
}

/// Parses `NAME[ARGS]{` or `NAME[CALL_ID]ID[ARGS]{`.
fn named_header(text: &str) -> Header {
    let Some((before, _)) = text.split_once("[ARGS]") else {
        return Header::Unclear;
    };
    let start = before.len() + "[ARGS]".len();
    let rest = text[start..].trim_start();
    let name = before.split("[CALL_ID]").next().unwrap_or_default();
    match rest.chars().next() {
        Some('{') => Header::Call {
            name: name.trim().to_owned(),
            at: text.len() - rest.len(),
        },
        Some(_) => Header::Other,
        None => Header::Unclear,
    }
}

/// Length of the longest suffix of `text` that is a prefix of `tag`.
pub fn begun(text: &str, tag: &str) -> usize {
    let most = tag.len().min(text.len());
    let lengths = (1..=most).rev();
    lengths
        .filter(|&n| tag.is_char_boundary(n))
        .find(|&n| text.ends_with(&tag[..n]))
        .unwrap_or(0)
}

/// Result of parsing the text before the arguments.
#[derive(Debug, PartialEq, Eq)]
enum Header {
    /// A call whose arguments begin at offset `at`.
    Call { name: String, at: usize },
    /// Not a call.
    Other,
    /// More text is needed.
    Unclear,
}

/// Parses `{"name": "…", "arguments": {`, and other members with string values.
fn header(text: &str) -> Header {
    let mut at = 0;
    let mut name = None;
    let expect = |at: &mut usize, wanted: char| {
        *at += text[*at..].len() - text[*at..].trim_start().len();
        match text[*at..].chars().next() {
            Some(c) if c == wanted => {
                *at += c.len_utf8();
                Ok(())
            }
            Some(_) => Err(Header::Other),
            None => Err(Header::Unclear),
        }
    };
    let mut read = || -> Result<Header, Header> {
        expect(&mut at, '{')?;
        loop {
            expect(&mut at, '"')?;
            let key = string(text, &mut at)?;
            expect(&mut at, ':')?;
            if key == "arguments" || key == "parameters" {
                expect(&mut at, '{')?;
                let name = name.take().ok_or(Header::Other)?;
                return Ok(Header::Call { name, at: at - 1 });
            }
            expect(&mut at, '"')?;
            let value = string(text, &mut at)?;
            if key == "name" {
                name = Some(value);
            }
            expect(&mut at, ',')?;
        }
    };
    read().unwrap_or_else(|other| other)
}

/// Parses the rest of a JSON string after its opening quote.
fn string(text: &str, at: &mut usize) -> Result<String, Header> {
    let start = *at;
    let mut escaped = false;
    for (offset, byte) in text[start..].bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => {
                *at = start + offset + 1;
                let quoted = &text[start - 1..*at];
                return serde_json::from_str(quoted).map_err(|_| Header::Other);
            }
            _ => {}
        }
    }
    Err(Header::Unclear)
}
