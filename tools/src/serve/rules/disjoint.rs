//! Proves that no value is valid against two schemas.

use std::cell::Cell;

use serde_json::{Map, Value};

/// Whether two schemas certainly exclude each other.
type Test<'a> = dyn Fn(&Map<String, Value>, &Map<String, Value>) -> bool + 'a;

/// Maximum number of comparisons.
const MAX_STEPS: usize = 20_000;
/// Maximum depth of comparisons and references.
const MAX_DEPTH: usize = 16;

/// Value types as bits. An integer is also a number.
const TYPES: [(&str, u8); 7] = [
    ("null", 1),
    ("boolean", 2),
    ("integer", 4),
    ("number", 4 | 8),
    ("string", 16),
    ("array", 32),
    ("object", 64),
];
const ALL: u8 = 127;
const NUMBER: u8 = 4 | 8;

/// A document of schemas, with its references.
pub struct Schemas<'a> {
    root: &'a Value,
    steps: Cell<usize>,
}

impl<'a> Schemas<'a> {
    /// The schemas of a document.
    pub fn of(root: &'a Value) -> Self {
        Self {
            root,
            steps: Cell::new(0),
        }
    }

    /// Indices of two schemas in `options` that may accept the same value.
    pub fn overlap(&self, options: &[Value]) -> Option<(usize, usize)> {
        let pairs = (0..options.len()).flat_map(|a| (a + 1..options.len()).map(move |b| (a, b)));
        let mut pairs = pairs;
        pairs.find(|&(a, b)| !self.disjoint(&options[a], &options[b], 0))
    }

    /// Whether it is certain that no value is valid against both.
    fn disjoint(&self, a: &Value, b: &Value, depth: usize) -> bool {
        self.steps.set(self.steps.get() + 1);
        if self.steps.get() > MAX_STEPS || depth > MAX_DEPTH {
            return false;
        }
        if a == &Value::Bool(false) || b == &Value::Bool(false) {
            return true;
        }
        let (a_parts, b_parts) = (self.parts(a), self.parts(b));
        let common = types(&a_parts) & types(&b_parts);
        let pair = |test: &Test<'_>| a_parts.iter().any(|a| b_parts.iter().any(|b| test(a, b)));
        let only = |kinds: u8| common & !kinds == 0;
        let limits = |less: &str, more: &str| {
            pair(&|a, b| above(a, b, less, more) || above(b, a, less, more))
        };
        common == 0
            || pair(&values_differ)
            || (only(NUMBER) && pair(&|a, b| beyond(a, b) || beyond(b, a)))
            || (only(16) && limits("minLength", "maxLength"))
            || (only(32) && limits("minItems", "maxItems"))
            || (only(64) && limits("minProperties", "maxProperties"))
            || (only(64) && self.properties_disjoint(&a_parts, &b_parts, depth))
            || self.options_disjoint(&a_parts, b, depth)
            || self.options_disjoint(&b_parts, a, depth)
    }

    /// All schemas that apply to the same value: `schema` itself, its `$ref`, and `allOf`.
    fn parts<'s>(&self, schema: &'s Value) -> Vec<&'s Map<String, Value>>
    where
        'a: 's,
    {
        let mut parts: Vec<&Map<String, Value>> = Vec::new();
        let mut open = vec![schema];
        while let Some(schema) = open.pop() {
            let Value::Object(map) = schema else {
                continue;
            };
            if parts.len() >= MAX_DEPTH || parts.iter().any(|known| std::ptr::eq(*known, map)) {
                continue;
            }
            parts.push(map);
            let target = map.get("$ref").and_then(Value::as_str);
            let target = target.and_then(|to| to.strip_prefix('#'));
            open.extend(target.and_then(|at| self.root.pointer(at)));
            open.extend(
                map.get("allOf")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten(),
            );
        }
        parts
    }

    /// Whether every alternative of `parts` excludes `other`.
    fn options_disjoint(&self, parts: &[&Map<String, Value>], other: &Value, depth: usize) -> bool {
        let lists = parts
            .iter()
            .flat_map(|part| ["anyOf", "oneOf"].map(|name| part.get(name)));
        let mut lists = lists.flatten().filter_map(Value::as_array);
        lists.any(|options| {
            options
                .iter()
                .all(|option| self.disjoint(option, other, depth + 1))
        })
    }

    /// Whether the schemas of a property that one of them requires exclude each other.
    fn properties_disjoint(
        &self,
        a: &[&Map<String, Value>],
        b: &[&Map<String, Value>],
        depth: usize,
    ) -> bool {
        let required = a.iter().chain(b).filter_map(|part| part.get("required"));
        let mut names = required.filter_map(Value::as_array).flatten();
        names.any(|name| {
            let Some(name) = name.as_str() else {
                return false;
            };
            let (a, b) = (properties(a, name), properties(b, name));
            a.iter()
                .any(|a| b.iter().any(|b| self.disjoint(a, b, depth + 1)))
        })
    }
}

/// The schemas of a property in all parts.
fn properties<'s>(parts: &[&'s Map<String, Value>], name: &str) -> Vec<&'s Value> {
    parts.iter().map(|&part| property(part, name)).collect()
}

/// The schema of a property in one part.
fn property<'s>(part: &'s Map<String, Value>, name: &str) -> &'s Value {
    const ANY: &Value = &Value::Bool(true);
    match part.get("properties").and_then(|all| all.get(name)) {
        Some(property) => property,
        None if part.contains_key("patternProperties") => ANY,
        None => part.get("additionalProperties").unwrap_or(ANY),
    }
}

/// Types of valid values.
fn types(parts: &[&Map<String, Value>]) -> u8 {
    let bit = |name: &Value| {
        let found = TYPES.iter().find(|(known, _)| name == known);
        found.map_or(0, |&(_, bits)| bits)
    };
    parts.iter().fold(ALL, |all, part| {
        let named = match part.get("type") {
            Some(Value::Array(names)) => names.iter().fold(0, |all, name| all | bit(name)),
            Some(name) => bit(name),
            None => ALL,
        };
        let given = values(part).map_or(ALL, |values| {
            values.iter().fold(0, |all, value| all | kind(value))
        });
        all & named & given
    })
}

fn kind(value: &Value) -> u8 {
    match value {
        Value::Null => 1,
        Value::Bool(_) => 2,
        Value::Number(n) if n.as_f64().is_some_and(|n| n.fract() == 0.0) => 4,
        Value::Number(_) => 8,
        Value::String(_) => 16,
        Value::Array(_) => 32,
        Value::Object(_) => 64,
    }
}

/// The valid values, if `const` or `enum` lists them.
fn values(part: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (part.get("const"), part.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// Whether both list their values and have none in common.
fn values_differ(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    match (values(a), values(b)) {
        (Some(a), Some(b)) => !a.iter().any(|a| b.iter().any(|b| equal(a, b))),
        _ => false,
    }
}

/// JSON equality; 1 equals 1.0.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let same = |(key, a): (&String, &Value)| b.get(key).is_some_and(|b| equal(a, b));
            a.len() == b.len() && a.iter().all(same)
        }
        (a, b) => a == b,
    }
}

/// Whether the minimum `less` of `a` is greater than the maximum `more` of `b`.
fn above(a: &Map<String, Value>, b: &Map<String, Value>, less: &str, more: &str) -> bool {
    let number = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_f64);
    matches!((number(a, less), number(b, more)), (Some(a), Some(b)) if a > b)
}

/// Whether all numbers of `a` are greater than those of `b`.
fn beyond(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let (least, less) = ("minimum", "exclusiveMinimum");
    let (most, more) = ("maximum", "exclusiveMaximum");
    let touch = |low: &str, high: &str| {
        let number = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_f64);
        matches!((number(a, low), number(b, high)), (Some(a), Some(b)) if a >= b)
    };
    above(a, b, least, most) || touch(less, most) || touch(least, more) || touch(less, more)
}
