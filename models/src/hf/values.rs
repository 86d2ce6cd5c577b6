//! Values of keys that determine forms.

use super::json::Keys;
use crate::error::Error;

/// The sizes that some keys are relative to.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) d_model: u32,
    pub(super) layers: u32,
    pub(super) heads: u32,
}

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
