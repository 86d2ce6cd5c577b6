//! Positioned reads of a container that starts somewhere in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::error::{Error, Result};
use super::layout::Extent;
use super::limits::READ_BUFFER;

/// A file, its label, and where the container starts in it.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub file: &'a File,
    pub path: &'a Path,
    pub base: u64,
}

impl Source<'_> {
    /// Fills `buf` from `offset` of the container.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        // `base + file_len` is known to fit before any other read.
        self.file
            .read_exact_at(buf, self.base.saturating_add(offset))
            .map_err(|source| Error::Read {
                path: self.path.to_path_buf(),
                offset,
                len: buf.len() as u64,
                source,
            })
    }

    /// Streams `extent` in pieces that are multiples of `unit` bytes, except the last one.
    pub fn stream(
        &self,
        extent: Extent,
        unit: u32,
        buf: &mut Vec<u8>,
        mut piece: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let unit = unit.max(1) as usize;
        let most = (READ_BUFFER / unit).max(1) * unit;
        let mut at = extent.offset;
        while at < extent.end() {
            let len = (extent.end() - at).min(most as u64) as usize;
            buf.resize(len, 0);
            self.read(at, buf)?;
            piece(at, buf)?;
            at += len as u64;
        }
        Ok(())
    }
}
