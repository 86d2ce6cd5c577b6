//! [`TileStore`]: serves the tiles of FFNs from memory or flash.
//!
//! ```text
//! visits    bank 7 │ bank 12 │ bank 12 │ ···      in the order of use: this layer's, then what surely follows
//!           asked ·········▲
//! slots     stay (LRFU) ························ │ pass (a ring)
//! ```
//!
//! The tiles of the coming visits are requested in the order of use, as far as there are slots; those requested at once are read
//! in the order of the file. Those in memory are computed
//! first, the others as they arrive. What every token visits is a cyclic scan, of which no cache keeps the part that is
//! needed next: so a fixed share of these tiles stays, evenly spread over the pass, and the others pass through a ring,
//! read ahead of the layer that computes. Experts are kept by recency and frequency.

use std::collections::VecDeque;
use std::sync::Arc;

use emberflow_kernels::{Columns, Compute};
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{CacheStats, Eviction, Key, SlotCache, SlotId};

use super::layout::{TileLayout, TiledMatrix};
use crate::error::Error;
use crate::input::Input;
use crate::matrix::multiply;
use crate::store::NeuronStore;

/// Slots of the ring at most: what storage reads while a matrix is computed, twice.
const RING: u64 = 32;
/// The ring has at most this part of the slots.
const RING_PART: u64 = 4;
/// Visits of later layers that are looked up.
const AHEAD: usize = 2;

/// A tile of a visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Unasked,
    Coming,
    Here(SlotId),
    Done,
}

/// One use of a bank.
#[derive(Debug)]
struct Visit {
    bank: u32,
    /// Tiles before it have been asked for.
    asked: u32,
    held: Vec<Held>,
}

/// The tiles of a model under a memory budget.
pub(crate) struct TileStore {
    layout: Arc<TileLayout>,
    cache: SlotCache,
    /// The current visit, and those that follow.
    visits: VecDeque<Visit>,
    /// Of these, the ones of the current layer.
    certain: usize,
    /// Lists of finished visits.
    spare: Vec<Vec<Held>>,
    /// Banks that every token visits, in order; empty if tokens also visit others.
    scan: Vec<u32>,
    /// Number, among the tiles that every token visits, of each bank's first.
    before: Vec<u32>,
    /// How many of these there are, and how many stay.
    always: u64,
    stay: u64,
    /// Slots for those that pass, and how many are in use.
    ring: u64,
    passing: u64,
    /// Units of work whose tile is in memory.
    ready: Vec<u32>,
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
        let mut always = 0;
        let before = banks.clone().map(|bank| {
            let before = always;
            always += if bank.always { bank.tiles } else { 0 };
            before
        });
        let before = before.collect();
        let scan: Vec<u32> = match banks.clone().all(|bank| bank.always) {
            true => (0..tiles.len() as u32).collect(),
            false => Vec::new(),
        };
        let widest = layout.banks.iter().flat_map(|bank| bank.matrices);
        let units = widest.flatten().map(|of| of.rows.div_ceil(of.unit()));
        let mut store = Self {
            cache,
            visits: VecDeque::with_capacity(64),
            certain: 0,
            spare: Vec::new(),
            scan,
            before,
            always: layout.always(),
            stay: 0,
            ring: 0,
            passing: 0,
            ready: Vec::with_capacity(units.max().unwrap_or(0)),
            layout,
        };
        store.set_slots(slots);
        Ok(store)
    }

    /// Changes the number of slots between two passes. No read may be in flight.
    pub fn set_slots(&mut self, slots: u64) {
        self.drop_visits(0);
        let slots = slots.min(self.layout.tiles());
        self.cache.resize(u32::try_from(slots).unwrap_or(u32::MAX));
        let all = slots == self.layout.tiles();
        self.ring = match all {
            true => slots,
            false => (slots / RING_PART).clamp(self.layout.least_slots().min(slots), RING),
        };
        self.stay = match all {
            true => self.always,
            false => (slots - self.ring).min(self.always),
        };
    }

    /// Bytes that a store of `layout` holds beside its slots.
    pub fn bytes_for(layout: &TileLayout) -> u64 {
        let banks = layout.banks.len() * size_of::<[u32; 2]>();
        // Lists of the visits of a layer, and of those that are foreseen.
        let held = 2 * layout.most_of_layer() * size_of::<Held>();
        layout.bytes() + (banks + held) as u64
    }

    /// Takes what arrives, until nothing is being read.
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

    /// Begins the FFN `place`, which visits `banks` in this order.
    pub fn begin_layer(
        &mut self,
        io: &mut NeuronStore,
        place: usize,
        banks: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        if let Some(last) = self.layout.end_of(place).checked_sub(1) {
            self.cache.begin_layer(last);
        }
        self.certain = 0;
        for bank in banks {
            let at = self.certain;
            let fresh = |visit: &Visit| visit.bank == bank && !visit.held.contains(&Held::Done);
            if !self.visits.get(at).is_some_and(fresh) {
                self.drop_visits(at);
                self.push(bank);
            }
            self.certain += 1;
        }
        self.ask(io)
    }

    /// Ends the current visit.
    pub fn end_visit(&mut self) {
        if let Some(visit) = self.visits.pop_front() {
            self.certain = self.certain.saturating_sub(1);
            self.forget(visit);
        }
    }

    /// Hits and misses.
    pub fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// Whether a tile makes room for others after use, as one of those that every token visits and that do not stay.
    fn passes(&self, bank: u32, tile: u32) -> bool {
        if !self.layout.banks[bank as usize].always {
            return false;
        }
        // Every (always / stay)-th stays.
        let number = u64::from(self.before[bank as usize] + tile);
        let stays = |n: u64| n * self.stay / self.always.max(1);
        stays(number + 1) == stays(number)
    }

    /// Adds a visit and pins what is in memory of it.
    fn push(&mut self, bank: u32) {
        let mut held = self.spare.pop().unwrap_or_default();
        for tile in 0..self.layout.tiles_of(bank) {
            let here = self.cache.get_pin(Key::new(bank, tile));
            self.passing += u64::from(here.is_some() && self.passes(bank, tile));
            held.push(here.map_or(Held::Unasked, Held::Here));
        }
        self.visits.push_back(Visit {
            bank,
            asked: 0,
            held,
        });
    }

    /// Forgets the visits from number `from` on.
    fn drop_visits(&mut self, from: usize) {
        while self.visits.len() > from {
            if let Some(visit) = self.visits.pop_back() {
                self.forget(visit);
            }
        }
    }

    /// Gives back what a visit holds.
    fn forget(&mut self, mut visit: Visit) {
        for (tile, held) in (0..).zip(visit.held.drain(..)) {
            match held {
                Held::Here(_) => self.release(visit.bank, tile, false),
                Held::Coming => self.passing -= u64::from(self.passes(visit.bank, tile)),
                Held::Unasked | Held::Done => {}
            }
        }
        self.spare.push(visit.held);
    }

    /// Unpins a tile that was or was not used.
    fn release(&mut self, bank: u32, tile: u32, used: bool) {
        let key = Key::new(bank, tile);
        if self.passes(bank, tile) {
            self.passing -= 1;
            self.cache.unpin_first_victim(key);
        } else if used {
            self.cache.unpin(key);
        } else {
            self.cache.unpin_unused(key);
        }
    }

    /// Requests tiles of the visits in the order of use, as far as there are slots.
    fn ask(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        let mut number = 0;
        while self.ask_of(io, number)? {
            number += 1;
            if number == self.visits.len() && !self.foresee() {
                break;
            }
        }
        io.submit_tiles()
    }

    /// Adds the visit that surely follows the last one. False if none does, or enough are known.
    fn foresee(&mut self) -> bool {
        let Some(last) = self.visits.back() else {
            return false;
        };
        let all = self.visits.len() >= self.certain + AHEAD;
        if self.scan.is_empty() || all {
            return false;
        }
        let next = (last.bank as usize + 1) % self.scan.len();
        self.push(self.scan[next]);
        true
    }

    /// Requests the tiles of visit number `number`. False if there is no room for one.
    fn ask_of(&mut self, io: &mut NeuronStore, number: usize) -> Result<bool, Error> {
        let Some(visit) = self.visits.get(number) else {
            return Ok(false);
        };
        let (bank, tiles) = (visit.bank, visit.held.len() as u32);
        for tile in visit.asked..tiles {
            self.visits[number].asked = tile;
            if self.visits[number].held[tile as usize] != Held::Unasked {
                continue;
            }
            let (key, passes) = (Key::new(bank, tile), self.passes(bank, tile));
            let held = if self.cache.contains(key) {
                self.cache.get_pin(key).map(Held::Here)
            } else if self.cache.is_loading(key) || passes && self.passing >= self.ring {
                None
            } else if let Some(slot) = self.cache.reserve(key) {
                let place = self.layout.place_of(bank, tile);
                io.read_tile([bank, tile], place, slot)?;
                Some(Held::Coming)
            } else {
                None
            };
            let Some(held) = held else {
                return Ok(false);
            };
            self.passing += u64::from(passes);
            self.visits[number].held[tile as usize] = held;
        }
        self.visits[number].asked = tiles;
        Ok(true)
    }

    /// Takes the tiles that have arrived.
    fn take_arrived(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        while let Some((bank, tile, slot)) = io.take_tile()? {
            self.admit(io, [bank, tile], slot)?;
        }
        Ok(())
    }

    fn admit(&mut self, io: &NeuronStore, [bank, tile]: [u32; 2], slot: Slot) -> Result<(), Error> {
        let key = Key::new(bank, tile);
        let (offset, _) = self.layout.place_of(bank, tile);
        if let Err(changed) = io.check_file(offset) {
            self.cache.abandon(key, slot);
            return Err(changed);
        }
        let id = self.cache.admit(key, slot);
        let passes = self.passes(bank, tile);
        let waits =
            |visit: &&mut Visit| visit.bank == bank && visit.held[tile as usize] == Held::Coming;
        match self.visits.iter_mut().find(waits) {
            Some(visit) => visit.held[tile as usize] = Held::Here(id),
            // Its visit was dropped, with its place in the ring.
            None if passes => self.cache.unpin_first_victim(key),
            None => self.cache.unpin_unused(key),
        }
        Ok(())
    }

    /// Waits until a tile of the current visit may have arrived.
    fn wait(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        if io.is_idle() {
            self.make_room(io)
        } else {
            io.wait()?;
            self.take_arrived(io)
        }
    }

    /// Nothing is being read and no needed tile is in memory: tiles that are needed later hold all slots. They are looked up
    /// again when it is their turn.
    fn make_room(&mut self, io: &mut NeuronStore) -> Result<(), Error> {
        for number in (0..self.visits.len()).rev() {
            for tile in (0..self.visits[number].held.len()).rev() {
                let visit = &mut self.visits[number];
                if let Held::Here(_) = visit.held[tile] {
                    (visit.held[tile], visit.asked) = (Held::Unasked, 0);
                    let bank = visit.bank;
                    self.release(bank, tile as u32, false);
                }
            }
        }
        self.ask(io)?;
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
            self.ask(io)?;
            let Some(visit) = self.visits.front() else {
                return Ok(());
            };
            self.ready.clear();
            for tile in 0..matrix.tiles() {
                if let Held::Here(_) = visit.held[(matrix.first + tile) as usize] {
                    self.ready.extend(matrix.units_of(tile));
                }
            }
            if self.ready.is_empty() {
                self.wait(io)?;
                continue;
            }
            let (bank, cache, layout) = (visit.bank, &self.cache, &io.layout);
            let of_units = Columns::new(&mut y[..tokens * rows], tokens, rows, rows);
            // One token's products are limited by reading weights, best from contiguous memory; those of several are
            // computed by blocks of rows.
            let together = if tokens == 1 {
                matrix.rows_of_tile / unit
            } else {
                1
            };
            let (ready, held) = ((&self.ready[..], together), &visit.held);
            (on.workers).for_each_block_of(
                ready,
                of_units,
                unit,
                scratch,
                &|scratch, first, mut y| {
                    let tile = (first / matrix.rows_of_tile) as u32;
                    let Held::Here(id) = held[(matrix.first + tile) as usize] else {
                        return;
                    };
                    let (offset, _) = matrix.place_of(tile);
                    let begin = layout.shift_of(offset) + first % matrix.rows_of_tile * row_bytes;
                    let bytes = &cache.bytes(id)[begin..begin + y.width() * row_bytes];
                    let of = (matrix.dtype, matrix.cols);
                    multiply(on.cpu, of, bytes, input, &mut y, scratch);
                },
            );
            for tile in 0..matrix.tiles() {
                let place = (matrix.first + tile) as usize;
                let held = &mut self.visits[0].held[place];
                if let Held::Here(_) = *held {
                    *held = Held::Done;
                    left -= 1;
                    self.release(bank, place as u32, true);
                }
            }
        }
        Ok(())
    }
}
