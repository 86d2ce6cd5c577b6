//! Values of keys that determine forms.

use crate::error::Error;
use crate::json::Keys;

/// A factor above 0.
pub(super) fn factor(keys: &Keys, key: &str) -> Result<Option<f32>, Error> {
    match keys.f32(key)? {
        Some(factor) if factor <= 0.0 => Err(keys.bad(key, "a number above 0")),
        factor => Ok(factor),
    }
}

/// The key's value if it is supported.
pub(super) fn must_be(keys: &Keys, key: &str, value: bool) -> Result<(), Error> {
    match keys.bool(key)? {
        Some(found) if found != value => {
            Err(keys.unsupported(key, &format!("only {value} is implemented")))
        }
        _ => Ok(()),
    }
}
