//! The kinds of values that a parameter's schema allows, and values of arguments written as text.

use std::collections::HashMap;

use serde_json::Value;

/// Maximum nesting of a schema's parts, with references followed.
const MAX_DEPTH: usize = 100;

/// Kinds of JSON values, as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// Strings.
    pub const TEXT: Self = Self(1);
    /// Numbers.
    pub const NUMBER: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const NULL: Self = Self(8);
    const OBJECT: Self = Self(16);
    const ARRAY: Self = Self(32);
    /// Any value.
    pub const ANY: Self = Self(63);

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

    /// A number written as in Python, or with zeros before it, as JSON; `None` if it is none, or need not be one.
    pub fn number(self, text: &str) -> Option<String> {
        if !self.has(Self::NUMBER) || self.has(Self::TEXT) {
            return None;
        }
        let (sign, digits) = match text.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("", text.strip_prefix('+').unwrap_or(text)),
        };
        let plain = digits.replace('_', "");
        let zeros = plain.trim_start_matches('0');
        let whole = match zeros.starts_with(|c: char| c.is_ascii_digit()) {
            true => zeros.to_owned(),
            false => format!("0{zeros}"),
        };
        let whole = match whole.strip_suffix('.') {
            Some(whole) => format!("{whole}.0"),
            None => whole,
        };
        let number = format!("{sign}{whole}");
        let valid = plain.starts_with(|c: char| c.is_ascii_digit() || c == '.') && plain != ".";
        (valid && serde_json::from_str::<serde_json::Number>(&number).is_ok()).then_some(number)
    }

    /// The same without strings, or any value.
    pub fn or_any_but_text(self) -> Self {
        match self.0 & !Self::TEXT.0 {
            0 => Self::ANY,
            kinds => Self(kinds),
        }
    }

    /// Whether a value is of these kinds.
    pub fn allow(self, value: &Value) -> bool {
        self.has(Self::of_value(value))
    }
}

/// Kinds of a tool's parameters, by name.
pub type ParameterKinds = [(String, Kinds)];

/// Finds the kinds that parts of one schema allow. Each part is visited once, however often it is referred to.
#[derive(Debug)]
pub struct KindFinder<'a> {
    root: &'a Value,
    /// Kinds of parts, by address.
    found: HashMap<*const Value, Kinds>,
}

impl<'a> KindFinder<'a> {
    /// A finder for parts of `root`, into which references point.
    pub fn new(root: &'a Value) -> Self {
        Self {
            root,
            found: HashMap::new(),
        }
    }

    /// Kinds that `schema`, a part of the root, allows.
    pub fn kinds(&mut self, schema: &'a Value) -> Kinds {
        self.within(schema, MAX_DEPTH)
    }

    fn within(&mut self, schema: &'a Value, depth: usize) -> Kinds {
        let Some(map) = schema.as_object().filter(|_| depth > 0) else {
            return Kinds::ANY;
        };
        // While a part is visited, a reference back to it says nothing.
        let place = std::ptr::from_ref(schema);
        if let Some(&known) = self.found.get(&place) {
            return known;
        }
        self.found.insert(place, Kinds::ANY);
        let mut kinds = match map.get("type") {
            Some(Value::String(kind)) => Kinds::named(kind),
            Some(Value::Array(all)) => (all.iter().filter_map(Value::as_str))
                .map(Kinds::named)
                .sum(),
            _ => Kinds::ANY,
        };
        if let Some(Value::Array(values)) = map.get("enum") {
            kinds = kinds.and(values.iter().map(Kinds::of_value).sum());
        }
        if let Some(value) = map.get("const") {
            kinds = kinds.and(Kinds::of_value(value));
        }
        if let Some(Value::String(path)) = map.get("$ref") {
            let target = path.strip_prefix('#');
            let target = target.and_then(|path| self.root.pointer(path));
            kinds = kinds.and(target.map_or(Kinds::ANY, |to| self.within(to, depth - 1)));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(all)) = map.get(key) {
                kinds = kinds.and(all.iter().map(|of| self.within(of, depth - 1)).sum());
            }
        }
        if let Some(Value::Array(all)) = map.get("allOf") {
            let every = all.iter().map(|of| self.within(of, depth - 1));
            kinds = every.fold(kinds, Kinds::and);
        }
        self.found.insert(place, kinds);
        kinds
    }
}

impl std::iter::Sum for Kinds {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self(0), |sum, of| Self(sum.0 | of.0))
    }
}
