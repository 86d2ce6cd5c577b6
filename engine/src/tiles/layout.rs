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

use emberflow_models::config::{Bank, ModelConfig};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::cache::{Eviction, SlotCache};
use emberflow_storage::container::{Container, TensorEntry};

use crate::matrix::{FileRange, TiledMatrix, rows_of_tile};
use crate::store::{Layout, SMALL};

/// Granularity of slot sizes.
const STEP: usize = 4 << 10;
/// A slot size is accepted if padding takes at most this share of the weights' bytes.
const WASTE: f64 = 0.05;

/// Fewest slots for tiles: two are computed while others are read.
const LEAST_SLOTS: u64 = 8;

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
                let matrix = |role| matrix(container, bank, role);
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
                *matrix = matrix.cut(room, bank.tiles);
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

    /// The matrix that tile `tile` of a bank is of, and the number of the tile in it.
    pub fn tile_of(&self, bank: u32, tile: u32) -> Option<(&TiledMatrix, u32)> {
        let matrices = self.banks[bank as usize].matrices.iter().flatten();
        let of = matrices.rev().find(|matrix| matrix.first <= tile);
        of.map(|matrix| (matrix, tile - matrix.first))
    }

    /// Bytes of tile `tile` of a bank.
    pub fn place_of(&self, bank: u32, tile: u32) -> FileRange {
        let of = self.tile_of(bank, tile);
        of.map_or_else(FileRange::default, |(of, tile)| of.place_of(tile))
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
fn matrix(container: &Container, bank: Bank, role: Role) -> Option<TiledMatrix> {
    TiledMatrix::of(container, container.tensor(&id(role, bank).to_string())?)
}

/// Whether a tensor is a matrix of an FFN that lies in tiles.
pub(crate) fn is_tiled(container: &Container, entry: &TensorEntry) -> bool {
    let id = entry.name().parse::<TensorId>();
    id.is_ok_and(|id| id.role.is_bundled()) && TiledMatrix::of(container, entry).is_some()
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
    let mut kinds = BTreeMap::<[usize; 3], usize>::new();
    let mut widest = 1;
    for matrix in banks.iter().flat_map(|bank| &bank.matrices).flatten() {
        let [row_bytes, least] = [matrix.row_bytes(), matrix.least_rows()];
        *kinds.entry([matrix.rows, row_bytes, least]).or_default() += 1;
        widest = widest.max(row_bytes * least.min(matrix.rows));
    }
    let (least, align) = layout.piece(widest);
    let least = least.next_multiple_of(STEP);
    let largest = least.max(largest);
    let weights: usize = kinds
        .iter()
        .map(|([rows, bytes, _], n)| rows * bytes * n)
        .sum();
    let memory = |len: usize| {
        let room = room_of(layout, len);
        let tiles = |&[rows, bytes, least]: &[usize; 3]| {
            rows.div_ceil(rows_of_tile(rows, bytes, least, room))
        };
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
