//! Tables of numbers in a file: plain numbers, or codes of a few bits that are packed along one of the dimensions.

use std::ops::Range;

use crate::dequant;
use crate::dtype::DType;
use crate::error::Error;
use crate::file::DataFile;

/// Columns of AWQ's words, from the lowest bits on, are 0, 2, 4, 6, 1, 3, 5, 7: the place of each column.
const AWQ: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Bytes of a word of codes.
const WORD: usize = 4;

/// How the elements of a table are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elements {
    /// As numbers of this type, or as codes of it.
    Plain(DType),
    /// Codes of so many bits, at most 8, along a row: a stream of bits, the lowest first, in so many bytes for each
    /// row. The number is added to each word of 32 bits first.
    Along {
        bits: usize,
        row_bytes: usize,
        add: u32,
    },
    /// Codes of so many bits that divide 32, in words that each hold consecutive rows of a column.
    Across(usize),
    /// Codes of 4 bits along a row in AWQ's order.
    Awq,
    /// Floats of 4 bits (e2m1), two in a byte.
    Floats4,
}

/// A table of numbers in a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table {
    /// Index into the files.
    pub(crate) file: usize,
    /// Byte position of the first element.
    pub(crate) offset: u64,
    /// Rows and columns.
    pub(crate) shape: [usize; 2],
    /// Their storage.
    pub(crate) elements: Elements,
}

impl Table {
    /// Bytes of a stored row.
    fn row_bytes(&self) -> usize {
        let cols = self.shape[1];
        match self.elements {
            Elements::Plain(dtype) => dtype.row_bytes(cols).unwrap_or(usize::MAX),
            Elements::Along { row_bytes, .. } => row_bytes,
            Elements::Across(_) => cols.saturating_mul(WORD),
            Elements::Awq | Elements::Floats4 => cols.div_ceil(2),
        }
    }

    /// Reads a window of rows and columns, row by row.
    pub(super) fn read(
        &self,
        files: &[DataFile],
        what: &dyn Fn() -> String,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let width = cols.len();
        if rows.is_empty() || width == 0 {
            return Ok(());
        }
        // Bytes of a stored row, and stored rows, with the window.
        let (bytes, lines) = match self.elements {
            Elements::Plain(dtype) => {
                let size = dtype.block().1;
                (cols.start * size..cols.end * size, rows.clone())
            }
            Elements::Along {
                bits, row_bytes, ..
            } => {
                let words = cols.start * bits / 32..(cols.end * bits).div_ceil(32);
                let bytes = words.start * WORD..(words.end * WORD).min(row_bytes);
                (bytes, rows.clone())
            }
            Elements::Across(bits) => {
                let lines = rows.start * bits / 32..(rows.end * bits).div_ceil(32);
                (cols.start * WORD..cols.end * WORD, lines)
            }
            Elements::Awq => {
                let words = cols.start / 8..cols.end.div_ceil(8);
                (words.start * WORD..words.end * WORD, rows.clone())
            }
            Elements::Floats4 => (cols.start / 2..cols.end.div_ceil(2), rows.clone()),
        };
        let mut raw = vec![0; bytes.len() * lines.len()];
        let row_bytes = self.row_bytes();
        let at = |line: usize| {
            let start = (line as u64).saturating_mul(row_bytes as u64);
            (self.offset.saturating_add(start)).saturating_add(bytes.start as u64)
        };
        let file = &files[self.file];
        if bytes.len() == row_bytes {
            file.read_at(&mut raw, at(lines.start), what)?;
        } else {
            for (line, raw) in lines.clone().zip(raw.chunks_exact_mut(bytes.len())) {
                file.read_at(raw, at(line), what)?;
            }
        }
        let each = raw
            .chunks_exact(bytes.len())
            .zip(out.chunks_exact_mut(width));
        match self.elements {
            Elements::Plain(dtype) => each.for_each(|(raw, out)| dtype.decode(raw, out)),
            Elements::Along { bits, add, .. } => {
                if add > 0 {
                    for word in raw.as_chunks_mut::<WORD>().0 {
                        *word = u32::from_le_bytes(*word).wrapping_add(add).to_le_bytes();
                    }
                }
                let first = cols.start * bits % 32;
                let each = raw
                    .chunks_exact(bytes.len())
                    .zip(out.chunks_exact_mut(width));
                each.for_each(|(raw, out)| stream(raw, first, bits, out));
            }
            Elements::Across(bits) => {
                let first = rows.start * bits / 32;
                for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
                    let words = &raw[(row * bits / 32 - first) * bytes.len()..][..bytes.len()];
                    let (shift, mask) = (row * bits % 32, (1 << bits) - 1);
                    for (word, out) in words.as_chunks::<WORD>().0.iter().zip(out) {
                        *out = (u32::from_le_bytes(*word) >> shift & mask) as f32;
                    }
                }
            }
            Elements::Awq => {
                let first = cols.start / 8 * 8;
                for (raw, out) in each {
                    for (col, out) in cols.clone().zip(out) {
                        let place = (col - first) / 8 * 8 + AWQ[col % 8];
                        *out = f32::from(raw[place / 2] >> (place % 2 * 4) & 15);
                    }
                }
            }
            Elements::Floats4 => {
                for (raw, out) in each {
                    for (col, out) in cols.clone().zip(out) {
                        let byte = raw[col / 2 - cols.start / 2];
                        *out = dequant::e2m1(byte >> (col % 2 * 4));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Codes of a stream of bits, the lowest first, from bit `first` on.
fn stream(raw: &[u8], first: usize, bits: usize, out: &mut [f32]) {
    let mask = (1u16 << bits) - 1;
    for (n, out) in out.iter_mut().enumerate() {
        let bit = first + n * bits;
        let [low, high] = [bit / 8, bit / 8 + 1].map(|at| raw.get(at).copied().unwrap_or(0));
        *out = f32::from(u16::from_le_bytes([low, high]) >> (bit % 8) & mask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a window's borders are, its numbers are those of the whole table.
    #[test]
    fn windows_are_parts_of_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let bytes: Vec<u8> = (0..8192u32).map(|n| (n * 167 % 241) as u8).collect();
        std::fs::write(&path, bytes).unwrap();
        let files = [DataFile::open(&path).unwrap()];
        const ROWS: usize = 32;
        const COLS: usize = 40;
        let along = |bits: usize, add| Elements::Along {
            bits,
            row_bytes: (COLS * bits).div_ceil(32) * WORD,
            add,
        };
        for elements in [
            Elements::Plain(DType::F8E4M3),
            Elements::Plain(DType::Bf16),
            along(2, 0),
            along(3, 0),
            along(4, 0x1111_1111),
            along(5, 0),
            along(6, 0),
            along(8, 0x0101_0101),
            Elements::Across(2),
            Elements::Across(4),
            Elements::Across(8),
            Elements::Awq,
            Elements::Floats4,
        ] {
            let table = Table {
                file: 0,
                offset: 5,
                shape: [ROWS, COLS],
                elements,
            };
            let read = |rows: Range<usize>, cols: Range<usize>| {
                let mut out = vec![0.0; rows.len() * cols.len()];
                let what = || "table".to_owned();
                table.read(&files, &what, rows, cols, &mut out).unwrap();
                out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
            };
            let whole = read(0..ROWS, 0..COLS);
            assert!(whole.iter().any(|value| *value != whole[0]));
            for (rows, cols) in [
                (3..4, 0..COLS),
                (9..32, 0..COLS),
                (0..5, 7..8),
                (1..30, 9..39),
                (17..18, 16..24),
                (4..4, 1..3),
            ] {
                let part = read(rows.clone(), cols.clone());
                let expected: Vec<u32> = (rows.clone())
                    .flat_map(|row| whole[row * COLS..][cols.clone()].to_vec())
                    .collect();
                assert_eq!(part, expected, "{elements:?} {rows:?} {cols:?}");
            }
        }
    }
}
