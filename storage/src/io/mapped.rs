//! A file mapped into memory: the page cache does the reading. For comparisons; nothing
//! is checked here, and resident memory is whatever the system makes of it.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

use super::sigbus::Watch;

/// A mapped file, from byte `base` on.
///
/// A file that is shortened while it is mapped cannot be read where it ended before. Callers ask
/// [`Mapped::shortened`] before they use bytes, which makes that an error; whoever comes between
/// the answer and the use is told on standard error, and the process ends (`sigbus.rs`).
#[derive(Debug)]
pub struct Mapped {
    map: Mmap,
    base: usize,
    file: File,
    _watch: Watch,
}

impl Mapped {
    /// Maps `file`, whose contents start at `base`; `path` is its name in messages.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new(file: &File, path: &Path, base: u64) -> io::Result<Self> {
        let base = usize::try_from(base).map_err(io::Error::other)?;
        let file = file.try_clone()?;
        // SAFETY: a container is never written to once it has its name, see the crate's
        // documentation. Somebody who shortens it all the same ends this program: see above.
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

    /// Bytes that were mapped, from the file's first one on.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.map.len() as u64
    }

    /// How long the file is now, where it is shorter than what was mapped.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn shortened(&self) -> io::Result<Option<u64>> {
        let now = self.file.metadata()?.len();
        Ok((now < self.file_len()).then_some(now))
    }

    /// `len` bytes from `offset` on; `None` beyond the end.
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
        file.set_len(9).unwrap();
        assert_eq!(
            (mapped.shortened().unwrap(), mapped.file_len()),
            (Some(9), 10)
        );
    }
}
