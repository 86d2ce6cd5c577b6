//! Checks of leased devices, and saved measurements on them.

use super::verdicts::{Found, OfProducts, Times, of_sums};
use super::{TokenScales, Verdict, accept, agrees, check, compared, wrong};
use crate::{DenseShape, DeviceError, Lease};

/// Prepares a leased device for `shape` and compares it with the CPU, for tokens with such scales: in all ways where no verdict
/// is saved, else in one, so that its driver has run the kernels, with the times of the verdict.
///
/// # Errors
/// The driver's, or a device whose sums are wrong, also if they were before.
pub fn checked(
    lease: &Lease,
    shape: &DenseShape,
    scales: TokenScales,
) -> Result<Verdict, DeviceError> {
    let mut device = lease.backend();
    let Some(verdicts) = lease.verdicts() else {
        return check(device.as_mut(), shape, scales);
    };
    let facts = device.facts().clone();
    let kernels = of_sums(&facts, shape, scales);
    if let Some(Found::Sums(verdict)) = verdicts.find(&facts, &kernels)? {
        if agrees(device.as_mut(), shape, scales, &verdict)? {
            return Ok(verdict);
        }
        tracing::warn!(
            device = facts.name,
            kernels,
            "is not what it was: checked anew"
        );
    }
    let verdict = compared(device.as_mut(), shape, scales)?;
    let found = match wrong(&facts, verdict.worst) {
        None => Found::Sums(verdict),
        Some(how) => Found::Wrong(how),
    };
    verdicts.put(&facts, &kernels, found);
    accept(&facts, verdict.worst)?;
    Ok(verdict)
}

impl Lease {
    /// The saved times of products, or what `measured` finds.
    ///
    /// # Errors
    /// Those of `measured`.
    pub(crate) fn times_of_products<E: From<DeviceError>>(
        &self,
        of: OfProducts,
        measured: impl FnOnce() -> Result<Times, E>,
    ) -> Result<Times, E> {
        let Some(verdicts) = self.verdicts() else {
            return measured();
        };
        let facts = self.backend().facts().clone();
        if let Some(Found::Products(times)) = verdicts.find(&facts, &of.name())? {
            return Ok(times);
        }
        let times = measured()?;
        verdicts.put(&facts, &of.name(), Found::Products(times.clone()));
        Ok(times)
    }
}
