//! How a matrix is cut into tiles: equal numbers of whole rows, contiguous in the file.

use std::ops::Range;

use emberflow_kernels::DType;
use emberflow_storage::container::{Container, Stripes, TensorEntry};

/// Rows per work item.
pub(crate) const ROWS_PER_CHUNK: usize = 32;

/// A byte range of the container's files, as its directory counts offsets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FileRange {
    pub offset: u64,
    pub len: usize,
}

/// A matrix whose rows lie one after another in a file, in tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TiledMatrix {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Where it begins, as in the container's directory.
    offset: u64,
    /// Rows of a tile; the last one may have fewer.
    pub rows_of_tile: usize,
    /// Number of its first tile among those of several matrices.
    pub first: u32,
    /// How its checksums divide it, if it has some; a tile is whole stripes.
    pub stripes: Option<Stripes>,
}

impl TiledMatrix {
    /// The matrix of a tensor whose rows lie one after another in the file, as they are multiplied, of a model without neurons in
    /// bundles; `None` for others.
    pub fn of(container: &Container, entry: &TensorEntry) -> Option<Self> {
        let &[rows, cols] = entry.dims() else {
            return None;
        };
        let dtype = DType::from_code(entry.dtype)?;
        let bytes = (dtype.row_bytes(cols as usize) as u64).checked_mul(rows)?;
        let lies = container.banks().is_empty() && container.has_rows(entry);
        (lies && bytes > 0 && bytes == entry.len).then(|| Self {
            stripes: container.stripes(entry),
            ..Self::whole(dtype, rows as usize, cols as usize, entry.offset)
        })
    }

    /// A matrix of one tile, without checksums.
    pub fn whole(dtype: DType, rows: usize, cols: usize, offset: u64) -> Self {
        Self {
            dtype,
            rows,
            cols,
            offset,
            rows_of_tile: rows,
            first: 0,
            stripes: None,
        }
    }

    /// Fewest rows of a tile but the last.
    pub fn least_rows(&self) -> usize {
        self.stripes.map_or(1, |stripes| stripes.rows())
    }

    /// The same in tiles of at most `room` bytes, or of the fewest rows. The first one has the number `first`.
    pub fn cut(self, room: usize, first: u32) -> Self {
        Self {
            rows_of_tile: rows_of_tile(self.rows, self.row_bytes(), self.least_rows(), room),
            first,
            ..self
        }
    }

    /// Number of tiles.
    pub fn tiles(&self) -> u32 {
        self.rows.div_ceil(self.rows_of_tile) as u32
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        (self.rows * self.row_bytes()) as u64
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.cols)
    }

    /// Rows of a unit of work. A tile is a whole number of units.
    pub fn unit(&self) -> usize {
        self.rows_of_tile.min(ROWS_PER_CHUNK)
    }

    /// Units of tile `tile` of the matrix.
    pub fn units_of(&self, tile: u32) -> Range<u32> {
        let each = (self.rows_of_tile / self.unit()) as u32;
        let all = self.rows.div_ceil(self.unit()) as u32;
        tile * each..((tile + 1) * each).min(all)
    }

    /// Rows of tile `tile` of the matrix.
    pub fn rows_of(&self, tile: u32) -> Range<usize> {
        let first = tile as usize * self.rows_of_tile;
        first..self.rows.min(first + self.rows_of_tile)
    }

    /// Number of the first stripe of tile `tile`, and how the matrix is divided, if it has checksums.
    pub fn stripes_of(&self, tile: u32) -> Option<(Stripes, u64)> {
        let stripes = self.stripes?;
        Some((stripes, (self.rows_of(tile).start / stripes.rows()) as u64))
    }

    /// Bytes of tile `tile` of the matrix.
    pub fn place_of(&self, tile: u32) -> FileRange {
        let rows = self.rows_of(tile);
        FileRange {
            offset: self.offset + (rows.start * self.row_bytes()) as u64,
            len: rows.len() * self.row_bytes(),
        }
    }
}

/// Rows of each tile of a matrix of `rows` rows of `row_bytes` bytes, in slots that hold `room` bytes: about equally many,
/// whole units of work if one fits, and a multiple of `least`, a power of two.
pub(crate) fn rows_of_tile(rows: usize, row_bytes: usize, least: usize, room: usize) -> usize {
    let many = room / row_bytes.max(1);
    let unit = match ROWS_PER_CHUNK.max(least) {
        unit if many < unit => least,
        unit => unit,
    };
    let most = (many / unit * unit).max(unit);
    let equal = rows.div_ceil(rows.div_ceil(most).max(1));
    equal.next_multiple_of(unit).min(most)
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    /// Every row is in one tile, tiles follow one another in the file and fit into a slot, and units of work are in one tile.
    #[test]
    fn tiles_are_the_rows_of_a_matrix() {
        let mut random = Rng::with_seed(7);
        for _ in 0..2000 {
            let rows = random.usize(1..3000);
            let cols = 32 * random.usize(1..200);
            let dtype = *random.choice(&[DType::F32, DType::F16, DType::Q8]).unwrap();
            let row_bytes = dtype.row_bytes(cols);
            let least = if random.bool() {
                1
            } else {
                1 << random.usize(0..8)
            };
            let room = (least * row_bytes).max(random.usize(1..600 << 10));
            let whole = TiledMatrix::whole(dtype, rows, cols, 1000);
            let matrix = TiledMatrix {
                rows_of_tile: rows_of_tile(rows, row_bytes, least, room),
                ..whole.cut(room, 3)
            };
            assert!(matrix.rows_of_tile.is_multiple_of(least));
            assert_eq!(matrix.first, 3);
            let mut end = 1000;
            let mut units = 0;
            for tile in 0..matrix.tiles() {
                let FileRange { offset, len: bytes } = matrix.place_of(tile);
                assert_eq!(offset, end);
                assert!(bytes > 0 && bytes <= room && bytes % row_bytes == 0);
                end += bytes as u64;
                let of_tile = matrix.units_of(tile);
                assert_eq!(of_tile.start, units);
                units = of_tile.end;
                let first = of_tile.start as usize * matrix.unit();
                assert_eq!(first, tile as usize * matrix.rows_of_tile);
            }
            assert_eq!(end, 1000 + (rows * row_bytes) as u64);
            assert_eq!(units as usize, rows.div_ceil(matrix.unit()));
            // As few as whole units allow.
            let most = room / row_bytes;
            let unit = if most < ROWS_PER_CHUNK.max(least) {
                least
            } else {
                ROWS_PER_CHUNK.max(least)
            };
            let most = most / unit * unit;
            assert!(matrix.tiles() as usize <= rows.div_ceil(most));
        }
    }
}
