//! Turns reads into device commands, and their outcomes into completions.
//!
//! The engine owns every slot from `submit` to its completion, and the memory that describes
//! commands to the kernel. Short reads, interrupted reads, splitting, merging and failures are
//! handled here once, so all devices behave the same.
//!
//! A short read is a state, not an error. Example: of 12288 bytes requested, 5000 arrive. The
//! engine resubmits the command for bytes 5000.. of its pieces. That offset is not aligned, so this
//! round uses the buffered descriptor, and the remaining 7288 bytes complete it. Zero bytes would
//! mean end of file.
//!
//! `start.rs` turns queued reads into commands, `finish.rs` turns outcomes into completions.

mod finish;
mod start;

use std::sync::Arc;

use super::device::{Device, Reaped, Waker};
use super::error::IoError;
use super::slip::Slip;
use super::source::FileSource;
use super::sys::Piece;
use super::{Completion, Priority, Read};
use crate::arena::{Arena, ArenaOptions, Slot};
use crate::limits::Limits;
use crate::trace::{DELIVER, Tracer};

/// Counters of one engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoEngineStats {
    /// Reads that delivered all their bytes.
    pub reads: u64,
    /// Bytes in those reads.
    pub bytes: u64,
    /// Commands submitted to the device: fewer than reads after merging, more after splitting or
    /// resuming.
    pub commands: u64,
    /// Commands through the page cache.
    pub buffered: u64,
    /// Unwanted bytes read between two merged reads.
    pub gap_bytes: u64,
    /// Commands retried: interrupted ones, and reads of a failed merged command.
    pub retries: u64,
}

/// A read not yet started.
struct Queued {
    read: Read,
    /// Absolute file offset.
    at: u64,
    /// Batch number: earlier batches first.
    batch: u64,
    /// Set after a merged command failed, to find out which of its reads fails.
    alone: bool,
}

impl Queued {
    fn order(&self) -> (Priority, u64, u64) {
        (self.read.priority, self.batch, self.at)
    }
}

/// A read with at least one part on the device.
struct Active {
    read: Read,
    at: u64,
    batch: u64,
    /// Its commands in flight.
    parts: u32,
    failed: Option<IoError>,
}

/// A read that is being split into commands.
struct Cutting {
    active: u32,
    priority: Priority,
    /// Bytes submitted so far.
    done: u32,
}

/// Reads one file through one device, on one thread. Most callers use [`super::IoThread`].
pub struct IoEngine {
    source: FileSource,
    limits: Limits,
    /// In reverse order: the next read is last.
    queue: Vec<Queued>,
    batch: u64,
    /// Reads being split, the current one last: an urgent read may overtake a prefetch.
    cutting: Vec<Cutting>,
    active: Vec<Option<Active>>,
    free_active: Vec<u32>,
    slips: Box<[Slip]>,
    free_slips: Vec<u32>,
    /// Bytes of the commands in flight.
    bytes_in_flight: u64,
    /// Sink for the bytes between merged reads. Commands may write to it concurrently; no one reads
    /// it.
    waste: Option<Slot>,
    /// Completions that needed no device.
    ready: Vec<Completion>,
    reaped: Vec<Reaped>,
    counters: IoEngineStats,
    trace: Tracer,
    // Last, and dropped only after `drop` below has drained it.
    device: Box<dyn Device>,
}

impl IoEngine {
    pub(crate) fn new(source: FileSource, device: Box<dyn Device>, limits: Limits) -> Self {
        let depth = device.capacity().min(limits.depth).max(1);
        let pieces = limits.pieces.max(1);
        let slips = (0..depth).map(|_| Slip::new(pieces)).collect();
        // Each slip may serve a full set of reads, plus one read being split per priority.
        let most = depth as usize * pieces + 2;
        Self {
            source,
            limits,
            queue: Vec::with_capacity(limits.queued),
            batch: 0,
            cutting: Vec::with_capacity(2),
            active: (0..most).map(|_| None).collect(),
            free_active: (0..most as u32).rev().collect(),
            slips,
            free_slips: (0..depth).rev().collect(),
            bytes_in_flight: 0,
            waste: waste(limits.gap),
            ready: Vec::new(),
            reaped: Vec::with_capacity(depth as usize),
            counters: IoEngineStats::default(),
            trace: Tracer::default(),
            device,
        }
    }

    /// Records its work in `trace`.
    pub(crate) fn traced(mut self, trace: Tracer) -> Self {
        self.trace = trace;
        self
    }

    pub(crate) fn trace(&self) -> &Tracer {
        &self.trace
    }

    /// Upper bound on the bytes an engine with these limits holds, not counting the slots in its
    /// reads.
    pub(crate) fn overhead(limits: Limits) -> u64 {
        let commands = u64::from(limits.depth.max(limits.lanes));
        let pieces = limits.pieces as u64;
        let per_piece = size_of::<Piece>() + size_of::<u32>() + size_of::<Option<Active>>() + 4;
        let per_command = size_of::<Slip>() as u64 + pieces * per_piece as u64;
        commands * per_command
            + (limits.queued * size_of::<Queued>()) as u64
            + u64::from(limits.gap.next_multiple_of(4096))
    }

    /// Name of the device: `uring`, `pread` or `sim`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.device.name()
    }

    /// The file it reads.
    #[must_use]
    pub fn source(&self) -> &FileSource {
        &self.source
    }

    /// Reads accepted and not yet submitted to the device.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slips.len() - self.free_slips.len()
    }

    /// Whether every read is complete and every completion taken.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
            && self.cutting.is_empty()
            && self.in_flight() == 0
            && self.ready.is_empty()
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> IoEngineStats {
        self.counters
    }

    /// Upper bound on queued reads.
    pub(crate) fn queue_limit(&self) -> usize {
        self.limits.queued
    }

    pub(crate) fn waker(&self) -> Waker {
        self.device.waker()
    }

    /// Takes all reads out of `batch`, which keeps its capacity. The order is: urgent before
    /// prefetch, then by batch, then by offset.
    pub fn submit(&mut self, batch: &mut Vec<Read>) {
        self.batch += 1;
        for read in batch.drain(..) {
            self.accept(read);
        }
        self.queue
            .sort_unstable_by_key(|q| std::cmp::Reverse(q.order()));
    }

    fn accept(&mut self, mut read: Read) {
        let at = self.source.base().checked_add(read.offset);
        let end = at.and_then(|at| at.checked_add(u64::from(read.len)));
        let in_slot = read.slot.range(read.slot_offset, read.len).is_some();
        match (at, end) {
            (Some(_), Some(_)) if in_slot && read.len == 0 => {
                self.ready.push(Completion::of(read, Ok(())));
            }
            (Some(at), Some(end)) if in_slot && end <= i64::MAX as u64 => {
                self.queue.push(Queued {
                    read,
                    at,
                    batch: self.batch,
                    alone: false,
                });
            }
            _ => {
                let error = IoError::BadRequest {
                    file: Arc::clone(self.source.label()),
                    offset: read.offset,
                    len: u64::from(read.len),
                    slot_offset: read.slot_offset,
                    slot_len: read.slot.len(),
                };
                self.ready.push(Completion::of(read, Err(error)));
            }
        }
    }

    /// Submits commands up to the device's capacity, then appends completions to `out`. With `wait`
    /// it blocks until there is at least one completion, the waker is called, or nothing is in
    /// flight.
    ///
    /// # Errors
    /// Only if the device is broken. Reads in flight and their slots are then lost.
    pub fn wait(&mut self, out: &mut Vec<Completion>, wait: bool) -> Result<(), IoError> {
        self.pump();
        let before = out.len();
        out.append(&mut self.ready);
        if self.in_flight() == 0 {
            return Ok(());
        }
        let mut reaped = std::mem::take(&mut self.reaped);
        let block = wait && out.len() == before;
        let result = self.device.reap(block, &mut reaped);
        let (start, old) = (self.trace.now(), out.len());
        for one in reaped.drain(..) {
            self.finish(one, out);
        }
        if out.len() > old {
            self.trace.io(&DELIVER, out.len() - old, start);
        }
        self.reaped = reaped;
        result.map_err(|e| self.broken(&e))?;
        // Keep the device busy while the caller handles the completions.
        self.pump();
        out.append(&mut self.ready);
        Ok(())
    }

    /// Fails every read not yet submitted, with an error from `reason`.
    pub(crate) fn purge(&mut self, mut reason: impl FnMut() -> IoError) {
        while let Some(q) = self.queue.pop() {
            self.ready.push(Completion::of(q.read, Err(reason())));
        }
        while let Some(cut) = self.cutting.pop() {
            self.stop_cutting(cut.active, reason());
        }
    }

    /// Cancels queued prefetches, and stops splitting one.
    pub(crate) fn cancel_prefetches(&mut self) {
        // The queue is reversed, so prefetches lie at its front.
        let n = self
            .queue
            .partition_point(|q| q.read.priority == Priority::Prefetch);
        for q in self.queue.drain(..n) {
            self.ready
                .push(Completion::of(q.read, Err(IoError::Cancelled)));
        }
        if let Some(at) = (self.cutting.iter()).position(|c| c.priority == Priority::Prefetch) {
            let cut = self.cutting.remove(at);
            self.stop_cutting(cut.active, IoError::Cancelled);
        }
    }

    fn broken(&self, error: &std::io::Error) -> IoError {
        IoError::Engine {
            engine: self.device.name(),
            reason: format!("reading {}: {error}", self.source.label()),
        }
    }
}

impl Drop for IoEngine {
    /// Waits for commands in flight, because the kernel writes into their slots until they end. If
    /// waiting fails, leaks the memory: a leak is harmless, a stray write is not.
    fn drop(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        while self.in_flight() > 0 {
            reaped.clear();
            if let Err(reason) = self.device.reap(true, &mut reaped) {
                tracing::error!(
                    commands = self.in_flight(), %reason,
                    "reads in flight cannot be awaited; their memory is leaked"
                );
                std::mem::forget(std::mem::take(&mut self.active));
                std::mem::forget(std::mem::take(&mut self.slips));
                std::mem::forget(self.waste.take());
                return;
            }
            for one in &reaped {
                self.free_slips.push(one.id);
            }
        }
    }
}

/// Sink for up to `gap` unwanted bytes. Without it, reads with gaps are not merged.
fn waste(gap: u32) -> Option<Slot> {
    let len = (gap as usize).checked_next_multiple_of(4096)?;
    Arena::new(1, len, 4096, ArenaOptions::default())
        .ok()?
        .take()
}
