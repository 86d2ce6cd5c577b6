//! Bundles in a mapped file, each checked on first use.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::{Error, Result};
use super::layout::Extent;
use super::reader::Container;
use super::rows::TensorRows;
use crate::io::Mapped;

/// A memory-mapped container, and its bundles checked so far.
///
/// Each bundle is checked against its checksum once per process. The kernel may drop a page and
/// read it again; the second read is not checked. Reads through the cache (every other policy) are
/// checked every time.
#[derive(Debug)]
pub struct MappedBundles {
    map: Mapped,
    path: PathBuf,
    /// A bit per row of the checksum table.
    checked: Vec<AtomicU64>,
}

impl MappedBundles {
    /// Maps the container's file.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new(container: &Container) -> Result<Self> {
        let path = container.path().to_path_buf();
        let map = Mapped::new(container.file(), &path, container.base())
            .map_err(|e| failed(&path, "map it into memory", e))?;
        let rows = container.checksum_rows();
        Ok(Self {
            map,
            path,
            checked: (0..rows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Checks that the file is still as long as its mapping. Call it before using a layer's bundles
    /// or rows.
    ///
    /// # Errors
    /// If the file has shrunk, or the system does not report its length.
    pub fn still_whole(&self) -> Result<()> {
        let now = self.map.shortened();
        match now.map_err(|e| failed(&self.path, "inspect it", e))? {
            None => Ok(()),
            Some(found) => Err(Error::Truncated {
                path: self.path.clone(),
                expected: self.map.file_len(),
                found,
            }),
        }
    }

    /// The bytes of a bundle of `container`, which must be the mapped one.
    ///
    /// # Errors
    /// If there is no such neuron, or its bytes are damaged.
    pub fn bundle(&self, container: &Container, bank: usize, neuron: u32) -> Result<&[u8]> {
        let offset = container.neuron_offset(bank, neuron);
        let stride = container.geometry().stride as usize;
        let bytes = self.map.bytes(offset, stride).unwrap_or_default();
        let row = container.checksum_row(bank, neuron);
        let place = row.and_then(|row| Some((self.checked.get(row / 64)?, 1 << (row % 64))));
        // The bits guard no other memory, so relaxed ordering suffices.
        if place.is_none_or(|(word, bit)| word.load(Ordering::Relaxed) & bit == 0) {
            container.check_bundle(bank, neuron, bytes)?;
            if let Some((word, bit)) = place {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        Ok(bytes)
    }

    /// Most bytes that become resident when a bank of `neurons` neurons of `container` is used.
    #[must_use]
    pub fn resident(container: &Container, neurons: u32) -> u64 {
        let len = neurons as usize * container.geometry().stride as usize;
        Mapped::resident(len) as u64
    }

    /// Releases a bank of `neurons` neurons from the process's memory; it is mapped again at its
    /// next use.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn release(&self, container: &Container, bank: usize, neurons: u32) -> Result<()> {
        let len = neurons as usize * container.geometry().stride as usize;
        self.release_bytes(container.neuron_offset(bank, 0), len)
    }

    /// The same for a tensor row.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn release_row(&self, rows: &TensorRows, row: usize) -> Result<()> {
        let Extent { offset, len } = rows.read_of(row);
        self.release_bytes(offset, len as usize)
    }

    fn release_bytes(&self, offset: u64, len: usize) -> Result<()> {
        let released = self.map.release(offset, len);
        released.map_err(|e| failed(&self.path, "release its memory", e))
    }

    /// The bytes of a tensor row, checked every time.
    ///
    /// # Errors
    /// If there is no such row, or its bytes are damaged.
    pub fn row(&self, container: &Container, rows: &TensorRows, row: usize) -> Result<&[u8]> {
        let Extent { offset, len } = rows.read_of(row);
        let bytes = self.map.bytes(offset, len as usize);
        container.check_row(rows, row, bytes.unwrap_or_default())
    }
}

fn failed(path: &Path, what: &'static str, source: io::Error) -> Error {
    Error::File {
        path: path.to_path_buf(),
        what,
        source,
    }
}
