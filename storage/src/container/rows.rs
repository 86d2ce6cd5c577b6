//! Dense tensors read row by row: a token needs one row of the embedding, and a few of a table.
//!
//! ```text
//! matrix    row 0 ‖ row 1 ‖ …
//! table     row 0 ‖ crc32 of row 0, u32 little endian ‖ row 1 ‖ crc32 of row 1 ‖ …
//! ```
//!
//! The length of a tensor determines which of the two it is. A row of a table includes its checksum. A row of a
//! matrix is read with the stripe that it is in, whose checksum the container has.

use super::checksum;
use super::error::{Error, Result};
use super::format::TensorEntry;
use super::layout::Extent;
use super::reader::Container;
use super::stripes::Stripes;

/// Bytes of the checksum after a row of a table.
pub const ROW_CHECKSUM: usize = size_of::<u32>();

/// Location of a tensor's rows.
#[derive(Debug, Clone)]
pub struct TensorRows {
    name: String,
    offset: u64,
    count: usize,
    row_len: usize,
    /// Bytes from one row to the next.
    stride: usize,
    /// Of a matrix in a container.
    stripes: Option<Stripes>,
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
    /// The rows of a tensor of `rows` rows of `row_len` bytes. Reads nothing. A tensor in a file of another format has no
    /// checksums; see [`Container::has_rows`].
    ///
    /// # Errors
    /// If the tensor does not have that many rows of that length.
    pub fn rows(&self, entry: &TensorEntry, rows: usize, row_len: usize) -> Result<TensorRows> {
        let Some(stride) = entry.row_stride(rows as u64, row_len) else {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!("tensor {} of {rows} rows", entry.name),
                expected: (rows as u64).saturating_mul(row_len as u64),
                found: entry.len,
            });
        };
        let stripes = self.stripes(entry).filter(|of| {
            // Of whole rows, as the entry's shape says.
            stride == row_len && of.len == of.rows() as u64 * row_len as u64
        });
        if stride == row_len && stripes.is_none() && !self.is_outside() {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!("rows of tensor {}", entry.name),
                expected: self
                    .stripes(entry)
                    .map_or(0, |of| of.len / of.rows() as u64),
                found: row_len as u64,
            });
        }
        Ok(TensorRows {
            name: entry.name.clone(),
            offset: entry.offset,
            count: rows,
            row_len,
            stride,
            stripes,
        })
    }

    /// Checks the bytes of [`TensorRows::read_of`] a row, which the caller has read, and returns the row itself.
    ///
    /// # Errors
    /// If there is no such row, or its bytes are not those that were packed.
    pub fn check_row<'b>(
        &self,
        rows: &TensorRows,
        row: usize,
        bytes: &'b [u8],
    ) -> Result<&'b [u8]> {
        let read = rows.read_of(row);
        if row >= rows.count || bytes.len() as u64 != read.len {
            return Err(Error::Length {
                path: self.path().to_path_buf(),
                what: format!("row {row} of {} of tensor {}", rows.count, rows.name),
                expected: read.len,
                found: bytes.len() as u64,
            });
        }
        if let Some(stripes) = rows.stripes {
            self.check_stripes(stripes, (row / stripes.rows()) as u64, bytes)?;
            return Ok(&bytes[row % stripes.rows() * rows.stride..][..rows.row_len]);
        }
        let (of_row, stored) = bytes.split_at(rows.row_len);
        let Some(stored) = stored.first_chunk() else {
            return self.check_unchanged(rows.offset).map(|()| of_row);
        };
        let (expected, found) = (u32::from_le_bytes(*stored), checksum(of_row));
        if expected == found {
            return Ok(of_row);
        }
        Err(Error::TensorChecksum {
            path: self.path().to_path_buf(),
            name: format!("{} (row {row})", rows.name),
            offset: read.offset,
            expected: expected.into(),
            found: found.into(),
        })
    }
}

impl TensorRows {
    /// Most bytes that are read for a row of `row_len` bytes: its stripe, or the row and its checksum.
    #[must_use]
    pub fn most_read(container: &Container, entry: &TensorEntry, row_len: usize) -> usize {
        let rows = entry.dims().first().copied().unwrap_or(0);
        match (entry.row_stride(rows, row_len), container.stripes(entry)) {
            (Some(stride), Some(of)) if stride == row_len => of.len.min(entry.len) as usize,
            (Some(stride), _) => stride,
            (None, _) => row_len,
        }
    }

    /// Bytes of a row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Bytes from one row to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The bytes of the container to read for a row, for [`Container::check_row`]: of a table the row and its checksum, of a
    /// matrix the stripe that it is in.
    #[must_use]
    pub fn read_of(&self, row: usize) -> Extent {
        let (first, count) = match self.stripes {
            Some(stripes) => {
                let first = row / stripes.rows() * stripes.rows();
                let left = self.count.saturating_sub(first);
                (first, stripes.rows().min(left))
            }
            None => (row, 1),
        };
        Extent {
            offset: self.offset + first as u64 * self.stride as u64,
            len: (count * self.stride) as u64,
        }
    }
}
