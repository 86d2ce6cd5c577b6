//! Bundles in a mapped file, each checked when it is first used.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::reader::Container;
use super::rows::TensorRows;
use crate::error::{Error, Result};
use crate::io::Mapped;

/// A container's file, mapped into memory, and which of its bundles were checked.
///
/// What is promised: no bundle is handed out whose bytes were not right once in this process. What is
/// not: the system may drop a page and read it again, and what comes the second time is not checked.
/// Reads through the cache (every other policy) are checked every time.
#[derive(Debug)]
pub struct MappedBundles {
    map: Mapped,
    path: PathBuf,
    /// A bit for each row of the checksums.
    checked: Vec<AtomicU64>,
}

impl MappedBundles {
    /// Maps the container's file.
    ///
    /// # Errors
    /// When the system refuses.
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

    /// Whether the file still has every byte that was mapped; to be asked before a layer's bundles,
    /// or rows, are used.
    ///
    /// # Errors
    /// When it has not, or the system does not say.
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

    /// The bytes of a bundle of `container`, which is the mapped one.
    ///
    /// # Errors
    /// When there is no such neuron, or its bytes are damaged.
    pub fn bundle(&self, container: &Container, bank: usize, neuron: u32) -> Result<&[u8]> {
        let offset = container.neuron_offset(bank, neuron);
        let stride = container.geometry().stride as usize;
        let bytes = self.map.bytes(offset, stride).unwrap_or_default();
        let row = container.checksum_row(bank, neuron);
        let place = row.and_then(|row| Some((self.checked.get(row / 64)?, 1 << (row % 64))));
        // The bits say nothing about other memory, so they need no order.
        if place.is_none_or(|(word, bit)| word.load(Ordering::Relaxed) & bit == 0) {
            container.check_bundle(bank, neuron, bytes)?;
            if let Some((word, bit)) = place {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        Ok(bytes)
    }

    /// The bytes of a row of a tensor, checked each time.
    ///
    /// # Errors
    /// When there is no such row, or its bytes are damaged.
    pub fn row(&self, container: &Container, rows: &TensorRows, row: usize) -> Result<&[u8]> {
        let bytes = self.map.bytes(rows.offset_of(row), rows.row_len());
        let bytes = bytes.unwrap_or_default();
        container.check_row(rows, row, bytes)?;
        Ok(bytes)
    }
}

fn failed(path: &Path, what: &'static str, source: io::Error) -> Error {
    Error::File {
        path: path.to_path_buf(),
        what,
        source,
    }
}
