//! Memory for reads: one aligned anonymous mapping cut into equal slots.
//!
//! A [`Slot`] is the only exclusive way into its bytes. It is moved into a read and comes back in
//! the completion, so the compiler forbids touching bytes the kernel may still write. After a load
//! the slot is turned into a [`SharedSlot`], which can be cloned and read from several threads, and
//! back into a [`Slot`] only when a single handle is left.
//!
//! Every handle keeps the mapping alive, so memory is unmapped only after the last one is gone.
//! Code that must abandon a slot the kernel may still write to (see `io::engine`) forgets the
//! handle: the mapping then stays for the life of the process, on purpose.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::sync::{Accesses, AtomicU32};

/// Large mappings start on this boundary so that the kernel can back them with huge pages.
const HUGE_PAGE: usize = 2 << 20;

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

/// How the memory of an [`Arena`] is treated.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArenaOptions {
    /// Advise huge pages. Pages are still faulted in on first touch, in 2 MiB steps.
    pub huge_pages: bool,
    /// Lock pages in memory as they are touched. Where the limit forbids it the arena is used
    /// unlocked and says so in the log.
    pub lock: bool,
}

struct Mapping {
    base: NonNull<u8>,
    /// Mapped bytes, a multiple of the page size.
    len: usize,
    slot_len: usize,
    users: Box<[Users]>,
}

/// Who uses a slot.
#[derive(Default)]
struct Users {
    /// Live [`SharedSlot`] handles; 0 while the slot is exclusive or at home.
    shares: AtomicU32,
    accesses: Accesses,
}

// SAFETY: the mapping is plain memory. Access to it goes through `Slot` (exclusive, one per index)
// and `SharedSlot` (read only, counted), which uphold the aliasing rules across threads.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself offers no way to reach the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn users(&self, index: u32) -> &Users {
        &self.users[index as usize]
    }

    fn ptr(&self, index: u32) -> *mut u8 {
        self.base
            .as_ptr()
            .wrapping_add(index as usize * self.slot_len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base/len are exactly what `map_aligned` left mapped, and no handle is left that
        // could reach the memory, as every handle holds this mapping alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).ok().filter(|&n| n > 0).unwrap_or(4096)
}

/// Maps `len` bytes (a page multiple) of zeroed memory that is not yet resident, on a huge-page
/// boundary when it is long enough to profit.
fn map_aligned(len: usize) -> std::io::Result<NonNull<u8>> {
    let extra = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
    let total = len
        .checked_add(extra)
        .ok_or_else(|| std::io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            total,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    let start = raw as usize;
    let head = if extra == 0 {
        0
    } else {
        start.next_multiple_of(HUGE_PAGE) - start
    };
    let base = raw.cast::<u8>().wrapping_add(head);
    // SAFETY: both ranges are inside the mapping just made and outside `base..base + len`.
    unsafe {
        if head > 0 {
            libc::munmap(raw, head);
        }
        if extra > head {
            libc::munmap(base.wrapping_add(len).cast(), extra - head);
        }
    }
    NonNull::new(base).ok_or_else(|| std::io::Error::from_raw_os_error(libc::ENOMEM))
}

/// A mapping cut into equal slots, with a free list.
///
/// Slots `limit..capacity` are retired: never handed out, and their memory is given back to the
/// operating system as they come home.
pub struct Arena {
    map: Arc<Mapping>,
    capacity: u32,
    limit: u32,
    free: Vec<u32>,
    home: Box<[bool]>,
    page: usize,
    locked: bool,
}

impl Arena {
    /// Maps `slots` slots of `slot_len` bytes. `slot_len` must be a multiple of `align`, the
    /// memory alignment that direct I/O asks for; every slot starts on that alignment.
    ///
    /// Nothing is resident before it is touched, yet the whole arena belongs to the budget.
    ///
    /// # Errors
    /// [`ArenaError::Geometry`] for impossible sizes, [`ArenaError::Map`] when the kernel refuses.
    pub fn new(
        slots: u32,
        slot_len: usize,
        align: usize,
        options: ArenaOptions,
    ) -> Result<Self, ArenaError> {
        let bad = ArenaError::Geometry {
            slots,
            slot_len,
            align,
        };
        let page = page_size();
        if slots == 0
            || slots == u32::MAX
            || slot_len == 0
            || align == 0
            || align > page
            || !page.is_multiple_of(align)
            || !slot_len.is_multiple_of(align)
        {
            return Err(bad);
        }
        let Some(len) = (slots as usize)
            .checked_mul(slot_len)
            .and_then(|n| n.checked_next_multiple_of(page))
            .filter(|&n| isize::try_from(n).is_ok())
        else {
            return Err(bad);
        };
        let base = map_aligned(len).map_err(|source| ArenaError::Map { bytes: len, source })?;
        if options.huge_pages && len >= HUGE_PAGE {
            // SAFETY: the range is the mapping just made. Advice may be refused without harm.
            unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
        let locked = options.lock && lock_on_fault(base, len);
        let users = (0..slots).map(|_| Users::default()).collect();
        Ok(Self {
            map: Arc::new(Mapping {
                base,
                len,
                slot_len,
                users,
            }),
            capacity: slots,
            limit: slots,
            free: (0..slots).rev().collect(),
            home: vec![true; slots as usize].into_boxed_slice(),
            page,
            locked,
        })
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
        u64::from(self.limit) * self.map.slot_len as u64
    }

    /// Whether pages are locked in memory as they are touched.
    #[must_use]
    pub fn locked(&self) -> bool {
        self.locked
    }

    /// Takes a free slot. Its content is whatever the last user left, at first zeros.
    pub fn take(&mut self) -> Option<Slot> {
        let index = self.free.pop()?;
        self.home[index as usize] = false;
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
        assert!(
            Arc::ptr_eq(&slot.map, &self.map),
            "a slot must go home to its own arena"
        );
        let index = slot.index;
        self.home[index as usize] = true;
        if index < self.limit {
            self.free.push(index);
        } else {
            self.discard(index, index + 1);
        }
    }

    /// Sets how many slots may be handed out, at most the capacity; the lowest indices stay.
    /// Memory of retired slots that are home is given back now, of others as they come home.
    pub fn set_limit(&mut self, slots: u32) {
        let new = slots.min(self.capacity);
        let old = std::mem::replace(&mut self.limit, new);
        if new < old {
            self.free.retain(|&index| index < new);
            let mut at = new;
            while at < old {
                let mut end = at;
                while end < old && self.home[end as usize] {
                    end += 1;
                }
                if end > at {
                    self.discard(at, end);
                }
                at = end + 1;
            }
        } else {
            let home = &self.home;
            let back = (old..new).rev().filter(|&index| home[index as usize]);
            self.free.extend(back);
        }
    }

    /// Gives back the pages that lie wholly inside retired home slots around `first..end`.
    fn discard(&mut self, first: u32, end: u32) {
        let (len, page) = (self.map.slot_len, self.page);
        let idle = |i: u32| i >= self.limit && self.home[i as usize];
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
            self.map.len
        } else {
            end as usize * len / page * page
        };
        if from >= to {
            return;
        }
        let at = self.map.base.as_ptr().wrapping_add(from).cast();
        // SAFETY: the range is inside the mapping, page aligned, and covers only slots that are
        // home, so no handle can reach it. Locked pages must be unlocked first, or DONTNEED fails.
        unsafe {
            if self.locked {
                libc::munlock(at, to - from);
            }
            libc::madvise(at, to - from, libc::MADV_DONTNEED);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let out = self.home.iter().filter(|&&home| !home).count();
        if out > 0 {
            tracing::debug!(
                out,
                bytes = self.map.len,
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

/// Locks pages as they are faulted in, so that locking does not make the whole arena resident.
fn lock_on_fault(base: NonNull<u8>, len: usize) -> bool {
    const MLOCK_ONFAULT: libc::c_uint = 1;
    // SAFETY: mlock2 on a range of our own mapping; it changes no content.
    let rc = unsafe { libc::syscall(libc::SYS_mlock2, base.as_ptr(), len, MLOCK_ONFAULT) };
    if rc != 0 {
        let reason = std::io::Error::last_os_error();
        tracing::warn!(bytes = len, %reason, "arena is not locked in memory; raise `ulimit -l`");
    }
    rc == 0
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
        self.map.users(self.index).accesses.read();
        // SAFETY: the range is mapped and initialised (anonymous memory), and this is the only
        // handle to it, so nobody writes while the borrow lives.
        unsafe { std::slice::from_raw_parts(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// The bytes, writable.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.map.users(self.index).accesses.write();
        // SAFETY: as in `as_slice`; the unique borrow of the only handle makes access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// Address of `offset..offset + len` inside the slot, or `None` when that leaves the slot.
    pub(crate) fn range(&mut self, offset: u32, len: u32) -> Option<*mut u8> {
        self.map.users(self.index).accesses.write();
        let end = (offset as usize).checked_add(len as usize)?;
        (end <= self.map.slot_len).then(|| self.map.ptr(self.index).wrapping_add(offset as usize))
    }

    /// Gives up exclusive access for a handle that can be cloned and read from many threads.
    #[must_use]
    pub fn share(self) -> SharedSlot {
        let shares = &self.map.users(self.index).shares;
        shares.store(1, Ordering::Relaxed);
        SharedSlot {
            map: self.map,
            index: self.index,
        }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}

/// Shared read access to one slot. Cloning and dropping are atomic counter steps, no allocation.
pub struct SharedSlot {
    map: Arc<Mapping>,
    index: u32,
}

impl SharedSlot {
    /// Number of the slot in its arena.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.map.users(self.index).accesses.read();
        // SAFETY: mapped and initialised; while a shared handle lives no exclusive one exists, so
        // nobody writes.
        unsafe { std::slice::from_raw_parts(self.map.ptr(self.index), self.map.slot_len) }
    }

    /// Whether other handles to this slot are alive.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.count().load(Ordering::Relaxed) > 1
    }

    /// Back to exclusive access, if this is the only handle.
    ///
    /// # Errors
    /// The handle itself while other handles are alive.
    pub fn try_unshare(self) -> Result<Slot, Self> {
        // Acquire pairs with the release in `drop`: all reads through other handles are over.
        let last = self
            .count()
            .compare_exchange(1, 0, Ordering::Acquire, Ordering::Relaxed);
        if last.is_err() {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so its mapping handle is moved out exactly once.
        let map = unsafe { std::ptr::read(&raw const this.map) };
        Ok(Slot {
            map,
            index: this.index,
        })
    }

    fn count(&self) -> &AtomicU32 {
        &self.map.users(self.index).shares
    }
}

impl Clone for SharedSlot {
    fn clone(&self) -> Self {
        self.count().fetch_add(1, Ordering::Relaxed);
        Self {
            map: Arc::clone(&self.map),
            index: self.index,
        }
    }
}

impl Drop for SharedSlot {
    fn drop(&mut self) {
        self.count().fetch_sub(1, Ordering::Release);
    }
}

impl fmt::Debug for SharedSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedSlot({})", self.index)
    }
}
