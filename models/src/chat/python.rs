//! Values in Python's notation.

use std::fmt::{self, Write};
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Output, Value};

/// Maximum nesting of written lists and dictionaries.
const MAX_DEPTH: usize = 100;

/// A number that Python writes with an exponent. The template engine writes it without, so it has a type of its
/// own, for output and tests only; it does not support arithmetic.
#[derive(Debug)]
pub(super) struct Exponent(pub(super) f64);

impl Object for Exponent {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&number(self.0))
    }
}

/// A number from outside.
pub(super) fn float(number: f64) -> Value {
    if has_exponent(number) {
        Value::from_object(Exponent(number))
    } else {
        Value::from(number)
    }
}

/// The number, if the value is a non-integer.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    match value.downcast_object_ref::<Exponent>() {
        Some(number) => Some(number.0),
        None if value.kind() == ValueKind::Number && !value.is_integer() => {
            f64::try_from(value.clone()).ok()
        }
        None => None,
    }
}

fn has_exponent(number: f64) -> bool {
    let size = number.abs();
    number.is_finite() && size != 0.0 && !(1e-4..1e16).contains(&size)
}

/// As `repr` writes a float.
pub(super) fn number(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    // Rust's limits for exponents are Python's.
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
    }
}

/// As `str` gives it.
pub(super) fn text(value: &Value) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_text(&mut out, value);
    out
}

/// Writes what a template prints.
pub(super) fn write(out: &mut Output<'_>, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => write_text(out, value),
    }
}

fn write_text(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None if value.is_undefined() => Ok(()),
        None => write_repr(out, value, 0),
    }
}

/// As `repr` gives it.
fn write_repr(out: &mut dyn Write, value: &Value, depth: usize) -> fmt::Result {
    if depth > MAX_DEPTH {
        return out.write_str("...");
    }
    if let Some(float) = as_float(value) {
        return out.write_str(&number(float));
    }
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            let Ok(items) = value.try_iter() else {
                return write!(out, "{value}");
            };
            let brackets = if value.is_tuple() { "()" } else { "[]" };
            out.write_str(&brackets[..1])?;
            for (at, item) in items.enumerate() {
                if at > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &item, depth + 1)?;
            }
            if value.is_tuple() && value.len() == Some(1) {
                out.write_str(",")?;
            }
            out.write_str(&brackets[1..])
        }
        ValueKind::Map => {
            let Ok(keys) = value.try_iter() else {
                return write!(out, "{value}");
            };
            out.write_str("{")?;
            for (at, key) in keys.enumerate() {
                if at > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.write_str("}")
        }
        _ => write!(out, "{value}"),
    }
}

fn write_quoted(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if is_printable(c) => out.write_char(c)?,
            c => match u32::from(c) {
                code @ 0..=0xff => write!(out, "\\x{code:02x}")?,
                code @ 0..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// As `str.isprintable`. Rust escapes the same characters, and a combining mark at the start of a
/// text.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        !c.is_ascii_control()
    } else {
        !format!("a{c}").escape_debug().any(|c| c == '\\')
    }
}
