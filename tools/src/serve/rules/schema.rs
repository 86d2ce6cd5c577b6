//! Bounds of JSON schemas.
//!
//! llguidance bounds most of what a schema may cost. Here are those whose cost grows faster than the
//! schema: parts that are combined with each other, expressions that must hold together, counted
//! properties, common multiples.

use serde_json::{Map, Value};

use super::MAX_SOURCE;

/// Largest number, up to which all integers are numbers of JSON.
const MAX_NUMBER: f64 = 9_007_199_254_740_992.0;
/// Most values in a schema.
const MAX_VALUES: usize = 2000;
/// Most steps through references, and how deep.
const MAX_STEPS: usize = 20_000;
const MAX_DEPTH: usize = 100;
/// Most references.
const MAX_REFS: usize = 400;
/// Most properties where their number has limits.
const MAX_COUNTED: usize = 32;
/// Sum of all limits of texts' lengths.
const MAX_LENGTHS: u64 = 4000;
/// Product of all different `multipleOf`, without their zeros.
const MAX_MULTIPLE: u64 = 2000;
/// Most expressions that one text must match.
const MAX_TOGETHER: usize = 4;
/// Most combinations, times the values in them.
const MAX_COMBINED: usize = 10_000;

/// What says nothing about values.
const NOTES: [&str; 9] = [
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$schema",
    "$id",
];

/// Checks that a schema's cost is bounded.
///
/// # Errors
/// What is too much.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut bounds = Bounds {
        root: schema,
        count: Count::default(),
        steps: 0,
    };
    bounds.count(schema, 0)?;
    bounds.count.check()?;
    bounds.combine(schema)
}

/// Numbers of the whole schema.
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
        let most = |what: &str, found: u64, most: u64| match found <= most {
            true => Ok(()),
            false => Err(format!(
                "the schema has {found} {what}; at most {most} are supported"
            )),
        };
        most("values", self.values as u64, MAX_VALUES as u64)?;
        most("bytes", self.bytes as u64, MAX_SOURCE as u64)?;
        most("references", self.refs as u64, MAX_REFS as u64)?;
        if self.counted {
            let what = "properties beside `minProperties` or `maxProperties`";
            most(what, self.properties as u64, MAX_COUNTED as u64)?;
        }
        let what = "characters in `minLength` and `maxLength` together";
        most(what, self.lengths, MAX_LENGTHS)?;
        self.multiples.sort_unstable();
        self.multiples.dedup();
        let product = (self.multiples.iter()).fold(1u64, |a, &b| a.saturating_mul(b));
        most("as the product of its `multipleOf`", product, MAX_MULTIPLE)
    }
}

/// What lies below a part of the schema, references followed.
#[derive(Clone, Copy)]
struct Below {
    values: usize,
    expressions: usize,
    /// Ways to choose among alternatives, of this value and with those of the values in it.
    ways: usize,
    all_ways: usize,
}

struct Bounds<'a> {
    root: &'a Value,
    count: Count,
    steps: usize,
}

impl<'a> Bounds<'a> {
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
                // One that is no count is refused later.
                let length = n.as_f64().unwrap_or(0.0).max(0.0) as u64;
                count.lengths = count.lengths.saturating_add(length);
            }
            ("multipleOf", Value::Number(n)) => {
                let digits: String = n.to_string().chars().filter(char::is_ascii_digit).collect();
                let digits = digits.trim_matches('0');
                // An exponent's digits only make it larger.
                count.multiples.push(digits.parse().unwrap_or(match digits {
                    "" => 1,
                    _ => u64::MAX,
                }));
            }
            _ => {}
        }
    }

    /// Looks for parts that llguidance combines with each other.
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
                    let ways = if all > 1 { below.all_ways } else { below.ways };
                    if ways.saturating_mul(below.values) > MAX_COMBINED && ways > 1 {
                        return Err("the schema combines too many alternatives: `allOf`, `anyOf`, `oneOf`, \
                                    `enum` or `$ref` beside each other"
                            .to_owned());
                    }
                    if below.expressions > MAX_TOGETHER {
                        return Err(format!(
                            "the schema combines {} of `pattern` and `format`; at most {MAX_TOGETHER} can \
                             be combined",
                            below.expressions
                        ));
                    }
                }
                let inner = map.iter().filter(|(key, inner)| {
                    *key == "$defs" || *key == "definitions" || !is_note(key, inner)
                });
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
            return Err("the schema's references lead through too many parts".to_owned());
        }
        let mut below = Below {
            values: 1,
            expressions: 0,
            ways: 1,
            all_ways: 1,
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
                below.add(part, part.ways);
                return Ok(());
            }
            _ => {}
        }
        let part = self.below(inner, path)?;
        let ways = match (key, inner) {
            ("allOf", Value::Array(_)) => part.all_ways,
            ("anyOf" | "oneOf" | "enum" | "type", Value::Array(items)) => items.len().max(1),
            _ => 1,
        };
        below.add(part, ways);
        if ways > 1 && key != "allOf" {
            below.all_ways = below.all_ways.saturating_mul(ways);
        }
        Ok(())
    }
}

impl Below {
    fn add(&mut self, part: Self, ways: usize) {
        self.values = self.values.saturating_add(part.values);
        self.expressions += part.expressions;
        self.ways = self.ways.saturating_mul(ways);
        self.all_ways = self.all_ways.saturating_mul(part.all_ways);
    }
}

/// Whether a member says nothing about values. A property may have such a name; it is an object then.
fn is_note(key: &str, value: &Value) -> bool {
    let definitions = key == "$defs" || key == "definitions";
    NOTES.contains(&key) && definitions == value.is_object()
}

/// Whether a schema is several at once.
fn combines(map: &Map<String, Value>) -> bool {
    let alone = ["anyOf", "oneOf", "allOf", "$ref", "enum", "const"];
    let several = |key: &str| alone.contains(&key);
    let parts = map
        .keys()
        .filter(|key| !NOTES.contains(&key.as_str()) && *key != "type");
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
