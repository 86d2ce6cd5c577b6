//! An open device, and the lease of the engine that uses it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Backend, Facts};
use crate::check::Verdicts;
use crate::error::DeviceError;

/// An open device, for one engine at a time.
#[derive(Clone)]
pub struct Device {
    facts: Facts,
    backend: Arc<Mutex<Box<dyn Backend>>>,
    leased: Arc<AtomicBool>,
    verdicts: Option<Verdicts>,
    optional: bool,
}

impl Device {
    /// A device that is open.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        Self {
            facts: backend.facts().clone(),
            backend: Arc::new(Mutex::new(backend)),
            leased: Arc::default(),
            verdicts: None,
            optional: false,
        }
    }

    /// The same, unused for models that it does not know.
    #[must_use]
    pub fn optional(self) -> Self {
        Self {
            optional: true,
            ..self
        }
    }

    /// Whether an engine runs without it if it does not know the model.
    pub fn is_optional(&self) -> bool {
        self.optional
    }

    /// The same, with a file that verdicts on it are saved in from start to start.
    #[must_use]
    pub fn with_verdicts(self, verdicts: Option<Verdicts>) -> Self {
        Self { verdicts, ..self }
    }

    /// Its properties.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The device for the caller alone, as long as the lease lives.
    ///
    /// # Errors
    /// Somebody else has it.
    pub fn lease(&self) -> Result<Lease, DeviceError> {
        match self.leased.swap(true, Ordering::Acquire) {
            false => Ok(Lease(self.clone())),
            true => Err(DeviceError {
                device: self.facts.name.clone(),
                what: "serves another engine; open it once more".into(),
            }),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.facts.name).finish()
    }
}

/// A device that nobody else uses.
#[derive(Debug)]
pub struct Lease(Device);

impl Lease {
    /// Its properties.
    pub(crate) fn facts(&self) -> &Facts {
        &self.0.facts
    }

    /// Where verdicts on it are saved.
    pub(crate) fn verdicts(&self) -> Option<&Verdicts> {
        self.0.verdicts.as_ref()
    }

    /// The device.
    pub fn backend(&self) -> MutexGuard<'_, Box<dyn Backend>> {
        let backend = self.0.backend.lock();
        backend.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.backend().clear();
        self.0.leased.store(false, Ordering::Release);
    }
}
