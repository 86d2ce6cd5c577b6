//! Arguments between tags as JSON text, piece by piece.

use serde_json::Value;

use super::escape;
use super::frame::{
    ArgumentTags, Begins, CallFrame, Middle, begins, begins_with_all, begun, chunks,
};
use super::literal::{self, Progress};
use super::types::{Kinds, ParameterKinds};

/// Maximum bytes of a key.
const MAX_KEY: usize = 512;

const CDATA: [&str; 2] = ["<![CDATA[", "]]>"];

/// State of the parser.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum At {
    /// Before a key, or the end.
    #[default]
    Between,
    /// Before a value, whose kinds are these.
    Start(Kinds),
    /// In a string that is passed on in pieces.
    Text,
    /// In another value.
    Value(Kinds),
}

/// Parser of one call's arguments.
#[derive(Debug, Clone, Default)]
pub struct Tagged {
    at: At,
    /// The keys so far.
    keys: Vec<String>,
    /// Whether the key was there before; then the first value stays.
    again: bool,
    begun: bool,
}

/// What ends at a value's end tag.
enum Ending {
    /// The value, before this offset, and its tag, before the second one.
    Here(usize, usize),
    /// Perhaps the value: text up to this offset is part of it.
    Open(usize),
}

impl Tagged {
    /// Reads from the start of `text`, removes what was read, and appends it to `out`. `ended`: no text follows.
    pub fn take(
        &mut self,
        framed: Framed<'_>,
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Progress {
        if !self.begun {
            out.push('{');
            self.begun = true;
        }
        loop {
            let progress = match self.at.clone() {
                At::Between => self.between(&framed, text, ended),
                At::Start(kinds) => self.start(&framed, kinds, text, ended, out),
                At::Text => self.string(&framed, text, ended, out),
                At::Value(kinds) => self.value(&framed, kinds, text, ended, out),
            };
            if progress == Some(Progress::Done) {
                out.push('}');
            }
            if let Some(progress) = progress {
                return progress;
            }
        }
    }

    /// A key, or the end; other text is skipped.
    fn between(&mut self, framed: &Framed<'_>, text: &mut String, ended: bool) -> Option<Progress> {
        match framed.follows(text, ended) {
            Follows::End => return Some(Progress::Done),
            Follows::Unclear => return Some(Progress::More),
            Follows::Other => {
                let start = text.len() - text.trim_start().len();
                let first = text[start..].chars().next().map_or(0, char::len_utf8);
                text.drain(..start + first);
                return None;
            }
            Follows::Key(length) => match framed.key(&text[length..]) {
                Key::Unclear => return Some(Progress::More),
                Key::Other => return Some(Progress::Wrong),
                Key::Is { key, kinds, end } => {
                    text.drain(..length + end);
                    self.again = self.keys.contains(&key);
                    self.keys.push(key);
                    self.at = At::Start(kinds);
                }
            },
        }
        None
    }

    /// The line break that the format has before a value.
    fn start(
        &mut self,
        framed: &Framed<'_>,
        kinds: Kinds,
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Option<Progress> {
        if framed.breaks_before() {
            if text.is_empty() && !ended {
                return Some(Progress::More);
            }
            if text.starts_with('\n') {
                text.drain(..1);
            }
        }
        if kinds.only_text() && !framed.tags.cdata {
            self.member(out);
            self.put("\"", out);
            self.at = At::Text;
        } else {
            self.at = At::Value(kinds);
        }
        None
    }

    /// More of a string.
    fn string(
        &mut self,
        framed: &Framed<'_>,
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Option<Progress> {
        let ending = framed.ending(text, ended, &self.keys);
        let (Ending::Here(value, _) | Ending::Open(value)) = ending;
        let mut json = String::new();
        text[..value]
            .chars()
            .for_each(|c| escape::append(c, &mut json));
        self.put(&json, out);
        match ending {
            Ending::Open(_) => {
                text.drain(..value);
                Some(Progress::More)
            }
            Ending::Here(_, end) => {
                self.put("\"", out);
                text.drain(..end);
                self.at = At::Between;
                None
            }
        }
    }

    /// A value that is no string, as soon as it is complete.
    fn value(
        &mut self,
        framed: &Framed<'_>,
        kinds: Kinds,
        text: &mut String,
        ended: bool,
        out: &mut String,
    ) -> Option<Progress> {
        let Ending::Here(value, end) = framed.ending(text, ended, &self.keys) else {
            return Some(Progress::More);
        };
        let written = &text[..value];
        let [open, close] = CDATA;
        let inner = written.trim().strip_prefix(open);
        let json = match inner.and_then(|inner| inner.strip_suffix(close)) {
            Some(inner) if framed.tags.cdata => Value::from(inner).to_string(),
            _ => json_of(kinds, written),
        };
        self.member(out);
        self.put(&json, out);
        text.drain(..end);
        self.at = At::Between;
        None
    }

    /// The key of the value that follows.
    fn member(&self, out: &mut String) {
        let comma = if self.keys.len() > 1 { ", " } else { "" };
        let key = self.keys.last().map_or("", |key| &key[..]);
        self.put(&format!("{comma}{}: ", Value::from(key)), out);
    }

    fn put(&self, json: &str, out: &mut String) {
        if !self.again {
            out.push_str(json);
        }
    }
}

/// What follows a value or a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// The tag of a key, of this length.
    Key(usize),
    /// The end of the arguments.
    End,
    /// More text is needed.
    Unclear,
    /// Something else.
    Other,
}

/// A key with the text up to its value.
enum Key {
    Is {
        key: String,
        kinds: Kinds,
        end: usize,
    },
    Unclear,
    Other,
}

/// A format, and the parameters of the called tool.
#[derive(Debug, Clone, Copy)]
pub struct Framed<'a> {
    /// The format.
    pub frame: &'a CallFrame,
    /// Its tags.
    pub tags: &'a ArgumentTags,
    /// The tool's parameters.
    pub parameters: &'a ParameterKinds,
}

impl Framed<'_> {
    /// What a text begins with. `ended`: no text follows.
    pub fn follows(&self, text: &str, ended: bool) -> Follows {
        let mut unclear = false;
        match begins_with_all(text, &self.tags.open) {
            Begins::With(length) => return Follows::Key(length),
            Begins::Unclear => unclear = true,
            Begins::Not => {}
        }
        for (at, end) in self.frame.ends().into_iter().enumerate() {
            match begins(text, end) {
                Begins::With(_) if at == 0 => return Follows::End,
                // The first end is missing: nothing but another call may follow.
                Begins::With(length) => match self.last(&text[length..], ended) {
                    Follows::Other => {}
                    found => return found,
                },
                Begins::Unclear => unclear |= !(ended && text.trim().is_empty()),
                Begins::Not => {}
            }
        }
        if unclear {
            Follows::Unclear
        } else {
            Follows::Other
        }
    }

    /// Whether nothing but ends and another call follow an end.
    fn last(&self, text: &str, ended: bool) -> Follows {
        if text.trim().is_empty() {
            return if ended {
                Follows::End
            } else {
                Follows::Unclear
            };
        }
        let lead = self.frame.lead();
        let starts = lead.iter().filter_map(|lead| lead.text());
        let mut found = Follows::Other;
        for next in starts.chain(self.frame.ends()) {
            match begins(text, next) {
                Begins::With(_) => return Follows::End,
                Begins::Unclear => found = Follows::Unclear,
                Begins::Not => {}
            }
        }
        found
    }

    /// The texts that begin other arguments.
    fn others(&self, seen: &[String]) -> Vec<String> {
        let before = match &self.tags.middle {
            Middle::Plain(text) => text,
            Middle::Typed { before, .. } => before,
        };
        let before = chunks(before).first().copied().unwrap_or_default();
        let open = self.tags.open.trim_start();
        let names = self.parameters.iter().map(|(name, _)| name);
        let names = names.filter(|name| !seen.contains(name));
        names.map(|name| format!("{open}{name}{before}")).collect()
    }

    /// Whether the format has a line break before values.
    fn breaks_before(&self) -> bool {
        match &self.tags.middle {
            Middle::Plain(text) => text.ends_with('\n'),
            Middle::Typed { after, .. } => after.ends_with('\n'),
        }
    }

    fn key(&self, text: &str) -> Key {
        let before = match &self.tags.middle {
            Middle::Plain(text) => text,
            Middle::Typed { before, .. } => before,
        };
        let first = chunks(before).first().copied().unwrap_or_default();
        let Some(at) = text.find(first) else {
            return if text.len() > MAX_KEY {
                Key::Other
            } else {
                Key::Unclear
            };
        };
        let key = text[..at].trim().to_owned();
        let length = match begins_with_all(&text[at..], before) {
            Begins::With(length) => at + length,
            Begins::Unclear => return Key::Unclear,
            Begins::Not => return Key::Other,
        };
        let known = self.parameters.iter().find(|(name, _)| *name == key);
        let kinds = known.map_or(Kinds::ANY, |(_, kinds)| *kinds);
        let Middle::Typed {
            text: word, after, ..
        } = &self.tags.middle
        else {
            return Key::Is {
                key,
                kinds,
                end: length,
            };
        };
        let rest = &text[length..];
        let first = chunks(after).first().copied().unwrap_or_default();
        let Some(at) = rest.find(first) else {
            return Key::Unclear;
        };
        let says = rest[..at].trim() == word;
        match begins_with_all(&rest[at..], after) {
            Begins::With(more) => Key::Is {
                key,
                kinds: if says {
                    Kinds::TEXT
                } else {
                    kinds.or_any_but_text()
                },
                end: length + at + more,
            },
            Begins::Unclear => Key::Unclear,
            Begins::Not => Key::Other,
        }
    }

    /// Where a value ends: at the end tag before another key or the end of the arguments, or at the key of another
    /// argument, if the end tag is missing. Its text may contain the end tag too. `seen`: keys so far.
    fn ending(&self, text: &str, ended: bool, seen: &[String]) -> Ending {
        let close = self.tags.close.trim();
        let breaks = self.tags.close.starts_with('\n');
        let without_break = |end: usize| {
            let value = &text[..end];
            value
                .strip_suffix('\n')
                .filter(|_| breaks)
                .unwrap_or(value)
                .len()
        };
        let others = self.others(seen);
        let next = others.iter().filter_map(|other| text.find(other)).min();
        let mut from = 0;
        while let Some(at) = text[from..].find(close) {
            let at = from + at;
            if next.is_some_and(|next| next < at) {
                break;
            }
            let end = at + close.len();
            match self.follows(&text[end..], ended) {
                Follows::Unclear if !ended => return Ending::Open(without_break(at)),
                Follows::Other => from = end,
                _ => return Ending::Here(without_break(at), end),
            }
        }
        if let Some(next) = next {
            return Ending::Here(without_break(next), next);
        }
        let others = others.iter().map(|other| begun(text, other));
        let held = others.fold(begun(text, close), usize::max);
        Ending::Open(without_break(text.len() - held))
    }
}

/// The JSON text of a value written as `text`: as JSON or a Python literal, if its kind is allowed, else a string.
fn json_of(kinds: Kinds, text: &str) -> String {
    let string = || Value::from(text).to_string();
    if kinds.only_text() {
        return string();
    }
    let trimmed = text.trim();
    // The text itself is kept: numbers may have more digits than a float holds.
    let written = match serde_json::from_str::<Value>(trimmed) {
        Ok(value) => Some((trimmed.to_owned(), value)),
        Err(_) => literal::python(trimmed)
            .and_then(|json| serde_json::from_str(&json).ok().map(|value| (json, value))),
    };
    match written {
        Some((json, value)) if kinds.allow(&value) => json,
        _ => string(),
    }
}
