//! Memory for reads: one aligned anonymous mapping cut into equal slots.
//!
//! A [`Slot`] is the only exclusive way into its bytes. It is moved into a read and comes back in
//! the completion, so the compiler forbids touching bytes the kernel may still write. After a load
//! the slot is put on the arena's *shelf*: whoever can look at the arena can read it, from several
//! threads at once, and only who may change the arena gets the [`Slot`] back.
//!
//! Every slot keeps the mapping alive, so memory is unmapped only after the last one is gone.
//! Code that must abandon a slot the kernel may still write to (see `io::engine`) forgets the
//! handle: the mapping then stays for the life of the process, on purpose.
//!
//! Memory below the limit is all that can be resident, whatever size the kernel's pages are:
//!
//! ```text
//! slot     0        1        2    ...      limit          capacity
//!          +--------+--------+--------+------+ - - - - - - - - +
//! pages    |  huge page 0    |  huge page 1  |ss|  addresses   |   s small, where no huge page fits
//!          +-----------------+---------------+--+ - - - - - - -+
//! resident at most up to here: Arena::charge ---^
//! ```
//!
//! The mapping starts on a huge page. Slots need not divide one: a slot of 24 KiB may lie on two.
#![allow(unsafe_code)]

use std::cmp::Ordering as CmpOrdering;
use std::fmt;
use std::sync::Arc;

use crate::io::pages::{Pages, page_size};
use crate::sync::Accesses;

/// Why an arena could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// Zero slots, zero length, a length that breaks the alignment, or a size beyond the address
    /// space.
    #[error(
        "arena of {slots} slots of {slot_len} bytes is not possible: both must be non-zero, the \
         slot length a multiple of {align} and the total below the address space"
    )]
    Geometry {
        /// Slots asked for.
        slots: u32,
        /// Bytes per slot asked for.
        slot_len: usize,
        /// Alignment the slot length must respect, in bytes.
        align: usize,
    },
    /// The kernel refused the mapping.
    #[error("mapping {bytes} bytes for the arena failed: {source}; lower the memory budget")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// How the memory of an [`Arena`] is treated. Nothing of it changes what [`Arena::charge`] says.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArenaOptions {
    /// Ask for huge pages: fewer address translations for random reads of weights, and fewer
    /// segments for the disk. Becoming resident in their size, not in that of a slot, they pay
    /// where slots are going to be filled anyway. A kernel that has none gives small ones.
    pub huge_pages: bool,
    /// Lock what is below the limit in memory. Where the system does not allow it the arena is
    /// used unlocked and says so in the log; see [`Arena::locked`].
    pub lock: bool,
    /// Make everything below the limit resident at once instead of at the first touch, which costs
    /// seconds for each GiB at a time that may matter more. Kernels before 5.14 do not.
    pub populate: bool,
}

struct Mapping {
    pages: Pages,
    slot_len: usize,
    /// By slot, for the model checker; else nothing.
    accesses: Box<[Accesses]>,
}

/// Where a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Home,
    /// Somebody has the [`Slot`].
    Out,
    Shelf,
}

impl Mapping {
    fn ptr(&self, index: u32) -> *mut u8 {
        self.pages.at(index as usize * self.slot_len)
    }
}

/// A mapping cut into equal slots, with a free list.
///
/// Slots `limit..capacity` are retired: never handed out, and their memory is given back to the
/// operating system as they come home. They cost addresses and nothing else.
pub struct Arena {
    map: Arc<Mapping>,
    options: ArenaOptions,
    capacity: u32,
    limit: u32,
    /// Room for the limit, so that slots come home without an allocation.
    free: Vec<u32>,
    /// Of the slots below the limit or not home; the others are home.
    places: Vec<Place>,
    page: usize,
    /// Bytes from the start that are locked.
    locked: usize,
}

impl Arena {
    /// Maps `slots` slots of `slot_len` bytes. `slot_len` must be a multiple of `align`, the
    /// memory alignment that direct I/O asks for; every slot starts on that alignment.
    ///
    /// Without [`ArenaOptions::populate`] nothing is resident before it is touched, yet the whole
    /// arena belongs to the budget.
    ///
    /// # Errors
    /// [`ArenaError::Geometry`] for impossible sizes, [`ArenaError::Map`] when the kernel refuses.
    pub fn new(
        slots: u32,
        slot_len: usize,
        align: usize,
        options: ArenaOptions,
    ) -> Result<Self, ArenaError> {
        Self::with_limit(slots, slots, slot_len, align, options)
    }

    /// An arena of `limit` slots that can grow to `capacity` in place, see [`Arena::set_limit`].
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
        // Refused only by kernels that have no huge pages at all.
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

    /// Bytes of memory that the first `slots` slots of `slot_len` bytes take at most, with the
    /// rounding to pages: what a budget must allow for an arena of that limit. Huge pages do not
    /// raise it.
    #[must_use]
    pub fn charge(slots: u32, slot_len: usize) -> u64 {
        let page = page_size() as u64;
        let bytes = u64::from(slots).saturating_mul(slot_len as u64);
        bytes.checked_next_multiple_of(page).unwrap_or(u64::MAX)
    }

    /// Bytes of bookkeeping for each slot below the limit, beside [`Arena::charge`].
    #[must_use]
    pub const fn overhead_per_slot() -> u64 {
        // Free list, place.
        (size_of::<u32>() + size_of::<Place>()) as u64
    }

    /// Slots mapped, retired ones included.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Slots that may be handed out.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Bytes per slot.
    #[must_use]
    pub fn slot_len(&self) -> usize {
        self.map.slot_len
    }

    /// Slots that can be taken now.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Bytes to charge to the budget for the slots below the limit.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        Self::charge(self.limit, self.map.slot_len)
    }

    /// Whether everything below the limit is locked in memory, as far as it is resident.
    #[must_use]
    pub fn locked(&self) -> bool {
        self.options.lock && self.locked >= self.end_of(self.limit)
    }

    /// Takes a free slot. Its content is whatever the last user left, at first zeros.
    pub fn take(&mut self) -> Option<Slot> {
        let index = self.free.pop()?;
        self.places[index as usize] = Place::Out;
        Some(Slot {
            map: Arc::clone(&self.map),
            index,
        })
    }

    /// Brings a slot home. A retired slot gives its memory back to the operating system.
    ///
    /// # Panics
    /// When the slot belongs to another arena.
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
            "a slot must go home to its own arena"
        );
        self.places[slot.index as usize] = place;
        slot.index
    }

    /// Puts a filled slot on the shelf, where many may read it by its index.
    ///
    /// # Panics
    /// When the slot belongs to another arena.
    pub fn shelve(&mut self, slot: Slot) {
        self.place(&slot, Place::Shelf);
    }

    /// The bytes of a slot on the shelf; `None` when it is not there.
    #[inline]
    #[must_use]
    pub fn shelved(&self, index: u32) -> Option<&[u8]> {
        if !self.is_shelved(index) {
            return None;
        }
        self.map.accesses[index as usize].read();
        // SAFETY: mapped and initialised. No `Slot` of this index exists while it is on the shelf, and
        // one is made only by a call that borrows the arena uniquely, so nobody writes while this
        // borrow lives.
        Some(unsafe { std::slice::from_raw_parts(self.map.ptr(index), self.map.slot_len) })
    }

    /// Whether a slot is on the shelf.
    #[inline]
    #[must_use]
    pub fn is_shelved(&self, index: u32) -> bool {
        self.places.get(index as usize) == Some(&Place::Shelf)
    }

    /// Takes a slot from the shelf; `None` when it is not there.
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

    /// Sets how many slots may be handed out, at most the capacity; the lowest indices stay.
    /// Memory of retired slots that are home is given back now, of others as they come home.
    /// May allocate when the limit rises.
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
                    "weights are not locked in memory; `emberflow doctor` tells the limit"
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
            // Locked pages cannot be given back.
            self.map.pages.unlock(end..self.locked);
            self.locked = end;
        }
        // Else the kernel may fill the page in which the limit lies to a huge one again.
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

    /// Gives back the bookkeeping of retired slots that are home.
    pub(crate) fn trim(&mut self) {
        let limit = self.limit as usize;
        let out = self.places.iter().rposition(|&p| p != Place::Home);
        self.places.truncate(out.map_or(0, |i| i + 1).max(limit));
        self.places.shrink_to_fit();
        self.free.shrink_to(limit);
    }

    /// Bytes up to the end of the last page of the slots below `limit`.
    fn end_of(&self, limit: u32) -> usize {
        // No overflow: at most the length of the mapping.
        (limit as usize * self.map.slot_len).next_multiple_of(self.page)
    }

    pub(crate) fn is_home(&self, index: u32) -> bool {
        (self.places.get(index as usize)).is_none_or(|&p| p == Place::Home)
    }

    /// Gives back the pages that lie wholly inside retired home slots around `first..end`.
    fn discard(&mut self, first: u32, end: u32) {
        let (len, page) = (self.map.slot_len, self.page);
        let idle = |i: u32| i >= self.limit && self.is_home(i);
        let (mut first, mut end) = (first, end);
        // A page shared with a neighbour can go only together with that neighbour.
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
            // SAFETY: the pages hold only slots that are home, so no handle reaches them.
            let given = unsafe { self.map.pages.discard(from..to) };
            if let Err(reason) = given {
                tracing::warn!(bytes = to - from, %reason, "memory could not be given back");
            }
        }
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

/// Exclusive access to one slot of an arena. Move-only; dropping it without [`Arena::put`] loses
/// the slot for that arena but is otherwise harmless.
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
        // handle to it, so nobody writes while the borrow lives.
        unsafe { std::slice::from_raw_parts(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// The bytes, writable.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.map.accesses[self.index as usize].write();
        // SAFETY: as in `as_slice`; the unique borrow of the only handle makes access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// Address of `offset..offset + len` inside the slot, or `None` when that leaves the slot.
    pub(crate) fn range(&mut self, offset: u32, len: u32) -> Option<*mut u8> {
        self.map.accesses[self.index as usize].write();
        let end = (offset as usize).checked_add(len as usize)?;
        (end <= self.map.slot_len).then(|| self.map.ptr(self.index).wrapping_add(offset as usize))
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}
