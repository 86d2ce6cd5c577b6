//! The engine on the thread that waits for its reads. If reads are few and short, handing them to
//! another thread takes as long as the device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Completion, FileSource, IoChoice, IoEngine, IoError, IoStats, Read};
use crate::limits::Limits;
use crate::sync::Mutex;
use crate::trace::Tracer;

/// How long a caller polls for completions before it sleeps: several times the duration of a short
/// read, and about as long as sleeping and waking up.
const AWAKE: Duration = Duration::from_micros(400);

/// Reads one file from any calling thread.
///
/// Reads make progress in its methods only. Dropping it discards reads not yet started and waits
/// for those in flight.
pub struct CallerIo {
    // never locked: only makes the type `Sync`
    engine: Mutex<IoEngine>,
    name: &'static str,
    /// Completions not yet taken, and the number of all such reads.
    done: Vec<Completion>,
    outstanding: usize,
    first_error: Option<Arc<IoError>>,
    busy_since: Option<Instant>,
    batches: u64,
    busy_ns: u64,
    wait_ns: u64,
}

impl CallerIo {
    /// Opens an engine for `source`.
    ///
    /// # Errors
    /// [`IoError::Engine`] if the requested device does not work.
    pub fn open(
        source: FileSource,
        choice: IoChoice,
        limits: Limits,
        trace: Tracer,
    ) -> Result<Self, IoError> {
        let engine = IoEngine::open_unbound(source, choice, limits)?.traced(trace);
        Ok(Self {
            name: engine.name(),
            engine: Mutex::new(engine),
            done: Vec::with_capacity(limits.queued),
            outstanding: 0,
            first_error: None,
            busy_since: None,
            batches: 0,
            busy_ns: 0,
            wait_ns: 0,
        })
    }

    fn engine(&mut self) -> &mut IoEngine {
        self.engine.get_mut().unwrap_or_else(|e| e.into_inner())
    }

    /// Name of the device in use.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Reads submitted whose completions are not yet taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Starts all reads in `batch`, which keeps its capacity, as far as the device has capacity.
    ///
    /// # Errors
    /// If the device is broken. A failed read is no error here: later reads complete as
    /// [`IoError::Stopped`].
    pub fn submit(&mut self, batch: &mut Vec<Read>) -> Result<(), IoError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.batches += 1;
        self.outstanding += batch.len();
        self.busy_since.get_or_insert_with(Instant::now);
        let first = self.first_error.clone();
        let engine = self.engine();
        engine.submit(batch);
        if let Some(first) = first {
            engine.purge(|| IoError::Stopped {
                first: Arc::clone(&first),
            });
        }
        self.step(false)
    }

    /// Cancels prefetches not yet started; they complete as [`IoError::Cancelled`].
    pub fn cancel_prefetches(&mut self) {
        self.engine().cancel_prefetches();
    }

    /// Appends completions to `out`. Waits until it has appended at least `min` or nothing is
    /// outstanding.
    ///
    /// # Errors
    /// If the device is broken, with reads outstanding.
    pub fn wait(&mut self, out: &mut Vec<Completion>, min: usize) -> Result<(), IoError> {
        let mut stepped = self.step(false);
        let min = min.min(self.outstanding);
        if self.done.len() < min {
            let since = Instant::now();
            while self.done.len() < min && stepped.is_ok() {
                stepped = self.step(since.elapsed() > AWAKE);
            }
            self.wait_ns += since.elapsed().as_nanos() as u64;
        }
        self.outstanding -= self.done.len();
        out.append(&mut self.done);
        if self.outstanding == 0
            && let Some(since) = self.busy_since.take()
        {
            self.busy_ns += since.elapsed().as_nanos() as u64;
        }
        stepped
    }

    /// Starts commands up to the device's capacity, and takes completed ones; with `wait` at least
    /// one.
    fn step(&mut self, wait: bool) -> Result<(), IoError> {
        if self.outstanding == self.done.len() {
            return Ok(());
        }
        let before = self.done.len();
        let engine = self.engine.get_mut().unwrap_or_else(|e| e.into_inner());
        let result = engine.wait(&mut self.done, wait);
        let fatal = |c: &Completion| c.result.as_ref().err().filter(|e| e.is_fatal()).cloned();
        let failed = self.done[before..].iter().find_map(fatal);
        if let Some(error) = failed.or_else(|| result.as_ref().err().cloned()) {
            self.stop(error);
        }
        result
    }

    /// The first failure stops everything not yet started.
    fn stop(&mut self, error: IoError) {
        if self.first_error.is_some() {
            return;
        }
        tracing::error!(%error, "reading stops");
        let first = Arc::new(error);
        self.first_error = Some(Arc::clone(&first));
        self.engine().purge(|| IoError::Stopped {
            first: Arc::clone(&first),
        });
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> IoStats {
        let c = self
            .engine
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .stats();
        IoStats {
            reads: c.reads,
            bytes: c.bytes,
            commands: c.commands,
            buffered: c.buffered,
            gap_bytes: c.gap_bytes,
            retries: c.retries,
            batches: self.batches,
            busy_ns: self.busy_ns,
            cpu_ns: 0,
            wait_ns: self.wait_ns,
        }
    }
}
