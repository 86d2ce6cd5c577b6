//! Typed access to the keys of a JSON object, with errors that name them.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// Alternative key names: (usual, alternative).
pub(crate) type Aliases = &'static [(&'static str, &'static str)];

/// Maximum length of `config.json` and similar files.
pub(crate) const MAX_CONFIG: u64 = 16 << 20;

/// A JSON object and its source.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    path: &'a Path,
    /// Name of the enclosing key with its dot; empty at the top level.
    prefix: &'static str,
    map: &'a Map<String, Value>,
    /// Alternative key names: (ours, alternative).
    others: Aliases,
}

/// Parses a file's text. Python's numbers outside JSON become what transformers 5 writes:
/// `{"__float__": "Infinity"}`.
pub(crate) fn parse(path: &Path, text: &str) -> Result<Value, Error> {
    let parsed = serde_json::from_str(text).or_else(|error| match without_python(text) {
        Some(text) => serde_json::from_str(&text),
        None => Err(error),
    });
    parsed.map_err(|error| json_error(path, &error))
}

/// The text with Python's numbers outside strings written as objects; `None` if it has none.
fn without_python(text: &str) -> Option<String> {
    const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let (mut plain, mut found) = (String::with_capacity(text.len()), false);
    let (mut inside, mut escaped) = (false, false);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let number = NUMBERS.iter().find(|number| rest.starts_with(**number));
        if let Some(number) = number.filter(|_| !inside) {
            plain.push_str(&format!("{{\"__float__\": \"{number}\"}}"));
            rest = &rest[number.len()..];
            found = true;
            continue;
        }
        inside ^= first == '"' && !escaped;
        escaped = inside && first == '\\' && !escaped;
        plain.push(first);
        rest = &rest[first.len_utf8()..];
    }
    found.then_some(plain)
}

pub(crate) fn json_error(path: &Path, error: &serde_json::Error) -> Error {
    Error::Json {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}

impl<'a> Keys<'a> {
    pub(crate) fn new(path: &'a Path, value: &'a Value) -> Result<Self, Error> {
        match value.as_object() {
            Some(map) => Ok(Self {
                path,
                prefix: "",
                map,
                others: &[],
            }),
            None => Err(Error::Json {
                path: path.to_owned(),
                reason: "the top is not an object".into(),
            }),
        }
    }

    /// The same keys inside the object `prefix`, which ends with a dot.
    pub(crate) fn inside(self, prefix: &'static str) -> Self {
        Self { prefix, ..self }
    }

    /// The same keys, some of which may have alternative names.
    pub(crate) fn called(self, others: Aliases) -> Self {
        Self { others, ..self }
    }

    /// The name under which the key is given; its own if it is not given.
    fn given<'k>(&self, key: &'k str) -> &'k str {
        let mut others = self.others.iter().filter(|(ours, _)| *ours == key);
        let other = others.find(|(_, other)| self.map.contains_key(*other));
        match other.filter(|_| !self.map.contains_key(key)) {
            Some((_, other)) => other,
            None => key,
        }
    }

    /// Refuses a key given under both names with different values.
    pub(crate) fn expect_one_name(&self) -> Result<(), Error> {
        for (ours, other) in self.others {
            if let (Some(own), Some(value)) = (self.map.get(*ours), self.map.get(*other))
                && own != value
            {
                return Err(self.bad(other, &format!("{own}, as {ours}")));
            }
        }
        Ok(())
    }

    /// The key's value; null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        let value = self.map.get(self.given(key));
        value.filter(|value| !value.is_null())
    }

    /// The whole object.
    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// The object under `key`. `prefix` is the key with a dot.
    pub(crate) fn object(
        &self,
        key: &str,
        prefix: &'static str,
    ) -> Result<Option<Keys<'a>>, Error> {
        self.read(key, "an object", |value| {
            value.as_object().map(|map| Keys {
                path: self.path,
                prefix,
                map,
                others: &[],
            })
        })
    }

    /// The value under `key`, converted; an error if it is present and does not convert.
    pub(crate) fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.get(key)
            .map(|value| convert(value).ok_or_else(|| self.bad(key, expected)))
            .transpose()
    }

    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.read(key, "an integer, 0 to 4294967295", as_u32)
    }

    pub(crate) fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.read(key, "a finite number", |value| {
            value
                .as_f64()
                .map(|number| number as f32)
                .filter(|number| number.is_finite())
        })
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn need_u32(&self, key: &str) -> Result<u32, Error> {
        self.u32(key)?
            .ok_or_else(|| self.missing(key, "an integer"))
    }

    pub(crate) fn need_f32(&self, key: &str) -> Result<f32, Error> {
        self.f32(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    pub(crate) fn need_str(&self, key: &str) -> Result<&'a str, Error> {
        self.str(key)?.ok_or_else(|| self.missing(key, "a string"))
    }

    /// A token id or a list of them; empty if the key is absent.
    pub(crate) fn tokens(&self, key: &str) -> Result<Vec<u32>, Error> {
        let convert = |value: &Value| match value {
            Value::Array(list) => list.iter().map(as_u32).collect(),
            single => as_u32(single).map(|token| vec![token]),
        };
        Ok(self
            .read(key, "a token id or a list of them", convert)?
            .unwrap_or_default())
    }

    pub(crate) fn missing(&self, key: &str, expected: &str) -> Error {
        Error::MissingKey {
            path: self.path.to_owned(),
            key: self.name(key),
            expected: expected.into(),
        }
    }

    pub(crate) fn bad(&self, key: &str, expected: &str) -> Error {
        Error::BadKey {
            path: self.path.to_owned(),
            key: self.name(key),
            found: self.found(key),
            expected: expected.into(),
        }
    }

    pub(crate) fn unsupported(&self, key: &str, why: &str) -> Error {
        Error::Unsupported {
            path: self.path.to_owned(),
            key: self.name(key),
            found: self.found(key),
            why: why.into(),
        }
    }

    fn name(&self, key: &str) -> String {
        format!("{}{}", self.prefix, self.given(key))
    }

    /// The value as text, truncated if long.
    fn found(&self, key: &str) -> String {
        const SHOWN: usize = 80;
        let text = self
            .map
            .get(self.given(key))
            .map_or_else(|| "absent".into(), Value::to_string);
        match text.char_indices().nth(SHOWN) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        }
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_key_has_one_value_under_two_names() {
        let with = |value: Value| {
            let keys = Keys::new(Path::new("config.json"), &value)?;
            let keys = keys.called(&[("n_group", "num_expert_group")]);
            keys.expect_one_name()?;
            keys.u32("n_group")
        };
        assert_eq!(with(json!({"num_expert_group": 3})).unwrap(), Some(3));
        assert_eq!(
            with(json!({"n_group": 3, "num_expert_group": 3})).unwrap(),
            Some(3)
        );
        assert_eq!(with(json!({})).unwrap(), None);
        for wrong in [
            json!({"num_expert_group": "x"}),
            json!({"n_group": 1, "num_expert_group": 3}),
        ] {
            let refused = with(wrong).unwrap_err().to_string();
            assert!(refused.contains("num_expert_group"), "{refused}");
        }
    }

    #[test]
    fn numbers_of_python_are_objects() {
        let read = |text: &str| parse(Path::new("config.json"), text);
        let text = r#"{"a\\": "NaN \" Infinity", "b": [0.0, Infinity], "c": -Infinity, "d": NaN}"#;
        let of = |number: &str| json!({"__float__": number});
        let expected = json!({
            "a\\": "NaN \" Infinity",
            "b": [0.0, of("Infinity")],
            "c": of("-Infinity"),
            "d": of("NaN"),
        });
        assert_eq!(read(text).unwrap(), expected);
        for bad in ["{\"a\": Infinity", "{\"a\": infinity}", "[NaNs]"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
