//! Memory as the kernel gives it: mapped pages that become resident when they are touched, and what
//! can be asked for them.
//!
//! The kernel backs a range with huge pages only inside one advised mapping. A range that ends at
//! the last byte that may become resident therefore never takes more than its length, whatever the
//! size of a huge page is; the pages at its ragged end stay small.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// Mappings start on this boundary, the usual size of a huge page (with pages of 4 KiB).
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// From the kernel's interface (5.14): make pages resident as if they were written to.
const MADV_POPULATE_WRITE: libc::c_int = 23;
/// From the kernel's interface: lock pages when they become resident, not before.
const MLOCK_ONFAULT: libc::c_uint = 1;

/// Bytes of a page.
pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).ok().filter(|&n| n > 0).unwrap_or(4096)
}

/// Gives the pages of freed allocations back to the system, as far as the allocator can: what was
/// only needed to open a model would be held for ever.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim has no preconditions, and touches free memory alone.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Asks for huge pages under the part of `bytes` that fills whole ones. Nothing else
/// changes, and no byte outside of it becomes resident. Best effort.
pub fn prefer_huge_pages(bytes: &mut [u8]) {
    let start = bytes.as_ptr().addr();
    let first = start.next_multiple_of(HUGE_PAGE);
    let end = (start + bytes.len()) / HUGE_PAGE * HUGE_PAGE;
    if first < end {
        let at = bytes.as_mut_ptr().wrapping_add(first - start);
        // SAFETY: the range lies inside of `bytes`, which is borrowed mutably, and the advice
        // does not change its contents.
        unsafe { libc::madvise(at.cast(), end - first, libc::MADV_HUGEPAGE) };
    }
}

/// An anonymous mapping of whole pages, zero at first.
pub(crate) struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory without a thread of its own. Access goes through the raw pointers of `at`,
// whose users answer for it.
unsafe impl Send for Pages {}
// SAFETY: as above; the methods only talk to the kernel, which is safe from any thread.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `len` bytes, a multiple of the page size, on a huge-page boundary when they are enough
    /// for one.
    pub(crate) fn map(len: usize) -> io::Result<Self> {
        let extra = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let total = len
            .checked_add(extra)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
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
            return Err(io::Error::last_os_error());
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
        match NonNull::new(base) {
            Some(base) => {
                let pages = Self { base, len };
                // A copy of the process must not share these pages: direct reads that are under
                // way at that moment could end in the copy's. A kernel without the advice makes
                // copies slower, no more.
                let _ = pages.advise(0..len, libc::MADV_DONTFORK);
                Ok(pages)
            }
            None => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        }
    }

    /// Mapped bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of the byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Start and length of a range of bytes in whole pages of this mapping, for the kernel.
    fn part(&self, range: Range<usize>) -> (*mut libc::c_void, usize) {
        let end = range.end.next_multiple_of(page_size()).min(self.len);
        let start = (range.start / page_size() * page_size()).min(end);
        (self.at(start).cast(), end - start)
    }

    fn advise(&self, range: Range<usize>, advice: libc::c_int) -> io::Result<()> {
        let (at, len) = self.part(range);
        if len == 0 {
            return Ok(());
        }
        // SAFETY: inside our own mapping. None of the advice that is given here changes what can
        // be read there, with the exception of `discard`, which is unsafe for that reason.
        match unsafe { libc::madvise(at, len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Huge pages for a range, as it is touched. A kernel without them refuses without harm.
    pub(crate) fn prefer_huge(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_HUGEPAGE)
    }

    /// Small pages only: touching one byte makes one page resident, and no more ever follow.
    pub(crate) fn prefer_small(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_NOHUGEPAGE)
    }

    /// Makes a range resident now, so that nobody waits for it later. Contents stay.
    pub(crate) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, MADV_POPULATE_WRITE)
    }

    /// Gives the memory of a range back; it reads as zeros afterwards. Fails where it is locked.
    ///
    /// # Safety
    /// Nobody holds a reference into the pages of the range.
    pub(crate) unsafe fn discard(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_DONTNEED)
    }

    /// Locks a range in memory: each page as it becomes resident, or at once on old kernels. The
    /// whole range counts against the limit either way.
    pub(crate) fn lock(&self, range: Range<usize>) -> io::Result<()> {
        let (at, len) = self.part(range);
        if len == 0 {
            return Ok(());
        }
        // SAFETY: a range of our own mapping; locking changes no content.
        if unsafe { libc::syscall(libc::SYS_mlock2, at, len, MLOCK_ONFAULT) } == 0 {
            return Ok(());
        }
        let reason = io::Error::last_os_error();
        if !matches!(reason.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) {
            return Err(reason);
        }
        // SAFETY: as above.
        match unsafe { libc::mlock(at, len) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Undoes [`Pages::lock`].
    pub(crate) fn unlock(&self, range: Range<usize>) {
        let (at, len) = self.part(range);
        if len > 0 {
            // SAFETY: as in `lock`. Failure leaves pages locked, which is no danger.
            unsafe { libc::munlock(at, len) };
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: base and len are what `map` left mapped, and whoever reaches the memory through
        // `at` keeps `self` alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Resident bytes of a range.
    fn resident(pages: &Pages, range: Range<usize>) -> usize {
        let (at, len) = pages.part(range);
        let mut map = vec![0u8; len / page_size()];
        // SAFETY: `map` has a byte for each page of the range, which is mapped.
        let rc = unsafe { libc::mincore(at, len, map.as_mut_ptr()) };
        assert_eq!(rc, 0);
        map.iter().filter(|&&m| m & 1 == 1).count() * page_size()
    }

    fn touch(pages: &Pages, offset: usize) {
        // SAFETY: inside the mapping, and nobody else knows it.
        unsafe { pages.at(offset).write_volatile(1) };
    }

    /// The kernel's background thread fills sparse ranges to huge pages. The same is asked for here
    /// at once: it must not go beyond what was advised.
    #[test]
    fn memory_beyond_the_advised_end_stays_as_it_is() {
        const MADV_COLLAPSE: libc::c_int = 25;
        let pages = Pages::map(8 * MIB).unwrap();
        pages.prefer_small(0..8 * MIB).ok();
        pages.prefer_huge(0..5 * MIB).ok();
        for offset in [MIB, 5 * MIB, 7 * MIB] {
            touch(&pages, offset);
        }
        for start in [0, 2, 4, 6] {
            let range = start * MIB..(start + 2) * MIB;
            pages.advise(range, MADV_COLLAPSE).ok();
        }
        assert!(resident(&pages, 0..2 * MIB) >= page_size());
        assert_eq!(resident(&pages, 4 * MIB..8 * MIB), 2 * page_size());
    }

    #[test]
    fn parts_are_whole_pages_of_the_mapping() {
        let page = page_size();
        let pages = Pages::map(4 * page).unwrap();
        let part = |range| {
            let (at, len) = pages.part(range);
            (at as usize - pages.at(0) as usize, len)
        };
        assert_eq!(part(0..0), (0, 0));
        assert_eq!(part(page..page + 1), (page, page));
        assert_eq!(part(page + 1..2 * page), (page, page));
        assert_eq!(part(0..9 * page), (0, 4 * page));
        assert_eq!(part(8 * page..9 * page), (4 * page, 0));
    }

    #[test]
    fn discarded_memory_is_zero_and_locked_memory_is_kept() {
        let pages = Pages::map(page_size()).unwrap();
        touch(&pages, 5);
        // SAFETY: no references into the mapping exist.
        let discard = || unsafe { pages.discard(0..page_size()) };
        if pages.lock(0..page_size()).is_ok() {
            assert!(discard().is_err());
            pages.unlock(0..page_size());
        }
        discard().unwrap();
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { pages.at(5).read_volatile() }, 0);
    }
}
