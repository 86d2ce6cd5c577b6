//! Grammars of arguments in each notation.

use std::cell::RefCell;
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::frame::{ArgumentTags, Middle, Notation};
use super::strings::PlainStrings;
use super::types::KindFinder;
use super::writer::{Member, Sequence, TEXT, Writer, json_of, quoted};

/// Maximum nesting of values that keep the family's notation; deeper ones are JSON.
const MAX_DEPTH: usize = 6;

/// Keywords of a schema that the rules here express.
const EXPRESSED: [&str; 8] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "$defs",
    "definitions",
    "x-guidance",
];

/// Definitions of a schema, which its parts may refer to.
const DEFINITIONS: [&str; 3] = ["$defs", "definitions", "x-guidance"];

/// Arguments of a tool.
pub struct ToolParameters<'a> {
    /// Prefix of the names of rules.
    pub name: &'a str,
    /// JSON schema of the arguments.
    pub schema: &'a Value,
    /// Whether all of the schema must be expressed.
    pub strict: bool,
}

impl ToolParameters<'_> {
    /// The expression of the arguments.
    ///
    /// # Errors
    /// What cannot be expressed.
    pub fn write(&self, notation: &Notation, writer: &Writer<'_>) -> Result<String, String> {
        if *notation != Notation::Json && self.strict {
            self.check()?;
        }
        match notation {
            Notation::Json => Ok(json_of(self.schema)),
            Notation::Tags(tags) => self.tagged(tags, writer),
            Notation::Python => Ok(self.literal(&Python, writer)),
            Notation::Bare { quote } => Ok(self.literal(&Bare { quote }, writer)),
        }
    }

    /// The schema of the object.
    fn object(&self) -> &Value {
        match constraints(self.schema) {
            1 if self.schema.get("properties").is_none() => resolved(self.schema, self.schema),
            _ => self.schema,
        }
    }

    /// Properties: name, schema, and whether each is required. `None` if any may be there.
    fn properties(&self) -> Option<Vec<Property<'_>>> {
        let none = || (self.object()["additionalProperties"] == false).then(Vec::new);
        properties(self.object()).or_else(none)
    }

    /// Checks that the rules here express all of the schema.
    fn check(&self) -> Result<(), String> {
        let object = self.object();
        let instead = "cannot be enforced in this model's format of calls; leave it out, or call without `strict`";
        let keys = object.as_object().into_iter().flatten();
        if let Some((key, _)) = keys.into_iter().find(|(key, _)| !is_expressed(key)) {
            return Err(format!("`{key}` at # {instead}"));
        }
        let known = |name: &Value| {
            name.as_str()
                .is_some_and(|name| object["properties"].get(name).is_some())
        };
        let required = object["required"].as_array();
        if let Some(name) = required.into_iter().flatten().find(|name| !known(name)) {
            return Err(format!(
                "`required` names {name}, which `properties` lacks; add it there"
            ));
        }
        match self.properties().is_none() && restricts_others(object) {
            true => Err(format!(
                "`additionalProperties` without `properties` {instead}"
            )),
            false => Ok(()),
        }
    }

    fn tagged(&self, tags: &ArgumentTags, writer: &Writer<'_>) -> Result<String, String> {
        let any_text = writer.until("value", TEXT, &tags.close);
        let (before, after) = match &tags.middle {
            Middle::Plain(text) => (text.clone(), None),
            Middle::Typed { before, after, .. } => (before.clone(), Some(after)),
        };
        let Some(properties) = self.properties() else {
            let (open, middle) = (writer.text(&tags.open), writer.text(&before));
            writer.rule("KEY", "/[^<>\"\\n]+/");
            let any = match (&tags.middle, after) {
                (Middle::Typed { text, number, .. }, Some(after)) => format!(
                    "{open} KEY {middle} ({} | {}) {} {any_text}",
                    quoted(text),
                    quoted(number),
                    writer.text(after)
                ),
                _ => format!("{open} KEY {middle} {any_text}"),
            };
            writer.rule("any", &any);
            return Ok("any*".to_owned());
        };
        let mut finder = KindFinder::new(self.schema);
        let strings = PlainStrings::new(self.name, self.schema, tags.close.trim(), writer);
        let words = match &tags.middle {
            Middle::Plain(_) => ["", ""],
            Middle::Typed { text, number, .. } => [&text[..], &number[..]],
        };
        let mut members = Vec::new();
        for (at, property) in properties.iter().enumerate() {
            let named = |why: String| format!("`{}`: {why}", property.name);
            let one = |says: &str, value: String| {
                let open = format!("{}{}{before}{says}", tags.open, property.name);
                let after = after.map_or("", |after| &after[..]);
                format!("{} {value}", writer.text(&(open + after)))
            };
            let [text, number] = words;
            let expression = if finder.kinds(property.schema).only_text() {
                let terminal = strings.terminal(at, property.schema).map_err(named)?;
                let value = terminal.map(|terminal| {
                    let name = format!("{}_v{at}", self.name);
                    writer.until(&name, &terminal, &tags.close)
                });
                one(text, value.unwrap_or_else(|| any_text.clone()))
            } else {
                let name = format!("{}_j{at}", self.name);
                if !writer.is_full() {
                    let schema = with_definitions(property.schema, self.schema);
                    writer.rule(&name, &json_of(&schema));
                }
                one(number, format!("{name} {}", writer.text(&tags.close)))
            };
            members.push(Member {
                expression,
                required: property.required,
            });
        }
        let separator = (!tags.between.is_empty()).then(|| writer.text(&tags.between));
        let sequence = Sequence {
            name: self.name,
            members,
            separator,
        };
        Ok(sequence.write(writer))
    }

    fn literal(&self, style: &dyn Style, writer: &Writer<'_>) -> String {
        style.rules(writer);
        let [open, close] = style.brackets().map(quoted);
        let Some(properties) = self.properties() else {
            return "anyarguments".to_owned();
        };
        let values = TypedValues {
            style,
            writer,
            name: self.name,
            root: self.schema,
            targets: RefCell::default(),
        };
        let members = properties.iter().enumerate().map(|(at, property)| {
            let name = format!("{}_{at}", self.name);
            let value = values.value(&name, property.schema, MAX_DEPTH);
            Member {
                expression: format!("{} ({value})", quoted(&style.parameter(property.name))),
                required: property.required,
            }
        });
        let sequence = Sequence {
            name: self.name,
            members: members.collect(),
            separator: Some(quoted(style.comma())),
        };
        let arguments = format!("{open} {} {close}", sequence.write(writer));
        values.write_targets();
        arguments
    }
}

struct Property<'a> {
    name: &'a str,
    schema: &'a Value,
    required: bool,
}

/// The properties of an object's schema.
fn properties(schema: &Value) -> Option<Vec<Property<'_>>> {
    let required = schema["required"].as_array();
    let properties = schema.get("properties").and_then(Value::as_object)?;
    let all = properties.iter().map(|(name, schema)| Property {
        name,
        schema,
        required: required.is_some_and(|all| all.iter().any(|other| other == name)),
    });
    Some(all.collect())
}

/// A part of `root` with the definitions that it may refer to.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = schema.clone();
    for key in DEFINITIONS {
        if let (Some(map), Some(definitions)) = (schema.as_object_mut(), root.get(key)) {
            map.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    schema
}

/// A notation of literals.
trait Style {
    /// Brackets of the arguments.
    fn brackets(&self) -> [&'static str; 2];
    /// Between two members.
    fn comma(&self) -> &'static str;
    /// What precedes an argument's value.
    fn parameter(&self, name: &str) -> String;
    /// What precedes the value of a nested member.
    fn key(&self, name: &str) -> String;
    /// A string, `true`, `false` and `null`.
    fn text(&self, text: &str) -> String;
    fn words(&self) -> [&'static str; 3];
    /// Adds the rules `anytext`, `anyvalue` and `anyarguments`.
    fn rules(&self, writer: &Writer<'_>);
}

struct Python;

impl Style for Python {
    fn brackets(&self) -> [&'static str; 2] {
        ["(", ")"]
    }

    fn comma(&self) -> &'static str {
        ", "
    }

    fn parameter(&self, name: &str) -> String {
        format!("{name}=")
    }

    fn key(&self, name: &str) -> String {
        format!("{}: ", quoted(name))
    }

    fn text(&self, text: &str) -> String {
        quoted(text)
    }

    fn words(&self) -> [&'static str; 3] {
        ["True", "False", "None"]
    }

    fn rules(&self, writer: &Writer<'_>) {
        writer.rule(
            "PTEXT",
            r#"/'([^'\\\n]|\\[\\'"nrt])*'|"([^"\\\n]|\\[\\'"nrt])*"/"#,
        );
        writer.rule("anytext", "PTEXT");
        writer.rule("PKEY", "/[A-Za-z_][A-Za-z0-9_]*/");
        writer.rule(
            "NUMBER",
            r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        );
        writer.rule("anymember", "anytext \": \" anyvalue");
        any(writer, self);
        writer.rule(
            "anyarguments",
            "\"(\" (PKEY \"=\" anyvalue (\", \" PKEY \"=\" anyvalue)*)? \")\"",
        );
    }
}

struct Bare<'a> {
    quote: &'a str,
}

impl Style for Bare<'_> {
    fn brackets(&self) -> [&'static str; 2] {
        ["{", "}"]
    }

    fn comma(&self) -> &'static str {
        ","
    }

    fn parameter(&self, name: &str) -> String {
        self.key(name)
    }

    fn key(&self, name: &str) -> String {
        format!("{name}:")
    }

    fn text(&self, text: &str) -> String {
        format!("{0}{text}{0}", self.quote)
    }

    fn words(&self) -> [&'static str; 3] {
        ["true", "false", "null"]
    }

    fn rules(&self, writer: &Writer<'_>) {
        let end = writer.until("btext", TEXT, self.quote);
        writer.rule("anytext", &format!("{} {end}", writer.text(self.quote)));
        writer.rule("PKEY", "/[A-Za-z_][A-Za-z0-9_]*/");
        writer.rule(
            "NUMBER",
            r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        );
        writer.rule("anymember", "PKEY \":\" anyvalue");
        any(writer, self);
        writer.rule("anyarguments", "anymap");
    }
}

/// Rules of arbitrary values.
fn any(writer: &Writer<'_>, style: &dyn Style) {
    let (words, comma) = (style.words().map(quoted), quoted(style.comma()));
    writer.rule(
        "anyvalue",
        &format!(
            "anytext | NUMBER | {} | anylist | anymap",
            words.join(" | ")
        ),
    );
    writer.rule(
        "anylist",
        &format!("\"[\" (anyvalue ({comma} anyvalue)*)? \"]\""),
    );
    writer.rule(
        "anymap",
        &format!("\"{{\" (anymember ({comma} anymember)*)? \"}}\""),
    );
}

/// Values of one tool.
struct TypedValues<'a> {
    style: &'a dyn Style,
    writer: &'a Writer<'a>,
    /// Prefix of the names of rules.
    name: &'a str,
    root: &'a Value,
    targets: RefCell<Targets<'a>>,
}

/// Schemas that references stand for. Each has one rule, which may refer to itself.
#[derive(Default)]
struct Targets<'a> {
    /// Names of the rules, by the address of the schema.
    names: HashMap<*const Value, String>,
    /// Schemas whose rules are not written yet.
    waiting: Vec<(String, &'a Value)>,
}

impl<'a> TypedValues<'a> {
    /// The expression of values that are valid against `schema`.
    fn value(&self, name: &str, schema: &'a Value, depth: usize) -> String {
        if let Some(target) = self.target(schema) {
            return target;
        }
        if depth == 0 {
            return self.json(name, schema);
        }
        if let Some(values) = schema["enum"].as_array() {
            let words: Option<Vec<String>> = values.iter().map(|value| self.word(value)).collect();
            return match words {
                Some(words) => words.join(" | "),
                None => self.json(name, schema),
            };
        }
        for key in ["anyOf", "oneOf"] {
            if let (Some(all), 1, None) = (
                schema[key].as_array(),
                constraints(schema),
                schema.get("properties"),
            ) {
                let all = all.iter().enumerate();
                let all = all.map(|(at, of)| self.value(&format!("{name}_{at}"), of, depth - 1));
                return all
                    .map(|one| format!("({one})"))
                    .collect::<Vec<_>>()
                    .join(" | ");
            }
        }
        if constraints(schema) > 0 {
            return self.json(name, schema);
        }
        match &schema["type"] {
            Value::String(kind) => self.kind(name, kind, schema, depth),
            Value::Array(kinds) => {
                let kinds = kinds.iter().filter_map(Value::as_str);
                let all = kinds.map(|kind| format!("({})", self.kind(name, kind, schema, depth)));
                all.collect::<Vec<_>>().join(" | ")
            }
            _ if schema.as_object().is_some_and(|map| !map.is_empty()) => self.json(name, schema),
            _ => "anyvalue".to_owned(),
        }
    }

    /// The rule of a reference that nothing restricts further, unless it leads to no schema.
    fn target(&self, schema: &'a Value) -> Option<String> {
        if schema.get("$ref").is_none() || constraints(schema) > 1 {
            return None;
        }
        let target = resolved(schema, self.root);
        if target.get("$ref").is_some() {
            return None;
        }
        let mut targets = self.targets.borrow_mut();
        let next = format!("{}_r{}", self.name, targets.names.len());
        let place = std::ptr::from_ref(target);
        if let Some(name) = targets.names.get(&place) {
            return Some(name.clone());
        }
        targets.names.insert(place, next.clone());
        targets.waiting.push((next.clone(), target));
        Some(next)
    }

    /// Writes the rules of all references.
    fn write_targets(&self) {
        loop {
            let next = self.targets.borrow_mut().waiting.pop();
            let Some((name, target)) = next.filter(|_| !self.writer.is_full()) else {
                return;
            };
            let value = self.value(&name, target, MAX_DEPTH);
            self.writer.rule(&name, &value);
        }
    }

    fn kind(&self, name: &str, kind: &str, schema: &'a Value, depth: usize) -> String {
        let [yes, no, null] = self.style.words().map(quoted);
        let comma = quoted(self.style.comma());
        match kind {
            "string" => "anytext".to_owned(),
            "boolean" => format!("{yes} | {no}"),
            "null" => null,
            "integer" => self.json(&format!("{name}_i"), &json!({"type": "integer"})),
            "number" => self.json(&format!("{name}_n"), &json!({"type": "number"})),
            "array" => match schema.get("items") {
                None => "anylist".to_owned(),
                Some(items) if !items.is_object() => self.json(name, schema),
                Some(items) => {
                    let rule = format!("{name}_e");
                    let item = self.value(&rule, items, depth - 1);
                    self.writer.rule(&rule, &item);
                    format!("\"[\" ({rule} ({comma} {rule})*)? \"]\"")
                }
            },
            _ => match properties(schema) {
                None => "anymap".to_owned(),
                Some(all) => self.object(name, &all, depth),
            },
        }
    }

    fn object(&self, name: &str, properties: &[Property<'a>], depth: usize) -> String {
        let members = properties.iter().enumerate().map(|(at, property)| {
            let value = self.value(&format!("{name}_{at}"), property.schema, depth - 1);
            Member {
                expression: format!("{} ({value})", quoted(&self.style.key(property.name))),
                required: property.required,
            }
        });
        let sequence = Sequence {
            name,
            members: members.collect(),
            separator: Some(quoted(self.style.comma())),
        };
        format!("\"{{\" {} \"}}\"", sequence.write(self.writer))
    }

    /// A value of an `enum`; `None` for lists and objects.
    fn word(&self, value: &Value) -> Option<String> {
        let [yes, no, null] = self.style.words();
        Some(match value {
            Value::String(text) => self.writer.text(&self.style.text(text)),
            Value::Bool(true) => quoted(yes),
            Value::Bool(false) => quoted(no),
            Value::Null => quoted(null),
            Value::Number(number) => quoted(&number.to_string()),
            Value::Array(_) | Value::Object(_) => return None,
        })
    }

    /// The value as JSON, which all readers of calls take too.
    fn json(&self, name: &str, schema: &Value) -> String {
        let rule = format!("{name}_j");
        if self.writer.is_full() {
            return rule;
        }
        let mut schema = with_definitions(schema, self.root);
        if let (Some(map), Some(options)) = (schema.as_object_mut(), self.root.get("x-guidance")) {
            map.insert("x-guidance".to_owned(), options.clone());
        }
        self.writer.rule(&rule, &json_of(&schema));
        rule
    }
}

/// The schema that a schema's reference into `root` stands for.
fn resolved<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MAX_DEPTH {
        let path = schema["$ref"]
            .as_str()
            .and_then(|path| path.strip_prefix('#'));
        match path.and_then(|path| root.pointer(path)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

/// Number of keywords that are not expressed here.
fn constraints(schema: &Value) -> usize {
    let none = Map::new();
    let map = schema.as_object().unwrap_or(&none);
    let others = map.keys().filter(|key| !is_expressed(key)).count();
    let required = || schema["required"].as_array().into_iter().flatten();
    let loose = match schema.get("properties") {
        None => required().next().is_some() || restricts_others(schema),
        Some(all) => {
            required().any(|name| name.as_str().is_none_or(|name| all.get(name).is_none()))
        }
    };
    others + usize::from(loose)
}

fn is_expressed(key: &str) -> bool {
    EXPRESSED.contains(&key)
}

/// Whether members that `properties` does not name are restricted.
fn restricts_others(schema: &Value) -> bool {
    let others = &schema["additionalProperties"];
    *others == false || others.as_object().is_some_and(|others| !others.is_empty())
}
