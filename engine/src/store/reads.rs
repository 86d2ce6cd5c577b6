//! Reads in flight: batched submission, completions, and the buffers of whole clusters. This module
//! does not interpret the bytes.
//!
//! ```text
//! cluster, part, row, tile ──► batch ──► I/O ──► next ──► Arrival
//! a free buffer ──► coming ──► unclaimed ──► claim           whole clusters
//! ```

mod tag;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::io::{
    CallerIo, Completion, FileSource, IoChoice, IoError, IoOptions, IoStats, IoThread, Priority,
    Read,
};
use emberflow_storage::trace::Tracer;

use super::latch::Latch;
use super::layout::{Cover, Layout};
use crate::error::Error;
use crate::options::Options;
use crate::trace::WAIT;

pub(super) use tag::{Half, Tag};

/// Reads per submission: the first reads are in flight while later ones are looked up.
const BATCH: usize = 256;

/// Up to this many bytes of neurons per layer, the compute thread reads them itself. With layers of
/// 1 MB this is up to 1.9 times as fast; with 19 MB it makes no difference.
pub(crate) const SMALL: usize = 4 << 20;

/// The thread that submits reads.
pub(super) enum IoDriver {
    /// A dedicated I/O thread.
    Thread(IoThread),
    /// The compute thread.
    Caller(Box<CallerIo>),
}

impl IoDriver {
    /// Chooses who reads. In small models a layer's reads are few and short, and handing them to a
    /// thread takes longer than the device. Long reads need a thread that keeps the device busy
    /// during computation; so do reads next to a device that computes.
    ///
    /// `inline`: the compute thread may read.
    pub fn open(
        layout: &Layout,
        source: FileSource,
        options: &Options,
        inline: bool,
        trace: Tracer,
    ) -> Result<Self, Error> {
        let io = IoOptions {
            core: options.lab.io_core,
            trace,
            ..IoOptions::default()
        };
        let real = matches!(options.lab.io, IoChoice::Auto | IoChoice::Uring);
        let small = layout.most_bank_bytes() <= SMALL && !layout.has_experts();
        if inline && real && small && io.core.is_none() && options.lane.is_none() {
            CallerIo::open(source, options.lab.io, io.limits, io.trace)
                .map(|io| Self::Caller(Box::new(io)))
        } else {
            IoThread::spawn(source, options.lab.io, io).map(Self::Thread)
        }
        .map_err(error)
    }

    /// Takes completions: at least `min`, unless nothing is outstanding.
    fn take(&mut self, out: &mut Vec<Completion>, min: usize) -> Result<(), Error> {
        match self {
            Self::Thread(io) => io.wait(out, min).map(|_| ()),
            Self::Caller(io) => io.wait(out, min),
        }
        .map_err(error)
    }
}

/// A completed read.
#[derive(Debug)]
pub(super) struct Arrival {
    /// The purpose of the read.
    pub tag: Tag,
    pub slot: Slot,
    pub result: Result<(), Error>,
    /// Cancelled before it began; `result` is an error then.
    pub cancelled: bool,
}

/// Reads in flight, and stream buffers.
pub(super) struct Reads {
    layout: Arc<Layout>,
    io: IoDriver,
    /// Buffers for whole clusters.
    buffers: Arena,
    /// Reads not yet submitted.
    batch: Vec<Read>,
    /// Completions not yet handled, in reverse order.
    done: Vec<Completion>,
    /// Whole clusters in flight.
    coming: Vec<(u32, u32)>,
    /// Whole clusters that have arrived and are not yet claimed.
    unclaimed: Vec<(u32, u32, Slot)>,
    /// Rows of tables that have arrived: (table, row, bytes).
    pub(super) rows: Vec<(u32, u32, Slot)>,
    /// Tiles that have arrived: (bank, tile, bytes).
    pub(super) tiles: Vec<(u32, u32, Slot)>,
    /// Time that computation was stalled on reads.
    waited: Duration,
    latch: Arc<Latch>,
    tracer: Tracer,
}

fn error(e: IoError) -> Error {
    emberflow_storage::Error::from(e).into()
}

impl Reads {
    /// With capacity for up to `buffers` stream buffers; none is allocated yet.
    pub(super) fn new(
        layout: Arc<Layout>,
        io: IoDriver,
        buffers: u32,
        memory: ArenaOptions,
        latch: Arc<Latch>,
        tracer: Tracer,
    ) -> Result<Self, Error> {
        let (len, align) = (layout.stream_len(), layout.memory_align());
        let buffers = Arena::with_limit(0, buffers, len, align, memory)
            .map_err(emberflow_storage::Error::from)?;
        Ok(Self {
            io,
            buffers,
            batch: Vec::with_capacity(BATCH),
            done: Vec::with_capacity(2 * layout.neurons_at_once()),
            coming: Vec::with_capacity(64),
            unclaimed: Vec::with_capacity(64),
            rows: Vec::new(),
            tiles: Vec::new(),
            waited: Duration::ZERO,
            latch,
            tracer,
            layout,
        })
    }

    /// Sets the number of stream buffers.
    pub(super) fn set_buffers(&mut self, count: u32) {
        self.buffers.set_limit(count);
    }

    /// Number of stream buffers.
    pub(super) fn most_buffers(&self) -> u32 {
        self.buffers.limit()
    }

    /// Number of free stream buffers.
    pub(super) fn free_buffers(&self) -> usize {
        self.buffers.free()
    }

    /// Takes a free stream buffer; return it with [`Reads::put`].
    pub(super) fn take_buffer(&mut self) -> Option<Slot> {
        self.buffers.take()
    }

    /// Returns a stream buffer.
    pub(super) fn put(&mut self, buffer: Slot) {
        self.buffers.put(buffer);
    }

    /// Queues a read. A full batch is submitted at once, others by [`Reads::submit`].
    fn request(&mut self, read: Read) -> Result<(), Error> {
        if self.batch.len() == BATCH {
            self.submit()?;
        }
        self.batch.push(read);
        Ok(())
    }

    /// Requests a whole cluster. Returns false if no buffer is free.
    pub(super) fn cluster(
        &mut self,
        bank: u32,
        cluster: u32,
        priority: Priority,
    ) -> Result<bool, Error> {
        let Some(slot) = self.buffers.take() else {
            return Ok(false);
        };
        self.cluster_into(bank, cluster, priority, slot)?;
        Ok(true)
    }

    /// Requests a whole cluster into `buffer`, after an earlier read was cancelled.
    pub(super) fn cluster_into(
        &mut self,
        bank: u32,
        cluster: u32,
        priority: Priority,
        slot: Slot,
    ) -> Result<(), Error> {
        let Cover { offset, len } = self.layout.cover_cluster(bank, cluster);
        let tag = Tag::Cluster { bank, cluster };
        let read = Read::new(tag.bits(), offset, len, slot);
        self.request(Read { priority, ..read })?;
        self.coming.push((bank, cluster));
        Ok(())
    }

    /// Requests a byte range of the file into a slot from byte `at` on.
    pub(super) fn part(
        &mut self,
        tag: Tag,
        Cover { offset, len }: Cover,
        slot: Slot,
        at: u32,
    ) -> Result<(), Error> {
        let read = Read::new(tag.bits(), offset, len, slot).at(at);
        self.request(match tag {
            Tag::Ahead { .. } => read.prefetch(),
            _ => read,
        })
    }

    /// Cancels prefetches that have not begun, if whole clusters are in flight.
    pub(super) fn cancel_prefetches(&mut self) -> Result<(), Error> {
        if self.coming.is_empty() {
            return Ok(());
        }
        self.submit()?;
        match &mut self.io {
            IoDriver::Thread(io) => {
                let cancelled = io.cancel_prefetches();
                self.latch.keep(cancelled.map_err(error))
            }
            IoDriver::Caller(io) => {
                io.cancel_prefetches();
                Ok(())
            }
        }
    }

    /// Submits the queued reads.
    pub(super) fn submit(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let sent = match &mut self.io {
            IoDriver::Thread(io) => io.submit(&mut self.batch),
            IoDriver::Caller(io) => io.submit(&mut self.batch),
        };
        self.latch.keep(sent.map_err(error))
    }

    /// Submits the queued reads if nothing is in flight.
    pub(super) fn submit_if_idle(&mut self) -> Result<(), Error> {
        match self.outstanding() {
            0 => self.submit(),
            _ => Ok(()),
        }
    }

    /// Number of reads in flight.
    pub fn outstanding(&self) -> usize {
        match &self.io {
            IoDriver::Thread(io) => io.outstanding(),
            IoDriver::Caller(io) => io.outstanding(),
        }
    }

    /// Number of reads in flight or queued.
    pub(super) fn pending(&self) -> usize {
        self.outstanding() + self.batch.len()
    }

    /// Takes completions without waiting; [`Reads::next`] returns them.
    pub(super) fn poll(&mut self) -> Result<(), Error> {
        let taken = self.io.take(&mut self.done, 0);
        self.done.reverse();
        self.latch.keep(taken)
    }

    /// Takes completions; blocks until there is one. `layer` is for traces.
    pub(super) fn wait(&mut self, layer: usize) -> Result<(), Error> {
        let start = Instant::now();
        let span = self.tracer.open(&WAIT, [layer as u64, 0]);
        let taken = self.io.take(&mut self.done, 1);
        drop(span);
        self.waited += start.elapsed();
        self.done.reverse();
        self.latch.keep(taken)
    }

    /// The next of the taken completions.
    pub(super) fn next(&mut self) -> Option<Arrival> {
        let Completion { tag, slot, result } = self.done.pop()?;
        let tag = Tag::from_bits(tag);
        if let Tag::Cluster { bank, cluster } = tag {
            self.coming.retain(|&key| key != (bank, cluster));
        }
        Some(Arrival {
            tag,
            slot,
            cancelled: matches!(result, Err(IoError::Cancelled)),
            result: result.map_err(error),
        })
    }

    /// Whether a whole cluster is in flight.
    pub(super) fn is_coming(&self, bank: u32, cluster: u32) -> bool {
        self.coming.contains(&(bank, cluster))
    }

    /// Whether a whole cluster is in flight or has arrived unclaimed.
    pub(super) fn is_underway(&self, bank: u32, cluster: u32) -> bool {
        let key = (bank, cluster);
        self.coming.contains(&key) || self.unclaimed.iter().any(|a| (a.0, a.1) == key)
    }

    /// The whole clusters in flight or unclaimed.
    pub(super) fn underway(&self) -> impl Iterator<Item = (u32, u32)> {
        let unclaimed = self.unclaimed.iter().map(|a| (a.0, a.1));
        self.coming.iter().copied().chain(unclaimed)
    }

    /// Holds a whole cluster that has arrived until it is claimed.
    pub(super) fn keep(&mut self, bank: u32, cluster: u32, buffer: Slot) {
        self.unclaimed.push((bank, cluster, buffer));
    }

    /// Takes the buffer of an unclaimed whole cluster.
    pub(super) fn claim(&mut self, bank: u32, cluster: u32) -> Option<Slot> {
        let mut unclaimed = self.unclaimed.iter();
        let i = unclaimed.position(|a| (a.0, a.1) == (bank, cluster))?;
        Some(self.unclaimed.swap_remove(i).2)
    }

    /// Frees the buffers of unclaimed clusters for which `follows` is false.
    pub(super) fn drop_unclaimed(&mut self, follows: impl Fn(u32, u32) -> bool) {
        let mut i = 0;
        while let Some(&(bank, cluster, _)) = self.unclaimed.get(i) {
            if follows(bank, cluster) {
                i += 1;
            } else {
                self.buffers.put(self.unclaimed.swap_remove(i).2);
            }
        }
    }

    /// Time that computation was stalled on reads.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    /// Name of the I/O engine.
    pub fn engine(&self) -> &'static str {
        match &self.io {
            IoDriver::Thread(io) => io.engine(),
            IoDriver::Caller(io) => io.name(),
        }
    }

    /// I/O statistics.
    pub(super) fn stats(&self) -> IoStats {
        match &self.io {
            IoDriver::Thread(io) => io.stats(),
            IoDriver::Caller(io) => io.stats(),
        }
    }
}
