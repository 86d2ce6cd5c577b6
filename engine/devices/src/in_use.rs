//! A device that an engine uses, and whether it still does.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock};

use emberflow_engine::Error;
use emberflow_kernels::DType;

use crate::backend::{Backend, Facts};
use crate::check::Verdict;
use crate::device::Lease;
use crate::error::DeviceError;

/// Most devices of an engine.
pub const MOST_DEVICES: usize = crate::split::MOST - 1;

/// The devices of an engine, in the user's order. Several of them have the CPU's bits and the machine's memory.
pub(crate) type Devices = Vec<Arc<InUse>>;

/// A leased device. Once it has failed nobody uses it any longer.
#[derive(Debug)]
pub(crate) struct InUse {
    lease: Lease,
    /// Its place among the engine's devices.
    pub number: usize,
    /// Result of its check against the CPU.
    pub verdict: Verdict,
    /// Formats and widths of matrices whose products have the CPU's bits too. Rows of others are not divided, since measured
    /// times must not change a text.
    multiplies: BTreeSet<(DType, usize)>,
    lost: OnceLock<DeviceError>,
    /// Products are left to the CPU for now.
    rests: AtomicBool,
    /// Clusters, and rows of matrices, that it has computed.
    computed: [AtomicU64; 2],
}

impl InUse {
    /// A device that has passed its check.
    pub fn new(
        lease: Lease,
        number: usize,
        verdict: Verdict,
        multiplies: BTreeSet<(DType, usize)>,
    ) -> Self {
        Self {
            lease,
            number,
            verdict,
            multiplies,
            lost: OnceLock::new(),
            rests: AtomicBool::new(false),
            computed: Default::default(),
        }
    }

    /// Locks the device.
    pub fn backend(&self) -> MutexGuard<'_, Box<dyn Backend>> {
        self.lease.backend()
    }

    /// The lease.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Its properties.
    pub fn facts(&self) -> &Facts {
        self.lease.facts()
    }

    /// A failure of it.
    pub fn failed(&self, what: &str) -> DeviceError {
        DeviceError {
            device: self.facts().name.clone(),
            what: what.into(),
        }
    }

    /// Whether products of matrices of a format and width have the CPU's bits.
    pub fn multiplies(&self, dtype: DType, cols: usize) -> bool {
        self.multiplies.contains(&(dtype, cols))
    }

    /// The failure that ended its use.
    pub fn lost(&self) -> Option<&DeviceError> {
        self.lost.get()
    }

    /// Leaves products to the CPU from here on, or not.
    pub fn set_rests(&self, rests: bool) {
        self.rests.store(rests, Ordering::Relaxed);
    }

    /// Whether products may be begun.
    pub fn takes_products(&self) -> bool {
        self.lost().is_none() && !self.rests.load(Ordering::Relaxed)
    }

    /// Records a failure. If the device has the CPU's bits, the CPU takes over;
    /// otherwise the text would change in the middle.
    ///
    /// # Errors
    /// The failure, unless the CPU can take over.
    pub fn or_lost<T>(&self, result: Result<T, DeviceError>) -> Result<Option<T>, Error> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(e) if !self.verdict.same_bits => Err(e.into()),
            Err(e) => {
                tracing::warn!(error = %e, "the engine goes on without the device");
                let _ = self.lost.set(e);
                Ok(None)
            }
        }
    }

    /// Counts clusters, and rows of matrices, that it has computed.
    pub fn count(&self, clusters: usize, rows: usize) {
        for (all, new) in self.computed.iter().zip([clusters, rows]) {
            all.fetch_add(new as u64, Ordering::Relaxed);
        }
    }

    /// See [`InUse::count`].
    pub fn computed(&self) -> [u64; 2] {
        self.computed.each_ref().map(|n| n.load(Ordering::Relaxed))
    }
}
