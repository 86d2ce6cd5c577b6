//! Python's methods on strings, lists and dictionaries, as called by templates.

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Handles a method call that the template engine does not know: first the methods below, then the
/// general collection.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return collections(state, value, method, args);
    };
    match method {
        "removeprefix" | "removesuffix" | "partition" | "rpartition" | "rsplit" | "index"
        | "rindex" => searched(text, method, args),
        "strip" | "lstrip" | "rstrip" | "splitlines" | "swapcase" | "casefold" | "title"
        | "center" | "ljust" | "rjust" | "zfill" => shaped(text, method, args),
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// Methods of strings that search for a text.
fn searched(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let one = |args: &[Value]| -> Result<String, Error> {
        let (text,): (String,) = from_args(args)?;
        Ok(text)
    };
    match method {
        "removeprefix" => {
            let prefix = one(args)?;
            Ok(Value::from(text.strip_prefix(&prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let suffix = one(args)?;
            Ok(Value::from(text.strip_suffix(&suffix).unwrap_or(text)))
        }
        "partition" => {
            let separator = one(args)?;
            Ok(match text.split_once(&separator) {
                Some((before, after)) => three(before, &separator, after),
                None => three(text, "", ""),
            })
        }
        "rpartition" => {
            let separator = one(args)?;
            Ok(match text.rsplit_once(&separator) {
                Some((before, after)) => three(before, &separator, after),
                None => three("", "", text),
            })
        }
        "rsplit" => {
            let (separator, limit): (Option<String>, Option<i64>) = from_args(args)?;
            if separator.as_deref() == Some("") {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "rsplit: empty separator",
                ));
            }
            Ok(Value::from(rsplit(text, separator.as_deref(), limit)))
        }
        _ => {
            let wanted = one(args)?;
            let at = match method {
                "index" => text.find(&wanted),
                _ => text.rfind(&wanted),
            };
            let at = at.ok_or_else(|| invalid("index: the text is not found"))?;
            Ok(Value::from(text[..at].chars().count()))
        }
    }
}

/// Methods of strings that cut, fill or change their characters.
fn shaped(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<String>,) = from_args(args)?;
            let chars = chars.as_deref();
            Ok(Value::from(match method {
                "strip" => strip(text, chars),
                "lstrip" => lstrip(text, chars),
                _ => rstrip(text, chars),
            }))
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            Ok(Value::from(lines(text, keep.unwrap_or(false))))
        }
        "swapcase" => Ok(Value::from(swapped(text))),
        "casefold" => Ok(Value::from(text.to_lowercase())),
        "title" => Ok(Value::from(title(text))),
        "center" | "ljust" | "rjust" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let side = match method {
                "center" => Side::Both,
                "ljust" => Side::Behind,
                _ => Side::Before,
            };
            Ok(Value::from(padded(text, width, fill.unwrap_or(' '), side)))
        }
        _ => {
            let (width,): (usize,) = from_args(args)?;
            let digits = text.trim_start_matches(['-', '+']);
            let sign = &text[..(text.len() - digits.len()).min(1)];
            let digits = &text[sign.len()..];
            let width = width.saturating_sub(sign.len());
            let digits = padded(digits, width, '0', Side::Before);
            Ok(Value::from(format!("{sign}{digits}")))
        }
    }
}

/// Methods of lists and dictionaries. None changes them: transformers forbids that.
fn collections(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), method) {
        (ValueKind::Seq | ValueKind::Iterable, "index") => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from)
                .ok_or_else(|| invalid("index: the value is not in the list"))
        }
        (ValueKind::Seq | ValueKind::Iterable, "count") => {
            let (wanted,): (&Value,) = from_args(args)?;
            Ok(Value::from(
                value.try_iter()?.filter(|item| item == wanted).count(),
            ))
        }
        (ValueKind::Seq | ValueKind::Map, "copy") => Ok(value.clone()),
        _ => unknown_method_callback(state, value, method, args),
    }
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Characters that Python's `strip` removes in addition to Unicode's white space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn lstrip<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    match chars {
        Some(chars) => text.trim_start_matches(|c| chars.contains(c)),
        None => text.trim_start_matches(is_space),
    }
}

fn rstrip<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    match chars {
        Some(chars) => text.trim_end_matches(|c| chars.contains(c)),
        None => text.trim_end_matches(is_space),
    }
}

pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    rstrip(lstrip(text, chars), chars)
}

fn lines(text: &str, keep: bool) -> Vec<Value> {
    let is_end = |c: char| "\n\r\u{b}\u{c}\u{1c}\u{1d}\u{1e}\u{85}\u{2028}\u{2029}".contains(c);
    let mut all = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(is_end).unwrap_or(rest.len());
        let end = match rest[at..].strip_prefix("\r\n") {
            Some(_) => 2,
            None => rest[at..].chars().next().map_or(0, char::len_utf8),
        };
        all.push(Value::from(&rest[..if keep { at + end } else { at }]));
        rest = &rest[at + end..];
    }
    all
}

fn swapped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
    }
    out
}

/// Every letter after a non-letter is capitalised.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

/// Position of the padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Before,
    Behind,
    Both,
}

/// Longest padded text.
const MAX_WIDTH: usize = 1 << 16;

/// The text padded with `fill` to `width` characters.
pub(super) fn padded(text: &str, width: usize, fill: char, side: Side) -> String {
    let width = width.min(MAX_WIDTH);
    let missing = width.saturating_sub(text.chars().count());
    let before = match side {
        Side::Before => missing,
        Side::Behind => 0,
        // divided as in CPython
        Side::Both => missing / 2 + (missing & width & 1),
    };
    let fill = |n: usize| std::iter::repeat_n(fill, n).collect::<String>();
    format!("{}{text}{}", fill(before), fill(missing - before))
}

fn three(a: &str, b: &str, c: &str) -> Value {
    Value::from(Tuple::from([a, b, c].map(Value::from)))
}

/// At most `limit` splits, from the right; a negative limit means no limit.
fn rsplit(text: &str, separator: Option<&str>, limit: Option<i64>) -> Vec<Value> {
    let limit = limit
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = text;
    match separator {
        Some(separator) => {
            while parts.len() < limit
                && let Some((before, after)) = rest.rsplit_once(separator)
            {
                parts.push(after);
                rest = before;
            }
            parts.push(rest);
        }
        None => {
            rest = rest.trim_end();
            while parts.len() < limit
                && let Some(at) = rest.rfind(char::is_whitespace)
            {
                let (before, after) = rest.split_at(at);
                parts.push(after.trim_start());
                rest = before.trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
        }
    }
    parts.into_iter().rev().map(Value::from).collect()
}
