//! GGUF metadata values, and typed access to them by key.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A metadata value. Integer widths are dropped: only the number matters.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
}

impl Value {
    fn as_u32(&self) -> Option<u32> {
        match self {
            Self::Uint(number) => u32::try_from(*number).ok(),
            Self::Int(number) => u32::try_from(*number).ok(),
            _ => None,
        }
    }

    fn as_i32(&self) -> Option<i32> {
        match self {
            Self::Uint(number) => i32::try_from(*number).ok(),
            Self::Int(number) => i32::try_from(*number).ok(),
            _ => None,
        }
    }

    fn as_f32(&self) -> Option<f32> {
        match self {
            Self::Float(number) => Some(*number as f32).filter(|number| number.is_finite()),
            _ => None,
        }
    }

    /// Whether it is `false`, 0, or a list of such values.
    fn is_off(&self) -> bool {
        match self {
            Self::Bool(value) => !value,
            Self::Uint(number) => *number == 0,
            Self::Int(number) => *number == 0,
            Self::Float(number) => *number == 0.0,
            Self::List(list) => list.iter().all(Self::is_off),
            Self::Text(_) => false,
        }
    }

    fn into_text(self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value for an error message, truncated if long.
    fn describe(&self) -> String {
        const SHOWN: usize = 80;
        match self {
            Self::Uint(number) => number.to_string(),
            Self::Int(number) => number.to_string(),
            Self::Float(number) => format!("{number:?}"),
            Self::Bool(value) => value.to_string(),
            Self::Text(text) => match text.char_indices().nth(SHOWN) {
                Some((end, _)) => format!("{:?}…", &text[..end]),
                None => format!("{text:?}"),
            },
            Self::List(list) => format!("a list of {} values", list.len()),
        }
    }
}

/// The metadata of one file.
#[derive(Debug)]
pub(crate) struct Metadata {
    path: PathBuf,
    values: HashMap<String, Value>,
}

impl Metadata {
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            values: HashMap::new(),
        }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn insert(&mut self, key: String, value: Value) -> Result<(), Error> {
        if self.values.contains_key(&key) {
            return Err(Error::Duplicate {
                path: self.path.clone(),
                what: "key",
                name: key,
            });
        }
        self.values.insert(key, value);
        Ok(())
    }

    /// Whether the key's value is a list.
    pub(crate) fn is_list(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some(Value::List(_)))
    }

    /// Whether the key exists.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The keys that begin with `prefix`, without it, in order.
    pub(crate) fn under(&self, prefix: &str) -> Vec<&str> {
        let keys = self.values.keys();
        let mut found: Vec<&str> = keys.filter_map(|key| key.strip_prefix(prefix)).collect();
        found.sort_unstable();
        found
    }

    /// Whether the key's value is `false` or 0, or all values of its list are: the feature is
    /// disabled.
    pub(crate) fn is_off(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(Value::is_off)
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.values.get(key) else {
            return Ok(None);
        };
        convert(value)
            .map(Some)
            .ok_or_else(|| self.bad(key, expected))
    }

    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.read(key, "an integer, 0 to 4294967295", Value::as_u32)
    }

    pub(crate) fn i32(&self, key: &str) -> Result<Option<i32>, Error> {
        self.read(key, "an integer", Value::as_i32)
    }

    pub(crate) fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.read(key, "a finite number", Value::as_f32)
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.read(key, "true or false", |value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<String>, Error> {
        self.read(key, "a string", |value| value.clone().into_text())
    }

    pub(crate) fn need_f32(&self, key: &str) -> Result<f32, Error> {
        self.f32(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    pub(crate) fn need_text(&self, key: &str) -> Result<String, Error> {
        self.text(key)?.ok_or_else(|| self.missing(key, "a string"))
    }

    /// A number given once, or per layer and equal in all.
    pub(crate) fn uniform_u32(&self, key: &str) -> Result<Option<u32>, Error> {
        let Some(Value::List(list)) = self.values.get(key) else {
            return self.u32(key);
        };
        match list.split_first() {
            Some((first, rest)) if rest.iter().all(|value| value == first) => first
                .as_u32()
                .map(Some)
                .ok_or_else(|| self.bad(key, "integers")),
            _ => Err(self.unsupported(
                key,
                "only models with the same number in every layer are implemented",
            )),
        }
    }

    /// Moves a list of strings out of the metadata; empty if the key is absent.
    pub(crate) fn take_texts(&mut self, key: &str) -> Result<Vec<String>, Error> {
        let bad = self.bad(key, "a list of strings");
        match self.values.remove(key) {
            None => Ok(Vec::new()),
            Some(Value::List(list)) => list
                .into_iter()
                .map(Value::into_text)
                .collect::<Option<_>>()
                .ok_or(bad),
            Some(_) => Err(bad),
        }
    }

    /// Frees the value of a key that is read.
    pub(crate) fn remove(&mut self, key: &str) {
        self.values.remove(key);
    }

    /// A token id or a list of them; empty if the key is absent.
    pub(crate) fn tokens(&self, key: &str) -> Result<Vec<u32>, Error> {
        match self.values.get(key) {
            Some(Value::List(_)) => self.list(key, "a list of token ids", Value::as_u32),
            _ => Ok(self.u32(key)?.into_iter().collect()),
        }
    }

    /// A list of integers; empty if the key is absent.
    pub(crate) fn i32s(&self, key: &str) -> Result<Vec<i32>, Error> {
        self.list(key, "a list of integers", Value::as_i32)
    }

    /// The same for integers from 0 on.
    pub(crate) fn u32s(&self, key: &str) -> Result<Vec<u32>, Error> {
        self.list(key, "a list of integers", Value::as_u32)
    }

    /// A list of numbers; empty if the key is absent.
    pub(crate) fn f32s(&self, key: &str) -> Result<Vec<f32>, Error> {
        self.list(key, "a list of finite numbers", Value::as_f32)
    }

    /// A list of numbers, of which some may be infinite; empty if the key is absent.
    pub(crate) fn numbers(&self, key: &str) -> Result<Vec<f32>, Error> {
        self.list(key, "a list of numbers", |value| match value {
            Value::Float(number) if !number.is_nan() => Some(*number as f32),
            _ => None,
        })
    }

    /// A list of flags; `None` if the key is absent or not a list.
    pub(crate) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, Error> {
        if !matches!(self.values.get(key), Some(Value::List(_))) {
            return Ok(None);
        }
        let flag = |value: &Value| match value {
            Value::Bool(flag) => Some(*flag),
            other => other.as_u32().map(|number| number != 0),
        };
        self.list(key, "a list of flags", flag).map(Some)
    }

    pub(crate) fn list<T>(
        &self,
        key: &str,
        expected: &str,
        convert: fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let list = self.read(key, expected, |value| match value {
            Value::List(list) => list.iter().map(convert).collect(),
            _ => None,
        })?;
        Ok(list.unwrap_or_default())
    }

    pub(crate) fn missing(&self, key: &str, expected: &str) -> Error {
        Error::MissingKey {
            path: self.path.clone(),
            key: key.to_owned(),
            expected: expected.into(),
        }
    }

    pub(crate) fn bad(&self, key: &str, expected: &str) -> Error {
        let (path, found) = (self.path.clone(), self.describe(key));
        Error::BadKey {
            path,
            key: key.to_owned(),
            found,
            expected: expected.into(),
        }
    }

    pub(crate) fn unsupported(&self, key: &str, why: &str) -> Error {
        let (path, found) = (self.path.clone(), self.describe(key));
        Error::Unsupported {
            path,
            key: key.to_owned(),
            found,
            why: why.into(),
        }
    }

    fn describe(&self, key: &str) -> String {
        self.values
            .get(key)
            .map_or_else(|| "absent".into(), Value::describe)
    }
}

/// The keys of an architecture, named without it.
#[derive(Clone, Copy)]
pub(crate) struct ArchKeys<'a> {
    pub(crate) metadata: &'a Metadata,
    pub(crate) arch: &'a str,
}

impl ArchKeys<'_> {
    /// The whole name of a key.
    pub(crate) fn key(&self, rest: &str) -> String {
        format!("{}.{rest}", self.arch)
    }

    pub(crate) fn u32(&self, rest: &str) -> Result<Option<u32>, Error> {
        self.metadata.u32(&self.key(rest))
    }

    pub(crate) fn f32(&self, rest: &str) -> Result<Option<f32>, Error> {
        self.metadata.f32(&self.key(rest))
    }

    pub(crate) fn bool(&self, rest: &str) -> Result<Option<bool>, Error> {
        self.metadata.bool(&self.key(rest))
    }

    pub(crate) fn u32s(&self, rest: &str) -> Result<Vec<u32>, Error> {
        self.metadata.u32s(&self.key(rest))
    }

    /// A number given once, or per layer and equal in all.
    pub(crate) fn uniform(&self, rest: &str) -> Result<Option<u32>, Error> {
        self.metadata.uniform_u32(&self.key(rest))
    }

    pub(crate) fn need(&self, rest: &str) -> Result<u32, Error> {
        (self.u32(rest)?).ok_or_else(|| self.missing(rest, "an integer"))
    }

    pub(crate) fn need_uniform(&self, rest: &str) -> Result<u32, Error> {
        (self.uniform(rest)?).ok_or_else(|| self.missing(rest, "an integer"))
    }

    pub(crate) fn need_f32(&self, rest: &str) -> Result<f32, Error> {
        self.metadata.need_f32(&self.key(rest))
    }

    pub(crate) fn missing(&self, rest: &str, expected: &str) -> Error {
        self.metadata.missing(&self.key(rest), expected)
    }

    pub(crate) fn bad(&self, rest: &str, expected: &str) -> Error {
        self.metadata.bad(&self.key(rest), expected)
    }

    pub(crate) fn unsupported(&self, rest: &str, why: &str) -> Error {
        self.metadata.unsupported(&self.key(rest), why)
    }
}
