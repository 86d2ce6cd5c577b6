//! JSON for templates, and `tojson` as Python's `json.dumps` writes it.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python;

/// JSON as a template's value.
pub(super) fn value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Value::from(n),
            (None, Some(n)) => Value::from(n),
            (None, None) => python::float(n.as_f64().unwrap_or_default()),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value).collect(),
        Json::Object(map) => {
            let members = map.iter().map(|(key, inner)| (key.as_str(), value(inner)));
            Value::from_pairs(members)
        }
    }
}

struct Style {
    indent: Option<usize>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

/// JSON text as Python writes it.
pub(super) fn text(json: &serde_json::Value) -> String {
    let tojson = tojson(&value(json), Kwargs::from_iter::<[(&str, Value); 0]>([]));
    // Every JSON value can be written.
    tojson.map_or_else(|_| json.to_string(), |text| text.to_string())
}

/// The filter: `tojson(indent=…, ensure_ascii=…, separators=…, sort_keys=…)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators needs two texts",
            ));
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let style = Style {
        indent,
        item,
        key,
        ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(Value::from_safe_string(out))
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if let Some(float) = python::as_float(value) {
        out.push_str(&number(float));
        return Ok(());
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::String => write_text(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, ['[', ']'], &items, style, depth, |out, item| {
                write_value(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sorted {
                keys.sort();
            }
            write_items(out, ['{', '}'], &keys, style, depth, |out, key| {
                write_text(out, &key_text(key), style.ascii);
                out.push_str(&style.key);
                write_value(out, &value.get_item(key)?, style, depth + 1)
            })?;
        }
        other => {
            let reason = format!("tojson: {other} has no json form");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    Ok(())
}

fn number(number: f64) -> String {
    match python::number(number).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        text => text.to_owned(),
    }
}

/// A key that is not a string is written as its value.
fn key_text(key: &Value) -> String {
    match (key.kind(), python::as_float(key)) {
        (_, Some(float)) => number(float),
        (ValueKind::None, _) => "null".to_owned(),
        (ValueKind::Bool, _) => key.is_true().to_string(),
        _ => key.to_string(),
    }
}

fn write_items(
    out: &mut String,
    brackets: [char; 2],
    items: &[Value],
    style: &Style,
    depth: usize,
    mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(width) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(
                ' ',
                width.saturating_mul(depth).min(1024),
            ));
        }
    };
    out.push(brackets[0]);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_str(&style.item);
        }
        new_line(out, depth + 1);
        write(out, item)?;
    }
    if !items.is_empty() {
        new_line(out, depth);
    }
    out.push(brackets[1]);
    Ok(())
}

fn write_text(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || (ascii && !c.is_ascii()) || (ascii && c == '\u{7f}') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
