//! Arguments that are JSON, and calls that are JSON objects.

use serde_json::Value;

use super::escape;
use super::frame::Members;

/// Words of Python, and of JSON.
const WORDS: [[&str; 2]; 3] = [["None", "null"], ["True", "true"], ["False", "false"]];

/// Finds the end of a JSON object or list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scan {
    depth: usize,
    text: bool,
    escaped: bool,
}

impl Scan {
    /// A scan that starts inside an object.
    pub fn inside() -> Self {
        Self {
            depth: 1,
            ..Self::default()
        }
    }

    /// Length of the text that belongs to the object, if it ends in `text`.
    pub fn end(&mut self, text: &str) -> Option<usize> {
        text.bytes()
            .position(|byte| self.ends(byte))
            .map(|at| at + 1)
    }

    /// Moves the part of `text` that belongs to the object to `out`; whether the object is complete. Control
    /// characters in strings, and Python's words, neither of which JSON allows but models write, become JSON. What
    /// may be the beginning of such a word stays in `text`.
    pub fn take(&mut self, text: &mut String, out: &mut String) -> bool {
        let mut used = 0;
        let mut done = false;
        while let Some(c) = text[used..].chars().next() {
            if let Some(found) = self.word(&text[used..]) {
                let Some([word, json]) = found else { break };
                out.push_str(json);
                used += word.len();
                continue;
            }
            let (in_text, mut bytes) = (self.text, [0; 4]);
            done = c
                .encode_utf8(&mut bytes)
                .bytes()
                .any(|byte| self.ends(byte));
            if in_text && c < ' ' {
                escape::append(c, out);
            } else {
                out.push(c);
            }
            used += c.len_utf8();
            if done {
                break;
            }
        }
        text.drain(..used);
        done
    }

    /// The word of Python with which `text` begins, and its JSON; inner `None` if more text is needed.
    fn word(&self, text: &str) -> Option<Option<[&'static str; 2]>> {
        if self.text || !text.starts_with(['N', 'T', 'F']) {
            return None;
        }
        let rest = text.trim_start_matches(|c: char| c.is_ascii_alphanumeric());
        let word = &text[..text.len() - rest.len()];
        let fits = |pair: &&[&str; 2]| match rest.is_empty() {
            true => pair[0].starts_with(word),
            false => pair[0] == word,
        };
        let found = WORDS.iter().find(fits)?;
        Some((!rest.is_empty()).then_some(*found))
    }

    /// Whether the object ends with this byte.
    fn ends(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.text => self.escaped = true,
            b'"' => self.text = !self.text,
            _ if self.text => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// A call that is a JSON object.
#[derive(Debug, PartialEq, Eq)]
pub enum Object {
    /// The object of the arguments of the tool with this name begins at this offset.
    Open { name: String, at: usize },
    /// The call is complete, and ends at this offset.
    Whole {
        name: String,
        arguments: String,
        end: usize,
    },
    /// Not a call.
    Other,
    /// More text is needed.
    Unclear,
}

/// What an object with calls may contain.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Members that the format has.
    pub members: &'a Members,
    /// Whether a tool has this name.
    pub is_tool: &'a dyn Fn(&str) -> bool,
    /// Whether nothing else says that this is a call, so that another member shows that it is none.
    pub bare: bool,
}

/// Names of members with a name, with arguments, and of others that calls have.
const NAMES: [&str; 3] = ["name", "tool_name", "function"];
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
const OTHERS: [&str; 4] = ["id", "type", "tool_call_id", "index"];

/// Parses an object, whose members may stand in any order, up to its arguments if its name is known by then.
pub fn object(text: &str, wanted: &Wanted<'_>) -> Object {
    let mut cursor = Cursor { text, at: 0 };
    read(&mut cursor, wanted).unwrap_or_else(|other| other)
}

fn read(cursor: &mut Cursor<'_>, wanted: &Wanted<'_>) -> Result<Object, Object> {
    let (mut name, mut arguments) = (None, None);
    cursor.expect('{')?;
    let mut first = true;
    loop {
        if cursor.peek()? == '}' {
            break;
        }
        if !first {
            cursor.expect(',')?;
        }
        first = false;
        let key = cursor.string()?;
        cursor.expect(':')?;
        let sign = cursor.peek()?;
        if (key == wanted.members.name || NAMES.contains(&&*key)) && sign == '"' {
            let found = cursor.string()?;
            if !(wanted.is_tool)(&found) {
                return Err(Object::Other);
            }
            name = Some(found);
        } else if key == wanted.members.arguments || ARGUMENTS.contains(&&*key) {
            if let (Some(name), '{') = (&name, sign) {
                let (name, at) = (name.clone(), cursor.at);
                return Ok(Object::Open { name, at });
            }
            arguments = Some(argument_text(cursor.value()?)?);
        } else if wanted.bare && !OTHERS.contains(&&*key) {
            return Err(Object::Other);
        } else {
            cursor.value()?;
        }
    }
    cursor.expect('}')?;
    Ok(Object::Whole {
        name: name.ok_or(Object::Other)?,
        arguments: arguments.unwrap_or_else(|| "{}".to_owned()),
        end: cursor.at,
    })
}

/// Arguments as the text of an object; they may be written as a string.
fn argument_text(written: &str) -> Result<String, Object> {
    let inner = match serde_json::from_str(written) {
        Ok(Value::String(inner)) if inner.trim().is_empty() => "{}".to_owned(),
        Ok(Value::String(inner)) => inner,
        Ok(Value::Null) => "{}".to_owned(),
        _ if written == "None" => "{}".to_owned(),
        _ => written.to_owned(),
    };
    if inner.trim_start().starts_with('{') {
        let (mut rest, mut json) = (inner, String::new());
        Scan::default().take(&mut rest, &mut json);
        Ok(json + &rest)
    } else {
        Err(Object::Other)
    }
}

/// A position in JSON text.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// The next character after white space.
    fn peek(&mut self) -> Result<char, Object> {
        let rest = &self.text[self.at..];
        let start = rest.trim_start();
        self.at += rest.len() - start.len();
        start.chars().next().ok_or(Object::Unclear)
    }

    fn expect(&mut self, wanted: char) -> Result<(), Object> {
        if self.peek()? == wanted {
            self.at += wanted.len_utf8();
            Ok(())
        } else {
            Err(Object::Other)
        }
    }

    fn string(&mut self) -> Result<String, Object> {
        if self.peek()? != '"' {
            return Err(Object::Other);
        }
        serde_json::from_str(self.value()?).map_err(|_| Object::Other)
    }

    /// The text of the next value.
    fn value(&mut self) -> Result<&'a str, Object> {
        let first = self.peek()?;
        let rest = &self.text[self.at..];
        let length = match first {
            '{' | '[' => Scan::default().end(rest),
            '"' => {
                let mut escaped = false;
                let closing = rest[1..].bytes().position(|byte| {
                    let closes = byte == b'"' && !escaped;
                    escaped = byte == b'\\' && !escaped;
                    closes
                });
                closing.map(|at| at + 2)
            }
            _ => rest.find(|c: char| c.is_whitespace() || ",}]".contains(c)),
        };
        let length = length.ok_or(Object::Unclear)?;
        self.at += length;
        Ok(&rest[..length])
    }
}
