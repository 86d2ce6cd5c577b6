//! A fixed number of slots for units of one size, and their eviction.

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

/// How a release counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Used,
    Unused,
    /// Counts as a use, and makes the unit a first victim.
    First,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that found the unit resident.
    pub hits: u64,
    /// Lookups that did not. A unit that is still loading is a miss.
    pub misses: u64,
    /// Units evicted, for other units or by a resize.
    pub evictions: u64,
}

/// Cache of units of one size (bundles, or parts of them), evicted by an [`Eviction`] policy.
///
/// Life of a slot: home -> [`reserve`](Self::reserve) -> loading -> [`admit`](Self::admit) ->
/// resident and pinned -> unpinned -> evicted -> loading another unit.
///
/// A use counts at its release: under [`Eviction::Lru`] the unit released last is evicted last.
/// Lookups, and under [`Eviction::Lrfu`] releases, touch only the table, which is stored in the
/// order in which a layer asks for its units.
///
/// Invariants, checked by [`check_invariants`](Self::check_invariants):
/// 1. The table maps key `k` to slot `s` if and only if slot `s` is loading or resident with key
///    `k`.
/// 2. Units that are not resident have pin count zero. Under [`Eviction::Lru`] a resident slot is
///    in exactly one ring: the evictable one, or, only if pinned, the one set aside. Other slots
///    are in none.
/// 3. The counts of resident, pinned and loading slots are right.
/// 4. Every slot is home, loading, or resident and on the arena's shelf.
/// 5. A slot is handed out only while fewer slots than the limit are in use, and its index is below
///    the limit.
/// 6. There are keys for every slot below the limit and for every slot that is not home.
#[derive(Debug)]
pub struct SlotCache {
    arena: Arena,
    table: Table,
    /// Flat number of the unit in each slot below the limit, and above it up to the last slot in
    /// use.
    keys: Vec<u32>,
    order: Order,
    resident: u32,
    /// Resident units that are pinned.
    in_use: u32,
    loading: u32,
    stats: CacheStats,
}

impl SlotCache {
    /// An empty LRU cache over the slots of `arena`, for banks of the given neuron counts. `None`
    /// if the neurons of all banks exceed 32 bits.
    #[must_use]
    pub fn new(arena: Arena, banks: &[u32]) -> Option<Self> {
        Self::with_eviction(arena, banks, Eviction::Lru)
    }

    /// Like [`new`](Self::new), with another eviction policy.
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

    /// Bytes of bookkeeping for `slots` slots over `neurons` neurons, beyond [`Arena::charge`]: 12
    /// per neuron, plus 1 under LRFU; 9 per slot, or 17 under LRU. The arena's capacity costs
    /// nothing.
    #[must_use]
    pub fn overhead(eviction: Eviction, slots: u32, neurons: u64) -> u64 {
        // The key, and the arena's own state.
        let per_slot = size_of::<u32>() as u64 + Arena::overhead_per_slot();
        Table::bytes_for(neurons)
            .saturating_add(eviction.bytes(slots.into(), neurons))
            .saturating_add(u64::from(slots) * per_slot)
    }

    /// Resizes the keys to the first `n` slots.
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

    /// Begins a pass over all layers, for a token or a chunk of tokens. Advances the clock of
    /// [`Eviction::Lrfu`].
    pub fn begin_pass(&mut self) {
        if let Order::Lrfu(lrfu) = &mut self.order {
            lrfu.begin_pass();
        }
    }

    /// Begins a layer whose last bank is `last`. Later banks come later in this pass. A unit up to
    /// that bank that was not used in this pass will not be used before the next one.
    ///
    /// # Panics
    /// When there is no such bank.
    pub fn begin_layer(&mut self, last: u32) {
        if let Order::Lrfu(lrfu) = &mut self.order {
            lrfu.begin_layer(self.table.end(last));
        }
    }

    /// Sets the prior of a unit never used: as if it had been used `rate` times per pass so far.
    ///
    /// # Panics
    /// If the key names no neuron.
    pub fn set_prior(&mut self, key: Key, rate: f64) {
        let unit = self.table.at_mut(self.table.flat(key));
        if let Order::Lrfu(lrfu) = &self.order {
            lrfu.set_prior(unit, rate);
        }
    }

    /// Reports the margins of the units from `first` on: how far a predictor's score is above the
    /// threshold at which it selects the unit, in sixteenths of a doubling of uses. Call it in
    /// every pass in which margins are known. `consecutive`: the previous report was for the
    /// previous token, so both together show how stable margins are.
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
            lrfu.set_margins(flat, margins, consecutive);
        }
    }

    /// Looks up a unit and pins it. The release of the pin counts as the use.
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

    /// Reserves a slot to load `key` into: a free one, or the next victim's. `None` if everything
    /// is pinned or loading, or `key` is already resident or loading.
    ///
    /// The caller must [`admit`](Self::admit) or [`abandon`](Self::abandon) it.
    pub fn reserve(&mut self, key: Key) -> Option<Slot> {
        let flat = self.table.flat(key);
        if self.table.at(flat).slot().is_some() {
            return None;
        }
        while self.is_full() {
            self.evict_next()?;
        }
        self.hand_out(flat)
    }

    /// Like [`reserve`](Self::reserve), but never evicts: for low-value prefetches.
    pub fn reserve_if_free(&mut self, key: Key) -> Option<Slot> {
        let flat = self.table.flat(key);
        if self.table.at(flat).slot().is_some() || self.is_full() {
            return None;
        }
        self.hand_out(flat)
    }

    /// Pinned slots above a lowered limit count too, so the limit holds.
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

    /// Makes a unit resident that was loaded ahead of need: neither pinned nor used, and last to be
    /// evicted.
    ///
    /// # Panics
    /// As [`admit`](Self::admit).
    pub fn admit_ahead(&mut self, key: Key, slot: Slot) {
        let index = self.make_resident(key, slot);
        match &mut self.order {
            Order::Lru(lru) => lru.add(index),
            Order::Lrfu(lrfu) => lrfu.keep_read_ahead(self.table.at_mut(self.table.flat(key))),
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

    /// Returns a slot whose load failed or was not needed.
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

    /// Releases one pin. Releasing the last one counts as a use.
    ///
    /// # Panics
    /// When the unit is not pinned.
    #[inline]
    pub fn unpin(&mut self, key: Key) {
        self.release(key, After::Used);
    }

    /// Releases one pin. Releasing the last one does not count as a use, except under
    /// [`Eviction::Lru`].
    ///
    /// # Panics
    /// When the unit is not pinned.
    pub fn unpin_unused(&mut self, key: Key) {
        self.release(key, After::Unused);
    }

    /// Releases one pin. Releasing the last one makes the unit the first victim: for units that
    /// will not be used again before all others, as in a scan larger than the cache.
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
                lrfu.add_use(unit);
                if after == After::First {
                    lrfu.put_first(flat, unit);
                }
            }
        }
    }

    /// The bytes of a pinned unit.
    ///
    /// # Panics
    /// If the unit is no longer resident, which a pin prevents.
    #[inline]
    #[must_use]
    pub fn bytes(&self, id: SlotId) -> &[u8] {
        match self.arena.shelved(id.0) {
            Some(bytes) => bytes,
            None => panic!("slot {} is not resident; it was used without a pin", id.0),
        }
    }

    /// Whether a slot holds a unit. Reads the same memory as [`bytes`](Self::bytes), so it can
    /// prefetch it.
    #[inline]
    #[must_use]
    pub fn holds(&self, id: SlotId) -> bool {
        self.arena.is_shelved(id.0)
    }

    /// Evicts a unit. `false` if it is not resident, or pinned.
    pub fn remove(&mut self, key: Key) -> bool {
        let unit = self.table.get(key);
        let (0, Some(slot)) = (unit.pins, unit.resident()) else {
            return false;
        };
        self.retire(slot)
    }

    /// Resident units.
    #[must_use]
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Slots reserved and not yet admitted or abandoned.
    #[must_use]
    pub fn loading(&self) -> u32 {
        self.loading
    }

    /// The slot limit.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.arena.limit()
    }

    /// The arena that holds the slots.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// Changes the slot limit, up to the arena's capacity. Memory above it returns to the operating
    /// system, with its bookkeeping. Shrinking evicts the next victims and moves other units below
    /// the new limit. Allocates, so keep it off the token path.
    ///
    /// Returns how many slots above the limit are still pinned or loading. Their memory is freed on
    /// eviction; call again after unpinning to free it at once.
    pub fn resize(&mut self, slots: u32) -> u32 {
        let slots = slots.min(self.arena.capacity());
        while self.resident + self.loading > slots && self.evict_next().is_some() {}
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

    /// Continues with other slots, for example of another length. Counts, the clock and the history of units remain.
    ///
    /// # Panics
    /// If a unit is resident or loading, or if `arena` has another capacity.
    pub fn replace_arena(&mut self, arena: Arena) {
        assert_eq!(
            (self.resident, self.loading),
            (0, 0),
            "the cache is not empty"
        );
        assert_eq!(arena.capacity(), self.arena.capacity(), "another capacity");
        self.arena = arena;
        self.keep_keys(self.arena.limit());
    }

    /// Moves an unpinned unit to a free slot, or evicts it if there is none.
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

    /// Evicts the next victim and returns its slot to the arena. `None` if there is none.
    fn evict_next(&mut self) -> Option<()> {
        self.prefetch_victims();
        let (table, keys) = (&self.table, &self.keys);
        let slot = match &mut self.order {
            Order::Lru(lru) => lru.victim(table, |slot| keys[slot as usize])?,
            Order::Lrfu(lrfu) => lrfu.victim(table, keys)?,
        };
        self.stats.evictions += u64::from(self.retire(slot));
        Some(())
    }

    /// Prefetches what evicting the upcoming victims will read, at scattered addresses. Reading
    /// them one after the other would cost a cache miss each.
    fn prefetch_victims(&self) {
        let Order::Lrfu(lrfu) = &self.order else {
            return;
        };
        let unit = |ahead| Some(self.table.at(lrfu.upcoming(ahead)?));
        let slot = |ahead| unit(ahead)?.resident();
        black_box(unit(8).map(|unit| unit.pins));
        black_box(slot(4).map(|slot| (self.keys[slot as usize], self.arena.is_shelved(slot))));
    }

    /// Returns the slot of a resident unit to the arena. `false` if the slot holds none.
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
