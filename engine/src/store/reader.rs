//! Interface to the I/O thread: batched submissions, completions, and the pool of stream buffers
//! for whole clusters.

use std::time::{Duration, Instant};

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::io::{
    CallerIo, Completion, FileSource, IoChoice, IoError, IoOptions, IoStats, IoThread, Priority,
    Read,
};
use emberflow_storage::trace::Tracer;

use super::layout::Layout;
use super::tag::Tag;
use crate::ablation::Ablation;
use crate::error::Error;
use crate::options::Options;
use crate::trace::WAIT;

/// Reads per submission: the first ones are in flight while later ones are looked up.
const BATCH: usize = 256;

/// Bytes of a layer's neurons up to which the thread that computes reads them itself. Measured with
/// layers of 1 MB, where it is up to 1.9 times as fast, and of 19 MB, where it makes no difference.
const SMALL: usize = 4 << 20;

/// Who reads.
enum Io {
    /// A thread of its own.
    Thread(IoThread),
    /// The thread that computes.
    Caller(Box<CallerIo>),
}

impl Io {
    /// Chooses who reads. Where a layer's reads are few and short, as in small models, handing them to
    /// a thread and back takes longer than the device. Long reads need a thread that keeps the
    /// device busy beside the computation, and so do reads beside a device that computes.
    fn open(
        layout: &Layout,
        source: FileSource,
        options: &Options,
        io: IoOptions,
    ) -> Result<Self, IoError> {
        let real = matches!(options.io, IoChoice::Auto | IoChoice::Uring);
        let full = options.ablation == Ablation::Full && io.core.is_none();
        let small = layout.most_bank_bytes() <= SMALL && !layout.has_experts();
        match real && full && small && options.device.is_none() {
            true => CallerIo::open(source, options.io, io.limits, io.trace)
                .map(|io| Self::Caller(Box::new(io))),
            false => IoThread::spawn(source, options.io, io).map(Self::Thread),
        }
    }

    /// Takes completions, at least `min` unless nothing is outstanding.
    fn take(&mut self, out: &mut Vec<Completion>, min: usize) -> Result<(), Error> {
        match self {
            Self::Thread(io) => io.wait(out, min).map(|_| ()),
            Self::Caller(io) => io.wait(out, min),
        }
        .map_err(error)
    }
}

/// Reads in flight, and stream buffers.
pub(super) struct Reader {
    io: Io,
    /// Buffers for whole clusters in flight.
    pub stream: Arena,
    /// Reads not yet submitted.
    batch: Vec<Read>,
    completions: Vec<Completion>,
    /// Time that computation stalled on reads.
    waited: Duration,
    tracer: Tracer,
}

fn error(e: IoError) -> Error {
    emberflow_storage::Error::from(e).into()
}

impl Reader {
    /// Opens the file, with room for up to `buffers` stream buffers, none of them yet.
    pub fn start(
        layout: &Layout,
        source: FileSource,
        options: &Options,
        buffers: u32,
        memory: ArenaOptions,
        tracer: Tracer,
    ) -> Result<Self, Error> {
        let io = IoOptions {
            core: options.io_core,
            trace: tracer.clone(),
            ..IoOptions::default()
        };
        let stream = Arena::with_limit(
            0,
            buffers,
            layout.stream_len(),
            layout.memory_align(),
            memory,
        )
        .map_err(emberflow_storage::Error::from)?;
        Ok(Self {
            io: Io::open(layout, source, options, io).map_err(error)?,
            stream,
            batch: Vec::with_capacity(BATCH),
            completions: Vec::with_capacity(2 * layout.neurons_at_once()),
            waited: Duration::ZERO,
            tracer,
        })
    }

    /// Queues a read; [`Reader::submit`] sends it at the latest.
    pub fn request(&mut self, read: Read) -> Result<(), Error> {
        if self.batch.len() == BATCH {
            self.submit()?;
        }
        self.batch.push(read);
        Ok(())
    }

    /// Queues a read of a whole cluster. False if no buffer is free.
    pub fn request_cluster(
        &mut self,
        layout: &Layout,
        bank: u32,
        cluster: u32,
        priority: Priority,
    ) -> Result<bool, Error> {
        let Some(slot) = self.stream.take() else {
            return Ok(false);
        };
        let read = Self::read_cluster(layout, bank, cluster, slot);
        self.request(Read { priority, ..read })?;
        Ok(true)
    }

    /// The read of a whole cluster.
    pub fn read_cluster(layout: &Layout, bank: u32, cluster: u32, slot: Slot) -> Read {
        let (offset, len) = layout.cover_cluster(bank, cluster);
        let tag = Tag::Cluster { bank, cluster };
        Read::new(tag.bits(), offset, len, slot)
    }

    /// Cancels the prefetches that have not begun.
    pub fn cancel_prefetches(&mut self) -> Result<(), Error> {
        self.submit()?;
        match &mut self.io {
            Io::Thread(io) => io.cancel_prefetches().map_err(error),
            Io::Caller(io) => {
                io.cancel_prefetches();
                Ok(())
            }
        }
    }

    /// Submits the queued reads.
    pub fn submit(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() {
            return Ok(());
        }
        match &mut self.io {
            Io::Thread(io) => io.submit(&mut self.batch),
            Io::Caller(io) => io.submit(&mut self.batch),
        }
        .map_err(error)
    }

    /// Reads in flight.
    pub fn outstanding(&self) -> usize {
        match &self.io {
            Io::Thread(io) => io.outstanding(),
            Io::Caller(io) => io.outstanding(),
        }
    }

    /// Reads in flight or queued.
    pub fn pending(&self) -> usize {
        self.outstanding() + self.batch.len()
    }

    /// Completions, without waiting. Return the vector with [`Reader::give_back`] so that its
    /// memory is reused.
    pub fn poll(&mut self) -> Result<Vec<Completion>, Error> {
        self.io.take(&mut self.completions, 0)?;
        Ok(std::mem::take(&mut self.completions))
    }

    /// Blocks until a completion; `layer` is for traces.
    pub fn wait(&mut self, layer: usize) -> Result<Vec<Completion>, Error> {
        let start = Instant::now();
        let span = self.tracer.open(&WAIT, [layer as u64, 0]);
        let waited = self.io.take(&mut self.completions, 1);
        drop(span);
        self.waited += start.elapsed();
        waited?;
        Ok(std::mem::take(&mut self.completions))
    }

    /// Takes back the memory of handled completions.
    pub fn give_back(&mut self, mut completions: Vec<Completion>) {
        completions.clear();
        self.completions = completions;
    }

    /// Returns a stream buffer to the pool.
    pub fn put(&mut self, slot: Slot) {
        self.stream.put(slot);
    }

    /// Time that computation stalled on reads.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Name of the I/O engine.
    pub fn engine(&self) -> &'static str {
        match &self.io {
            Io::Thread(io) => io.engine(),
            Io::Caller(io) => io.name(),
        }
    }

    /// I/O statistics.
    pub fn stats(&self) -> IoStats {
        match &self.io {
            Io::Thread(io) => io.stats(),
            Io::Caller(io) => io.stats(),
        }
    }
}
