//! [`TileStore`]: serves the tiles of FFNs from memory or flash.
//!
//! ```text
//! visits    bank 7 │ bank 12 │ bank 12 │ ···      in order of use: the current layer, then read-ahead
//!           requested ····▲
//! slots     cache (LRFU) ·························· │ ring of transient tiles
//! ```
//!
//! Tiles are requested in order of use while slots are free. Resident ones are multiplied first, the others on arrival.
//!
//! Every token visits all dense tiles (dense FFNs and shared experts). Such a cyclic scan defeats LRU: it evicts each tile just
//! before its next use. So a fixed number of dense tiles is retained, bank by bank, and the others are transient: they pass
//! through a ring of slots, read ahead of the layer that is computed. Retained banks are evenly spaced over the pass, so that
//! storage never waits for computing, and whole, so that drafts can use them. Experts are cached by LRFU.

use std::collections::VecDeque;
use std::sync::Arc;

use emberflow_kernels::{BlockList, Columns, Compute};
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{CacheStats, Eviction, Key, SlotCache, SlotId};

use super::layout::TileLayout;
use crate::error::Error;
use crate::input::Input;
use crate::matrix::{TiledMatrix, multiply};
use crate::store::NeuronStore;

/// Most slots of the ring: 16 MiB of the largest tiles, which storage at 1.6 GB/s reads in 10 ms. A layer's attention, during
/// which no completion is handled, is shorter.
const RING: u64 = 32;
/// The ring takes at most 1/`RING_PART` of the slots, so that a small budget still retains tiles.
const RING_PART: u64 = 4;
/// Visits looked up beyond the current layer: the ring holds fewer tiles than two large banks.
const AHEAD: usize = 2;

/// A tile of a visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Absent,
    Reading,
    Resident(SlotId),
    Done,
}

/// One use of a bank.
#[derive(Debug)]
struct Visit {
    bank: u32,
    /// Tiles before it have been asked for.
    requested: u32,
    held: Vec<Held>,
    /// For drafts: it counts as no use.
    draft: bool,
}

/// The tiles of a model under a memory budget.
pub(crate) struct TileStore {
    layout: Arc<TileLayout>,
    cache: SlotCache,
    /// Visits in order of use; the first one is being computed.
    visits: VecDeque<Visit>,
    /// Number of visits of the current layer; the others are read-ahead.
    current: usize,
    /// Emptied lists of finished visits, for reuse.
    spare: Vec<Vec<Held>>,
    /// All banks in order of use, if all are dense: then the next visit is known. Otherwise empty.
    scan: Vec<u32>,
    /// Dense tiles in banks that are retained before it, by bank.
    dense_before: Vec<u32>,
    /// Dense tiles, and how many of them are retained.
    dense: u64,
    retained: u64,
    /// Slots for transient tiles, and how many are in use.
    ring: u64,
    transient: u64,
    /// Tiles multiplied, and tiles read, since the start.
    used: u64,
    read: u64,
    /// Units of work of resident tiles.
    ready: Vec<u32>,
}

/// The banks in the order in which their tiles are retained: those of any first part are evenly spaced (van der Corput).
fn retention_order(banks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..banks).collect();
    order.sort_by_key(|&bank| {
        let place = ((bank as u64) << 32) / banks as u64;
        (place as u32).reverse_bits()
    });
    order
}

impl TileStore {
    /// An empty store with `slots` slots.
    pub fn new(layout: Arc<TileLayout>, slots: u64, memory: ArenaOptions) -> Result<Self, Error> {
        let tiles: Vec<u32> = layout.banks.iter().map(|bank| bank.tiles).collect();
        let all = u32::try_from(layout.tiles()).unwrap_or(u32::MAX - 1).max(1);
        let arena = Arena::with_limit(0, all, layout.slot_len, layout.align, memory)
            .map_err(emberflow_storage::Error::from)?;
        let cache = SlotCache::with_eviction(arena, &tiles, Eviction::Lrfu);
        let Some(cache) = cache else {
            let first = format!("{} tiles are more than a cache can index", layout.tiles());
            return Err(Error::Failed { first });
        };
        let banks = layout.banks.iter();
        let mut before = 0;
        let mut dense_before = vec![0; tiles.len()];
        for bank in retention_order(tiles.len()) {
            dense_before[bank] = before;
            before += if layout.banks[bank].dense {
                tiles[bank]
            } else {
                0
            };
        }
        let scan: Vec<u32> = match banks.clone().all(|bank| bank.dense) {
            true => (0..tiles.len() as u32).collect(),
            false => Vec::new(),
        };
        let widest = layout.banks.iter().flat_map(|bank| bank.matrices);
        let units = widest.flatten().map(|of| of.rows.div_ceil(of.unit()));
        let mut store = Self {
            cache,
            visits: VecDeque::with_capacity(64),
            current: 0,
            spare: Vec::new(),
            scan,
            dense_before,
            dense: layout.dense_tiles(),
            retained: 0,
            ring: 0,
            transient: 0,
            used: 0,
            read: 0,
            ready: Vec::with_capacity(units.max().unwrap_or(0)),
            layout,
        };
        store.set_slots(slots);
        Ok(store)
    }

    /// Changes the number of slots between two passes. No read may be in flight.
    pub fn set_slots(&mut self, slots: u64) {
        self.truncate_visits(0);
        let slots = slots.min(self.layout.tiles());
        self.cache.resize(u32::try_from(slots).unwrap_or(u32::MAX));
        let all = slots == self.layout.tiles();
        self.ring = match all {
            true => slots,
            false => (slots / RING_PART).clamp(self.layout.least_slots().min(slots), RING),
        };
        self.retained = match all {
            true => self.dense,
            false => (slots - self.ring).min(self.dense),
        };
    }

    /// Bytes that a store of `layout` holds beside its slots.
    pub fn bytes_for(layout: &TileLayout) -> u64 {
        let banks = layout.banks.len() * size_of::<[u32; 2]>();
        // Lists of the visits of a layer, and of those read ahead.
        let held = 2 * layout.most_of_layer() * size_of::<Held>();
        layout.bytes() + (banks + held) as u64
    }

    /// Whether there is a slot for every tile.
    pub fn holds_all(&self) -> bool {
        u64::from(self.cache.slots()) >= self.layout.tiles()
    }

    /// Waits for all reads in flight.
    pub fn settle(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        io.submit_tiles()?;
        while !io.is_idle() {
            io.wait()?;
        }
        self.take_arrived(io)
    }

    /// Begins a pass over all layers.
    pub fn begin_pass(&mut self) {
        self.cache.begin_pass();
    }

    /// Begins FFN number `place`, which visits `banks` in this order.
    pub fn begin_layer(
        &mut self,
        io: &mut NeuronStore,
        place: usize,
        banks: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        if let Some(last) = self.layout.end_of(place).checked_sub(1) {
            self.cache.begin_layer(last);
        }
        self.current = 0;
        for bank in banks {
            let at = self.current;
            let fresh = |visit: &Visit| visit.bank == bank && !visit.held.contains(&Held::Done);
            if !self.visits.get(at).is_some_and(fresh) {
                self.truncate_visits(at);
                self.add_visit(bank);
            }
            self.current += 1;
        }
        self.request(io)
    }

    /// Begins a visit of `bank` for drafts, before all others. False without one, if a tile is not in memory.
    pub fn begin_held(&mut self, bank: u32) -> bool {
        let keys = (0..self.layout.tiles_of(bank)).map(|tile| Key::new(bank, tile));
        if !keys.into_iter().all(|key| self.cache.contains(key)) {
            return false;
        }
        self.add_visit(bank);
        self.visits.rotate_right(1);
        if let Some(visit) = self.visits.front_mut() {
            (visit.requested, visit.draft) = (visit.held.len() as u32, true);
        }
        self.current += 1;
        true
    }

    /// Ends the current visit.
    pub fn end_visit(&mut self) {
        if let Some(visit) = self.visits.pop_front() {
            self.current = self.current.saturating_sub(1);
            self.release_visit(visit);
        }
    }

    /// Tiles that were multiplied without a read, tiles read, and evictions.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.used.saturating_sub(self.read),
            misses: self.read,
            evictions: self.cache.stats().evictions,
        }
    }

    /// Whether a tile is dense and not retained.
    fn is_transient(&self, bank: u32, tile: u32) -> bool {
        if !self.layout.banks[bank as usize].dense {
            return false;
        }
        u64::from(self.dense_before[bank as usize] + tile) >= self.retained
    }

    /// Appends a visit and pins its resident tiles.
    fn add_visit(&mut self, bank: u32) {
        let mut held = self.spare.pop().unwrap_or_default();
        for tile in 0..self.layout.tiles_of(bank) {
            let here = self.cache.get_pin(Key::new(bank, tile));
            self.transient += u64::from(here.is_some() && self.is_transient(bank, tile));
            held.push(here.map_or(Held::Absent, Held::Resident));
        }
        self.visits.push_back(Visit {
            bank,
            requested: 0,
            held,
            draft: false,
        });
    }

    /// Removes the visits from number `from` on.
    fn truncate_visits(&mut self, from: usize) {
        while self.visits.len() > from {
            if let Some(visit) = self.visits.pop_back() {
                self.release_visit(visit);
            }
        }
    }

    /// Unpins the tiles of a removed visit.
    fn release_visit(&mut self, mut visit: Visit) {
        for (tile, held) in (0..).zip(visit.held.drain(..)) {
            match held {
                Held::Resident(_) => self.release(visit.bank, tile, false),
                Held::Reading => self.transient -= u64::from(self.is_transient(visit.bank, tile)),
                Held::Absent | Held::Done => {}
            }
        }
        self.spare.push(visit.held);
    }

    /// Unpins a tile; `used` counts as a use.
    fn release(&mut self, bank: u32, tile: u32, used: bool) {
        let key = Key::new(bank, tile);
        if self.is_transient(bank, tile) {
            self.transient -= 1;
            self.cache.unpin_first_victim(key);
        } else if used {
            self.cache.unpin(key);
        } else {
            self.cache.unpin_unused(key);
        }
    }

    /// Requests tiles of the visits in order while slots are free.
    fn request(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        let mut number = 0;
        while self.request_visit(io, number)? {
            number += 1;
            if number == self.visits.len() && !self.read_ahead() {
                break;
            }
        }
        io.submit_tiles()
    }

    /// Appends the visit after the last one. False if it is unknown, or enough are appended.
    fn read_ahead(&mut self) -> bool {
        let Some(last) = self.visits.back() else {
            return false;
        };
        let all = self.visits.len() >= self.current + AHEAD;
        if self.scan.is_empty() || all {
            return false;
        }
        let next = (last.bank as usize + 1) % self.scan.len();
        self.add_visit(self.scan[next]);
        true
    }

    /// Requests the tiles of visit number `number`. False if a tile has no slot yet.
    fn request_visit(&mut self, io: &mut NeuronStore, number: usize) -> Result<bool, Error> {
        let Some(visit) = self.visits.get(number) else {
            return Ok(false);
        };
        let (bank, tiles) = (visit.bank, visit.held.len() as u32);
        for tile in visit.requested..tiles {
            self.visits[number].requested = tile;
            if self.visits[number].held[tile as usize] != Held::Absent {
                continue;
            }
            let (key, passes) = (Key::new(bank, tile), self.is_transient(bank, tile));
            let held = if self.cache.contains(key) {
                self.cache.get_pin(key).map(Held::Resident)
            } else if self.cache.is_loading(key) || passes && self.transient >= self.ring {
                None
            } else if let Some(slot) = self.cache.reserve(key) {
                let place = self.layout.place_of(bank, tile);
                io.read_tile(bank, tile, place, slot)?;
                self.read += 1;
                Some(Held::Reading)
            } else {
                None
            };
            let Some(held) = held else {
                return Ok(false);
            };
            self.transient += u64::from(passes);
            self.visits[number].held[tile as usize] = held;
        }
        self.visits[number].requested = tiles;
        Ok(true)
    }

    /// Takes the tiles that have arrived.
    fn take_arrived(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        while let Some((bank, tile, slot)) = io.take_tile()? {
            self.admit(io, bank, tile, slot)?;
        }
        Ok(())
    }

    fn admit(&mut self, io: &NeuronStore, bank: u32, tile: u32, slot: Slot) -> Result<(), Error> {
        let key = Key::new(bank, tile);
        let checked = self.layout.tile_of(bank, tile);
        let checked = checked.map_or(Ok(()), |(of, tile)| io.check_tile(of, tile, &slot));
        if let Err(damaged) = checked {
            self.cache.abandon(key, slot);
            return Err(damaged);
        }
        let id = self.cache.admit(key, slot);
        let passes = self.is_transient(bank, tile);
        let waits =
            |visit: &&mut Visit| visit.bank == bank && visit.held[tile as usize] == Held::Reading;
        match self.visits.iter_mut().find(waits) {
            Some(visit) => visit.held[tile as usize] = Held::Resident(id),
            // Its visit was removed.
            None if passes => self.cache.unpin_first_victim(key),
            None => self.cache.unpin_unused(key),
        }
        Ok(())
    }

    /// Waits for a read; without one in flight, frees slots.
    fn wait(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        if io.is_idle() {
            self.make_room(io)
        } else {
            io.wait()?;
            self.take_arrived(io)
        }
    }

    /// Resolves a deadlock in which tiles that are needed later are pinned in all slots: unpins them. Their visits look them up
    /// again.
    fn make_room(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        for number in (0..self.visits.len()).rev() {
            for tile in (0..self.visits[number].held.len()).rev() {
                let visit = &mut self.visits[number];
                if let Held::Resident(_) = visit.held[tile] {
                    (visit.held[tile], visit.requested) = (Held::Absent, 0);
                    let bank = visit.bank;
                    self.release(bank, tile as u32, false);
                }
            }
        }
        self.request(io)?;
        match io.is_idle() {
            false => Ok(()),
            true => io.fail(format!(
                "none of {} slots for tiles is available",
                self.cache.slots()
            )),
        }
    }

    /// `y[t] = matrix · x[t]` for every token t of `input`, as [`Matrix::matmul`](crate::matrix::Matrix::matmul); `matrix` is of
    /// the bank of the current visit.
    pub fn matmul(
        &mut self,
        io: &mut NeuronStore,
        matrix: TiledMatrix,
        on: &Compute,
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
        y: &mut [f32],
    ) -> Result<(), Error> {
        let (tokens, rows, unit) = (input.tokens(), matrix.rows, matrix.unit());
        let (row_bytes, mut left) = (matrix.row_bytes(), matrix.tiles());
        while left > 0 {
            io.poll()?;
            self.take_arrived(io)?;
            self.request(io)?;
            let Some(visit) = self.visits.front() else {
                return Ok(());
            };
            self.ready.clear();
            for tile in 0..matrix.tiles() {
                if let Held::Resident(_) = visit.held[(matrix.first + tile) as usize] {
                    self.ready.extend(matrix.units_of(tile));
                }
            }
            if self.ready.is_empty() {
                self.wait(io)?;
                continue;
            }
            let (bank, counts) = (visit.bank, !visit.draft);
            let (cache, layout) = (&self.cache, &io.layout);
            let of_units = Columns::new(&mut y[..tokens * rows], tokens, rows, rows);
            // With one token the limit is memory bandwidth, which is highest on contiguous rows; with several, the
            // kernels work on blocks of rows.
            let together = if tokens == 1 {
                matrix.rows_of_tile / unit
            } else {
                1
            };
            let (ready, held) = (&self.ready, &visit.held);
            let ready = BlockList {
                numbers: ready,
                group: together,
            };
            (on.workers).for_each_block_of(
                ready,
                of_units,
                unit,
                scratch,
                &|scratch, first, mut y| {
                    let tile = (first / matrix.rows_of_tile) as u32;
                    let Held::Resident(id) = held[(matrix.first + tile) as usize] else {
                        return;
                    };
                    let shift = layout.shift_of(matrix.place_of(tile).offset);
                    let begin = shift + first % matrix.rows_of_tile * row_bytes;
                    let bytes = &cache.bytes(id)[begin..begin + y.width() * row_bytes];
                    multiply(
                        on.cpu,
                        matrix.dtype,
                        matrix.cols,
                        bytes,
                        input,
                        &mut y,
                        scratch,
                    );
                },
            );
            for tile in 0..matrix.tiles() {
                let place = (matrix.first + tile) as usize;
                let held = &mut self.visits[0].held[place];
                if let Held::Resident(_) = *held {
                    *held = Held::Done;
                    left -= 1;
                    self.used += u64::from(counts);
                    self.release(bank, place as u32, counts);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retained_banks_are_evenly_spaced() {
        for banks in [1, 2, 3, 7, 28, 64, 100] {
            let order = retention_order(banks);
            for count in 1..=banks {
                let mut first = order[..count].to_vec();
                first.sort_unstable();
                first.push(first[0] + banks);
                let gaps = first.windows(2).map(|pair| pair[1] - pair[0]);
                let most = gaps.max().unwrap_or(0);
                assert!(
                    most <= 2 * banks.div_ceil(count) + 2,
                    "{count} of {banks}: {first:?}"
                );
            }
        }
    }
}
