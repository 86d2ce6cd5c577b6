//! The kinds of values that a parameter's schema allows, and values of arguments written as text.

use serde_json::Value;

use super::literal;

/// Maximum references followed from a schema.
const MAX_DEPTH: usize = 8;

/// Kinds of JSON values, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// Strings.
    pub const TEXT: Self = Self(1);
    const NUMBER: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const NULL: Self = Self(8);
    const OBJECT: Self = Self(16);
    const ARRAY: Self = Self(32);
    /// Any value.
    pub const ANY: Self = Self(63);

    /// Kinds that `schema` allows; its references point into `root`.
    pub fn of(schema: &Value, root: &Value) -> Self {
        Self::within(schema, root, MAX_DEPTH)
    }

    fn within(schema: &Value, root: &Value, depth: usize) -> Self {
        let Some(map) = schema.as_object().filter(|_| depth > 0) else {
            return Self::ANY;
        };
        let mut kinds = match map.get("type") {
            Some(Value::String(kind)) => Self::named(kind),
            Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).map(Self::named).sum(),
            _ => Self::ANY,
        };
        if let Some(Value::Array(values)) = map.get("enum") {
            kinds = kinds.and(values.iter().map(Self::of_value).sum());
        }
        if let Some(value) = map.get("const") {
            kinds = kinds.and(Self::of_value(value));
        }
        if let Some(Value::String(path)) = map.get("$ref") {
            let target = path.strip_prefix('#').and_then(|path| root.pointer(path));
            kinds = kinds.and(target.map_or(Self::ANY, |to| Self::within(to, root, depth - 1)));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(all)) = map.get(key) {
                let some = all.iter().map(|of| Self::within(of, root, depth - 1));
                kinds = kinds.and(some.sum());
            }
        }
        if let Some(Value::Array(all)) = map.get("allOf") {
            let every = all.iter().map(|of| Self::within(of, root, depth - 1));
            kinds = every.fold(kinds, Self::and);
        }
        kinds
    }

    fn named(kind: &str) -> Self {
        match kind {
            "string" => Self::TEXT,
            "number" | "integer" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            _ => Self::ANY,
        }
    }

    /// The kind of a value.
    pub fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::TEXT,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether all values are strings.
    pub fn only_text(self) -> bool {
        self == Self::TEXT
    }

    /// The same without strings, or any value.
    pub fn or_any_but_text(self) -> Self {
        match self.0 & !Self::TEXT.0 {
            0 => Self::ANY,
            kinds => Self(kinds),
        }
    }

    /// The JSON text of a value written as `text`: as JSON or a Python literal, if its kind is allowed, else a string.
    pub fn json(self, text: &str) -> String {
        let string = || Value::from(text).to_string();
        if self.only_text() {
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
            Some((json, value)) if self.has(Self::of_value(&value)) => json,
            _ => string(),
        }
    }
}

impl std::iter::Sum for Kinds {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self(0), |sum, of| Self(sum.0 | of.0))
    }
}
