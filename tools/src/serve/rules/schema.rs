//! Limits on JSON schemas.
//!
//! llguidance limits most costs. These limits concern constructs whose cost grows faster than the schema: combined
//! alternatives, patterns that must match together, counted properties, common multiples.

use serde_json::{Map, Value};

use super::MAX_SOURCE;
use super::keywords::Keyword;

/// Largest number: 2^53, up to which doubles represent all integers.
const MAX_NUMBER: f64 = 9_007_199_254_740_992.0;
/// Maximum values in a schema.
const MAX_VALUES: usize = 2000;
/// Maximum steps through references, and depth.
const MAX_STEPS: usize = 20_000;
const MAX_DEPTH: usize = 100;
/// Maximum references.
const MAX_REFS: usize = 400;
/// Maximum properties of an object with `minProperties` or `maxProperties`.
const MAX_COUNTED: usize = 32;
/// Maximum sum of all string length limits.
const MAX_LENGTHS: u64 = 4000;
/// Maximum product of all distinct `multipleOf` values, each as an integer without its zeros at either end.
const MAX_MULTIPLE: u64 = 2000;
/// Maximum patterns that one string must match.
const MAX_TOGETHER: usize = 4;
/// Maximum combinations times the values in them.
const MAX_COMBINED: usize = 10_000;

/// Checks that the cost of a schema is bounded.
///
/// # Errors
/// A limit is exceeded.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut bounds = SchemaCounter {
        root: schema,
        count: Count::default(),
        steps: 0,
    };
    bounds.count(schema, 0)?;
    bounds.count.check()?;
    bounds.combine(schema)
}

/// Counts over the whole schema.
#[derive(Default)]
struct Count {
    values: usize,
    bytes: usize,
    refs: usize,
    properties: usize,
    counted: bool,
    lengths: u64,
    multiples: Vec<u64>,
}

impl Count {
    fn check(&mut self) -> Result<(), String> {
        let most = |what: &str, found: u64, most: u64| {
            if found <= most {
                Ok(())
            } else {
                Err(format!(
                    "the schema has {found} {what}; at most {most} are supported"
                ))
            }
        };
        most("values", self.values as u64, MAX_VALUES as u64)?;
        most("bytes", self.bytes as u64, MAX_SOURCE as u64)?;
        most("references", self.refs as u64, MAX_REFS as u64)?;
        if self.counted {
            let what = "properties with `minProperties` or `maxProperties`";
            most(what, self.properties as u64, MAX_COUNTED as u64)?;
        }
        let what = "characters in all `minLength` and `maxLength` together";
        most(what, self.lengths, MAX_LENGTHS)?;
        self.multiples.sort_unstable();
        self.multiples.dedup();
        let product = (self.multiples.iter()).fold(1u64, |a, &b| a.saturating_mul(b));
        most("as the product of its `multipleOf`", product, MAX_MULTIPLE)
    }
}

/// Totals of a part of the schema, with references followed.
#[derive(Clone, Copy)]
struct Below {
    values: usize,
    expressions: usize,
    /// Combinations of alternatives of this value and of the values in it.
    combinations: usize,
    all_combinations: usize,
}

struct SchemaCounter<'a> {
    root: &'a Value,
    count: Count,
    steps: usize,
}

impl<'a> SchemaCounter<'a> {
    fn count(&mut self, value: &Value, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!(
                "the schema is nested more than {MAX_DEPTH} levels deep"
            ));
        }
        let count = &mut self.count;
        count.values += 1;
        match value {
            Value::String(text) => count.bytes += text.len(),
            Value::Number(n) if n.as_f64().is_none_or(|n| n.abs() > MAX_NUMBER) => {
                return Err(format!(
                    "the schema has the number {n}; the largest is 2^53"
                ));
            }
            Value::Array(items) => {
                for item in items {
                    self.count(item, depth + 1)?;
                }
            }
            Value::Object(map) => {
                for (key, inner) in map {
                    if is_note(key, inner) {
                        continue;
                    }
                    self.count.bytes += key.len();
                    self.keyword(key, inner);
                    self.count(inner, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn keyword(&mut self, key: &str, value: &Value) {
        let count = &mut self.count;
        match (key, value) {
            ("$ref", Value::String(_)) => count.refs += 1,
            ("properties", Value::Object(map)) => count.properties += map.len(),
            ("minProperties" | "maxProperties", Value::Number(_)) => count.counted = true,
            ("minLength" | "maxLength", Value::Number(n)) => {
                // Invalid lengths are rejected later.
                let length = n.as_f64().unwrap_or(0.0).max(0.0) as u64;
                count.lengths = count.lengths.saturating_add(length);
            }
            ("multipleOf", Value::Number(n)) => {
                let digits: String = n.to_string().chars().filter(char::is_ascii_digit).collect();
                let digits = digits.trim_matches('0');
                // The digits of an exponent only make it larger.
                count.multiples.push(digits.parse().unwrap_or(match digits {
                    "" => 1,
                    _ => u64::MAX,
                }));
            }
            _ => {}
        }
    }

    /// Checks constructs that llguidance combines.
    fn combine(&mut self, value: &'a Value) -> Result<(), String> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.combine(item)),
            Value::Object(map) => {
                if combines(map) {
                    let below = self.below(value, &mut Vec::new())?;
                    let all = map
                        .get("allOf")
                        .and_then(Value::as_array)
                        .map_or(0, Vec::len);
                    let combinations = if all > 1 {
                        below.all_combinations
                    } else {
                        below.combinations
                    };
                    if combinations.saturating_mul(below.values) > MAX_COMBINED && combinations > 1
                    {
                        return Err("the schema combines too many alternatives: `allOf`, `anyOf`, `oneOf`, \
                                    `enum` or `$ref` in one place"
                            .to_owned());
                    }
                    if below.expressions > MAX_TOGETHER {
                        return Err(format!(
                            "the schema combines {} of `pattern` and `format`; at most {MAX_TOGETHER} may \
                             be combined",
                            below.expressions
                        ));
                    }
                }
                let inner = map
                    .iter()
                    .filter(|(key, inner)| defines(key) || !is_note(key, inner));
                for (_, inner) in inner {
                    self.combine(inner)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn below(&mut self, value: &'a Value, path: &mut Vec<&'a str>) -> Result<Below, String> {
        self.steps += 1;
        if self.steps > MAX_STEPS || path.len() > MAX_DEPTH {
            return Err("the schema's references expand to too many parts".to_owned());
        }
        let mut below = Below {
            values: 1,
            expressions: 0,
            combinations: 1,
            all_combinations: 1,
        };
        match value {
            Value::Array(items) => {
                for item in items {
                    let item = self.below(item, path)?;
                    below.add(item, 1);
                }
            }
            Value::Object(map) => {
                for (key, inner) in map.iter().filter(|(key, inner)| !is_note(key, inner)) {
                    self.below_keyword(&mut below, key, inner, path)?;
                }
            }
            _ => {}
        }
        Ok(below)
    }

    fn below_keyword(
        &mut self,
        below: &mut Below,
        key: &'a str,
        inner: &'a Value,
        path: &mut Vec<&'a str>,
    ) -> Result<(), String> {
        match (key, inner) {
            ("pattern" | "format", Value::String(_)) => below.expressions += 1,
            ("patternProperties", Value::Object(map)) => below.expressions += map.len(),
            ("$ref", Value::String(to)) if !path.contains(&to.as_str()) => {
                let place = to.strip_prefix('#').and_then(|at| self.root.pointer(at));
                let Some(place) = place else {
                    return Ok(());
                };
                path.push(to);
                let part = self.below(place, path)?;
                path.pop();
                below.add(part, part.combinations);
                return Ok(());
            }
            _ => {}
        }
        let part = self.below(inner, path)?;
        let combinations = match (key, inner) {
            ("allOf", Value::Array(_)) => part.all_combinations,
            ("anyOf" | "oneOf" | "enum" | "type", Value::Array(items)) => items.len().max(1),
            _ => 1,
        };
        below.add(part, combinations);
        if combinations > 1 && key != "allOf" {
            below.all_combinations = below.all_combinations.saturating_mul(combinations);
        }
        Ok(())
    }
}

impl Below {
    fn add(&mut self, part: Self, combinations: usize) {
        self.values = self.values.saturating_add(part.values);
        self.expressions += part.expressions;
        self.combinations = self.combinations.saturating_mul(combinations);
        self.all_combinations = self.all_combinations.saturating_mul(part.all_combinations);
    }
}

/// Whether a member is an annotation. If it is an object, it is a property of that name instead.
fn is_note(key: &str, value: &Value) -> bool {
    let note = defines(key) || Keyword::of(key) == Some(Keyword::Note);
    note && defines(key) == value.is_object()
}

/// Whether a keyword only holds schemas to which others refer.
fn defines(key: &str) -> bool {
    key == "$defs" || key == "definitions"
}

/// Whether a schema combines several schemas for one value.
fn combines(map: &Map<String, Value>) -> bool {
    let alone = ["anyOf", "oneOf", "allOf", "$ref", "enum", "const"];
    let several = |key: &str| alone.contains(&key);
    let parts = map
        .keys()
        .filter(|key| !defines(key) && Keyword::of(key) != Some(Keyword::Note) && *key != "type");
    let parts: Vec<&str> = parts.map(String::as_str).collect();
    let all = map
        .get("allOf")
        .and_then(Value::as_array)
        .map_or(0, Vec::len);
    let lengths = parts.contains(&"minLength") || parts.contains(&"maxLength");
    let expressions = parts.contains(&"pattern") || parts.contains(&"format");
    all > 1
        || (parts.len() > 1 && (parts.iter().any(|part| several(part)) || (lengths && expressions)))
}
