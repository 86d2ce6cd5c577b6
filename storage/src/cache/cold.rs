//! A fixed number of slots for units of one size, and who leaves them for others.

use super::policy::{Order, Policy};
use super::rings::resize;
use super::table::{Key, Table};
use crate::arena::{Arena, SharedSlot, Slot};

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

/// What is known of one slot.
#[derive(Debug)]
enum State {
    /// In the arena.
    Home,
    /// Handed out to be filled.
    Loading,
    /// Filled.
    Resident(SharedSlot),
}

/// Cache of units of one size (bundles, or parts of them). Who is evicted says its [`Policy`].
///
/// Life of a slot: home -> [`reserve`](Self::reserve) -> loading -> [`admit`](Self::admit) ->
/// resident and pinned -> unpinned -> evicted -> loading for somebody else.
///
/// Recency is the time of release: under [`Policy::Lru`] an unpinned unit is the newest of the
/// evictable ones. [`unpin_all`](Self::unpin_all) releases in the order of last use.
///
/// Invariants, checked by [`check_invariants`](Self::check_invariants):
/// 1. The table names slot `s` for key `k` if and only if slot `s` is loading or resident with
///    key `k`.
/// 2. A resident slot is in exactly one list of the order: of those in use if its pin count is
///    above zero, else of those that may be evicted. Others are in none and have pin count zero.
/// 3. The list lengths add up to the number of resident slots.
/// 4. Every slot is home, loading or resident; the arena agrees on who is home.
/// 5. A slot is handed out only while fewer than the limit are in use, and never one at or above
///    the limit.
/// 6. There are entries for every slot below the limit and for every slot that is not home.
#[derive(Debug)]
pub struct ColdCache {
    arena: Arena,
    table: Table,
    /// All of the following have one entry per slot below the limit, and for those above as long
    /// as one is in use. The others are home.
    state: Vec<State>,
    key: Vec<u32>,
    pins: Vec<u32>,
    order: Order,
    loading: u32,
    stats: CacheStats,
}

impl ColdCache {
    /// An empty cache over the slots of `arena` for banks of the given neuron counts, least
    /// recently used first out. `None` when the neurons of all banks cannot be numbered with 32
    /// bits.
    #[must_use]
    pub fn new(arena: Arena, banks: &[u32]) -> Option<Self> {
        Self::with_policy(arena, banks, Policy::Lru)
    }

    /// The same with another policy.
    #[must_use]
    pub fn with_policy(arena: Arena, banks: &[u32], policy: Policy) -> Option<Self> {
        let table = Table::new(banks)?;
        let mut cache = Self {
            order: Order::new(policy, table.len()),
            table,
            state: Vec::new(),
            key: Vec::new(),
            pins: Vec::new(),
            loading: 0,
            stats: CacheStats::default(),
            arena,
        };
        cache.keep_entries(cache.arena.limit());
        Some(cache)
    }

    /// Bytes of bookkeeping a cache of `slots` slots over `neurons` neurons needs beside
    /// [`Arena::charge`], for the budget: 4 for each neuron, 5 more where uses are counted, 49 for
    /// each slot. The arena's capacity costs nothing.
    #[must_use]
    pub fn overhead(policy: Policy, slots: u32, neurons: u64) -> u64 {
        // State, key, pins, two links, and what the arena itself keeps.
        let per_slot = size_of::<State>() as u64 + 4 * 4 + Arena::overhead_per_slot();
        Table::bytes_for(neurons)
            .saturating_add(policy.bytes(neurons))
            .saturating_add(u64::from(slots) * per_slot)
    }

    /// Makes or drops entries, so that there are those of the first `n` slots.
    fn keep_entries(&mut self, n: u32) {
        let len = n as usize;
        self.state
            .reserve_exact(len.saturating_sub(self.state.len()));
        self.state.resize_with(len, || State::Home);
        self.state.shrink_to_fit();
        resize(&mut self.key, len, 0);
        resize(&mut self.pins, len, 0);
        self.order.resize(n);
    }

    /// Time passes: what was used so far counts a little less. For every token, or chunk.
    pub fn tick(&mut self) {
        self.order.tick(&self.key);
    }

    /// Says how often a unit will be used per tick as far as is known, before it ever was.
    ///
    /// # Panics
    /// When the key names no neuron.
    pub fn expect(&mut self, key: Key, uses: f64) {
        self.order.expect(self.table.flat(key), uses);
    }

    /// Looks a unit up, makes it the most recently used and pins it. The caller unpins it.
    ///
    /// # Panics
    /// When the key names no neuron.
    #[inline]
    pub fn get_pin(&mut self, key: Key) -> Option<SlotId> {
        let flat = self.table.flat(key);
        match self.table.get(flat) {
            Some(slot) if self.is_resident(slot) => {
                self.stats.hits += 1;
                let i = slot as usize;
                if self.pins[i] == 0 {
                    self.order.remove(slot);
                } else {
                    self.order.unpin(slot);
                }
                self.order.used(flat);
                self.order.pin(slot);
                self.pins[i] += 1;
                Some(SlotId(slot))
            }
            _ => {
                self.stats.misses += 1;
                None
            }
        }
    }

    /// Whether a unit is resident. Does not count as a use.
    #[inline]
    #[must_use]
    pub fn contains(&self, key: Key) -> bool {
        let slot = self.table.get(self.table.flat(key));
        slot.is_some_and(|slot| self.is_resident(slot))
    }

    /// Whether a unit is being loaded.
    #[inline]
    #[must_use]
    pub fn is_loading(&self, key: Key) -> bool {
        let slot = self.table.get(self.table.flat(key));
        slot.is_some_and(|slot| matches!(self.state[slot as usize], State::Loading))
    }

    /// A slot to load `key` into: a free one, or that of the next victim among unpinned units.
    /// `None` when everything is pinned or loading, or `key` is resident or loading already.
    ///
    /// The caller ends it with [`admit`](Self::admit) or [`abandon`](Self::abandon).
    pub fn reserve(&mut self, key: Key) -> Option<Slot> {
        let flat = self.table.flat(key);
        if self.table.get(flat).is_some() {
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
        if self.table.get(flat).is_some() || self.is_full() {
            return None;
        }
        self.hand_out(flat)
    }

    /// Slots beyond the limit that are still in use count, so the limit holds while they linger.
    fn is_full(&self) -> bool {
        self.resident() + self.loading >= self.arena.limit()
    }

    fn hand_out(&mut self, flat: u32) -> Option<Slot> {
        let slot = self.arena.take()?;
        self.table.set(flat, Some(slot.index()));
        self.state[slot.index() as usize] = State::Loading;
        self.key[slot.index() as usize] = flat;
        self.loading += 1;
        Some(slot)
    }

    /// Makes a loaded unit resident, as the most recently used one, and pins it.
    ///
    /// # Panics
    /// When the slot was not reserved for `key`.
    pub fn admit(&mut self, key: Key, slot: Slot) -> SlotId {
        let index = self.loading_slot(key, &slot);
        self.loading -= 1;
        self.state[index as usize] = State::Resident(slot.share());
        self.pins[index as usize] = 1;
        self.order.used(self.key[index as usize]);
        self.order.pin(index);
        SlotId(index)
    }

    /// Makes a unit resident that was loaded ahead of its need: neither pinned nor counted as
    /// used, and the last to be evicted.
    ///
    /// # Panics
    /// As [`admit`](Self::admit).
    pub fn admit_ahead(&mut self, key: Key, slot: Slot) {
        let index = self.loading_slot(key, &slot);
        self.loading -= 1;
        self.state[index as usize] = State::Resident(slot.share());
        self.order.push_last_victim(index);
    }

    /// Takes a slot back whose load failed or was not needed.
    ///
    /// # Panics
    /// When the slot was not reserved for `key`.
    pub fn abandon(&mut self, key: Key, slot: Slot) {
        let index = self.loading_slot(key, &slot);
        self.loading -= 1;
        self.table.set(self.key[index as usize], None);
        self.state[index as usize] = State::Home;
        self.arena.put(slot);
    }

    fn loading_slot(&self, key: Key, slot: &Slot) -> u32 {
        let index = slot.index();
        let loading = matches!(self.state.get(index as usize), Some(State::Loading));
        assert!(
            loading && self.table.get(self.table.flat(key)) == Some(index),
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
    pub fn unpin(&mut self, id: SlotId) {
        if self.drop_pin(id) {
            self.order.push(id.0, self.key[id.index()]);
        }
    }

    /// Releases one pin. With the last one the unit becomes the next to be evicted: for units that
    /// are known not to be wanted before everything else is, as in a scan larger than the cache.
    ///
    /// # Panics
    /// When the unit is not pinned.
    pub fn unpin_first_victim(&mut self, id: SlotId) {
        if self.drop_pin(id) {
            self.order.push_first_victim(id.0);
        }
    }

    /// True when that was the last pin; the unit is then in no list.
    fn drop_pin(&mut self, id: SlotId) -> bool {
        let pins = &mut self.pins[id.index()];
        assert!(*pins > 0, "slot {} is not pinned", id.0);
        *pins -= 1;
        let last = *pins == 0;
        if last {
            self.order.unpin(id.0);
        }
        last
    }

    /// Releases all pins of all units: the end of a wave.
    pub fn unpin_all(&mut self) {
        while let Some(slot) = self.order.first_pinned() {
            self.pins[slot as usize] = 0;
            self.order.unpin(slot);
            self.order.push(slot, self.key[slot as usize]);
        }
    }

    /// The bytes of a pinned unit.
    ///
    /// # Panics
    /// When the unit is not resident any more, which a pin prevents.
    #[inline]
    #[must_use]
    pub fn bytes(&self, id: SlotId) -> &[u8] {
        match &self.state[id.index()] {
            State::Resident(slot) => slot.as_slice(),
            _ => panic!("slot {} is not resident; it was used without a pin", id.0),
        }
    }

    /// A handle to the bytes of a unit that does not borrow the cache, so that threads can compute
    /// on it while the cache goes on. It keeps the unit from being evicted, like a pin.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    #[inline]
    #[must_use]
    pub fn share(&self, id: SlotId) -> SharedSlot {
        match &self.state[id.index()] {
            State::Resident(slot) => slot.clone(),
            _ => panic!("slot {} is not resident; it was used without a pin", id.0),
        }
    }

    /// Makes a unit leave. `false` when it is not resident, or in use.
    pub fn remove(&mut self, key: Key) -> bool {
        let Some(slot) = self.table.get(self.table.flat(key)) else {
            return false;
        };
        if !self.is_resident(slot) || self.pins[slot as usize] > 0 {
            return false;
        }
        let Some(exclusive) = self.make_exclusive(slot) else {
            return false;
        };
        self.order.remove(slot);
        self.retire(slot, exclusive);
        true
    }

    /// Units resident now.
    #[must_use]
    pub fn resident(&self) -> u32 {
        self.order.evictable() + self.order.pinned()
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

    /// Bytes per slot.
    #[must_use]
    pub fn slot_len(&self) -> usize {
        self.arena.slot_len()
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// Sets the counters to zero, for a new measurement.
    pub fn reset_stats(&mut self) {
        self.stats = CacheStats::default();
    }

    /// Changes how many slots may be used, at most the arena's capacity. Memory beyond is given
    /// back to the operating system, and so is that of the bookkeeping. The next victims
    /// leave; the others are moved below the new end if need be. Allocates: not for the token path.
    ///
    /// Returns how many slots beyond the new end are still pinned or loading. Their memory goes
    /// when they are evicted; call again after unpinning to have it at once.
    pub fn resize(&mut self, slots: u32) -> u32 {
        let slots = slots.min(self.arena.capacity());
        while self.resident() + self.loading > slots && self.evict_oldest().is_some() {}
        self.arena.set_limit(slots);
        let known = self.state.len() as u32;
        let (mut stuck, mut needed) = (0, slots);
        for index in slots..known {
            let gone = match self.state[index as usize] {
                State::Home => true,
                State::Resident(_) if self.pins[index as usize] == 0 => self.move_down(index),
                _ => false,
            };
            if !gone {
                stuck += 1;
                needed = index + 1;
            }
        }
        self.keep_entries(needed);
        self.arena.trim();
        stuck
    }

    /// Moves an unpinned unit to a free slot, or evicts it when there is none. `false` when
    /// somebody holds a handle to it.
    fn move_down(&mut self, from: u32) -> bool {
        let Some(old) = self.make_exclusive(from) else {
            return false;
        };
        let Some(mut new) = self.arena.take() else {
            self.order.remove(from);
            self.retire(from, old);
            self.stats.evictions += 1;
            return true;
        };
        new.as_mut_slice().copy_from_slice(old.as_slice());
        let to = new.index();
        self.order.rings.replace(from, to);
        self.key[to as usize] = self.key[from as usize];
        self.table.set(self.key[from as usize], Some(to));
        self.state[to as usize] = State::Resident(new.share());
        self.arena.put(old);
        true
    }

    /// Evicts the next victim; its slot goes home. `None` when there is none.
    fn evict_oldest(&mut self) -> Option<()> {
        // A unit with a shared handle is in use; it gets another round.
        for _ in 0..self.order.evictable() {
            let slot = self.order.victim()?;
            self.order.remove(slot);
            if let Some(exclusive) = self.make_exclusive(slot) {
                self.retire(slot, exclusive);
                self.stats.evictions += 1;
                return Some(());
            }
            self.order.push_last_victim(slot);
        }
        None
    }

    /// Takes the slot of a resident unit out of its state, unless handles to it are alive.
    fn make_exclusive(&mut self, slot: u32) -> Option<Slot> {
        let state = &mut self.state[slot as usize];
        match std::mem::replace(state, State::Home) {
            State::Resident(shared) => match shared.try_unshare() {
                Ok(exclusive) => Some(exclusive),
                Err(shared) => {
                    *state = State::Resident(shared);
                    None
                }
            },
            other => {
                *state = other;
                None
            }
        }
    }

    fn retire(&mut self, index: u32, slot: Slot) {
        self.table.set(self.key[index as usize], None);
        self.arena.put(slot);
    }

    #[inline]
    fn is_resident(&self, slot: u32) -> bool {
        matches!(self.state[slot as usize], State::Resident(_))
    }

    /// Evictable units from the next victim on, as flat neuron numbers, for tests and traces.
    #[must_use]
    pub fn dump(&self) -> Vec<u32> {
        let slots = self.order.iter();
        slots.map(|s| self.key[s as usize]).collect()
    }

    /// Checks the numbered invariants; for tests.
    ///
    /// # Panics
    /// When one does not hold, naming it.
    pub fn check_invariants(&self) {
        let entries = self.state.len();
        assert!(entries >= self.arena.limit() as usize, "6: too few entries");
        let others = [self.key.len(), self.pins.len(), self.order.rings.len()];
        assert_eq!(others, [entries; 3], "6: entries of different number");
        let mut listed = vec![0u32; entries];
        for slot in self.order.iter() {
            listed[slot as usize] += 1;
            assert_eq!(
                self.pins[slot as usize], 0,
                "2: slot {slot} may be evicted and is pinned"
            );
        }
        for slot in self.order.iter_pinned() {
            listed[slot as usize] += 1;
            assert!(self.pins[slot as usize] > 0, "2: slot {slot} is not pinned");
        }
        let (mut home, mut loading, mut resident) = (0, 0, 0);
        for (slot, state) in self.state.iter().enumerate() {
            let named = self.table.get(self.key[slot]) == Some(slot as u32);
            match state {
                State::Home => {
                    home += u32::from((slot as u32) < self.arena.limit());
                    assert!(!named, "1: home slot {slot} is in the table");
                }
                State::Loading => loading += 1,
                State::Resident(shared) => {
                    resident += 1;
                    assert_eq!(shared.index() as usize, slot, "4: slot {slot} is misplaced");
                }
            }
            let is_resident = matches!(state, State::Resident(_));
            assert!(
                matches!(state, State::Home) || named,
                "1: slot {slot} has no entry"
            );
            assert_eq!(
                listed[slot],
                u32::from(is_resident),
                "2: lists of slot {slot}"
            );
            assert!(
                is_resident || self.pins[slot] == 0,
                "2: pins of slot {slot}"
            );
        }
        let entries = self.table.present().count() as u32;
        assert_eq!(entries, loading + resident, "1: stray table entries");
        assert_eq!(self.resident(), resident, "3: list lengths");
        assert_eq!(self.loading, loading, "4: loading count");
        assert_eq!(
            self.arena.free() as u32,
            home,
            "4: home slots against the arena"
        );
    }
}
