//! Anonymous memory mappings and madvise.
//!
//! Pages become resident on first touch. The kernel uses huge pages only inside an advised range.
//! So a range that ends at the last byte allowed to become resident never takes more memory than
//! its length; the pages at its unaligned end stay small.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// Alignment of mappings: the usual size of a huge page (with 4 KiB pages).
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Kernel interface (5.14): make pages resident as if written to.
const MADV_POPULATE_WRITE: libc::c_int = 23;
/// Kernel interface: lock pages when they become resident.
const MLOCK_ONFAULT: libc::c_uint = 1;

/// Page size in bytes.
pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).ok().filter(|&n| n > 0).unwrap_or(4096)
}

/// Returns freed heap pages to the system, such as those needed only to open a model, if the
/// allocator supports it.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim has no preconditions, and touches free memory alone.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Advises huge pages for the huge-page-aligned part of `bytes`. Makes nothing resident. Best
/// effort.
pub fn prefer_huge_pages(bytes: &mut [u8]) {
    let start = bytes.as_ptr().addr();
    let first = start.next_multiple_of(HUGE_PAGE);
    let end = (start + bytes.len()) / HUGE_PAGE * HUGE_PAGE;
    if first < end {
        let at = bytes.as_mut_ptr().wrapping_add(first - start);
        // SAFETY: the range lies inside `bytes`, which is borrowed mutably, and the advice does not
        // change its contents.
        unsafe { libc::madvise(at.cast(), end - first, libc::MADV_HUGEPAGE) };
    }
}

/// An anonymous mapping of whole pages, initially zero.
pub(crate) struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory, bound to no thread. Access goes through the raw pointers of `at`, whose
// users are responsible for it.
unsafe impl Send for Pages {}
// SAFETY: as above; the methods only make system calls, which are safe from any thread.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `len` bytes, a multiple of the page size. Aligns to huge pages if `len` is at least
    /// one.
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
                // A forked process must not share these pages: direct reads in flight at that
                // moment could end up in the child's copy. On a kernel without this advice a fork
                // is only slower.
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

    /// Address and length of a byte range, rounded out to whole pages of this mapping.
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
        // SAFETY: inside our own mapping. No advice given here changes readable contents, except
        // that of `discard`, which is unsafe for that reason.
        match unsafe { libc::madvise(at, len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Advises huge pages for a range. Harmless on a kernel without them.
    pub(crate) fn prefer_huge(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_HUGEPAGE)
    }

    /// Advises small pages only: touching a byte makes one page resident and no more.
    pub(crate) fn prefer_small(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_NOHUGEPAGE)
    }

    /// Makes a range resident now, to avoid page faults later. Keeps its contents.
    pub(crate) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, MADV_POPULATE_WRITE)
    }

    /// Frees the memory of a range, which then reads as zeros. Fails on a locked range.
    ///
    /// # Safety
    /// No reference into the pages of the range may exist.
    pub(crate) unsafe fn discard(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_DONTNEED)
    }

    /// Locks a range in memory, each page as it becomes resident, or all at once on old kernels.
    /// Either way the whole range counts against RLIMIT_MEMLOCK.
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
            // SAFETY: as in `lock`. Failure leaves pages locked, which is harmless.
            unsafe { libc::munlock(at, len) };
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: base and len are what `map` left mapped, and every user of `at` keeps `self`
        // alive.
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
        // SAFETY: inside the mapping, and no one else uses it.
        unsafe { pages.at(offset).write_volatile(1) };
    }

    /// khugepaged collapses sparse ranges into huge pages in the background. MADV_COLLAPSE does it
    /// at once: it must not go beyond the advised range.
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
