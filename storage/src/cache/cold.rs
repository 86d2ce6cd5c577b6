//! A fixed number of slots for units of one size, and who leaves them for others.

use super::policy::{Order, Policy};
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

/// All of it together, because a lookup reads all of it.
#[derive(Debug)]
struct Entry {
    state: State,
    /// Flat number of the unit.
    key: u32,
    pins: u32,
}

impl Entry {
    fn home() -> Self {
        Self {
            state: State::Home,
            key: 0,
            pins: 0,
        }
    }
}

/// Cache of units of one size (bundles, or parts of them). Who is evicted says its [`Policy`].
///
/// Life of a slot: home -> [`reserve`](Self::reserve) -> loading -> [`admit`](Self::admit) ->
/// resident and pinned -> unpinned -> evicted -> loading for somebody else.
///
/// Recency is the time of release: under [`Policy::Lru`] an unpinned unit is the newest of the
/// evictable ones. A pinned one keeps its place in the order, so that a lookup touches nothing
/// but its entry; it is taken out when it would be the next victim, or put anew when released.
///
/// Invariants, checked by [`check_invariants`](Self::check_invariants):
/// 1. The table names slot `s` for key `k` if and only if slot `s` is loading or resident with
///    key `k`.
/// 2. A resident slot is in exactly one list of the order: of those that may be evicted, or, only
///    with a pin count above zero, of those in use. Others are in none and have pin count zero.
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
    entries: Vec<Entry>,
    order: Order,
    resident: u32,
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
            entries: Vec::new(),
            resident: 0,
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
        // The entry, two links, and what the arena itself keeps.
        let per_slot = size_of::<Entry>() as u64 + 2 * 4 + Arena::overhead_per_slot();
        Table::bytes_for(neurons)
            .saturating_add(policy.bytes(neurons))
            .saturating_add(u64::from(slots) * per_slot)
    }

    /// Makes or drops entries, so that there are those of the first `n` slots.
    fn keep_entries(&mut self, n: u32) {
        let len = n as usize;
        self.entries
            .reserve_exact(len.saturating_sub(self.entries.len()));
        self.entries.resize_with(len, Entry::home);
        self.entries.shrink_to_fit();
        self.order.resize(n);
    }

    /// Time passes: what was used so far counts a little less. For every token, or chunk.
    pub fn tick(&mut self) {
        let entries = &self.entries;
        self.order.tick(|slot| entries[slot as usize].key);
    }

    /// Says how often a unit will be used per tick as far as is known, before it ever was.
    ///
    /// # Panics
    /// When the key names no neuron.
    pub fn expect(&mut self, key: Key, uses: f64) {
        self.order.expect(self.table.flat(key), uses);
    }

    /// Looks a unit up and pins it. The caller unpins it, which counts as the use.
    ///
    /// # Panics
    /// When the key names no neuron.
    #[inline]
    pub fn get_pin(&mut self, key: Key) -> Option<SlotId> {
        let flat = self.table.flat(key);
        if let Some(slot) = self.table.get(flat) {
            let entry = &mut self.entries[slot as usize];
            if matches!(entry.state, State::Resident(_)) {
                entry.pins += 1;
                self.stats.hits += 1;
                return Some(SlotId(slot));
            }
        }
        self.stats.misses += 1;
        None
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
        slot.is_some_and(|slot| matches!(self.entries[slot as usize].state, State::Loading))
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
        self.resident + self.loading >= self.arena.limit()
    }

    fn hand_out(&mut self, flat: u32) -> Option<Slot> {
        let slot = self.arena.take()?;
        self.table.set(flat, Some(slot.index()));
        self.entries[slot.index() as usize] = Entry {
            state: State::Loading,
            key: flat,
            pins: 0,
        };
        self.loading += 1;
        Some(slot)
    }

    /// Makes a loaded unit resident and pins it.
    ///
    /// # Panics
    /// When the slot was not reserved for `key`.
    pub fn admit(&mut self, key: Key, slot: Slot) -> SlotId {
        let index = self.make_resident(key, slot);
        self.entries[index as usize].pins = 1;
        self.order.set_aside(index);
        SlotId(index)
    }

    /// Makes a unit resident that was loaded ahead of its need: neither pinned nor counted as
    /// used, and the last to be evicted.
    ///
    /// # Panics
    /// As [`admit`](Self::admit).
    pub fn admit_ahead(&mut self, key: Key, slot: Slot) {
        let index = self.make_resident(key, slot);
        self.order.push_last_victim(index);
    }

    fn make_resident(&mut self, key: Key, slot: Slot) -> u32 {
        let index = self.loading_slot(key, &slot);
        self.loading -= 1;
        self.resident += 1;
        self.entries[index as usize].state = State::Resident(slot.share());
        index
    }

    /// Takes a slot back whose load failed or was not needed.
    ///
    /// # Panics
    /// When the slot was not reserved for `key`.
    pub fn abandon(&mut self, key: Key, slot: Slot) {
        let index = self.loading_slot(key, &slot);
        self.loading -= 1;
        self.entries[index as usize].state = State::Home;
        self.table.set(self.entries[index as usize].key, None);
        self.arena.put(slot);
    }

    fn loading_slot(&self, key: Key, slot: &Slot) -> u32 {
        let index = slot.index();
        let entry = self.entries.get(index as usize);
        let loading = entry.is_some_and(|e| matches!(e.state, State::Loading));
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
        if let Some(unit) = self.drop_pin(id) {
            self.order.push(id.0, unit);
        }
    }

    /// Releases one pin. With the last one the unit becomes the next to be evicted: for units that
    /// are known not to be wanted before everything else is, as in a scan larger than the cache.
    ///
    /// # Panics
    /// When the unit is not pinned.
    pub fn unpin_first_victim(&mut self, id: SlotId) {
        if self.drop_pin(id).is_some() {
            self.order.push_first_victim(id.0);
        }
    }

    /// The unit, if that was the last pin; it is then in no list, and was used.
    fn drop_pin(&mut self, id: SlotId) -> Option<u32> {
        let entry = &mut self.entries[id.index()];
        assert!(entry.pins > 0, "slot {} is not pinned", id.0);
        entry.pins -= 1;
        if entry.pins > 0 {
            return None;
        }
        self.order.remove(id.0);
        self.order.used(entry.key);
        Some(entry.key)
    }

    /// The bytes of a pinned unit.
    ///
    /// # Panics
    /// When the unit is not resident any more, which a pin prevents.
    #[inline]
    #[must_use]
    pub fn bytes(&self, id: SlotId) -> &[u8] {
        match &self.entries[id.index()].state {
            State::Resident(slot) => slot.as_slice(),
            _ => panic!("slot {} is not resident; it was used without a pin", id.0),
        }
    }

    /// Whether a unit is resident and pinned.
    #[inline]
    #[must_use]
    pub fn is_pinned(&self, id: SlotId) -> bool {
        self.entries[id.index()].pins > 0
    }

    /// A handle to the bytes of a unit that does not borrow the cache, so that threads can compute
    /// on it while the cache goes on. It keeps the unit from being evicted, like a pin.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    #[inline]
    #[must_use]
    pub fn share(&self, id: SlotId) -> SharedSlot {
        match &self.entries[id.index()].state {
            State::Resident(slot) => slot.clone(),
            _ => panic!("slot {} is not resident; it was used without a pin", id.0),
        }
    }

    /// Makes a unit leave. `false` when it is not resident, or in use.
    pub fn remove(&mut self, key: Key) -> bool {
        let Some(slot) = self.table.get(self.table.flat(key)) else {
            return false;
        };
        if !self.is_resident(slot) || self.entries[slot as usize].pins > 0 {
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
        while self.resident + self.loading > slots && self.evict_oldest().is_some() {}
        self.arena.set_limit(slots);
        let known = self.entries.len() as u32;
        let (mut stuck, mut needed) = (0, slots);
        for index in slots..known {
            let entry = &self.entries[index as usize];
            let gone = match entry.state {
                State::Home => true,
                State::Resident(_) if entry.pins == 0 => self.move_down(index),
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
        let key = self.entries[from as usize].key;
        self.table.set(key, Some(to));
        self.entries[to as usize] = Entry {
            state: State::Resident(new.share()),
            key,
            pins: 0,
        };
        self.arena.put(old);
        true
    }

    /// Evicts the next victim; its slot goes home. `None` when there is none.
    fn evict_oldest(&mut self) -> Option<()> {
        for _ in 0..self.resident {
            let slot = self.order.victim()?;
            self.order.remove(slot);
            if self.entries[slot as usize].pins > 0 {
                self.order.set_aside(slot);
                continue;
            }
            // A unit with a shared handle is in use; it gets another round.
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
        let state = &mut self.entries[slot as usize].state;
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
        self.resident -= 1;
        self.table.set(self.entries[index as usize].key, None);
        self.arena.put(slot);
    }

    #[inline]
    fn is_resident(&self, slot: u32) -> bool {
        matches!(self.entries[slot as usize].state, State::Resident(_))
    }

    /// Evictable units from the next victim on, as flat neuron numbers, for tests and traces.
    #[must_use]
    pub fn dump(&self) -> Vec<u32> {
        let entries = self.order.iter().map(|s| &self.entries[s as usize]);
        entries.filter(|e| e.pins == 0).map(|e| e.key).collect()
    }

    /// Checks the numbered invariants; for tests.
    ///
    /// # Panics
    /// When one does not hold, naming it.
    pub fn check_invariants(&self) {
        let entries = self.entries.len();
        assert!(entries >= self.arena.limit() as usize, "6: too few entries");
        assert_eq!(self.order.rings.len(), entries, "6: links");
        let mut listed = vec![0u32; entries];
        for slot in self.order.iter() {
            listed[slot as usize] += 1;
        }
        for slot in self.order.iter_aside() {
            listed[slot as usize] += 1;
            let pins = self.entries[slot as usize].pins;
            assert!(pins > 0, "2: slot {slot} is not pinned");
        }
        let (mut home, mut loading, mut resident) = (0, 0, 0);
        for (slot, Entry { state, key, pins }) in self.entries.iter().enumerate() {
            let named = self.table.get(*key) == Some(slot as u32);
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
            assert!(is_resident || *pins == 0, "2: pins of slot {slot}");
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
