//! What becomes of each field of a request.
//!
//! [`TABLE`] names the fields of OpenAI's, vLLM's, llama.cpp's, Ollama's and Anthropic's interfaces:
//! honoured, ignored without harm, or refused by name. [`take`] holds a body to it before anything else reads
//! the body. docs/serve.md shows the table, and a test posts every row of it.

mod table;

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::error::ApiError;
pub use table::TABLE;

/// Kinds of requests, as bits.
pub mod on {
    /// `/v1/chat/completions`
    pub const CHAT: u16 = 1;
    /// `/v1/completions`
    pub const TEXT: u16 = 2;
    /// `/v1/responses`
    pub const RESPONSE: u16 = 4;
    /// `/api/chat`
    pub const OLLAMA_CHAT: u16 = 8;
    /// `/api/generate`
    pub const OLLAMA_GENERATE: u16 = 16;
    /// `options` of Ollama's requests
    pub const OPTIONS: u16 = 32;
    /// `/completion`
    pub const NATIVE: u16 = 64;
    /// `/infill`
    pub const INFILL: u16 = 128;
    /// `/v1/messages`
    pub const MESSAGE: u16 = 256;
    /// `/v1/embeddings`
    pub const EMBEDDING: u16 = 512;
    /// `/api/embed`
    pub const OLLAMA_EMBED: u16 = 1024;
    /// `/api/embeddings`
    pub const OLLAMA_EMBEDDING: u16 = 2048;
    /// All of OpenAI's that give texts.
    pub const OPEN: u16 = CHAT | TEXT | RESPONSE;
    /// llama.cpp's own, whose fields those of completions are.
    pub const OWN: u16 = NATIVE | INFILL;
    /// All of Ollama's that give texts.
    pub const OLLAMA: u16 = OLLAMA_CHAT | OLLAMA_GENERATE;
}

/// Interfaces that have a field, as bits.
pub mod of {
    /// OpenAI
    pub const O: u8 = 1;
    /// vLLM
    pub const V: u8 = 2;
    /// llama.cpp's server
    pub const L: u8 = 4;
    /// Ollama
    pub const A: u8 = 8;
    /// Emberflow's own.
    pub const E: u8 = 16;
    /// Anthropic
    pub const N: u8 = 32;
}

/// What a field's value may be. `null` is as if the field were not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// True or false.
    Flag,
    /// A whole number.
    Whole,
    /// A whole number of 0 or more.
    Count,
    /// A number.
    Number,
    /// A text.
    Text,
    /// A list.
    List,
    /// An object.
    Object,
    /// Several of these: who reads the field says which.
    Any,
}

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// It has its effect.
    Honoured,
    /// It is another name of this field, which goes first where both are given.
    As(&'static str),
    /// It has no effect, and needs none, because of this.
    Harmless(&'static str),
    /// It is refused, and this is what to do instead, if there is something.
    Refused(&'static str),
}

/// A field of a request.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Type,
    /// Requests that may have it: bits of [`on`].
    pub on: u16,
    /// Interfaces that have it: bits of [`of`].
    pub of: u8,
    /// What becomes of it.
    pub does: Does,
    /// Values in JSON with which it is as if the field were not there.
    pub off: &'static [&'static str],
}

impl Field {
    const fn new(name: &'static str, kind: Type, on: u16, of: u8, does: Does) -> Self {
        Self {
            name,
            kind,
            on,
            of,
            does,
            off: &[],
        }
    }

    const fn off(self, off: &'static [&'static str]) -> Self {
        Self { off, ..self }
    }

    /// The value that a request gives to the field, `None` if it is as if there were none.
    fn value(&self, text: &str) -> Result<Option<String>, ApiError> {
        if text == "null" || self.is_off(text) {
            return Ok(None);
        }
        match self.does {
            Does::Harmless(_) => Ok(None),
            Does::Refused(instead) => Err(self.refusal(instead)),
            Does::Honoured | Does::As(_) => self.typed(text).map(Some),
        }
    }

    /// Whether this value turns the field off. Numbers are compared as numbers.
    fn is_off(&self, text: &str) -> bool {
        let number = |text: &str| text.parse::<f64>().ok();
        let same =
            |off: &&str| *off == text || number(off).is_some_and(|n| number(text) == Some(n));
        let bare: String = match text.len() {
            0..=64 => text.split_ascii_whitespace().collect(),
            _ => return false,
        };
        self.off.iter().any(same) || self.off.contains(&&*bare)
    }

    fn refusal(&self, instead: &str) -> ApiError {
        let name = self.name;
        let mut message = format!("`{name}` is not supported: leave it out");
        if !self.off.is_empty() {
            message += &format!(", or send {}", self.off.join(" or "));
        }
        if !instead.is_empty() {
            message += &format!("; {instead}");
        }
        ApiError::param(name, message)
    }

    /// The value, if it is of the field's type; whole numbers without a fraction.
    fn typed(&self, text: &str) -> Result<String, ApiError> {
        let begins = |signs: &[u8]| signs.contains(text.as_bytes().first().unwrap_or(&0));
        let number = || serde_json::from_str::<serde_json::Number>(text).ok();
        let whole = |least: i64| {
            let number = number()?;
            if number.is_f64() {
                let value = number.as_f64().filter(|v| v.fract() == 0.0)?;
                let fits = value.abs() < (1u64 << 53) as f64 && value >= least as f64;
                return fits.then(|| (value as i64).to_string());
            }
            let fits = number.is_u64() || number.as_i64().is_some_and(|n| n >= least);
            fits.then(|| text.to_owned())
        };
        let (found, expected) = match self.kind {
            Type::Flag => (begins(b"tf").then(|| text.to_owned()), "true or false"),
            Type::Whole => (whole(i64::MIN), "a whole number"),
            Type::Count => (whole(0), "a whole number of 0 or more"),
            Type::Number => (number().map(|_| text.to_owned()), "a number"),
            Type::Text => (begins(b"\"").then(|| text.to_owned()), "a text"),
            Type::List => (begins(b"[").then(|| text.to_owned()), "a list"),
            Type::Object => (begins(b"{").then(|| text.to_owned()), "an object"),
            Type::Any => (Some(text.to_owned()), ""),
        };
        found.ok_or_else(|| {
            let name = self.name;
            let shown: String = text.chars().take(40).collect();
            let or = match self.off.is_empty() {
                true => String::new(),
                false => format!(" (or {})", self.off.join(" or ")),
            };
            ApiError::param(
                name,
                format!("`{name}` is {shown}, expected {expected}{or}"),
            )
        })
    }
}

/// The table as docs/serve.md shows it.
pub fn markdown() -> String {
    let mut all = String::from("| field | requests | of | here |\n|---|---|---|---|\n");
    for field in TABLE {
        let off: Vec<String> = field.off.iter().map(|off| format!("`{off}`")).collect();
        let here = match field.does {
            Does::Honoured => "honoured".to_owned(),
            Does::As(name) => format!("as `{name}`"),
            Does::Harmless(why) => format!("ignored: {why}"),
            Does::Refused(instead) => {
                let mut here = "refused".to_owned();
                if !off.is_empty() {
                    here += &format!(" but for {}", off.join(", "));
                }
                if !instead.is_empty() {
                    here += &format!("; {instead}");
                }
                here
            }
        };
        let here = match field.does {
            Does::Honoured | Does::As(_) if !off.is_empty() => {
                format!("{here}; {} as if left out", off.join(", "))
            }
            _ => here,
        };
        let (name, on, of) = (
            field.name,
            words(field.on, &ON),
            words(field.of.into(), &OF),
        );
        all += &format!("| `{name}` | {on} | {of} | {here} |\n");
    }
    all
}

/// What the bits of [`on`] are called.
const ON: [&str; 12] = [
    "chats",
    "completions",
    "responses",
    "`/api/chat`",
    "`/api/generate`",
    "`options`",
    "`/completion`",
    "`/infill`",
    "messages",
    "embeddings",
    "`/api/embed`",
    "`/api/embeddings`",
];

/// What the bits of [`of`] are called.
const OF: [&str; 6] = [
    "OpenAI",
    "vLLM",
    "llama.cpp",
    "Ollama",
    "Emberflow",
    "Anthropic",
];

/// The names of the bits that are set.
fn words(bits: u16, names: &[&str]) -> String {
    let set = names
        .iter()
        .enumerate()
        .filter(|(at, _)| bits >> at & 1 == 1);
    let set: Vec<&str> = set.map(|(_, name)| *name).collect();
    set.join(", ")
}

/// The field of this name in requests of a kind.
pub fn field(on: u16, name: &str) -> Option<&'static Field> {
    TABLE.iter().find(|f| f.on & on != 0 && f.name == name)
}

/// The body of a request of a kind with the fields that the server reads, under the names by which it
/// reads them.
///
/// # Errors
/// A body that is no object, a field of the wrong type, one that is refused.
pub fn take(on: u16, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let given = members(body).map_err(|e| ApiError::invalid(format!("the body: {e}")))?;
    let mut values: BTreeMap<&str, String> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, text) in &given {
        // What no interface has is ignored, as clients expect.
        let Some(field) = field(on, name) else {
            continue;
        };
        let Some(value) = field.value(text)? else {
            continue;
        };
        match field.does {
            Does::As(name) => others.push((name, value)),
            _ => {
                values.insert(field.name, value);
            }
        }
    }
    for (name, value) in others {
        values.entry(name).or_insert(value);
    }
    let mut taken = Vec::with_capacity(body.len());
    taken.push(b'{');
    for (name, value) in values {
        if taken.len() > 1 {
            taken.push(b',');
        }
        // Names of the table need no escapes.
        taken.extend_from_slice(format!("\"{name}\":{value}").as_bytes());
    }
    taken.push(b'}');
    Ok(taken)
}

/// The members of an object, each with the text of its value. Of equal names the last one counts.
fn members(object: &[u8]) -> Result<BTreeMap<String, &str>, serde_json::Error> {
    // Says what is wrong, and where; what follows then finds nothing wrong.
    let _: BTreeMap<String, IgnoredAny> = serde_json::from_slice(object)?;
    let mut members = BTreeMap::new();
    let mut at = object
        .iter()
        .position(|&b| b == b'{')
        .map_or(object.len(), |at| at + 1);
    loop {
        let mut name = serde_json::Deserializer::from_slice(&object[at..]).into_iter::<String>();
        let Some(Ok(read)) = name.next() else {
            return Ok(members);
        };
        at += name.byte_offset();
        at += object[at..]
            .iter()
            .position(|&b| b == b':')
            .map_or(0, |colon| colon + 1);
        let mut value =
            serde_json::Deserializer::from_slice(&object[at..]).into_iter::<IgnoredAny>();
        value.next().transpose()?;
        let end = at + value.byte_offset();
        let text = std::str::from_utf8(&object[at..end]).unwrap_or_default();
        members.insert(read, text.trim());
        at = end
            + object[end..]
                .iter()
                .position(|&b| b == b',')
                .map_or(0, |comma| comma + 1);
    }
}

/// Reads what [`take`] took.
///
/// # Errors
/// A field that is missing, or of the wrong form, with the way to it.
pub fn read<T: DeserializeOwned>(on: u16, taken: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(taken);
    serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        let why = e.into_inner().to_string();
        // Places in a body that was written anew say nothing.
        let why = why.rsplit_once(" at line ").map_or(&*why, |(why, _)| why);
        let name = path.split(['.', '[']).next().unwrap_or_default();
        let field = match path.as_str() {
            // Fields that are flattened have no path; their messages name them.
            "." => why.split('`').nth(1).and_then(|name| field(on, name)),
            _ => field(on, name),
        };
        let message = match path.as_str() {
            "." => format!("the body: {why}"),
            path => format!("{path}: {why}"),
        };
        match field {
            Some(field) => ApiError::param(field.name, message),
            None => ApiError::invalid(message),
        }
    })
}

/// Reads fields that one part of the server writes for another.
///
/// # Errors
/// As [`read`].
pub fn rewrite<T: DeserializeOwned>(on: u16, fields: &impl Serialize) -> Result<T, ApiError> {
    let body = serde_json::to_vec(fields).map_err(ApiError::invalid)?;
    read(on, &take(on, &body)?)
}

#[cfg(test)]
mod tests;
