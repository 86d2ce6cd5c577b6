//! The engine: turns reads into device commands and outcomes into completions.
//!
//! It owns every slot from `submit` until its completion, and the memory that describes commands
//! to the kernel. Short reads, interruptions, cutting, merging and failures are handled here once,
//! so all devices behave the same.
//!
//! A short read is a state, not an error. Example: 12288 bytes are asked for, 5000 arrive. The
//! command goes back to the device for bytes 5000.. of its pieces. That offset is not aligned, so
//! this round takes the buffered descriptor; the remaining 7288 bytes complete it. Zero bytes
//! would mean that the file ends here.
//!
//! `start.rs` turns queued reads into commands, `finish.rs` outcomes into completions.

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
    /// Bytes delivered by them.
    pub bytes: u64,
    /// Commands given to the device. Fewer than reads when neighbours were merged, more when
    /// reads were cut or continued.
    pub commands: u64,
    /// Commands that went through the page cache.
    pub buffered: u64,
    /// Bytes read only because they lay between two reads.
    pub gap_bytes: u64,
    /// Commands repeated after an interruption.
    pub retries: u64,
}

/// A read waiting for its turn.
struct Queued {
    read: Read,
    /// Absolute file offset.
    at: u64,
    /// Batch number: earlier batches go first.
    batch: u64,
    /// Set after a merged command failed, so that the failure can be told from its neighbours.
    alone: bool,
}

impl Queued {
    fn order(&self) -> (Priority, u64, u64) {
        (self.read.priority, self.batch, self.at)
    }
}

/// A read of which at least one part was given to the device.
struct Active {
    read: Read,
    at: u64,
    batch: u64,
    /// Commands in flight for it.
    parts: u32,
    failed: Option<IoError>,
}

/// One read in the middle of being cut into commands.
struct Cutting {
    active: u32,
    priority: Priority,
    /// Bytes given to the device so far.
    done: u32,
}

/// Reads from one file through one device. Lives on one thread; [`super::IoThread`] is the usual
/// way to use it.
pub struct IoEngine {
    source: FileSource,
    limits: Limits,
    /// Next read last.
    queue: Vec<Queued>,
    batch: u64,
    /// Reads being cut, the one to go on with last: an urgent one may overtake a prefetch.
    cutting: Vec<Cutting>,
    active: Vec<Option<Active>>,
    free_active: Vec<u32>,
    slips: Box<[Slip]>,
    free_slips: Vec<u32>,
    /// Where bytes between two merged reads go. Commands may write to it at the same time; nobody
    /// reads it.
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
        // Every slip may serve a full set of reads, plus one being cut of each priority.
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
            waste: waste(limits.gap),
            ready: Vec::new(),
            reaped: Vec::with_capacity(depth as usize),
            counters: IoEngineStats::default(),
            trace: Tracer::default(),
            device,
        }
    }

    /// The same engine, with a record of what it does.
    pub(crate) fn traced(mut self, trace: Tracer) -> Self {
        self.trace = trace;
        self
    }

    pub(crate) fn trace(&self) -> &Tracer {
        &self.trace
    }

    /// Most bytes an engine with these limits holds beside the slots in its reads.
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

    /// The file that is read.
    #[must_use]
    pub fn source(&self) -> &FileSource {
        &self.source
    }

    /// Reads accepted and not yet given to the device.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Commands on the device.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slips.len() - self.free_slips.len()
    }

    /// Whether every read has been completed and every completion taken.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
            && self.cutting.is_empty()
            && self.in_flight() == 0
            && self.ready.is_empty()
    }

    /// The counters so far.
    #[must_use]
    pub fn stats(&self) -> IoEngineStats {
        self.counters
    }

    /// Reads to accept at most before some have been started.
    pub(crate) fn queue_limit(&self) -> usize {
        self.limits.queued
    }

    pub(crate) fn waker(&self) -> Waker {
        self.device.waker()
    }

    /// Takes all reads out of `batch`, which keeps its capacity. Urgent reads go before
    /// prefetches, earlier batches before later ones; inside a batch the order is by offset.
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

    /// Starts what fits on the device, then appends completions to `out`. With `wait` it blocks
    /// until there is at least one, the waker was used, or nothing is left to wait for.
    ///
    /// # Errors
    /// Only when the device is broken; reads in flight are then lost and so are their slots.
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
        // Keep the device busy while the caller looks at the completions.
        self.pump();
        out.append(&mut self.ready);
        Ok(())
    }

    /// Completes every read that was not yet given to the device with what `reason` returns.
    pub(crate) fn purge(&mut self, mut reason: impl FnMut() -> IoError) {
        while let Some(q) = self.queue.pop() {
            self.ready.push(Completion::of(q.read, Err(reason())));
        }
        while let Some(cut) = self.cutting.pop() {
            self.stop_cutting(cut.active, reason());
        }
    }

    /// Completes queued prefetches as cancelled, and does not go on with one that is being cut.
    pub(crate) fn cancel_prefetches(&mut self) {
        // Prefetches sort behind everything urgent, so they lie at the front of the reversed queue.
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
    /// Waits for commands in flight, as the kernel writes into their slots until they end. Where
    /// that cannot be had, the memory is leaked on purpose: a leak is harmless, a stray write is
    /// not.
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

/// Memory for up to `gap` unwanted bytes; without it reads with gaps are not merged.
fn waste(gap: u32) -> Option<Slot> {
    let len = (gap as usize).checked_next_multiple_of(4096)?;
    Arena::new(1, len, 4096, ArenaOptions::default())
        .ok()?
        .take()
}
