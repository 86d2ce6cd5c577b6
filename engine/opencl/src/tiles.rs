//! Rows in tiles, for devices with a memory of their own: the bytes that neighbouring items read at once lie side by side.
//!
//! ```text
//! a tile   │ unit 0 of all rows │ unit 1 of all rows │ …          16 bytes each
//!          │ what fills no unit, row by row │                   f16, bf16 and f32 of odd widths
//!          │ scale 0 of all rows │ scale 1 of all rows │ …      2 bytes each; super-blocks row by row
//! ```
//!
//! Nothing is added: a tile is as long as its rows. The last one of a matrix may have fewer rows than places.

/// Rows of a tile; a multiple of it is a cluster.
pub const TILE_ROWS: usize = 32;

const UNIT: usize = 16;

/// Tiles of rows of a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Bytes of a row's quants, or of its elements.
    pub quants: usize,
    /// Bytes of its scales.
    pub scales: usize,
    /// Bytes of them that lie together.
    pub scale: usize,
}

impl Tiles {
    /// Bytes of a tile.
    pub fn len(&self) -> usize {
        TILE_ROWS * (self.quants + self.scales)
    }

    /// Whether rows have no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of so many rows.
    pub fn bytes(&self, rows: usize) -> usize {
        rows.div_ceil(TILE_ROWS) * self.len()
    }

    /// Fills a tile with rows, their quants and scales: [`TILE_ROWS`] of them, or fewer of the last one. Places of rows
    /// that are not there stay as they are.
    ///
    /// # Panics
    /// Other lengths.
    pub fn fill(&self, rows: &[[&[u8]; 2]], to: &mut [u8]) {
        let whole = self.quants / UNIT * UNIT;
        let (units, behind) = to.split_at_mut(TILE_ROWS * whole);
        let (rest, scales) = behind.split_at_mut(TILE_ROWS * (self.quants - whole));
        // Row by row: what is read lies together, and what is written stays in the cache.
        for (r, [quants, _]) in rows.iter().enumerate() {
            let from = quants[..whole].as_chunks::<UNIT>().0;
            let places = units
                .as_chunks_mut::<UNIT>()
                .0
                .get_mut(r..)
                .unwrap_or_default();
            for (unit, to) in from.iter().zip(places.iter_mut().step_by(TILE_ROWS)) {
                *to = *unit;
            }
        }
        if whole < self.quants {
            let places = rest.chunks_exact_mut(self.quants - whole);
            for ([quants, _], to) in rows.iter().zip(places) {
                to.copy_from_slice(&quants[whole..]);
            }
        }
        for (r, [_, its]) in rows.iter().enumerate().filter(|_| self.scale > 0) {
            let places = scales.chunks_exact_mut(self.scale).skip(r);
            for (scale, to) in (its.chunks_exact(self.scale)).zip(places.step_by(TILE_ROWS)) {
                to.copy_from_slice(scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of every row is at its place, and no two at the same.
    #[test]
    fn bytes_of_rows_have_a_place_each() {
        for (quants, scales, scale) in [
            (48, 6, 2),
            (64, 4, 2),
            (200, 0, 0),
            (10, 0, 0),
            (20, 0, 0),
            (16, 2, 2),
            (48, 9, 9),
        ] {
            let tiles = Tiles {
                quants,
                scales,
                scale,
            };
            for count in [TILE_ROWS, 1, 5] {
                let row = |r: usize| -> Vec<u8> {
                    let byte = |i: usize| (r * 7 + i * 13 + 1) as u8 | 1;
                    (0..quants + scales).map(byte).collect()
                };
                let rows: Vec<Vec<u8>> = (0..count).map(row).collect();
                let both: Vec<[&[u8]; 2]> = rows
                    .iter()
                    .map(|row| {
                        let (quants, scales) = row.split_at(quants);
                        [quants, scales]
                    })
                    .collect();
                let mut to = vec![0; tiles.len()];
                tiles.fill(&both, &mut to);
                let (whole, rest) = (quants / UNIT * UNIT, quants % UNIT);
                for (r, row) in rows.iter().enumerate() {
                    for (i, byte) in row.iter().enumerate() {
                        let at = match i {
                            _ if i < whole => (i / UNIT * TILE_ROWS + r) * UNIT + i % UNIT,
                            _ if i < quants => TILE_ROWS * whole + r * rest + i - whole,
                            _ => {
                                let i = i - quants;
                                TILE_ROWS * quants + (i / scale * TILE_ROWS + r) * scale + i % scale
                            }
                        };
                        assert_eq!(to[at], *byte, "{quants} {scales}: row {r}, byte {i}");
                    }
                }
                // All bytes of rows are odd.
                let filled = to.iter().filter(|&&byte| byte != 0).count();
                assert_eq!(filled, count * (quants + scales));
            }
        }
    }
}
