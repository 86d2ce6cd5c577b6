//! Tiled layout of rows for devices with separate memory: bytes that neighbouring work items read together are adjacent.
//!
//! ```text
//! tile   │ unit 0 of all rows │ unit 1 of all rows │ …        units of 16 bytes
//!        │ remainder of row 0 │ remainder of row 1 │ …        bytes that fill no unit: floats of odd widths
//!        │ scale 0 of all rows │ scale 1 of all rows │ …      2 bytes each; super-blocks row by row
//! ```
//!
//! A tile is exactly as long as its rows. The last tile of a matrix may have unused places.

/// Rows per tile; it divides a cluster.
pub const TILE_ROWS: usize = 32;

const UNIT: usize = 16;

/// Layout of tiles of equally long rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Bytes of quantised values, or of elements, per row.
    pub quants: usize,
    /// Bytes of scales per row.
    pub scales: usize,
    /// Bytes of scales that stay together.
    pub scale: usize,
}

impl Tiles {
    /// Bytes per tile.
    pub fn len(&self) -> usize {
        TILE_ROWS * (self.quants + self.scales)
    }

    /// Whether rows have no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the tiles of `rows` rows.
    pub fn bytes(&self, rows: usize) -> usize {
        rows.div_ceil(TILE_ROWS) * self.len()
    }

    /// Fills a tile with rows `[quants, scales]`: [`TILE_ROWS`] of them, or fewer in the last tile, whose unused places
    /// stay unchanged.
    ///
    /// # Panics
    /// If a length does not match.
    pub fn fill(&self, rows: &[[&[u8]; 2]], tile: &mut [u8]) {
        let whole = self.quants / UNIT * UNIT;
        let (units, remainder) = tile.split_at_mut(TILE_ROWS * whole);
        let (rest, tile_scales) = remainder.split_at_mut(TILE_ROWS * (self.quants - whole));
        // Row by row: sequential reads, and writes that stay in the cache.
        for (r, [quants, _]) in rows.iter().enumerate() {
            let sources = quants[..whole].as_chunks::<UNIT>().0;
            let targets = units
                .as_chunks_mut::<UNIT>()
                .0
                .get_mut(r..)
                .unwrap_or_default();
            for (source, target) in sources.iter().zip(targets.iter_mut().step_by(TILE_ROWS)) {
                *target = *source;
            }
        }
        if whole < self.quants {
            let targets = rest.chunks_exact_mut(self.quants - whole);
            for ([quants, _], target) in rows.iter().zip(targets) {
                target.copy_from_slice(&quants[whole..]);
            }
        }
        for (r, [_, scales]) in rows.iter().enumerate().filter(|_| self.scale > 0) {
            let targets = tile_scales.chunks_exact_mut(self.scale).skip(r);
            let sources = scales.chunks_exact(self.scale);
            for (source, target) in sources.zip(targets.step_by(TILE_ROWS)) {
                target.copy_from_slice(source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of every row has its own place.
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
                let mut tile = vec![0; tiles.len()];
                tiles.fill(&both, &mut tile);
                let (whole, rest) = (quants / UNIT * UNIT, quants % UNIT);
                for (r, row) in rows.iter().enumerate() {
                    for (i, byte) in row.iter().enumerate() {
                        let place = match i {
                            _ if i < whole => (i / UNIT * TILE_ROWS + r) * UNIT + i % UNIT,
                            _ if i < quants => TILE_ROWS * whole + r * rest + i - whole,
                            _ => {
                                let i = i - quants;
                                TILE_ROWS * quants + (i / scale * TILE_ROWS + r) * scale + i % scale
                            }
                        };
                        assert_eq!(tile[place], *byte, "{quants} {scales}: row {r}, byte {i}");
                    }
                }
                // All bytes of rows are odd.
                let filled = tile.iter().filter(|&&byte| byte != 0).count();
                assert_eq!(filled, count * (quants + scales));
            }
        }
    }
}
