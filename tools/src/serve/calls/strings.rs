//! Grammars of strings that are written as they are, between tags.

use std::cell::RefCell;
use std::collections::HashMap;

use llguidance::regex_to_lark;
use serde_json::Value;

use super::super::rules::format_pattern;
use super::writer::{Writer, quoted};

/// Strings that a part of a schema allows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Texts {
    /// All.
    Any,
    /// Those of a terminal's expression.
    Of(String),
    /// None.
    Never,
}

impl Texts {
    /// Strings that all of `parts` allow.
    fn every(parts: Vec<Self>) -> Self {
        let mut all = Vec::new();
        for part in parts {
            match part {
                Self::Any => {}
                Self::Never => return Self::Never,
                Self::Of(expression) => all.push(format!("({expression})")),
            }
        }
        match all.is_empty() {
            true => Self::Any,
            false => Self::Of(all.join(" & ")),
        }
    }

    /// Strings that one of `parts` allows.
    fn some(parts: Vec<Self>) -> Self {
        let mut all = Vec::new();
        for part in parts {
            match part {
                Self::Any => return Self::Any,
                Self::Never => {}
                Self::Of(expression) => all.push(format!("({expression})")),
            }
        }
        match all.is_empty() {
            true => Self::Never,
            false => Self::Of(all.join(" | ")),
        }
    }
}

/// Writes the terminals of one tool's strings.
pub struct PlainStrings<'a> {
    /// Prefix of the names of terminals.
    name: String,
    /// The schema into which references point.
    root: &'a Value,
    /// What ends a string, so that none contains it.
    end: &'a str,
    writer: &'a Writer<'a>,
    /// What references stand for, by the address of the schema; `None` while it is found out.
    targets: RefCell<HashMap<*const Value, Option<Texts>>>,
}

impl<'a> PlainStrings<'a> {
    /// For the tool whose rules have names with this prefix.
    pub fn new(name: &str, root: &'a Value, end: &'a str, writer: &'a Writer<'a>) -> Self {
        Self {
            name: name.to_uppercase(),
            root,
            end,
            writer,
            targets: RefCell::default(),
        }
    }

    /// The terminal of the strings that parameter number `at` may have; `None` for all strings.
    ///
    /// # Errors
    /// What cannot be expressed.
    pub fn terminal(&self, at: usize, schema: &'a Value) -> Result<Option<String>, String> {
        match self.texts(schema)? {
            Texts::Any => Ok(None),
            Texts::Never => Err("no string is valid against its schema".to_owned()),
            Texts::Of(expression) => {
                let name = format!("{}_T{at}", self.name);
                let without = Writer::without(self.end);
                let rule = format!("({expression}) & {without}");
                self.writer.rule(&name, &rule);
                Ok(Some(name))
            }
        }
    }

    fn texts(&self, schema: &'a Value) -> Result<Texts, String> {
        let Value::Object(map) = schema else {
            return Ok(match schema {
                Value::Bool(false) => Texts::Never,
                _ => Texts::Any,
            });
        };
        let mut parts = Vec::new();
        for (key, value) in map {
            let list = || value.as_array().map_or(&[][..], Vec::as_slice);
            let each = || {
                list()
                    .iter()
                    .map(|of| self.texts(of))
                    .collect::<Result<Vec<_>, _>>()
            };
            parts.push(match (&key[..], value) {
                ("type", Value::String(kind)) if kind != "string" => Texts::Never,
                ("type", Value::Array(kinds)) if !kinds.contains(&"string".into()) => Texts::Never,
                ("enum", _) => self.words(list())?,
                ("const", value) => self.words(std::slice::from_ref(value))?,
                ("pattern", Value::String(pattern)) => Texts::Of(search(pattern)),
                ("format", Value::String(name)) => {
                    let pattern = format_pattern(name);
                    pattern.map_or(Texts::Any, |pattern| Texts::Of(regex(&pattern)))
                }
                ("allOf", _) => Texts::every(each()?),
                ("anyOf" | "oneOf", _) => Texts::some(each()?),
                ("$ref", Value::String(to)) => self.target(to)?,
                _ => Texts::Any,
            });
        }
        parts.push(lengths(schema)?);
        Ok(Texts::every(parts))
    }

    /// The strings among these values.
    fn words(&self, values: &[Value]) -> Result<Texts, String> {
        let words: Vec<&str> = values.iter().filter_map(Value::as_str).collect();
        if let Some(word) = words.iter().find(|word| word.contains(self.end)) {
            return Err(format!(
                "the value {} contains `{}`, which ends values in this model's format of calls; choose another one",
                quoted(word),
                self.end
            ));
        }
        let words = words.into_iter().map(|word| Texts::Of(quoted(word)));
        Ok(Texts::some(words.collect()))
    }

    /// What a reference stands for. Its terminal is written once.
    fn target(&self, to: &str) -> Result<Texts, String> {
        let place = to.strip_prefix('#').and_then(|at| self.root.pointer(at));
        let Some(place) = place else {
            return Err(format!(
                "the reference `{to}` leads to no part of the schema"
            ));
        };
        let key = std::ptr::from_ref(place);
        let known = self.targets.borrow().get(&key).cloned();
        match known {
            Some(Some(texts)) => return Ok(texts),
            Some(None) => {
                return Err(format!(
                    "the reference `{to}` leads to itself; leave it out"
                ));
            }
            None => {}
        }
        self.targets.borrow_mut().insert(key, None);
        let texts = match self.texts(place)? {
            Texts::Of(expression) => {
                let name = format!("{}_R{}", self.name, self.targets.borrow().len());
                self.writer.rule(&name, &expression);
                Texts::Of(name)
            }
            other => other,
        };
        self.targets.borrow_mut().insert(key, Some(texts.clone()));
        Ok(texts)
    }
}

/// Strings with as many characters as a schema says.
fn lengths(schema: &Value) -> Result<Texts, String> {
    let [least, most] = ["minLength", "maxLength"].map(|key| schema[key].as_u64());
    if let (Some(least), Some(most)) = (least, most)
        && least > most
    {
        return Err(format!(
            "`minLength` {least} is greater than `maxLength` {most}"
        ));
    }
    Ok(match (least.unwrap_or(0), most) {
        (0, None) => Texts::Any,
        (least, None) => Texts::Of(format!("/(?s:.{{{least},}})/")),
        (least, Some(most)) => Texts::Of(format!("/(?s:.{{{least},{most}}})/")),
    })
}

/// A regular expression that matches whole texts.
fn regex(pattern: &str) -> String {
    format!("/(?:{})/", regex_to_lark(pattern, "dw"))
}

/// Texts in which a pattern of a schema is found.
fn search(pattern: &str) -> String {
    let all = alternatives(pattern).into_iter().map(|one| {
        let open = one.strip_prefix("(?:").or(one.strip_prefix('('));
        if let Some(inner) = open.filter(|open| !open.starts_with('?') && is_group(one)) {
            return search(&inner[..inner.len() - 1]);
        }
        let (before, inner) = match one.strip_prefix('^') {
            Some(inner) => ("", inner),
            None => ("(?s:.*)", one),
        };
        let end = inner.strip_suffix('$').filter(|rest| !is_escaped(rest));
        let (inner, after) = match end {
            Some(inner) => (inner, ""),
            None => (inner, "(?s:.*)"),
        };
        let inner = regex_to_lark(inner, "dw");
        format!("/{before}(?:{inner}){after}/")
    });
    all.collect::<Vec<_>>().join(" | ")
}

/// Whether what follows a text is escaped by its end.
fn is_escaped(text: &str) -> bool {
    (text.len() - text.trim_end_matches('\\').len()) % 2 == 1
}

/// Signs of a regular expression that are neither escaped nor in a class: offset, sign, and the number of groups
/// around it.
fn signs(pattern: &str) -> Vec<(usize, char, usize)> {
    let (mut found, mut depth, mut class, mut escaped) = (Vec::new(), 0usize, false, false);
    for (at, sign) in pattern.char_indices() {
        match sign {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => class = false,
            _ if class => {}
            '[' => class = true,
            ')' => {
                depth = depth.saturating_sub(1);
                found.push((at, sign, depth));
            }
            _ => {
                found.push((at, sign, depth));
                depth += usize::from(sign == '(');
            }
        }
    }
    found
}

/// The alternatives of a regular expression.
fn alternatives(pattern: &str) -> Vec<&str> {
    let mut all = Vec::new();
    let mut start = 0;
    for (at, sign, depth) in signs(pattern) {
        if sign == '|' && depth == 0 {
            all.push(&pattern[start..at]);
            start = at + 1;
        }
    }
    all.push(&pattern[start..]);
    all
}

/// Whether a regular expression is one group.
fn is_group(pattern: &str) -> bool {
    let signs = signs(pattern);
    let closed = signs
        .iter()
        .find(|(_, sign, depth)| *sign == ')' && *depth == 0);
    pattern.starts_with('(') && closed.is_some_and(|(at, _, _)| at + 1 == pattern.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_bind_their_alternative() {
        let any = "(?s:.*)";
        for (pattern, wanted) in [
            ("b", format!("/{any}(?:b){any}/")),
            ("^b", format!("/(?:b){any}/")),
            ("b$", format!("/{any}(?:b)/")),
            ("^b\\$", format!("/(?:b\\$){any}/")),
            ("^[a|b]$|c", format!("/(?:[a|b])/ | /{any}(?:c){any}/")),
            ("(^a$|^\\d/$)", "/(?:a)/ | /(?:[0-9]\\/)/".to_owned()),
            ("^(a|b)$", "/(?:(a|b))/".to_owned()),
            ("(a)(b)", format!("/{any}(?:(a)(b)){any}/")),
            ("", format!("/{any}(?:){any}/")),
        ] {
            assert_eq!(search(pattern), wanted, "{pattern}");
        }
    }
}
