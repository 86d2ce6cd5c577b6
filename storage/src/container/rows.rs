//! Dense tensors read row by row: a token needs one row of the embedding.

use xxhash_rust::xxh3::Xxh3;

use super::checksum;
use super::error::{Error, Result};
use super::format::TensorEntry;
use super::layout::Extent;
use super::reader::Container;

/// Location of a tensor's rows, and their checksums.
#[derive(Debug, Clone)]
pub struct TensorRows {
    name: String,
    offset: u64,
    row_len: usize,
    checksums: Vec<u32>,
}

impl Container {
    /// Reads a tensor of `rows` rows once, checks it, and keeps a crc32 of each row to check later
    /// reads of single rows.
    ///
    /// # Errors
    /// If the tensor does not divide into that many rows, reading fails, or the data are damaged.
    pub fn rows(&self, entry: &TensorEntry, rows: usize) -> Result<TensorRows> {
        let row_len = entry.len / (rows as u64).max(1);
        let unit = u32::try_from(row_len).unwrap_or(0);
        if unit == 0 || row_len * rows as u64 != entry.len {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!("tensor {} of {rows} rows", entry.name),
                expected: row_len * rows as u64,
                found: entry.len,
            });
        }
        let extent = Extent {
            offset: entry.offset,
            len: entry.len,
        };
        let mut hash = Xxh3::new();
        let mut checksums = Vec::with_capacity(rows);
        self.source()
            .stream(extent, unit, &mut Vec::new(), |_, piece| {
                hash.update(piece);
                checksums.extend(piece.chunks_exact(unit as usize).map(checksum));
                Ok(())
            })?;
        let rows = TensorRows {
            name: entry.name.clone(),
            offset: entry.offset,
            row_len: unit as usize,
            checksums,
        };
        let name = entry.name.clone();
        rows.compare(self, name, entry.offset, entry.xxh3, hash.digest())?;
        Ok(rows)
    }

    /// Checks the bytes of a row that the caller has read.
    ///
    /// # Errors
    /// If there is no such row, or its bytes differ from those checked with the whole tensor.
    pub fn check_row(&self, rows: &TensorRows, row: usize, bytes: &[u8]) -> Result<()> {
        let expected = rows
            .checksums
            .get(row)
            .filter(|_| bytes.len() == rows.row_len);
        let Some(&expected) = expected else {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!(
                    "row {row} of {} of tensor {}",
                    rows.checksums.len(),
                    rows.name
                ),
                expected: rows.row_len as u64,
                found: bytes.len() as u64,
            });
        };
        let (name, offset) = (format!("{} (row {row})", rows.name), rows.offset_of(row));
        rows.compare(self, name, offset, expected.into(), checksum(bytes).into())
    }
}

impl TensorRows {
    /// Bytes that [`Container::rows`] keeps for `rows` rows.
    #[must_use]
    pub fn bytes_for(rows: usize) -> u64 {
        (rows * size_of::<u32>()) as u64
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// First byte of a row in the container.
    #[must_use]
    pub fn offset_of(&self, row: usize) -> u64 {
        self.offset + row as u64 * self.row_len as u64
    }

    fn compare(
        &self,
        container: &Container,
        name: String,
        offset: u64,
        expected: u64,
        found: u64,
    ) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::TensorChecksum {
            path: container.path().to_path_buf(),
            name,
            offset,
            expected,
            found,
        })
    }
}
