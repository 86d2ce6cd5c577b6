//! Memory for reads: one aligned anonymous mapping, divided into equal slots.
//!
//! A [`Slot`] is the only exclusive access to its bytes. It moves into a read and comes back in the
//! completion, so the compiler forbids touching bytes the kernel may still write. After a load the
//! slot goes to the arena's *shelf*: any holder of `&Arena` can read it, from several threads at
//! once, and only `&mut Arena` gets the [`Slot`] back.
//!
//! Every slot keeps the mapping alive, so the memory is unmapped after the last one is dropped.
//! Code that must abandon a slot the kernel may still write to (see `io::engine`) forgets the
//! handle: the mapping then intentionally stays for the life of the process.
//!
//! Only memory below the limit can become resident, whatever the page size:
//!
//! ```text
//! slot     0        1        2    ...      limit          capacity
//!          +--------+--------+--------+------+ - - - - - - - - +
//! pages    |  huge page 0    |  huge page 1  |ss|  addresses   |   s small, where no huge page fits
//!          +-----------------+---------------+--+ - - - - - - -+
//! resident at most up to here: Arena::charge ---^
//! ```
//!
//! The mapping is aligned to huge pages. Slots need not divide one: a slot of 24 KiB may span two.
#![allow(unsafe_code)]

use std::cmp::Ordering as CmpOrdering;
use std::fmt;
use std::sync::Arc;

use crate::pages::{Pages, page_size};
use crate::sync::Accesses;

/// Why an arena could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// Zero slots, zero length, a misaligned length, or a size beyond the address space.
    #[error(
        "arena of {slots} slots of {slot_len} bytes is not possible: both must be non-zero, the \
         slot length a multiple of {align} and the total below the address space"
    )]
    Geometry {
        /// Slots requested.
        slots: u32,
        /// Bytes per slot requested.
        slot_len: usize,
        /// Required alignment of the slot length, in bytes.
        align: usize,
    },
    /// The kernel refused the mapping.
    #[error("mapping {bytes} bytes for the arena failed: {source}; lower the memory budget")]
    Map {
        /// Bytes requested.
        bytes: usize,
        /// Error of the kernel.
        source: std::io::Error,
    },
}

/// Options for the memory of an [`Arena`]. None of them changes [`Arena::charge`].
#[derive(Debug, Clone, Copy, Default)]
pub struct ArenaOptions {
    /// Advise huge pages: fewer TLB misses for random reads of weights, and fewer segments per disk
    /// command. They become resident in their own size, so they pay off if most slots will be
    /// filled. A kernel without huge pages uses small ones.
    pub huge_pages: bool,
    /// Lock memory below the limit. If the system refuses, the arena works unlocked and logs that;
    /// see [`Arena::locked`].
    pub lock: bool,
    /// Make all memory below the limit resident now instead of at first touch, which would cost
    /// seconds per GiB later. No effect before Linux 5.14.
    pub populate: bool,
}

struct Mapping {
    pages: Pages,
    slot_len: usize,
    /// By slot, for the model checker; empty otherwise.
    accesses: Box<[Accesses]>,
}

/// State of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Home,
    /// Handed out as a [`Slot`].
    Out,
    Shelf,
}

impl Mapping {
    fn ptr(&self, index: u32) -> *mut u8 {
        self.pages.at(index as usize * self.slot_len)
    }
}

/// A mapping divided into equal slots, with a free list.
///
/// Slots `limit..capacity` are retired: never handed out, and their memory returns to the operating
/// system once they are free. They cost only address space.
pub struct Arena {
    map: Arc<Mapping>,
    options: ArenaOptions,
    capacity: u32,
    limit: u32,
    /// Has capacity for the limit, so returning a slot does not allocate.
    free: Vec<u32>,
    /// States of the slots below the limit or not free. All others are free.
    places: Vec<Place>,
    page: usize,
    /// Locked bytes, from the start.
    locked: usize,
}

impl Arena {
    /// Maps `slots` slots of `slot_len` bytes. `slot_len` must be a multiple of `align`, the memory
    /// alignment for direct I/O; every slot has that alignment.
    ///
    /// Without [`ArenaOptions::populate`] nothing is resident before it is touched, but the whole
    /// arena counts against the budget.
    ///
    /// # Errors
    /// [`ArenaError::Geometry`] for invalid sizes, [`ArenaError::Map`] if the kernel refuses.
    pub fn new(
        slots: u32,
        slot_len: usize,
        align: usize,
        options: ArenaOptions,
    ) -> Result<Self, ArenaError> {
        Self::with_limit(slots, slots, slot_len, align, options)
    }

    /// An arena of `limit` slots that can grow in place to `capacity`, see [`Arena::set_limit`].
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn with_limit(
        limit: u32,
        capacity: u32,
        slot_len: usize,
        align: usize,
        options: ArenaOptions,
    ) -> Result<Self, ArenaError> {
        let bad = ArenaError::Geometry {
            slots: capacity,
            slot_len,
            align,
        };
        let page = page_size();
        if capacity == 0
            || capacity == u32::MAX
            || slot_len == 0
            || align == 0
            || align > page
            || !page.is_multiple_of(align)
            || !slot_len.is_multiple_of(align)
        {
            return Err(bad);
        }
        let Some(len) = (capacity as usize)
            .checked_mul(slot_len)
            .and_then(|n| n.checked_next_multiple_of(page))
            .filter(|&n| isize::try_from(n).is_ok())
        else {
            return Err(bad);
        };
        let pages = Pages::map(len).map_err(|source| ArenaError::Map { bytes: len, source })?;
        // Refused only by kernels without huge pages.
        let _ = pages.prefer_small(0..len);
        let mut arena = Self {
            map: Arc::new(Mapping {
                pages,
                slot_len,
                accesses: std::iter::repeat_with(Default::default)
                    .take(capacity as usize)
                    .collect(),
            }),
            options,
            capacity,
            limit: 0,
            free: Vec::new(),
            places: Vec::new(),
            page,
            locked: 0,
        };
        arena.set_limit(limit);
        Ok(arena)
    }

    /// Upper bound on the memory of `slots` slots of `slot_len` bytes, rounded up to pages: the
    /// budget for an arena with that limit. Huge pages do not raise it.
    #[must_use]
    pub fn charge(slots: u32, slot_len: usize) -> u64 {
        let page = page_size() as u64;
        let bytes = u64::from(slots).saturating_mul(slot_len as u64);
        bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX)
    }

    /// Bytes of bookkeeping per slot below the limit, beyond [`Arena::charge`].
    #[must_use]
    pub const fn overhead_per_slot() -> u64 {
        // Free list, place.
        (size_of::<u32>() + size_of::<Place>()) as u64
    }

    /// Mapped slots, retired ones included.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Number of slots that may be handed out.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Bytes per slot.
    #[must_use]
    pub fn slot_len(&self) -> usize {
        self.map.slot_len
    }

    /// Slots available now.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Bytes that the slots below the limit cost in the budget.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        Self::charge(self.limit, self.map.slot_len)
    }

    /// Whether all resident memory below the limit is locked.
    #[must_use]
    pub fn locked(&self) -> bool {
        self.options.lock && self.locked >= self.end_of(self.limit)
    }

    /// Takes a free slot. Its content is what its last user left, initially zeros.
    pub fn take(&mut self) -> Option<Slot> {
        let index = self.free.pop()?;
        self.places[index as usize] = Place::Out;
        Some(Slot {
            map: Arc::clone(&self.map),
            index,
        })
    }

    /// Returns a slot. The memory of a retired slot goes back to the operating system.
    ///
    /// # Panics
    /// If the slot belongs to another arena.
    pub fn put(&mut self, slot: Slot) {
        let index = self.place(&slot, Place::Home);
        if index < self.limit {
            self.free.push(index);
        } else {
            self.discard(index, index + 1);
        }
    }

    fn place(&mut self, slot: &Slot, place: Place) -> u32 {
        assert!(
            Arc::ptr_eq(&slot.map, &self.map),
            "a slot must be returned to its own arena"
        );
        self.places[slot.index as usize] = place;
        slot.index
    }

    /// Puts a filled slot on the shelf, for shared reading by its index.
    ///
    /// # Panics
    /// If the slot belongs to another arena.
    pub fn shelve(&mut self, slot: Slot) {
        self.place(&slot, Place::Shelf);
    }

    /// The bytes of a shelved slot; `None` if it is not on the shelf.
    #[inline]
    #[must_use]
    pub fn shelved(&self, index: u32) -> Option<&[u8]> {
        if !self.is_shelved(index) {
            return None;
        }
        self.map.accesses[index as usize].read();
        // SAFETY: mapped and initialised. No `Slot` of this index exists while it is on the shelf,
        // and creating one needs `&mut self`, so no one writes while this borrow lives.
        Some(unsafe { std::slice::from_raw_parts(self.map.ptr(index), self.map.slot_len) })
    }

    /// Whether a slot is on the shelf.
    #[inline]
    #[must_use]
    pub fn is_shelved(&self, index: u32) -> bool {
        self.places.get(index as usize) == Some(&Place::Shelf)
    }

    /// Takes a slot off the shelf; `None` if it is not there.
    pub fn unshelve(&mut self, index: u32) -> Option<Slot> {
        if !self.is_shelved(index) {
            return None;
        }
        self.places[index as usize] = Place::Out;
        Some(Slot {
            map: Arc::clone(&self.map),
            index,
        })
    }

    /// The memory below the limit, for another thread to make resident: clearing pages takes
    /// seconds per GiB. Pages stay charged, so the limit must not fall before that thread is done.
    #[must_use]
    pub fn pages(&self) -> ArenaPages {
        ArenaPages {
            map: Arc::clone(&self.map),
            first: 0,
            end: self.end_of(self.limit),
        }
    }

    /// Sets how many slots may be handed out, up to the capacity; the lowest indices remain. Memory
    /// of retired slots is freed now if they are free, otherwise when they return. May allocate
    /// when the limit rises.
    pub fn set_limit(&mut self, slots: u32) {
        let new = slots.min(self.capacity);
        let old = std::mem::replace(&mut self.limit, new);
        match new.cmp(&old) {
            CmpOrdering::Less => self.shrink(old),
            CmpOrdering::Equal => {}
            CmpOrdering::Greater => self.grow(old),
        }
    }

    fn grow(&mut self, old: u32) {
        let new = self.limit;
        let missing = (new as usize).saturating_sub(self.places.len());
        self.places.reserve_exact(missing);
        self.places.resize(self.places.len() + missing, Place::Home);
        self.free.reserve_exact(new as usize - self.free.len());
        let places = &self.places;
        let back = (old..new)
            .rev()
            .filter(|&index| places[index as usize] == Place::Home);
        self.free.extend(back);

        let (from, to) = (self.end_of(old), self.end_of(new));
        let pages = &self.map.pages;
        if self.options.huge_pages
            && let Err(reason) = pages.prefer_huge(0..to)
        {
            tracing::debug!(%reason, "no huge pages");
        }
        if self.options.lock {
            match pages.lock(0..to) {
                Ok(()) => self.locked = to,
                Err(reason) => tracing::warn!(
                    bytes = to, %reason,
                    "weights are not locked in memory; `emberflow doctor` prints the limit"
                ),
            }
        }
        if self.options.populate
            && let Err(reason) = pages.populate(from..to)
        {
            tracing::debug!(%reason, "memory will become resident when it is first used");
        }
    }

    fn shrink(&mut self, old: u32) {
        let new = self.limit;
        let end = self.end_of(new);
        if self.locked > end {
            // Locked pages cannot be discarded.
            self.map.pages.unlock(end..self.locked);
            self.locked = end;
        }
        // Otherwise the kernel may collapse the pages around the limit into a huge page again.
        let _ = self.map.pages.prefer_small(end..self.map.pages.len());
        self.free.retain(|&index| index < new);
        let mut at = new;
        while at < old {
            let mut end = at;
            while end < old && self.is_home(end) {
                end += 1;
            }
            if end > at {
                self.discard(at, end);
            }
            at = end + 1;
        }
        self.trim();
    }

    /// Frees the bookkeeping of retired free slots.
    pub(crate) fn trim(&mut self) {
        let limit = self.limit as usize;
        let out = self.places.iter().rposition(|&p| p != Place::Home);
        self.places.truncate(out.map_or(0, |i| i + 1).max(limit));
        self.places.shrink_to_fit();
        self.free.shrink_to(limit);
    }

    /// Offset of the end of the last page of the slots below `limit`.
    fn end_of(&self, limit: u32) -> usize {
        // No overflow: at most the length of the mapping.
        (limit as usize * self.map.slot_len).next_multiple_of(self.page)
    }

    pub(crate) fn is_home(&self, index: u32) -> bool {
        (self.places.get(index as usize)).is_none_or(|&p| p == Place::Home)
    }

    /// Frees the pages that lie entirely in retired free slots around `first..end`.
    fn discard(&mut self, first: u32, end: u32) {
        let (len, page) = (self.map.slot_len, self.page);
        let idle = |i: u32| i >= self.limit && self.is_home(i);
        let (mut first, mut end) = (first, end);
        // A page shared with a neighbouring slot can be freed only if that slot is idle too.
        while !(first as usize * len).is_multiple_of(page) && first > 0 && idle(first - 1) {
            first -= 1;
        }
        while !(end as usize * len).is_multiple_of(page) && end < self.capacity && idle(end) {
            end += 1;
        }
        let from = (first as usize * len).next_multiple_of(page);
        let to = if end == self.capacity {
            self.map.pages.len()
        } else {
            end as usize * len / page * page
        };
        if from < to {
            // SAFETY: the pages contain only free slots, so no handle reaches them.
            let given = unsafe { self.map.pages.discard(from..to) };
            if let Err(reason) = given {
                tracing::warn!(bytes = to - from, %reason, "memory could not be given back");
            }
        }
    }
}

/// The memory of an arena's slots, for another thread to make resident: see [`Arena::pages`].
#[derive(Clone)]
pub struct ArenaPages {
    map: Arc<Mapping>,
    /// Offsets of whole pages.
    first: usize,
    end: usize,
}

impl ArenaPages {
    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // an arena may be empty, which is nothing special
    pub fn len(&self) -> usize {
        self.end - self.first
    }

    /// The `i`-th of `n` parts, which are about equally long.
    #[must_use]
    pub fn part(&self, i: usize, n: usize) -> Self {
        // Whole huge pages, as far as that goes.
        const UNIT: usize = 2 << 20;
        let at = |i: usize| {
            if i >= n {
                self.end
            } else {
                (self.first + self.len() / n * i) / UNIT * UNIT
            }
        };
        Self {
            map: Arc::clone(&self.map),
            first: at(i).max(self.first),
            end: at(i + 1).max(self.first),
        }
    }

    /// Makes the memory resident. Preserves its contents, so the slots may be in use at the same
    /// time. False if the system does not support it: before Linux 5.14.
    #[must_use]
    pub fn populate(&self) -> bool {
        self.first == self.end || self.map.pages.populate(self.first..self.end).is_ok()
    }
}

impl fmt::Debug for ArenaPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ArenaPages").field(&self.len()).finish()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let out = (self.places.iter()).filter(|&&p| p == Place::Out).count();
        if out > 0 {
            tracing::debug!(
                out,
                bytes = self.map.pages.len(),
                "arena dropped with slots out; its memory stays mapped until the last one is gone"
            );
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("capacity", &self.capacity)
            .field("limit", &self.limit)
            .field("slot_len", &self.map.slot_len)
            .field("free", &self.free.len())
            .finish()
    }
}

/// Exclusive access to one slot of an arena. Move-only. Dropping it without [`Arena::put`] loses
/// the slot for that arena and is otherwise harmless.
pub struct Slot {
    map: Arc<Mapping>,
    index: u32,
}

impl Slot {
    /// Number of the slot in its arena.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Bytes in the slot.
    #[must_use]
    #[allow(clippy::len_without_is_empty, clippy::misnamed_getters)] // a slot is never empty
    pub fn len(&self) -> usize {
        self.map.slot_len
    }

    /// The bytes, read only.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.map.accesses[self.index as usize].read();
        // SAFETY: the range is mapped and initialised (anonymous memory), and this is the only
        // handle to it, so no one writes while the borrow lives.
        unsafe { std::slice::from_raw_parts(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// The bytes, writable.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.map.accesses[self.index as usize].write();
        // SAFETY: as in `as_slice`; the unique borrow of the only handle makes access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// Its memory, for another thread to make resident: see [`Arena::pages`].
    #[must_use]
    pub fn pages(&self) -> ArenaPages {
        let (len, page) = (self.map.slot_len, page_size());
        let first = self.index as usize * len;
        ArenaPages {
            map: Arc::clone(&self.map),
            first: first / page * page,
            end: (first + len).next_multiple_of(page),
        }
    }

    /// Address of `offset..offset + len` in the slot, or `None` if that exceeds the slot.
    pub(crate) fn range(&mut self, offset: u32, len: u32) -> Option<*mut u8> {
        self.map.accesses[self.index as usize].write();
        let end = (offset as usize).checked_add(len as usize)?;
        (end <= self.map.slot_len).then(|| self.map.ptr(self.index).wrapping_add(offset as usize))
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}
