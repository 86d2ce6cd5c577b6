//! jinja2's filters and tests that the template engine lacks or implements differently.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::{filters, globals};

use super::{methods, python};

/// Adds them.
pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("string", |value: &Value| python::text(value));
    environment.add_filter("trim", |value: &Value, chars: Option<String>| {
        methods::strip(&python::text(value), chars.as_deref()).to_owned()
    });
    environment.add_filter("lower", |value: &Value| python::text(value).to_lowercase());
    environment.add_filter("upper", |value: &Value| python::text(value).to_uppercase());
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("items", items);
    environment.add_filter("center", |value: &Value, width: Option<usize>| {
        methods::padded(
            &python::text(value),
            width.unwrap_or(80),
            ' ',
            methods::Side::Both,
        )
    });
    environment.add_filter("striptags", |value: &Value| {
        filters::striptags(python::text(value))
    });
    environment.add_filter("wordcount", |value: &Value| {
        let text = python::text(value);
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("urlencode", |value: &Value| quoted(&python::text(value)));
    environment.add_filter("filesizeformat", filters::filesizeformat);
    environment.add_filter(PRINTF, printf);
    environment.add_function("joiner", globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    environment.add_test("iterable", |value: &Value| {
        value.is_undefined() || (!value.is_none() && value.try_iter().is_ok())
    });
    environment.add_test("sequence", |value: &Value| match value.kind() {
        ValueKind::Iterable => value.len().is_some(),
        kind => matches!(
            kind,
            ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map
        ),
    });
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
            || python::as_float(value).is_some()
    });
    environment.add_test("integer", |value: &Value| {
        value.kind() == ValueKind::Number && value.is_integer()
    });
    environment.add_test("float", |value: &Value| python::as_float(value).is_some());
    environment.add_test("callable", |value: &Value| match value.kind() {
        ValueKind::Undefined => true,
        ValueKind::Plain => python::as_float(value).is_none(),
        _ => false,
    });
}

/// Name of the filter for `text % arguments`.
pub(super) const PRINTF: &str = "__printf";

/// `text % arguments`: a tuple has one argument for each placeholder.
fn printf(text: String, arguments: &Value) -> Result<String, Error> {
    if arguments.is_tuple() {
        let arguments: Vec<Value> = arguments.try_iter()?.collect();
        format(FormatStyle::Printf, &text, &arguments)
    } else {
        format(FormatStyle::Printf, &text, std::slice::from_ref(arguments))
    }
}

fn replace(
    value: &Value,
    from: &Value,
    to: &Value,
    count: Option<usize>,
    options: Kwargs,
) -> Result<String, Error> {
    let count = match count {
        Some(count) => Some(count),
        None => options.get("count")?,
    };
    options.assert_all_used()?;
    let [value, from, to] = [value, from, to].map(python::text);
    Ok(match count {
        Some(count) => value.replacen(&from, &to, count),
        None => value.replace(&from, &to),
    })
}

fn join(
    value: &Value,
    between: Option<&Value>,
    attribute: Option<&Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let d: Option<Value> = options.get("d")?;
    let named: Option<Value> = options.get("attribute")?;
    options.assert_all_used()?;
    let between = between.or(d.as_ref()).map(python::text).unwrap_or_default();
    let attribute = attribute.or(named.as_ref());
    if value.is_undefined() {
        return Ok(String::new());
    }
    let mut out = String::new();
    for (at, item) in value.try_iter()?.enumerate() {
        if at > 0 {
            out.push_str(&between);
        }
        match attribute {
            Some(attribute) => out.push_str(&python::text(&item.get_item(attribute)?)),
            None => out.push_str(&python::text(&item)),
        }
    }
    Ok(out)
}

fn default(
    value: &Value,
    instead: Option<Value>,
    boolean: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named: Option<Value> = options.get("default_value")?;
    let boolean = match boolean {
        Some(boolean) => boolean,
        None => options.get::<Option<bool>>("boolean")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    Ok(if value.is_undefined() || (boolean && !value.is_true()) {
        instead.or(named).unwrap_or_else(|| Value::from(""))
    } else {
        value.clone()
    })
}

fn truncate(
    value: &Value,
    length: Option<usize>,
    cuts_words: Option<bool>,
    end: Option<String>,
    options: Kwargs,
) -> Result<String, Error> {
    let length = length.or(options.get("length")?).unwrap_or(255);
    let cuts_words = cuts_words.or(options.get("killwords")?).unwrap_or(false);
    let end = end
        .or(options.get("end")?)
        .unwrap_or_else(|| "...".to_owned());
    let leeway: usize = options.get::<Option<usize>>("leeway")?.unwrap_or(5);
    options.assert_all_used()?;
    let text = python::text(value);
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept = length.saturating_sub(end.chars().count());
    let kept: String = text.chars().take(kept).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !cuts_words => words,
        _ => &kept,
    };
    Ok(format!("{kept}{end}"))
}

/// As an integer; `default`, or 0, if the value is none.
fn int(
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Result<Value, Error> {
    let default = default
        .or(options.get("default")?)
        .unwrap_or(Value::from(0));
    let base = base.or(options.get("base")?).unwrap_or(10);
    options.assert_all_used()?;
    let float = |number: f64| {
        if number.is_finite() {
            Value::from(number as i128)
        } else {
            default.clone()
        }
    };
    let Some(text) = value.as_str() else {
        return Ok(match (python::as_float(value), value.kind()) {
            (Some(number), _) => float(number),
            (None, ValueKind::Bool) => Value::from(i64::from(value.is_true())),
            (None, ValueKind::Number) => value.clone(),
            _ => default,
        });
    };
    let text = text.trim().replace('_', "");
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = text.to_lowercase();
    let digits = digits.strip_prefix(prefix).unwrap_or(&digits);
    match (2..=36)
        .contains(&base)
        .then(|| i128::from_str_radix(digits, base))
    {
        Some(Ok(number)) => Ok(Value::from(number)),
        _ => Ok(text.parse().map_or_else(|_| default.clone(), float)),
    }
}

/// As a number; `default`, or 0, if the value is none.
fn float(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default
        .or(options.get("default")?)
        .unwrap_or(Value::from(0.0));
    options.assert_all_used()?;
    let number = match (value.as_str(), python::as_float(value)) {
        (Some(text), _) => text.trim().replace('_', "").parse().ok(),
        (None, Some(number)) => Some(number),
        (None, None) => f64::try_from(value.clone()).ok(),
    };
    Ok(number.map_or(default, Value::from))
}

/// As a part of an address.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"_.-~/".contains(&byte) {
            out.push(char::from(byte))
        } else {
            out.push_str(&format!("%{byte:02X}"))
        }
    }
    out
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        Ok(0)
    } else {
        minijinja::filters::length(value)
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => minijinja::filters::items(value),
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("items: {kind} is no mapping"),
        )),
    }
}
