//! Pages of one size, reserved by sequences and shared between them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use emberflow_storage::arena::{Arena, ArenaOptions};

use super::page::Page;
use crate::error::Error;

/// Free and reserved pages.
#[derive(Debug)]
struct Free {
    pages: Vec<Arc<Page>>,
    /// Pages not reserved by any sequence.
    uncharged: usize,
}

/// Pages of one size.
///
/// A sequence reserves as many as it will ever hold. Since pages can be shared, there are never more
/// in use than reserved, and [`Pool::take`] always succeeds.
#[derive(Debug)]
pub(super) struct Pool {
    total: usize,
    free: Mutex<Free>,
}

impl Pool {
    /// `total` pages of `bytes` bytes, not backed by memory until used.
    pub fn new(bytes: usize, total: usize) -> Result<Self, Error> {
        // Without huge pages, long contexts are read slower than weights.
        let options = ArenaOptions {
            huge_pages: true,
            ..ArenaOptions::default()
        };
        let slots = u32::try_from(total).unwrap_or(u32::MAX);
        let mut arena = Arena::new(slots.max(1), bytes.max(1), 1, options)
            .map_err(emberflow_storage::Error::from)?;
        let taken = std::iter::from_fn(|| arena.take()).take(total);
        let mut pages: Vec<_> = taken.map(|slot| Arc::new(Page::new(slot))).collect();
        // Low addresses first.
        pages.reverse();
        Ok(Self {
            total,
            free: Mutex::new(Free {
                uncharged: pages.len(),
                pages,
            }),
        })
    }

    /// Number of pages.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Reserves `count` pages.
    ///
    /// # Errors
    /// The number of pages that could be reserved, if fewer.
    pub fn reserve(&self, count: usize) -> Result<(), usize> {
        let mut free = self.lock();
        if count > free.uncharged {
            return Err(free.uncharged);
        }
        free.uncharged -= count;
        Ok(())
    }

    /// One of the pages that the caller has reserved.
    pub fn take(&self) -> Arc<Page> {
        match self.lock().pages.pop() {
            Some(page) => page,
            None => unreachable!("sequences hold no more pages than they were charged for"),
        }
    }

    /// Drops pages and the reservation of `charged` pages. Pages without other owners become free.
    pub fn give_back(&self, pages: impl IntoIterator<Item = Arc<Page>>, charged: usize) {
        let mut free = self.lock();
        for page in pages {
            if Arc::strong_count(&page) == 1 {
                free.pages.push(page);
            }
        }
        free.uncharged += charged;
    }

    /// Pages without owner, and unreserved pages.
    #[cfg(test)]
    pub fn free(&self) -> (usize, usize) {
        let free = self.lock();
        (free.pages.len(), free.uncharged)
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
