//! Dense tensors read row by row: a token needs one row of the embedding, and a few of a table.
//!
//! ```text
//! matrix    row 0 ‖ row 1 ‖ …
//! table     row 0 ‖ crc32 of row 0, u32 little endian ‖ row 1 ‖ crc32 of row 1 ‖ …
//! ```
//!
//! The length of a tensor determines which of the two it is. A row of a table includes its checksum, so
//! opening a table reads none of it and needs no memory. A matrix, as in older containers, is read once
//! when it is opened, and the checksums of its rows stay in memory.

use xxhash_rust::xxh3::Xxh3;

use super::checksum;
use super::error::{Error, Result};
use super::format::TensorEntry;
use super::layout::Extent;
use super::reader::Container;

/// Bytes of the checksum after a row of a table.
pub const ROW_CHECKSUM: usize = size_of::<u32>();

/// Location of a tensor's rows, and their checksums.
#[derive(Debug, Clone)]
pub struct TensorRows {
    name: String,
    offset: u64,
    count: usize,
    row_len: usize,
    /// Bytes from one row to the next.
    stride: usize,
    /// Checksums of a matrix; empty for a table.
    checksums: Vec<u32>,
}

/// Appends to `table` a row as tables store it: the row and its checksum.
pub fn append_row(table: &mut Vec<u8>, row: &[u8]) {
    table.extend_from_slice(row);
    table.extend_from_slice(&checksum(row).to_le_bytes());
}

/// Splits a stored row of a table into the row and whether its checksum matches. Anything shorter than
/// a checksum is damaged.
#[must_use]
pub fn table_row(stored: &[u8]) -> (&[u8], bool) {
    match stored.split_last_chunk::<ROW_CHECKSUM>() {
        Some((row, sum)) => (row, checksum(row) == u32::from_le_bytes(*sum)),
        None => (stored, false),
    }
}

impl TensorEntry {
    /// Distance between rows in a tensor of `rows` rows of `row_len` bytes: `row_len` in a matrix,
    /// and [`ROW_CHECKSUM`] more in a table. `None` if the tensor has neither length.
    #[must_use]
    pub fn row_stride(&self, rows: u64, row_len: usize) -> Option<usize> {
        let strides = [row_len, row_len.checked_add(ROW_CHECKSUM)?];
        let fits = |&stride: &usize| rows.checked_mul(stride as u64) == Some(self.len);
        strides
            .into_iter()
            .find(|stride| row_len > 0 && fits(stride))
    }
}

impl Container {
    /// The rows of a tensor of `rows` rows of `row_len` bytes. Does not read a table; reads a matrix
    /// once, checks it, and stores a crc32 of each row to check later reads of single rows. A tensor in a file of another
    /// format has no checksums; see [`Container::has_rows`].
    ///
    /// # Errors
    /// If the tensor does not have that many rows of that length, reading fails, or the data are
    /// damaged.
    pub fn rows(&self, entry: &TensorEntry, rows: usize, row_len: usize) -> Result<TensorRows> {
        let Some(stride) = entry.row_stride(rows as u64, row_len) else {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!("tensor {} of {rows} rows", entry.name),
                expected: (rows as u64).saturating_mul(row_len as u64),
                found: entry.len,
            });
        };
        let mut of = TensorRows {
            name: entry.name.clone(),
            offset: entry.offset,
            count: rows,
            row_len,
            stride,
            checksums: Vec::new(),
        };
        if stride == row_len && !self.is_outside() {
            of.checksums = self.checksums_of(entry, &of)?;
        }
        Ok(of)
    }

    /// Reads a matrix, checks it, and returns a checksum for each row.
    fn checksums_of(&self, entry: &TensorEntry, rows: &TensorRows) -> Result<Vec<u32>> {
        let extent = Extent {
            offset: entry.offset,
            len: entry.len,
        };
        let unit = u32::try_from(rows.row_len).unwrap_or(u32::MAX);
        let mut hash = Xxh3::new();
        let mut checksums = Vec::with_capacity(rows.count);
        self.source()
            .stream(extent, unit, &mut Vec::new(), |_, piece| {
                hash.update(piece);
                checksums.extend(piece.chunks_exact(rows.row_len).map(checksum));
                Ok(())
            })?;
        let name = entry.name.clone();
        rows.compare(self, name, entry.offset, entry.xxh3, hash.digest())?;
        Ok(checksums)
    }

    /// Checks the [`TensorRows::stored_len`] bytes of a row that the caller has read, and returns the
    /// row itself.
    ///
    /// # Errors
    /// If there is no such row, or its bytes are not those that were packed.
    pub fn check_row<'b>(
        &self,
        rows: &TensorRows,
        row: usize,
        bytes: &'b [u8],
    ) -> Result<&'b [u8]> {
        if row >= rows.count || bytes.len() != rows.stride {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!("row {row} of {} of tensor {}", rows.count, rows.name),
                expected: rows.stride as u64,
                found: bytes.len() as u64,
            });
        }
        let (of_row, stored) = bytes.split_at(rows.row_len);
        if self.is_outside() {
            return self.check_unchanged(rows.offset).map(|()| of_row);
        }
        let stored = stored.first_chunk().map(|sum| u32::from_le_bytes(*sum));
        let expected = stored.or_else(|| rows.checksums.get(row).copied());
        let expected = expected.map_or(u64::MAX, u64::from);
        let (name, offset) = (format!("{} (row {row})", rows.name), rows.offset_of(row));
        rows.compare(self, name, offset, expected, checksum(of_row).into())?;
        Ok(of_row)
    }
}

impl TensorRows {
    /// Bytes that [`Container::rows`] allocates for the `rows` rows of `row_len` bytes of `entry`.
    #[must_use]
    pub fn bytes_for(entry: &TensorEntry, rows: u64, row_len: usize) -> u64 {
        match entry.row_stride(rows, row_len) {
            Some(stride) if stride == row_len => rows * ROW_CHECKSUM as u64,
            _ => 0,
        }
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Bytes of a stored row, its checksum included: the input of [`Container::check_row`], and the
    /// distance between two rows.
    #[must_use]
    pub fn stored_len(&self) -> usize {
        self.stride
    }

    /// First byte of a row in the container.
    #[must_use]
    pub fn offset_of(&self, row: usize) -> u64 {
        self.offset + row as u64 * self.stride as u64
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
