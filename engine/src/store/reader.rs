//! Interface to the I/O thread: batched submissions, completions, and the pool of stream buffers
//! for whole clusters.

use std::time::Duration;

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::clock::Moment;
use emberflow_storage::io::{
    Completion, FileSource, IoError, IoOptions, IoStats, IoThread, Priority, Read,
};
use emberflow_storage::trace::Tracer;

use super::layout::Layout;
use super::tag::Tag;
use crate::error::Error;
use crate::options::Options;
use crate::trace::WAIT;

/// Reads per submission: the first ones are in flight while later ones are looked up.
const BATCH: usize = 256;

/// Reads in flight, and stream buffers.
pub(super) struct Reader {
    io: IoThread,
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
    /// Starts the I/O thread, with room for up to `buffers` stream buffers, none of them yet.
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
            io: IoThread::spawn(source, options.io, io).map_err(error)?,
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
        self.io.cancel_prefetches().map_err(error)
    }

    /// Submits the queued reads.
    pub fn submit(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() {
            return Ok(());
        }
        self.io.submit(&mut self.batch).map_err(error)
    }

    /// Reads in flight.
    pub fn outstanding(&self) -> usize {
        self.io.outstanding()
    }

    /// Reads in flight or queued.
    pub fn pending(&self) -> usize {
        self.io.outstanding() + self.batch.len()
    }

    /// Completions, without waiting. Return the vector with [`Reader::give_back`] so that its
    /// memory is reused.
    pub fn poll(&mut self) -> Result<Vec<Completion>, Error> {
        self.io.try_drain(&mut self.completions).map_err(error)?;
        Ok(std::mem::take(&mut self.completions))
    }

    /// Blocks until a completion; `layer` is for traces.
    pub fn wait(&mut self, layer: usize) -> Result<Vec<Completion>, Error> {
        let start = Moment::now();
        let span = self.tracer.open(&WAIT, [layer as u64, 0]);
        let waited = self.io.wait(&mut self.completions, 1);
        drop(span);
        self.waited += start.elapsed();
        waited.map_err(error)?;
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
        self.io.engine()
    }

    /// I/O statistics.
    pub fn stats(&self) -> IoStats {
        self.io.stats()
    }
}
