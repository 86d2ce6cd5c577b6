//! State that the engine's thread and the HTTP thread share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::metrics::Totals;
use super::snapshot::Snapshot;

/// Time that running requests have to end after the signal to stop.
const GRACE: Duration = Duration::from_secs(20);

/// What both threads see.
#[derive(Debug, Default)]
pub struct Shared {
    totals: Mutex<Totals>,
    snapshot: Mutex<Snapshot>,
    /// Somebody wants a new snapshot.
    asked: AtomicBool,
    /// Makes the running pass yield; set once the engine is open.
    yields: OnceLock<Arc<AtomicBool>>,
    closing: OnceLock<Instant>,
}

impl Shared {
    /// The engine is open; `yields` makes its pass yield.
    pub fn is_ready(&self, yields: Arc<AtomicBool>) {
        let _ = self.yields.set(yields);
    }

    /// Whether the engine is open.
    pub fn ready(&self) -> bool {
        self.yields.get().is_some()
    }

    /// Makes the running pass yield at the next layer.
    pub fn interrupt(&self) {
        if let Some(yields) = self.yields.get() {
            yields.store(true, Ordering::Relaxed);
        }
    }

    /// No request is accepted any more.
    pub fn close(&self) {
        let _ = self.closing.set(Instant::now());
    }

    /// Whether the server is closing.
    pub fn closing(&self) -> bool {
        self.closing.get().is_some()
    }

    /// Whether running requests have had their time.
    pub fn must_end(&self) -> bool {
        self.closing.get().is_some_and(|at| at.elapsed() > GRACE)
    }

    /// Whether somebody has asked for a new snapshot since the last call.
    pub fn is_asked(&self) -> bool {
        self.asked.swap(false, Ordering::Relaxed)
    }

    /// Publishes a snapshot.
    pub fn set_snapshot(&self, snapshot: Snapshot) {
        *self.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    /// The last snapshot; asks for the next one.
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
