//! Rewrites schemas with keywords that llguidance supports.
//!
//! llguidance treats `oneOf` as `anyOf`, rejects unknown formats, and reports invalid counts poorly. Here `oneOf`
//! becomes `anyOf` if no value is valid against two of its schemas, and is rejected otherwise; formats become
//! supported ones or patterns, or are removed, since they are annotations, as are keywords that only annotate.

use std::fmt::Display;

use serde_json::{Map, Value, json};

use super::disjoint::Schemas;
use super::keywords::Keyword;

/// Keywords whose value is a count.
const COUNTS: [&str; 6] = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
];
/// Formats that llguidance supports.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];
/// Formats that include a supported one.
const WIDER: [(&str, &str); 3] = [
    ("idn-email", "email"),
    ("idn-hostname", "hostname"),
    ("iri", "uri"),
];
/// Formats expressed as patterns.
const PATTERNS: [(&str, &str); 4] = [
    ("uri-reference", REFERENCE),
    ("iri-reference", REFERENCE),
    ("json-pointer", r"^(/([^/~]|~[01])*)*$"),
    (
        "relative-json-pointer",
        r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    ),
];
/// URI references of RFC 3986 without a port.
const REFERENCE: &str = r"^([a-zA-Z][a-zA-Z0-9+.\-]*:)?([a-zA-Z0-9\-._~!$&'()*+,;=@/]|%[0-9a-fA-F]{2})*(\?([a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|%[0-9a-fA-F]{2})*)?(#([a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|%[0-9a-fA-F]{2})*)?$";

/// Rewrites a schema of bounded depth and size. `strict`: unknown keywords are refused, as they may be misspelt.
///
/// # Errors
/// A schema that cannot be expressed.
pub fn plain(schema: &Value, strict: bool) -> Result<Value, String> {
    let mut plain = schema.clone();
    let visitor = Visitor {
        schemas: Schemas::of(schema),
        strict,
    };
    visitor.visit(&mut plain, "#")?;
    Ok(plain)
}

struct Visitor<'a> {
    schemas: Schemas<'a>,
    /// Whether unknown keywords are refused.
    strict: bool,
}

impl Visitor<'_> {
    fn visit(&self, schema: &mut Value, place: &str) -> Result<(), String> {
        let Value::Object(map) = schema else {
            return Ok(());
        };
        map.retain(|name, _| Keyword::of(name) != Some(Keyword::Note));
        for (name, inner) in map.iter_mut() {
            let below = |key: &dyn Display| format!("{place}/{name}/{key}");
            match (Keyword::of(name), inner) {
                (None, _) if self.strict => return Err(Keyword::unknown(name, place)),
                (Some(Keyword::Unsupported), _) => return Err(Keyword::unsupported(name, place)),
                (Some(Keyword::Named), Value::Object(schemas)) => {
                    for (key, schema) in schemas.iter_mut() {
                        self.visit(schema, &below(key))?;
                    }
                }
                (Some(Keyword::Nested), Value::Array(schemas)) => {
                    for (at, schema) in schemas.iter_mut().enumerate() {
                        self.visit(schema, &below(&at))?;
                    }
                }
                (Some(Keyword::Nested), schema) => {
                    self.visit(schema, &format!("{place}/{name}"))?;
                }
                _ => {}
            }
        }
        for name in COUNTS {
            if let Some(count) = map.get_mut(name) {
                *count = json!(whole(name, count, place)?);
            }
        }
        format(map);
        one_of(map, &self.schemas, place)
    }
}

/// The value of a keyword whose value is a count.
fn whole(name: &str, count: &Value, place: &str) -> Result<u64, String> {
    let float = || count.as_f64().filter(|n| n.fract() == 0.0 && *n >= 0.0);
    let whole = count.as_u64().or_else(|| float().map(|n| n as u64));
    whole
        .ok_or_else(|| format!("`{name}` at {place} is {count}; it must be a non-negative integer"))
}

/// Replaces or removes a format.
fn format(map: &mut Map<String, Value>) {
    let Some(Value::String(name)) = map.get("format") else {
        return;
    };
    let of = |list: &[(&str, &'static str)]| {
        let found = list.iter().find(|(known, _)| known == name);
        found.map(|&(_, known)| known)
    };
    if FORMATS.contains(&&**name) {
        return;
    }
    let (wider, pattern) = (of(&WIDER), of(&PATTERNS));
    map.shift_remove("format");
    if let Some(known) = wider {
        map.insert("format".to_owned(), known.into());
    }
    if let Some(pattern) = pattern {
        map.entry("pattern").or_insert_with(|| pattern.into());
    }
}

/// Turns `oneOf` into `anyOf`.
fn one_of(map: &mut Map<String, Value>, schemas: &Schemas<'_>, place: &str) -> Result<(), String> {
    let Some(Value::Array(options)) = map.get("oneOf") else {
        return Ok(());
    };
    let exclusive = match one_required(options) {
        Some(exclusive) => exclusive,
        None => {
            if let Some((a, b)) = schemas.overlap(options) {
                return Err(format!(
                    "a value could be valid against both schemas {a} and {b} of `oneOf` at {place}, which would \
                     make it invalid; use `anyOf`, or give them different types or a required property \
                     with different constants"
                ));
            }
            options.clone()
        }
    };
    map.shift_remove("oneOf");
    if map.contains_key("anyOf") {
        let mut all = map.shift_remove("allOf").unwrap_or_else(|| json!([]));
        if let Value::Array(all) = &mut all {
            all.push(json!({ "anyOf": exclusive }));
        }
        map.insert("allOf".to_owned(), all)
    } else {
        map.insert("anyOf".to_owned(), json!(exclusive))
    };
    Ok(())
}

/// If each schema only requires one property, returns schemas that also exclude the properties of the others, so that
/// exactly one is valid.
fn one_required(options: &[Value]) -> Option<Vec<Value>> {
    let mut names: Vec<&str> = Vec::new();
    for option in options {
        let option = option.as_object()?;
        let says = |key: &String| !matches!(&**key, "required" | "type");
        let object = option.get("type").is_none_or(|kind| kind == "object");
        if option.keys().any(says) || !object {
            return None;
        }
        match &option.get("required")?.as_array()?[..] {
            [Value::String(name)] if !names.contains(&&**name) => names.push(name),
            _ => return None,
        }
    }
    let others = |name: &str| -> Map<String, Value> {
        let others = names.iter().filter(|&&other| other != name);
        others
            .map(|&other| (other.to_owned(), json!(false)))
            .collect()
    };
    let all = names
        .iter()
        .map(|name| json!({"type": "object", "required": [name], "properties": others(name)}));
    (names.len() > 1).then(|| all.collect())
}
