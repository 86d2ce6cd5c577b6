//! State shared by the engine thread and the HTTP thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::metrics::Totals;
use super::snapshot::Snapshot;

/// Time for running requests to finish after a stop signal.
const GRACE: Duration = Duration::from_secs(20);

/// The shared state.
#[derive(Debug, Default)]
pub struct Shared {
    totals: Mutex<Totals>,
    snapshot: Mutex<Snapshot>,
    /// Whether a new snapshot was requested.
    asked: AtomicBool,
    /// Interrupts the running pass; set once the engine is open.
    yields: OnceLock<Arc<AtomicBool>>,
    closing: OnceLock<Instant>,
}

impl Shared {
    /// Called once the engine is open; `yields` interrupts its pass.
    pub fn set_ready(&self, yields: Arc<AtomicBool>) {
        let _ = self.yields.set(yields);
    }

    /// Whether the engine is open.
    pub fn ready(&self) -> bool {
        self.yields.get().is_some()
    }

    /// Interrupts the running pass at the next layer.
    pub fn interrupt(&self) {
        if let Some(yields) = self.yields.get() {
            yields.store(true, Ordering::Relaxed);
        }
    }

    /// Stops accepting requests.
    pub fn close(&self) {
        let _ = self.closing.set(Instant::now());
    }

    /// Whether the server is shutting down.
    pub fn closing(&self) -> bool {
        self.closing.get().is_some()
    }

    /// Whether the grace period for running requests is over.
    pub fn must_end(&self) -> bool {
        self.closing.get().is_some_and(|at| at.elapsed() > GRACE)
    }

    /// Whether a snapshot was requested since the last call.
    pub fn take_snapshot_request(&self) -> bool {
        self.asked.swap(false, Ordering::Relaxed)
    }

    /// Publishes a snapshot.
    pub fn set_snapshot(&self, snapshot: Snapshot) {
        *self.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    /// The last snapshot; requests a new one.
    pub fn snapshot(&self) -> Snapshot {
        self.asked.store(true, Ordering::Relaxed);
        let snapshot = self.snapshot.lock();
        snapshot.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Publishes totals.
    pub fn set(&self, totals: Totals) {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner) = totals;
    }

    /// The last published totals.
    pub fn totals(&self) -> Totals {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
