//! A memory-mapped file, read through the page cache. For comparison only: nothing is checked, and
//! the kernel decides how much is resident.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

use super::sigbus::Watch;

/// The system also maps cached pages around a used one, in windows of this many bytes
/// (`fault_around_bytes`).
const AROUND: usize = 64 << 10;

/// A mapped file, starting at byte `base`.
///
/// If the file shrinks while mapped, the pages beyond its new end cannot be read. Callers check
/// [`Mapped::shortened`] before they use bytes, which turns that into an error. If the file shrinks
/// between the check and the use, the process prints a message and exits (`sigbus.rs`).
#[derive(Debug)]
pub struct Mapped {
    map: Mmap,
    base: usize,
    file: File,
    _watch: Watch,
}

impl Mapped {
    /// Maps `file`, whose content starts at `base`; `path` names it in messages.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(file: &File, path: &Path, base: u64) -> io::Result<Self> {
        let base = usize::try_from(base).map_err(io::Error::other)?;
        let file = file.try_clone()?;
        // SAFETY: a container is never written to once it has its name, see the crate's
        // documentation. Shrinking it anyway ends this program, see above.
        let map = unsafe { Mmap::map(&file)? };
        let text = format!(
            "emberflow: {}: the file was shortened, or its device failed, while it was mapped into \
             memory (--policy mmap); verify it or copy it again, and change no container that is in \
             use\n",
            path.display()
        );
        let watch = Watch::new(map.as_ptr() as usize, map.len(), text)?;
        Ok(Self {
            map,
            base,
            file,
            _watch: watch,
        })
    }

    /// Length of the mapping, from the start of the file.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Current length of the file, if it is shorter than the mapping.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn shortened(&self) -> io::Result<Option<u64>> {
        let now = self.file.metadata()?.len();
        Ok((now < self.file_len()).then_some(now))
    }

    /// Most bytes that become resident when `len` bytes are used.
    #[must_use]
    pub fn resident(len: usize) -> usize {
        len.next_multiple_of(AROUND) + AROUND
    }

    /// Releases the pages of the `len` bytes at `offset`, and those mapped around them, from the
    /// process's memory. They remain in the system's cache until it evicts them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn release(&self, offset: u64, len: usize) -> io::Result<()> {
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let start = self.base.saturating_add(offset);
        let place = self.map.as_ptr() as usize;
        let first = ((place + start.min(self.map.len())) & !(AROUND - 1)).max(place) - place;
        let end = (place.saturating_add(start).saturating_add(len)).next_multiple_of(AROUND);
        let end = (end - place).min(self.map.len());
        if first >= end {
            return Ok(());
        }
        // SAFETY: the range lies in the mapping, which is shared, of a file and never written to: its
        // pages hold the file's bytes again when they are next used.
        unsafe {
            self.map
                .unchecked_advise_range(UncheckedAdvice::DontNeed, first, end - first)
        }
    }

    /// The `len` bytes at `offset`; `None` beyond the end.
    #[inline]
    pub fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = self.base.checked_add(usize::try_from(offset).ok()?)?;
        self.map.get(start..start.checked_add(len)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn bytes_are_those_of_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let mapped = Mapped::new(&file, Path::new("digits"), 4).unwrap();
        assert_eq!(mapped.bytes(1, 3), Some(&b"567"[..]));
        assert_eq!(mapped.bytes(6, 0), Some(&b""[..]));
        assert_eq!(mapped.bytes(4, 3), None);
        assert_eq!(mapped.bytes(u64::MAX, 1), None);
        assert_eq!(mapped.shortened().unwrap(), None);
        mapped.release(1, 3).unwrap();
        mapped.release(3, 300 << 10).unwrap();
        assert_eq!(mapped.bytes(1, 3), Some(&b"567"[..]));
        file.set_len(9).unwrap();
        assert_eq!(
            (mapped.shortened().unwrap(), mapped.file_len()),
            (Some(9), 10)
        );
    }
}
