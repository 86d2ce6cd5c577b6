//! A file mapped into memory: the page cache does the reading. For comparisons; nothing
//! is checked on the way, and resident memory is whatever the system makes of it.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// A mapped file, from byte `base` on.
#[derive(Debug)]
pub struct Mapped {
    map: Mmap,
    base: usize,
}

impl Mapped {
    /// Maps `file`, whose contents start at `base`.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new(file: &File, base: u64) -> io::Result<Self> {
        let base = usize::try_from(base).map_err(io::Error::other)?;
        // SAFETY: a container is never written to once it has its name, see the crate's
        // documentation. Somebody who truncates it all the same ends this program with
        // SIGBUS, as with every program that maps files.
        let map = unsafe { Mmap::map(file)? };
        Ok(Self { map, base })
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
        let mapped = Mapped::new(&file, 4).unwrap();
        assert_eq!(mapped.bytes(1, 3), Some(&b"567"[..]));
        assert_eq!(mapped.bytes(6, 0), Some(&b""[..]));
        assert_eq!(mapped.bytes(4, 3), None);
        assert_eq!(mapped.bytes(u64::MAX, 1), None);
    }
}
