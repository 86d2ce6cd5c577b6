//! How each request field is handled.
//!
//! [`TABLE`] lists the fields of the APIs of OpenAI, vLLM, llama.cpp, Ollama and Anthropic: honoured, ignored without
//! harm, only returned, or rejected by name. [`take`] checks a body against it before anything else parses the body.
//! docs/serve.md shows the table, and a test sends every field in it.

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
    /// All generation endpoints of OpenAI's API.
    pub const OPEN: u16 = CHAT | TEXT | RESPONSE;
    /// llama.cpp's endpoints, which have the fields of completions.
    pub const OWN: u16 = NATIVE | INFILL;
    /// Ollama's generation endpoints.
    pub const OLLAMA: u16 = OLLAMA_CHAT | OLLAMA_GENERATE;
}

/// APIs that define a field, as bits.
pub mod of {
    /// OpenAI
    pub const O: u8 = 1;
    /// vLLM
    pub const V: u8 = 2;
    /// llama.cpp's server
    pub const L: u8 = 4;
    /// Ollama
    pub const A: u8 = 8;
    /// Emberflow only.
    pub const E: u8 = 16;
    /// Anthropic
    pub const N: u8 = 32;
}

/// Type of a field's value. `null` counts as absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// Boolean.
    Flag,
    /// Integer.
    Whole,
    /// Non-negative integer.
    Count,
    /// A number.
    Number,
    /// String.
    Text,
    /// A list.
    List,
    /// An object.
    Object,
    /// Several of these, checked by the code that reads the field.
    Any,
}

/// How a field is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// It takes effect.
    Honoured,
    /// An alias of this field, which takes precedence if both are given.
    As(&'static str),
    /// Ignored, for this reason.
    Harmless(&'static str),
    /// Returned in the response, and otherwise ignored, for this reason.
    Returned(&'static str),
    /// Rejected, with a hint if there is an alternative.
    Refused(&'static str),
}

/// A request field.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: Type,
    /// Requests that may have it: bits of [`on`].
    pub on: u16,
    /// APIs that define it: bits of [`of`].
    pub of: u8,
    /// How it is handled.
    pub does: Does,
    /// JSON values that count as absent.
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

    /// The value of the field; `None` if it counts as absent.
    fn value(&self, text: &str) -> Result<Option<String>, ApiError> {
        if text == "null" || self.is_off(text) {
            return Ok(None);
        }
        match self.does {
            Does::Harmless(_) => Ok(None),
            Does::Refused(instead) => Err(self.refusal(instead)),
            Does::Honoured | Does::As(_) | Does::Returned(_) => self.typed(text).map(Some),
        }
    }

    /// Whether the value counts as absent. Numbers are compared as numbers.
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
        let mut message = format!("`{name}` is not supported: remove it");
        if !self.off.is_empty() {
            message += &format!(" or set it to {}", self.off.join(" or "));
        }
        if !instead.is_empty() {
            message += &format!("; {instead}");
        }
        ApiError::param(name, message)
    }

    /// Checks the type of the value; removes the fraction of integers such as 1.0.
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
            Type::Whole => (whole(i64::MIN), "an integer"),
            Type::Count => (whole(0), "a non-negative integer"),
            Type::Number => (number().map(|_| text.to_owned()), "a number"),
            Type::Text => (begins(b"\"").then(|| text.to_owned()), "a string"),
            Type::List => (begins(b"[").then(|| text.to_owned()), "a list"),
            Type::Object => (begins(b"{").then(|| text.to_owned()), "an object"),
            Type::Any => (Some(text.to_owned()), ""),
        };
        found.ok_or_else(|| {
            let name = self.name;
            let shown: String = text.chars().take(40).collect();
            let or = if self.off.is_empty() {
                String::new()
            } else {
                format!(" (or {})", self.off.join(" or "))
            };
            ApiError::param(
                name,
                format!("`{name}` is {shown}, expected {expected}{or}"),
            )
        })
    }
}

/// The table as shown in docs/serve.md.
pub fn markdown() -> String {
    let mut all = String::from("| field | requests | of | here |\n|---|---|---|---|\n");
    for field in TABLE {
        let off: Vec<String> = field.off.iter().map(|off| format!("`{off}`")).collect();
        let here = match field.does {
            Does::Honoured => "honoured".to_owned(),
            Does::As(name) => format!("as `{name}`"),
            Does::Harmless(why) => format!("ignored: {why}"),
            Does::Returned(why) => format!("returned: {why}"),
            Does::Refused(instead) => {
                let mut here = "refused".to_owned();
                if !off.is_empty() {
                    here += &format!(" except {}", off.join(", "));
                }
                if !instead.is_empty() {
                    here += &format!("; {instead}");
                }
                here
            }
        };
        let here = match field.does {
            Does::Honoured | Does::As(_) if !off.is_empty() => {
                format!("{here}; {} counts as absent", off.join(", "))
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

/// Names of the bits of [`on`].
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

/// Names of the bits of [`of`].
const OF: [&str; 6] = [
    "OpenAI",
    "vLLM",
    "llama.cpp",
    "Ollama",
    "Emberflow",
    "Anthropic",
];

/// Names of the bits that are set.
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

/// Parses the body of a request of a kind and returns an object with the fields that the server uses, under their
/// main names.
///
/// # Errors
/// A body that is not an object, a field of the wrong type, or a rejected field.
pub fn take(on: u16, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let given = members(body).map_err(|e| ApiError::invalid(format!("the request body: {e}")))?;
    let mut values: BTreeMap<&str, String> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, text) in &given {
        // Unknown fields are ignored, as clients expect.
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
        // Names in the table need no escaping.
        taken.extend_from_slice(format!("\"{name}\":{value}").as_bytes());
    }
    taken.push(b'}');
    Ok(taken)
}

/// Members of an object, with the JSON text of each value. Of duplicate names the last one counts.
fn members(object: &[u8]) -> Result<BTreeMap<String, &str>, serde_json::Error> {
    // This reports syntax errors with their position; the code below assumes valid JSON.
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

/// Deserializes the object that [`take`] returned.
///
/// # Errors
/// A missing field, or one of the wrong type, with its path.
pub fn read<T: DeserializeOwned>(on: u16, taken: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(taken);
    serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        let why = e.into_inner().to_string();
        // Positions in the rewritten object are meaningless to the client.
        let why = why.rsplit_once(" at line ").map_or(&*why, |(why, _)| why);
        let name = path.split(['.', '[']).next().unwrap_or_default();
        let field = match path.as_str() {
            // Flattened fields have no path; their messages name them.
            "." => why.split('`').nth(1).and_then(|name| field(on, name)),
            _ => field(on, name),
        };
        let message = match path.as_str() {
            "." => format!("the request body: {why}"),
            path => format!("{path}: {why}"),
        };
        match field {
            Some(field) => ApiError::param(field.name, message),
            None => ApiError::invalid(message),
        }
    })
}

/// Deserializes fields that one part of the server writes for another.
///
/// # Errors
/// As [`read`].
pub fn rewrite<T: DeserializeOwned>(on: u16, fields: &impl Serialize) -> Result<T, ApiError> {
    let body = serde_json::to_vec(fields).map_err(ApiError::invalid)?;
    read(on, &take(on, &body)?)
}

#[cfg(test)]
mod tests;
