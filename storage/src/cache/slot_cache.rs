//! A fixed number of slots for units of one size, and who leaves them for others.

mod inspect;

use std::hint::black_box;

use super::eviction::{Eviction, Order};
use super::lrfu::Lrfu;
use super::lru::Lru;
use super::table::{Key, Table};
use crate::arena::{Arena, Slot};

/// A resident unit. Stays valid while the unit is pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u32);

impl SlotId {
    /// Index of the slot in the arena.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a unit is after its last pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Used,
    Unused,
    /// The next victim.
    First,
}

/// What happened so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that found their unit resident.
    pub hits: u64,
    /// Lookups that did not; a unit that is still loading is a miss.
    pub misses: u64,
    /// Units that left for others or for a smaller size.
    pub evictions: u64,
}

/// Cache of units of one size (bundles, or parts of them). Who is evicted says its [`Eviction`].
///
/// Life of a slot: home -> [`reserve`](Self::reserve) -> loading -> [`admit`](Self::admit) ->
/// resident and pinned -> unpinned -> evicted -> loading for somebody else.
///
/// Recency is the time of release: under [`Eviction::Lru`] an unpinned unit is the newest of the
/// evictable ones. Lookups, and under [`Eviction::Lrfu`] releases, touch the table alone, which lies
/// in the order in which units are asked for.
///
/// Invariants, checked by [`check_invariants`](Self::check_invariants):
/// 1. The table names slot `s` for key `k` if and only if slot `s` is loading or resident with
///    key `k`.
/// 2. Units that are not resident have pin count zero. Under [`Eviction::Lru`] a resident slot is in
///    exactly one list: of those that may be evicted, or, only with a pin count above zero, of
///    those in use. Others are in none.
/// 3. The counts of resident, pinned and loading slots are right.
/// 4. Every slot is home, loading or resident, which is on the arena's shelf.
/// 5. A slot is handed out only while fewer than the limit are in use, and never one at or above
///    the limit.
/// 6. There are keys for every slot below the limit and for every slot that is not home.
#[derive(Debug)]
pub struct SlotCache {
    arena: Arena,
    table: Table,
    /// Flat numbers of the units in the slots below the limit, and in those above as long as one is
    /// in use. The others are home.
    keys: Vec<u32>,
    order: Order,
    resident: u32,
    /// Resident ones that are pinned.
    in_use: u32,
    loading: u32,
    stats: CacheStats,
}

impl SlotCache {
    /// An empty cache over the slots of `arena` for banks of the given neuron counts, least
    /// recently used first out. `None` when the neurons of all banks cannot be numbered with 32
    /// bits.
    #[must_use]
    pub fn new(arena: Arena, banks: &[u32]) -> Option<Self> {
        Self::with_eviction(arena, banks, Eviction::Lru)
    }

    /// The same with another order of eviction.
    #[must_use]
    pub fn with_eviction(arena: Arena, banks: &[u32], eviction: Eviction) -> Option<Self> {
        if arena.capacity() > Table::SLOTS {
            return None;
        }
        let table = Table::new(banks)?;
        let mut cache = Self {
            order: match eviction {
                Eviction::Lru => Order::Lru(Lru::new()),
                Eviction::Lrfu => Order::Lrfu(Box::new(Lrfu::new(table.len()))),
            },
            table,
            keys: Vec::new(),
            resident: 0,
            in_use: 0,
            loading: 0,
            stats: CacheStats::default(),
            arena,
        };
        cache.keep_keys(cache.arena.limit());
        Some(cache)
    }

    /// Bytes of bookkeeping a cache of `slots` slots over `neurons` neurons needs beside
    /// [`Arena::charge`], for the budget: 12 for each neuron, 1 more where uses are counted, 9 for
    /// each slot, or 17 for the last use. The arena's capacity costs nothing.
    #[must_use]
    pub fn overhead(eviction: Eviction, slots: u32, neurons: u64) -> u64 {
        // The key, and what the arena itself keeps.
        let per_slot = size_of::<u32>() as u64 + Arena::overhead_per_slot();
        Table::bytes_for(neurons)
            .saturating_add(eviction.bytes(slots.into(), neurons))
            .saturating_add(u64::from(slots) * per_slot)
    }

    /// Makes or drops keys, so that there are those of the first `n` slots.
    fn keep_keys(&mut self, n: u32) {
        let len = n as usize;
        self.keys.reserve_exact(len.saturating_sub(self.keys.len()));
        self.keys.resize(len, 0);
        self.keys.shrink_to_fit();
        match &mut self.order {
            Order::Lru(lru) => lru.resize(n),
            Order::Lrfu(lrfu) => lrfu.resize(n),
        }
    }

    /// A pass over all layers begins, for a token or a chunk of tokens: the clock of [`Eviction::Lrfu`]
    /// advances by a tick.
    pub fn begin_pass(&mut self) {
        if let Order::Lrfu(lrfu) = &mut self.order {
            lrfu.tick();
        }
    }

    /// A layer begins whose last bank is `last`. Banks after it come later in this pass; units of the
    /// others that were not used in this pass will not be used before the next one.
    ///
    /// # Panics
    /// When there is no such bank.
    pub fn begin_layer(&mut self, last: u32) {
        if let Order::Lrfu(lrfu) = &mut self.order {
            lrfu.reach(self.table.end(last));
        }
    }

    /// Starts a unit that was never used as if it had been used `rate` times per pass so far.
    ///
    /// # Panics
    /// When the key names no neuron.
    pub fn set_prior(&mut self, key: Key, rate: f64) {
        let unit = self.table.at_mut(self.table.flat(key));
        if let Order::Lrfu(lrfu) = &self.order {
            lrfu.expect(unit, rate);
        }
    }

    /// Reports the margins of the units from `first` on: how far a predictor's score is above the
    /// threshold at which it names the unit, in steps of which 16 are worth a doubling of uses. Called
    /// in every pass in which they are known. `consecutive`: the report before was for the token
    /// before, so that both together tell how long a margin lasts.
    ///
    /// # Panics
    /// When the key names no neuron.
    pub fn set_margins(
        &mut self,
        first: Key,
        margins: impl ExactSizeIterator<Item = i8>,
        consecutive: bool,
    ) {
        let flat = self.table.flat(first);
        if let Order::Lrfu(lrfu) = &mut self.order {
            lrfu.lean(flat, margins, consecutive);
        }
    }

    /// Looks a unit up and pins it. The caller unpins it, which counts as the use.
    ///
    /// # Panics
    /// When the key names no neuron.
    #[inline]
    pub fn get_pin(&mut self, key: Key) -> Option<SlotId> {
        let unit = self.table.at_mut(self.table.flat(key));
        let Some(slot) = unit.resident() else {
            self.stats.misses += 1;
            return None;
        };
        assert!(
            unit.pins < u16::MAX,
            "neuron {} is pinned too often",
            key.neuron
        );
        self.in_use += u32::from(unit.pins == 0);
        unit.pins += 1;
        self.stats.hits += 1;
        Some(SlotId(slot))
    }

    /// Whether a unit is resident. Does not count as a use.
    #[inline]
    #[must_use]
    pub fn contains(&self, key: Key) -> bool {
        self.table.get(key).resident().is_some()
    }

    /// Whether a unit is being loaded.
    #[inline]
    #[must_use]
    pub fn is_loading(&self, key: Key) -> bool {
        self.table.get(key).loading().is_some()
    }

    /// A slot to load `key` into: a free one, or that of the next victim among unpinned units.
    /// `None` when everything is pinned or loading, or `key` is resident or loading already.
    ///
    /// The caller ends it with [`admit`](Self::admit) or [`abandon`](Self::abandon).
    pub fn reserve(&mut self, key: Key) -> Option<Slot> {
        let flat = self.table.flat(key);
        if self.table.at(flat).slot().is_some() {
            return None;
        }
        while self.is_full() {
            self.evict_oldest()?;
        }
        self.hand_out(flat)
    }

    /// Like [`reserve`](Self::reserve), but never evicts: for prefetches that are not worth
    /// somebody else's place.
    pub fn reserve_if_free(&mut self, key: Key) -> Option<Slot> {
        let flat = self.table.flat(key);
        if self.table.at(flat).slot().is_some() || self.is_full() {
            return None;
        }
        self.hand_out(flat)
    }

    /// Slots beyond the limit that are still in use count, so the limit holds while they linger.
    fn is_full(&self) -> bool {
        self.resident + self.loading >= self.arena.limit()
    }

    fn hand_out(&mut self, flat: u32) -> Option<Slot> {
        let slot = self.arena.take()?;
        self.table.at_mut(flat).load(slot.index());
        self.keys[slot.index() as usize] = flat;
        self.loading += 1;
        Some(slot)
    }

    /// Makes a loaded unit resident and pins it.
    ///
    /// # Panics
    /// When the slot was not reserved for `key`.
    pub fn admit(&mut self, key: Key, slot: Slot) -> SlotId {
        let index = self.make_resident(key, slot);
        let unit = self.table.at_mut(self.table.flat(key));
        unit.pins = 1;
        self.in_use += 1;
        if let Order::Lru(lru) = &mut self.order {
            lru.add_in_use(index);
        }
        SlotId(index)
    }

    /// Makes a unit resident that was loaded ahead of its need: neither pinned nor counted as
    /// used, and the last to be evicted.
    ///
    /// # Panics
    /// As [`admit`](Self::admit).
    pub fn admit_ahead(&mut self, key: Key, slot: Slot) {
        let index = self.make_resident(key, slot);
        match &mut self.order {
            Order::Lru(lru) => lru.add(index),
            Order::Lrfu(lrfu) => lrfu.keep(self.table.at_mut(self.table.flat(key))),
        }
    }

    fn make_resident(&mut self, key: Key, slot: Slot) -> u32 {
        let index = self.loading_slot(key, &slot);
        self.loading -= 1;
        self.resident += 1;
        self.arena.shelve(slot);
        self.table.at_mut(self.table.flat(key)).settle(index);
        index
    }

    /// Takes a slot back whose load failed or was not needed.
    ///
    /// # Panics
    /// When the slot was not reserved for `key`.
    pub fn abandon(&mut self, key: Key, slot: Slot) {
        self.loading_slot(key, &slot);
        self.loading -= 1;
        self.table.at_mut(self.table.flat(key)).leave();
        self.arena.put(slot);
    }

    fn loading_slot(&self, key: Key, slot: &Slot) -> u32 {
        let index = slot.index();
        assert!(
            self.table.get(key).loading() == Some(index),
            "slot {index} was not reserved for neuron {} of bank {}",
            key.neuron,
            key.bank
        );
        index
    }

    /// Releases one pin. With the last one the unit becomes the most recently used.
    ///
    /// # Panics
    /// When the unit is not pinned.
    #[inline]
    pub fn unpin(&mut self, key: Key) {
        self.release(key, After::Used);
    }

    /// Releases one pin. With the last one the unit is worth what it was before, as if it had not been
    /// used. Under [`Eviction::Lru`] it is the most recently used one all the same.
    ///
    /// # Panics
    /// When the unit is not pinned.
    pub fn unpin_unused(&mut self, key: Key) {
        self.release(key, After::Unused);
    }

    /// Releases one pin. With the last one the unit becomes the next to be evicted: for units that
    /// are known not to be wanted before everything else is, as in a scan larger than the cache.
    ///
    /// # Panics
    /// When the unit is not pinned.
    pub fn unpin_first_victim(&mut self, key: Key) {
        self.release(key, After::First);
    }

    #[inline]
    fn release(&mut self, key: Key, after: After) {
        let flat = self.table.flat(key);
        let unit = self.table.at_mut(flat);
        let (true, Some(slot)) = (unit.pins > 0, unit.slot()) else {
            panic!("neuron {} of bank {} is not pinned", key.neuron, key.bank);
        };
        unit.pins -= 1;
        if unit.pins > 0 {
            return;
        }
        self.in_use -= 1;
        match &mut self.order {
            Order::Lru(lru) if after == After::First => lru.put_first(slot),
            Order::Lru(lru) => lru.put_last(slot),
            Order::Lrfu(_) if after == After::Unused => {}
            Order::Lrfu(lrfu) => {
                lrfu.used(unit);
                if after == After::First {
                    lrfu.put_first(flat, unit);
                }
            }
        }
    }

    /// The bytes of a pinned unit.
    ///
    /// # Panics
    /// When the unit is not resident any more, which a pin prevents.
    #[inline]
    #[must_use]
    pub fn bytes(&self, id: SlotId) -> &[u8] {
        match self.arena.shelved(id.0) {
            Some(bytes) => bytes,
            None => panic!("slot {} is not resident; it was used without a pin", id.0),
        }
    }

    /// Whether a slot holds a unit. Reads what [`bytes`](Self::bytes) reads, so that it can be
    /// had on its way from memory.
    #[inline]
    #[must_use]
    pub fn holds(&self, id: SlotId) -> bool {
        self.arena.is_shelved(id.0)
    }

    /// Makes a unit leave. `false` when it is not resident, or in use.
    pub fn remove(&mut self, key: Key) -> bool {
        let unit = self.table.get(key);
        let (0, Some(slot)) = (unit.pins, unit.resident()) else {
            return false;
        };
        self.retire(slot)
    }

    /// Units resident now.
    #[must_use]
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Slots handed out and not yet admitted or abandoned.
    #[must_use]
    pub fn loading(&self) -> u32 {
        self.loading
    }

    /// Slots that may be used.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.arena.limit()
    }

    /// The memory behind the slots.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// Changes how many slots may be used, at most the arena's capacity. Memory beyond is given
    /// back to the operating system, and so is that of the bookkeeping. The next victims
    /// leave; the others are moved below the new end if need be. Allocates: not for the token path.
    ///
    /// Returns how many slots beyond the new end are still pinned or loading. Their memory goes
    /// when they are evicted; call again after unpinning to have it at once.
    pub fn resize(&mut self, slots: u32) -> u32 {
        let slots = slots.min(self.arena.capacity());
        while self.resident + self.loading > slots && self.evict_oldest().is_some() {}
        self.arena.set_limit(slots);
        let known = self.keys.len() as u32;
        let (mut stuck, mut needed) = (0, slots);
        for index in slots..known {
            let key = self.keys[index as usize];
            let idle = self.arena.is_shelved(index) && self.table.at(key).pins == 0;
            if idle {
                self.move_down(index);
            } else if !self.arena.is_home(index) {
                stuck += 1;
                needed = index + 1;
            }
        }
        self.keep_keys(needed);
        self.arena.trim();
        stuck
    }

    /// Moves an unpinned unit to a free slot, or evicts it when there is none.
    fn move_down(&mut self, from: u32) {
        let Some(mut new) = self.arena.take() else {
            self.stats.evictions += u64::from(self.retire(from));
            return;
        };
        let Some(old) = self.arena.unshelve(from) else {
            return self.arena.put(new);
        };
        new.as_mut_slice().copy_from_slice(old.as_slice());
        let to = new.index();
        if let Order::Lru(lru) = &mut self.order {
            lru.renumber(from, to);
        }
        let key = self.keys[from as usize];
        self.table.at_mut(key).move_to(to);
        self.keys[to as usize] = key;
        self.arena.shelve(new);
        self.arena.put(old);
    }

    /// Evicts the next victim; its slot goes home. `None` when there is none.
    fn evict_oldest(&mut self) -> Option<()> {
        self.touch_later_victims();
        let (table, keys) = (&self.table, &self.keys);
        let slot = match &mut self.order {
            Order::Lru(lru) => lru.victim(table, |slot| keys[slot as usize])?,
            Order::Lrfu(lrfu) => lrfu.victim(table, keys)?,
        };
        self.stats.evictions += u64::from(self.retire(slot));
        Some(())
    }

    /// Has what an eviction reads of the later victims on its way from memory. It lies at several
    /// places in no order, and one after the other they would cost a wait each.
    fn touch_later_victims(&self) {
        let Order::Lrfu(lrfu) = &self.order else {
            return;
        };
        let unit = |ahead| Some(self.table.at(lrfu.later(ahead)?));
        let slot = |ahead| unit(ahead)?.resident();
        black_box(unit(8).map(|unit| unit.pins));
        black_box(slot(4).map(|slot| (self.keys[slot as usize], self.arena.is_shelved(slot))));
    }

    /// Sends the slot of a resident unit home. `false` where none is in it.
    fn retire(&mut self, index: u32) -> bool {
        let Some(slot) = self.arena.unshelve(index) else {
            return false;
        };
        if let Order::Lru(lru) = &mut self.order {
            lru.remove(index);
        }
        self.resident -= 1;
        self.table.at_mut(self.keys[index as usize]).leave();
        self.arena.put(slot);
        true
    }
}
