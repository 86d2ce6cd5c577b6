//! Keys and values in pages of positions: the pool, and the pages of one sequence.
//!
//! Sequences with a common prefix share pages, copy-on-write. Admission reserves pages for a
//! sequence's full length, so that decode never runs out of pages.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;

use super::layer::{LayerKv, PageWriter};
use super::page::Page;
use super::pool::Pool;
use super::shape::KvShape;
use crate::error::Error;

/// The page pool of an engine.
#[derive(Debug)]
pub(crate) struct KvPool {
    shape: KvShape,
    pool: Pool,
}

impl KvPool {
    /// A pool of `total` pages, not backed by memory until used.
    pub fn new(shape: KvShape, total: usize) -> Result<Arc<Self>, Error> {
        let pool = Pool::new(shape.page_bytes(), total)?;
        Ok(Arc::new(Self { shape, pool }))
    }

    /// An empty sequence with pages reserved for `positions` positions.
    ///
    /// # Errors
    /// [`Error::KvFull`] if other sequences reserve too much.
    pub fn sequence(self: &Arc<Self>, positions: usize) -> Result<KvPages, Error> {
        let charged = self.shape.pages(positions);
        let full = |free| Error::KvFull {
            positions,
            free: free * self.shape.page,
            total: self.pool.total() * self.shape.page,
        };
        self.pool.reserve(charged).map_err(full)?;
        Ok(KvPages {
            pages: Vec::with_capacity(charged),
            positions,
            charged,
            overflow: None,
            pool: Arc::clone(self),
        })
    }
}

/// The pages of one sequence.
#[derive(Debug)]
pub(crate) struct KvPages {
    pool: Arc<KvPool>,
    pages: Vec<Arc<Page>>,
    /// Capacity in positions, and the pages reserved for it.
    positions: usize,
    charged: usize,
    /// The first position with a number beyond the format.
    overflow: Option<usize>,
}

impl KvPages {
    /// Capacity in positions.
    pub fn capacity(&self) -> usize {
        self.positions
    }

    /// Geometry of its pages.
    pub fn shape(&self) -> KvShape {
        self.pool.shape
    }

    /// Makes `count` positions from `first` on writable: allocates pages and copies shared ones
    /// (copy-on-write) with all their positions.
    pub fn prepare(&mut self, first: usize, count: usize) {
        debug_assert!(first + count <= self.positions);
        let shape = self.pool.shape;
        let needed = shape.pages(first + count);
        for at in first / shape.page..needed.min(self.pages.len()) {
            if Arc::get_mut(&mut self.pages[at]).is_none() {
                let mut page = self.pool.pool.take();
                if let Some(to) = Arc::get_mut(&mut page) {
                    let kept = (first + count - at * shape.page).min(shape.page);
                    copy_positions(shape, self.pages[at].bytes(), to.bytes_mut(), kept);
                }
                let shared = std::mem::replace(&mut self.pages[at], page);
                self.pool.pool.give_back(std::iter::once(shared), 0);
            }
        }
        while self.pages.len() < needed {
            self.pages.push(self.pool.pool.take());
        }
    }

    /// A sequence that shares the first `len` positions, with pages reserved for `positions`
    /// positions.
    ///
    /// # Errors
    /// As [`KvPool::sequence`].
    pub fn fork(&self, len: usize, positions: usize) -> Result<Self, Error> {
        let mut fork = self.pool.sequence(positions)?;
        fork.adopt(self, len);
        Ok(fork)
    }

    /// Replaces the contents by the first `len` positions of `other`, of the same pool; pages are
    /// shared. `len` is within the capacity.
    pub fn adopt(&mut self, other: &Self, len: usize) {
        self.truncate(0);
        let shared = self.pool.shape.pages(len.min(self.positions));
        let pages = other.pages.iter().take(shared).cloned();
        self.pages.extend(pages);
        self.overflow = other.overflow.filter(|&position| position < len);
    }

    /// Drops the pages after position `len`.
    pub fn truncate(&mut self, len: usize) {
        let kept = self.pool.shape.pages(len).min(self.pages.len());
        self.pool.pool.give_back(self.pages.drain(kept..), 0);
        self.overflow = self.overflow.filter(|&position| position < len);
    }

    /// The first position with a number that its format does not hold.
    pub fn overflow(&self) -> Option<usize> {
        self.overflow
    }

    /// A writer for `position`, after `prepare`.
    pub fn writer(&mut self, position: usize) -> PageWriter<'_> {
        let shape = self.pool.shape;
        match Arc::get_mut(&mut self.pages[position / shape.page]) {
            Some(page) => PageWriter::new(shape, page, position, &mut self.overflow),
            None => unreachable!("a prepared page has one owner"),
        }
    }

    /// One layer, for reading.
    pub fn layer(&self, layer: usize) -> LayerKv<'_> {
        LayerKv::new(self.pool.shape, &self.pages, layer)
    }

    /// Writes the keys and values of `positions`.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write(&self, positions: Range<usize>, to: &mut dyn Write) -> io::Result<()> {
        (self.pool.shape).visit(positions, |page, bytes| {
            to.write_all(&self.pages[page].bytes()[bytes])
        })
    }

    /// Reads what [`KvPages::write`] wrote of `positions`, which follow those that are there.
    ///
    /// # Errors
    /// Those of `from`.
    pub fn read(&mut self, positions: Range<usize>, from: &mut dyn Read) -> io::Result<()> {
        self.prepare(positions.start, positions.len());
        let pages = &mut self.pages;
        (self.pool.shape).visit(positions, |page, bytes| {
            match Arc::get_mut(&mut pages[page]) {
                Some(page) => from.read_exact(&mut page.bytes_mut()[bytes]),
                None => unreachable!("a prepared page has one owner"),
            }
        })
    }

    /// Fills the pages of `len` positions with a small constant, for benchmarks.
    pub fn pretend(&mut self, len: usize) {
        self.truncate(0);
        self.prepare(0, len);
        for page in &mut self.pages {
            if let Some(page) = Arc::get_mut(page) {
                page.bytes_mut().fill(0x2c);
            }
        }
    }
}

impl Drop for KvPages {
    fn drop(&mut self) {
        self.pool.pool.give_back(self.pages.drain(..), self.charged);
    }
}

/// Copies the first `count` positions of a page.
fn copy_positions(shape: KvShape, from: &[u8], to: &mut [u8], count: usize) {
    for layer in 0..shape.layers() {
        let used = [
            count.next_multiple_of(emberflow_kernels::GROUP) * shape.head_dim(layer),
            count * shape.width(layer),
        ];
        for (kind, elements) in used.into_iter().enumerate() {
            for head in 0..shape.kv_heads(layer) {
                let start = shape.at(layer, kind, head);
                let range = start..start + shape.bytes(elements);
                to[range.clone()].copy_from_slice(&from[range]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::HeadLayers;
    use super::*;
    use emberflow_kernels::{Cpu, DType};

    const SHAPE: KvShape = KvShape {
        dtype: DType::F32,
        kinds: [
            HeadLayers {
                layers: 1,
                kv_heads: 2,
                head_dim: 4,
            },
            HeadLayers {
                layers: 1,
                kv_heads: 2,
                head_dim: 4,
            },
        ],
        page: 32,
        latent: false,
    };

    /// Writes `value` at one position of every layer and head.
    fn write(kv: &mut KvPages, position: usize, value: f32) {
        kv.prepare(position, 1);
        let mut page = kv.writer(position);
        for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let row = [value, value + 0.25, layer as f32, head as f32];
            page.store_key(Cpu::detect(), layer, head, &row);
            page.store_value(Cpu::detect(), layer, head, &row);
        }
    }

    fn value(kv: &KvPages, position: usize) -> f32 {
        let read = |layer, head| {
            let bytes = kv.layer(layer).values(head, position..position + 1);
            let row: Vec<f32> = bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            assert_eq!(row[1..4], [row[0] + 0.25, layer as f32, head as f32]);
            row[0]
        };
        let first = read(0, 0);
        assert!([read(0, 1), read(1, 0), read(1, 1)] == [first; 3]);
        first
    }

    fn free(pool: &KvPool) -> (usize, usize) {
        pool.pool.free()
    }

    #[test]
    fn forks_share_pages_until_one_of_them_writes() {
        let pool = KvPool::new(SHAPE, 9).unwrap();
        let mut first = pool.sequence(96).unwrap();
        (0..40).for_each(|p| write(&mut first, p, p as f32));
        assert_eq!(free(&pool), (7, 6));
        let mut second = first.fork(40, 96).unwrap();
        let mut third = first.fork(35, 96).unwrap();
        assert_eq!(free(&pool), (7, 0));
        write(&mut second, 40, 100.0);
        assert_eq!(free(&pool).0, 6);
        write(&mut first, 40, 200.0);
        write(&mut third, 35, 300.0);
        // All three still share the first page.
        assert_eq!(free(&pool).0, 5);
        for (kv, len, last) in [
            (&first, 41, 200.0),
            (&second, 41, 100.0),
            (&third, 36, 300.0),
        ] {
            assert!((0..len - 1).all(|p| value(kv, p) == p as f32));
            assert_eq!(value(kv, len - 1), last);
        }
        drop(first);
        assert_eq!(free(&pool), (6, 3));
        assert_eq!(value(&second, 0), 0.0);
        drop((second, third));
        assert_eq!(free(&pool), (9, 9));
    }

    #[test]
    fn admission_reserves_all_pages() {
        let pool = KvPool::new(SHAPE, 4).unwrap();
        let mut sequence = pool.sequence(70).unwrap();
        assert!(matches!(
            pool.sequence(33),
            Err(Error::KvFull {
                positions: 33,
                free: 32,
                total: 128
            })
        ));
        assert!(sequence.fork(0, 33).is_err());
        let mut two = sequence.fork(0, 32).unwrap();
        (0..70).for_each(|p| write(&mut sequence, p, 1.0));
        (0..32).for_each(|p| write(&mut two, p, 2.0));
        assert_eq!(free(&pool), (0, 0));
        sequence.truncate(1);
        assert_eq!(free(&pool), (2, 0));
        (1..70).for_each(|p| write(&mut sequence, p, 3.0));
        assert_eq!((value(&sequence, 0), value(&sequence, 69)), (1.0, 3.0));
        // exactly one page
        sequence.truncate(32);
        assert_eq!(free(&pool), (2, 0));
    }
}
