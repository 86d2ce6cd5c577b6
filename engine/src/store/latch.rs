//! The first failure of a store: residency may be inconsistent afterwards, so it refuses further
//! work. And the first damage that a compute thread found.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::Error;

/// Shared by the parts of a store that can fail.
#[derive(Debug, Default)]
pub(super) struct Latch {
    first: OnceLock<String>,
    damage: Mutex<Option<Error>>,
}

impl Latch {
    /// Fails after the first failure.
    pub fn check(&self) -> Result<(), Error> {
        match self.first.get() {
            None => Ok(()),
            Some(first) => Err(Error::Failed {
                first: first.clone(),
            }),
        }
    }

    /// Records a failure if it is the first one.
    pub fn keep<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result {
            self.first.get_or_init(|| e.to_string());
        }
        result
    }

    /// The value, if intact; else records the damage if it is the first one.
    pub fn intact<T>(&self, checked: Result<T, impl Into<Error>>) -> Option<T> {
        let damage = |error: Error| {
            let mut first = self.damage.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
        };
        checked.map_err(|e| damage(e.into())).ok()
    }

    /// Whether a compute thread found damage.
    pub fn is_damaged(&self) -> bool {
        let damage = self.damage.lock();
        damage.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes the first damage.
    pub fn take_damage(&self) -> Option<Error> {
        let damage = self.damage.lock();
        damage.unwrap_or_else(PoisonError::into_inner).take()
    }
}
