//! Python's methods on strings, lists and dictionaries, as called by templates.

use minijinja::value::from_args;
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
        return unknown_method_callback(state, value, method, args);
    };
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
        _ => unknown_method_callback(state, value, method, args),
    }
}

fn three(a: &str, b: &str, c: &str) -> Value {
    [a, b, c].into_iter().map(Value::from).collect()
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
