//! Vectors of pools of positions, for one pool size: the pages of a sequence that hold them.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;

use super::layer::{LayerKv, PageWriter};
use super::pages::{KvPages, KvPool};
use super::shape::PoolShape;
use crate::error::Error;

/// The memory of all sequences for pools of one size.
#[derive(Debug)]
pub(super) struct EntryPool {
    shape: PoolShape,
    pages: Arc<KvPool>,
}

impl EntryPool {
    /// Memory for `sequences` sequences of `positions` positions; `None` without pools.
    pub fn new(
        shape: PoolShape,
        positions: usize,
        sequences: usize,
    ) -> Result<Option<Self>, Error> {
        if shape.size == 0 {
            return Ok(None);
        }
        let pages = shape.pages.pages(shape.pools(positions)) * sequences;
        let pages = KvPool::new(shape.pages, pages)?;
        Ok(Some(Self { shape, pages }))
    }

    /// The pool vectors of an empty sequence of up to `positions` positions.
    ///
    /// # Errors
    /// [`Error::KvFull`] if other sequences reserve too much.
    pub fn sequence(&self, positions: usize) -> Result<Entries, Error> {
        Ok(Entries {
            shape: self.shape,
            pages: self.pages.sequence(self.shape.pools(positions))?,
        })
    }
}

/// The vectors of a sequence's complete pools.
#[derive(Debug)]
pub(crate) struct Entries {
    shape: PoolShape,
    pages: KvPages,
}

impl Entries {
    /// Prepares them for `count` positions from `first` on.
    pub fn prepare(&mut self, first: usize, count: usize) {
        let before = self.shape.pools(first);
        let new = self.shape.pools(first + count) - before;
        if new > 0 {
            self.pages.prepare(before, new);
        }
    }

    /// A writer for pool `pool`, after [`Entries::prepare`].
    pub fn writer(&mut self, pool: usize) -> PageWriter<'_> {
        self.pages.writer(pool)
    }

    /// The first position of the first pool with a number that its format does not hold.
    pub fn overflow(&self) -> Option<usize> {
        self.pages.overflow().map(|pool| pool * self.shape.size)
    }

    /// One layer, for reading.
    pub fn layer(&self, layer: usize) -> LayerKv<'_> {
        self.pages.layer(layer)
    }

    /// The pool vectors of a sequence of up to `positions` positions that continues from position
    /// `len`.
    ///
    /// # Errors
    /// As [`EntryPool::sequence`].
    pub fn fork(&self, len: usize, positions: usize) -> Result<Self, Error> {
        let [len, most] = [len, positions].map(|positions| self.shape.pools(positions));
        Ok(Self {
            shape: self.shape,
            pages: self.pages.fork(len, most)?,
        })
    }

    /// Replaces the contents by those of `other` up to position `len`.
    pub fn adopt(&mut self, other: &Self, len: usize) {
        self.pages.adopt(&other.pages, self.shape.pools(len));
    }

    /// Drops the contents after position `len`.
    pub fn truncate(&mut self, len: usize) {
        self.pages.truncate(self.shape.pools(len));
    }

    /// Writes the vectors of the pools that `positions` complete.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write(&self, positions: Range<usize>, to: &mut dyn Write) -> io::Result<()> {
        self.pages.write(self.pools(positions), to)
    }

    /// Reads what [`Entries::write`] wrote.
    ///
    /// # Errors
    /// Those of `from`.
    pub fn read(&mut self, positions: Range<usize>, from: &mut dyn Read) -> io::Result<()> {
        match self.pools(positions) {
            none if none.is_empty() => Ok(()),
            pools => self.pages.read(pools, from),
        }
    }

    /// Bytes that [`Entries::write`] writes.
    pub fn saved_bytes(&self, positions: Range<usize>) -> u64 {
        self.pools(positions).len() as u64 * self.pages.shape().position_bytes()
    }

    fn pools(&self, positions: Range<usize>) -> Range<usize> {
        self.shape.pools(positions.start)..self.shape.pools(positions.end)
    }

    /// Fills the vectors of `len` positions with a small constant, for benchmarks.
    pub fn pretend(&mut self, len: usize) {
        self.pages.pretend(self.shape.pools(len));
    }
}
