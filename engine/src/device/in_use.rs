//! A device that an engine uses, and whether it still does.

use std::collections::BTreeSet;
use std::sync::{MutexGuard, OnceLock};

use emberflow_kernels::DType;

use super::{Backend, DeviceError, Lease};
use crate::error::Error;

/// A leased device. Once it has failed nobody uses it any longer.
#[derive(Debug)]
pub(crate) struct InUse {
    lease: Lease,
    /// Whether its sums have the CPU's bits.
    same_bits: bool,
    /// Formats and widths of matrices whose products have them too: how rows are divided depends on what was measured, and
    /// must not decide on a text.
    multiplies: BTreeSet<(DType, usize)>,
    lost: OnceLock<DeviceError>,
}

impl InUse {
    /// A device that has passed its check.
    pub fn new(lease: Lease, same_bits: bool, multiplies: BTreeSet<(DType, usize)>) -> Self {
        Self {
            lease,
            same_bits,
            multiplies,
            lost: OnceLock::new(),
        }
    }

    /// The device; nobody else has it meanwhile.
    pub fn backend(&self) -> MutexGuard<'_, Box<dyn Backend>> {
        self.lease.backend()
    }

    /// The lease.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Whether products of matrices of a format and width have the CPU's bits.
    pub fn multiplies(&self, dtype: DType, cols: usize) -> bool {
        self.multiplies.contains(&(dtype, cols))
    }

    /// Why it is not used any longer.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.lost.get()
    }

    /// Takes note of a failure. Where the device has the CPU's bits the CPU goes on without it;
    /// otherwise the text would change in the middle.
    ///
    /// # Errors
    /// The failure, unless the CPU can go on.
    pub fn or_lost<T>(&self, result: Result<T, DeviceError>) -> Result<Option<T>, Error> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(e) if !self.same_bits => Err(e.into()),
            Err(e) => {
                tracing::warn!(error = %e, "the CPU goes on without the device");
                let _ = self.lost.set(e);
                Ok(None)
            }
        }
    }
}
