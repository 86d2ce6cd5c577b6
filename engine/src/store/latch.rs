//! The first failure of a store, after which residency may be inconsistent and the store refuses
//! further work; and the first damage found by a compute thread.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::Error;

/// Shared by all parts of a store that can fail.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    first: OnceLock<String>,
    damage: Mutex<Option<Error>>,
}

impl Latch {
    /// Returns an error after the first failure.
    pub fn check(&self) -> Result<(), Error> {
        match self.first.get() {
            None => Ok(()),
            Some(first) => Err(Error::Failed {
                first: first.clone(),
            }),
        }
    }

    /// Records a failure, if it is the first.
    pub fn keep<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result {
            self.first.get_or_init(|| e.to_string());
        }
        result
    }

    /// The value if intact; otherwise records the damage, if it is the first.
    pub fn intact<T>(&self, checked: Result<T, impl Into<Error>>) -> Option<T> {
        let damage = |error: Error| {
            let mut first = self.damage.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
        };
        checked.map_err(|e| damage(e.into())).ok()
    }

    /// Whether a compute thread has found damage.
    pub fn is_damaged(&self) -> bool {
        let damage = self.damage.lock();
        damage.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Takes the first recorded damage.
    pub fn take_damage(&self) -> Option<Error> {
        let damage = self.damage.lock();
        damage.unwrap_or_else(PoisonError::into_inner).take()
    }
}
