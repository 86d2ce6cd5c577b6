//! How the matrices of FFNs are cut into tiles.
//!
//! ```text
//! matrix   rows 0..r │ r..2r │ 2r..3r │ …      equal tiles, whole rows, contiguous in the file
//! slot     ····[ tile ]···                     from sector to sector, so a tile begins at an offset
//! ```
//!
//! The cut follows from the file alone. Memory is divided into slots of one size for all tiles of a model.

use std::collections::BTreeMap;
use std::ops::Range;

use emberflow_kernels::DType;
use emberflow_models::config::{Bank, ModelConfig};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::cache::{Eviction, SlotCache};
use emberflow_storage::container::{Container, TensorEntry};

use crate::matrix::ROWS_PER_CHUNK;
use crate::store::{FileRange, Layout, SMALL};

/// Granularity of slot sizes.
const STEP: usize = 4 << 10;
/// A slot size is accepted if padding takes at most this share of the weights' bytes.
const WASTE: f64 = 0.05;

/// Fewest slots for tiles: two are computed while others are read.
const LEAST_SLOTS: u64 = 8;

/// A matrix of a bank, in tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TiledMatrix {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Where it begins, as in the container's directory.
    offset: u64,
    /// Rows of a tile; the last one may have fewer.
    pub rows_of_tile: usize,
    /// Number of its first tile in the bank.
    pub first: u32,
}

impl TiledMatrix {
    /// Number of tiles.
    pub fn tiles(&self) -> u32 {
        self.rows.div_ceil(self.rows_of_tile) as u32
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

    /// Bytes of tile `tile` of the matrix.
    pub fn place_of(&self, tile: u32) -> FileRange {
        let first = tile as usize * self.rows_of_tile;
        let rows = self.rows_of_tile.min(self.rows - first);
        FileRange {
            offset: self.offset + (first * self.row_bytes()) as u64,
            len: rows * self.row_bytes(),
        }
    }
}

/// The matrices of a bank that lie in tiles: Gate, Up and Down.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TiledBank {
    pub matrices: [Option<TiledMatrix>; 3],
    /// Number of tiles.
    pub tiles: u32,
    /// A dense FFN or a shared expert, which every token visits.
    pub dense: bool,
}

/// Bytes of a model's tiles.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TileReads {
    /// Of dense FFNs and shared experts.
    pub dense: f64,
    /// Of the routed experts, and the share of them that a token visits.
    pub experts: f64,
    /// See `experts`.
    pub visited: f64,
    /// Bytes of a read.
    pub len: u64,
}

/// All tiles of a model.
#[derive(Debug, Clone)]
pub(crate) struct TileLayout {
    /// Banks, layer by layer.
    pub(super) banks: Vec<TiledBank>,
    /// Banks of each FFN, in the order of layers.
    layers: Vec<Range<u32>>,
    /// Bytes and alignment of a slot.
    pub slot_len: usize,
    pub align: usize,
}

impl TileLayout {
    /// The tiles of a model whose matrices lie by rows. Slots have at most `largest` bytes, unless a row needs more.
    pub fn of(layout: &Layout, c: &ModelConfig, largest: usize) -> Self {
        let container = &layout.container;
        let banks_of = |layer| {
            let experts = c.mixture_of(layer).map_or(0, |_| c.experts);
            let of = move |bank: Bank| {
                let matrix = |role| matrix(container, c, bank, role);
                TiledBank {
                    matrices: [Role::Gate, Role::Up, Role::Down].map(matrix),
                    tiles: 0,
                    dense: experts == 0 || bank.expert >= experts,
                }
            };
            c.banks_of(layer).map(of)
        };
        let mut banks = Vec::new();
        let mut layers = Vec::new();
        for layer in c.ffn_layers() {
            let first = banks.len() as u32;
            banks.extend(banks_of(layer));
            layers.push(first..banks.len() as u32);
        }
        let (slot_len, align) = slot(layout, &banks, largest);
        let room = room_of(layout, slot_len);
        for bank in &mut banks {
            for matrix in bank.matrices.iter_mut().flatten() {
                matrix.rows_of_tile = rows_of_tile(matrix.rows, matrix.row_bytes(), room);
                matrix.first = bank.tiles;
                bank.tiles += matrix.tiles();
            }
        }
        Self {
            banks,
            layers,
            slot_len,
            align,
        }
    }

    /// Number of the first bank of FFN number `place`.
    pub fn first_bank(&self, place: usize) -> u32 {
        self.layers.get(place).map_or(0, |banks| banks.start)
    }

    /// One more than the number of its last bank.
    pub fn end_of(&self, place: usize) -> u32 {
        self.layers.get(place).map_or(0, |banks| banks.end)
    }

    /// Matrix number `which` (Gate, Up, Down) of a bank, if it lies in tiles.
    pub fn matrix(&self, bank: u32, which: usize) -> Option<TiledMatrix> {
        self.banks[bank as usize].matrices[which]
    }

    /// Tiles of a bank.
    pub fn tiles_of(&self, bank: u32) -> u32 {
        self.banks[bank as usize].tiles
    }

    /// Bytes of tile `tile` of a bank.
    pub fn place_of(&self, bank: u32, tile: u32) -> FileRange {
        let matrices = self.banks[bank as usize].matrices.iter().flatten();
        let of = matrices.rev().find(|matrix| matrix.first <= tile);
        let place = of.map(|matrix| matrix.place_of(tile - matrix.first));
        place.unwrap_or_default()
    }

    /// Number of tiles.
    pub fn tiles(&self) -> u64 {
        self.banks.iter().map(|bank| u64::from(bank.tiles)).sum()
    }

    /// Most tiles of a layer.
    pub fn most_of_layer(&self) -> usize {
        let of_layer = |banks: &Range<u32>| {
            let banks = &self.banks[banks.start as usize..banks.end as usize];
            banks.iter().map(|bank| bank.tiles as usize).sum()
        };
        self.layers.iter().map(of_layer).max().unwrap_or(0)
    }

    /// Number of dense tiles.
    pub fn dense_tiles(&self) -> u64 {
        let dense = self.banks.iter().filter(|bank| bank.dense);
        dense.map(|bank| u64::from(bank.tiles)).sum()
    }

    /// Bytes that the forecast of a pass needs.
    pub fn reads(&self, c: &ModelConfig) -> TileReads {
        let bytes = |bank: &TiledBank| -> f64 {
            let matrices = bank.matrices.iter().flatten();
            matrices
                .map(|of| of.rows as f64 * of.row_bytes() as f64)
                .sum()
        };
        let [dense, experts] = [true, false].map(|dense| {
            let some = self.banks.iter().filter(|bank| bank.dense == dense);
            some.map(bytes).sum()
        });
        let chosen = c.mixture.as_ref().map_or(0, |mixture| mixture.chosen);
        TileReads {
            dense,
            experts,
            visited: f64::from(chosen) / f64::from(c.experts.max(1)),
            len: self.slot_len as u64,
        }
    }

    /// Whether a layer's reads are few and short, so that the compute thread may do them.
    pub fn is_small(&self) -> bool {
        let most = self.banks.iter().map(|bank| bank.tiles as usize).max();
        let experts = self.banks.iter().any(|bank| !bank.dense);
        !experts && most.unwrap_or(0) * self.slot_len <= SMALL
    }

    /// Bytes of a slot and its bookkeeping.
    pub fn slot_charge(&self) -> u64 {
        let overhead = |slots| SlotCache::overhead(Eviction::Lrfu, slots, 0);
        self.slot_len as u64 + overhead(1) - overhead(0)
    }

    /// Fewest slots with which a pass makes progress without waiting for each read.
    pub fn least_slots(&self) -> u64 {
        LEAST_SLOTS.min(self.tiles())
    }

    /// Bytes of the directory of tiles and of what a store knows of each.
    pub fn bytes(&self) -> u64 {
        let directory = self.banks.len() * size_of::<TiledBank>();
        directory as u64 + SlotCache::overhead(Eviction::Lrfu, 0, self.tiles())
    }
}

/// The matrix of a role if its rows are stored one after another; not yet cut.
fn matrix(container: &Container, c: &ModelConfig, bank: Bank, role: Role) -> Option<TiledMatrix> {
    let [d, neurons] = [c.bundle_width(), bank.neurons].map(|n| n as usize);
    let (rows, cols) = match role {
        Role::Down => (d, neurons),
        _ => (neurons, d),
    };
    let entry = container.tensor(&id(role, bank).to_string())?;
    is_tiled(container, entry).then_some(TiledMatrix {
        dtype: DType::from_code(entry.dtype)?,
        rows,
        cols,
        offset: entry.offset,
        rows_of_tile: rows,
        first: 0,
    })
}

/// Whether a tensor is a matrix of an FFN that lies in tiles.
pub(crate) fn is_tiled(container: &Container, entry: &TensorEntry) -> bool {
    let [rows, cols] = entry.dims() else {
        return false;
    };
    let id = entry.name().parse::<TensorId>();
    let dtype = DType::from_code(entry.dtype);
    let bytes = dtype.map(|dtype| dtype.row_bytes(*cols as usize) as u64 * rows);
    id.is_ok_and(|id| id.role.is_bundled())
        && entry.len > 0
        && bytes == Some(entry.len)
        && container.is_outside()
        && container.has_rows(entry)
}

/// Bytes of FFN matrices that do not lie in tiles: converted, stored in parts or interleaved row by row.
pub(crate) fn whole_bytes(container: &Container) -> u64 {
    let entries = container.tensors().iter();
    let bundled = entries.filter(|entry| {
        let id = entry.name().parse::<TensorId>();
        id.is_ok_and(|id| id.role.is_bundled()) && !is_tiled(container, entry)
    });
    bundled.map(|entry| entry.len).sum()
}

/// A matrix of a bank.
pub(super) fn id(role: Role, bank: Bank) -> TensorId {
    TensorId {
        role,
        layer: bank.layer,
        expert: bank.expert,
    }
}

/// Bytes of a tile in a slot of `len` bytes.
fn room_of(layout: &Layout, len: usize) -> usize {
    // A tile may begin and end within a sector.
    let (slack, _) = layout.piece(0);
    len.saturating_sub(slack)
}

/// Size and alignment of slots: the largest size with little padding, otherwise the one with least.
fn slot(layout: &Layout, banks: &[TiledBank], largest: usize) -> (usize, usize) {
    let mut kinds = BTreeMap::<[usize; 2], usize>::new();
    let mut widest = 1;
    for matrix in banks.iter().flat_map(|bank| &bank.matrices).flatten() {
        *kinds.entry([matrix.rows, matrix.row_bytes()]).or_default() += 1;
        widest = widest.max(matrix.row_bytes());
    }
    let (least, align) = layout.piece(widest);
    let least = least.next_multiple_of(STEP);
    let largest = least.max(largest);
    let weights: usize = kinds
        .iter()
        .map(|([rows, bytes], n)| rows * bytes * n)
        .sum();
    let memory = |len: usize| {
        let room = room_of(layout, len);
        let tiles = |&[rows, bytes]: &[usize; 2]| rows.div_ceil(rows_of_tile(rows, bytes, room));
        kinds
            .iter()
            .map(|(kind, n)| tiles(kind) * n * len)
            .sum::<usize>()
    };
    let sizes = (least / STEP..largest / STEP + 1)
        .rev()
        .map(|steps| steps * STEP);
    let good = |&len: &usize| memory(len) as f64 <= (1.0 + WASTE) * weights as f64;
    let chosen = sizes.clone().find(good);
    let chosen = chosen.or_else(|| sizes.min_by_key(|&len| memory(len)));
    (chosen.unwrap_or(least), align)
}

/// Rows of each tile of a matrix of `rows` rows of `row_bytes` bytes, in slots that hold `room` bytes: about equally many,
/// and whole units of work if one fits.
fn rows_of_tile(rows: usize, row_bytes: usize, room: usize) -> usize {
    let unit = ROWS_PER_CHUNK;
    let (unit, most) = match room / row_bytes.max(1) {
        few if few < unit => (1, few.max(1)),
        many => (unit, many / unit * unit),
    };
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
            let room = row_bytes.max(random.usize(1..600 << 10));
            let matrix = TiledMatrix {
                dtype,
                rows,
                cols,
                offset: 1000,
                rows_of_tile: rows_of_tile(rows, row_bytes, room),
                first: 3,
            };
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
            let most = if most < ROWS_PER_CHUNK {
                most
            } else {
                most / ROWS_PER_CHUNK * ROWS_PER_CHUNK
            };
            assert!(matrix.tiles() as usize <= rows.div_ceil(most));
        }
    }
}
