//! The cold cache against a plain model: maps and queues, no slots, no links.

use std::collections::{HashMap, VecDeque};

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::cache::{CacheStats, Eviction, Key, SlotCache, SlotId};
use proptest::prelude::*;

const LEN: usize = 512;
const BANKS: [u32; 3] = [5, 1, 6];

const CAPACITY: u32 = 7;

fn arena() -> Arena {
    Arena::new(CAPACITY, LEN, 512, ArenaOptions::default()).unwrap()
}

fn cache(slots: u32, eviction: Eviction) -> SlotCache {
    let mut cache = SlotCache::with_eviction(arena(), &BANKS, eviction).unwrap();
    assert_eq!(cache.resize(slots), 0);
    cache
}

fn key(n: u32) -> Key {
    let n = n % BANKS.iter().sum::<u32>();
    match n {
        0..5 => Key::new(0, n),
        5 => Key::new(1, 0),
        _ => Key::new(2, n - 6),
    }
}

fn mark(slot: &mut Slot, key: Key) {
    slot.as_mut_slice().fill((key.bank * 16 + key.neuron) as u8);
}

fn is_marked(bytes: &[u8], key: Key) -> bool {
    bytes.len() == LEN
        && bytes
            .iter()
            .all(|&b| u32::from(b) == key.bank * 16 + key.neuron)
}

#[derive(Debug, Clone)]
enum Op {
    Get(u32),
    Reserve(u32),
    ReserveIfFree(u32),
    Admit(u32),
    Abandon(u32),
    Unpin(u32),
    UnpinUnused(u32),
    UnpinFirstVictim(u32),
    Resize(u32),
    /// An arena with this number of slots, if no unit is in use or loading.
    ReplaceArena(u32),
    Begin(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..12u32;
    prop_oneof![
        6 => n.clone().prop_map(Op::Get),
        6 => n.clone().prop_map(Op::Reserve),
        1 => n.clone().prop_map(Op::ReserveIfFree),
        6 => n.clone().prop_map(Op::Admit),
        1 => n.clone().prop_map(Op::Abandon),
        6 => n.clone().prop_map(Op::Unpin),
        2 => n.clone().prop_map(Op::UnpinUnused),
        2 => n.prop_map(Op::UnpinFirstVictim),
        1 => (0..=CAPACITY).prop_map(Op::Resize),
        1 => (0..=CAPACITY).prop_map(Op::ReplaceArena),
        2 => (0..3u32).prop_map(Op::Begin),
    ]
}

/// The expected behaviour of the cache, in the simplest form.
#[derive(Default)]
struct Model {
    limit: usize,
    /// Evictable, oldest first.
    lru: VecDeque<Key>,
    /// In use, in the order of last use.
    pinned: Vec<Key>,
    pins: HashMap<Key, u32>,
    loading: Vec<Key>,
    stats: CacheStats,
}

impl Model {
    fn resident(&self, k: Key) -> bool {
        self.lru.contains(&k) || self.pinned.contains(&k)
    }

    fn used(&self) -> usize {
        self.lru.len() + self.pinned.len() + self.loading.len()
    }

    /// Evicts the oldest.
    fn evict(&mut self) -> bool {
        let some = self.lru.pop_front().is_some();
        self.stats.evictions += u64::from(some);
        some
    }
}

struct World {
    eviction: Eviction,
    cache: SlotCache,
    model: Model,
    slots: HashMap<Key, Slot>,
    ids: HashMap<Key, SlotId>,
}

impl World {
    fn new(slots: u32, eviction: Eviction) -> Self {
        let model = Model {
            limit: slots as usize,
            ..Model::default()
        };
        Self {
            eviction,
            cache: cache(slots, eviction),
            model,
            slots: HashMap::new(),
            ids: HashMap::new(),
        }
    }

    fn step(&mut self, op: &Op) {
        if self.eviction == Eviction::Lrfu {
            // `cache_lrfu.rs` checks the order; here it is taken from the cache.
            self.model.lru = self.cache.dump().into_iter().map(key).collect();
        }
        match *op {
            Op::Begin(bank) => {
                if bank == 0 {
                    self.cache.begin_pass();
                }
                self.cache.begin_layer(bank);
            }
            Op::Get(n) => self.get(key(n)),
            Op::Reserve(n) => self.reserve(key(n), true),
            Op::ReserveIfFree(n) => self.reserve(key(n), false),
            Op::Admit(n) => self.admit(key(n)),
            Op::Abandon(n) => self.abandon(key(n)),
            Op::Unpin(n) => self.unpin(key(n), false, SlotCache::unpin),
            Op::UnpinUnused(n) => self.unpin(key(n), false, SlotCache::unpin_unused),
            Op::UnpinFirstVictim(n) => self.unpin(key(n), true, SlotCache::unpin_first_victim),
            Op::Resize(slots) => self.resize(slots),
            Op::ReplaceArena(slots) => {
                self.resize(0);
                if self.model.used() == 0 {
                    self.cache.replace_arena(arena());
                }
                self.resize(slots);
            }
        }
        self.check();
    }

    fn get(&mut self, k: Key) {
        let got = self.cache.get_pin(k);
        assert_eq!(got.is_some(), self.model.resident(k), "get {k:?}");
        let m = &mut self.model;
        if let Some(id) = got {
            m.stats.hits += 1;
            m.lru.retain(|&x| x != k);
            m.pinned.retain(|&x| x != k);
            m.pinned.push(k);
            *m.pins.entry(k).or_default() += 1;
            self.ids.insert(k, id);
            assert!(is_marked(self.cache.bytes(id), k));
        } else {
            m.stats.misses += 1;
        }
    }

    /// Requests a slot; with `evict`, evicts others for it.
    fn reserve(&mut self, k: Key, evict: bool) {
        let m = &mut self.model;
        let known = m.resident(k) || m.loading.contains(&k);
        let mut room = !known;
        while room && m.used() >= m.limit {
            room = evict && m.evict();
        }
        let got = if evict {
            self.cache.reserve(k)
        } else {
            self.cache.reserve_if_free(k)
        };
        assert_eq!(got.is_some(), room, "reserve {k:?}, evicting: {evict}");
        if let Some(mut slot) = got {
            mark(&mut slot, k);
            m.loading.push(k);
            self.slots.insert(k, slot);
        }
    }

    fn admit(&mut self, k: Key) {
        if let Some(slot) = self.slots.remove(&k) {
            let id = self.cache.admit(k, slot);
            assert!(is_marked(self.cache.bytes(id), k));
            self.model.loading.retain(|&x| x != k);
            self.model.pinned.push(k);
            self.model.pins.insert(k, 1);
            self.ids.insert(k, id);
        }
    }

    fn abandon(&mut self, k: Key) {
        if let Some(slot) = self.slots.remove(&k) {
            self.cache.abandon(k, slot);
            self.model.loading.retain(|&x| x != k);
        }
    }

    /// Releases one pin by `unpin`; the last release makes the neuron the `first` victim or the
    /// last.
    fn unpin(&mut self, k: Key, first: bool, unpin: fn(&mut SlotCache, Key)) {
        let Some(pins) = self.model.pins.get_mut(&k) else {
            return;
        };
        unpin(&mut self.cache, k);
        *pins -= 1;
        if *pins == 0 {
            self.model.pins.remove(&k);
            self.model.pinned.retain(|&x| x != k);
            if first {
                self.model.lru.push_front(k);
            } else {
                self.model.lru.push_back(k);
            }
        }
    }

    fn resize(&mut self, slots: u32) {
        let m = &mut self.model;
        m.limit = slots as usize;
        while m.used() > m.limit && m.evict() {}
        let stuck = self.cache.resize(slots);
        // Stuck slots are in use; with nothing in use there are none.
        let in_use = m.pinned.len() + m.loading.len();
        assert!(stuck as usize <= in_use, "{stuck} stuck, {in_use} in use");
        assert_eq!(self.cache.slots(), slots);
    }

    fn check(&self) {
        self.cache.check_invariants();
        let m = &self.model;
        assert_eq!(self.cache.resident() as usize, m.lru.len() + m.pinned.len());
        assert_eq!(self.cache.loading() as usize, m.loading.len());
        assert_eq!(self.cache.stats(), m.stats);
        for n in 0..12 {
            let k = key(n);
            assert_eq!(self.cache.contains(k), m.resident(k), "contains {k:?}");
            assert_eq!(self.cache.is_loading(k), m.loading.contains(&k));
        }
        let flat = |k: &Key| [0, 5, 6][k.bank as usize] + k.neuron;
        let mut want: Vec<u32> = m.lru.iter().map(flat).collect();
        let mut found = self.cache.dump();
        if self.eviction == Eviction::Lrfu {
            want.sort_unstable();
            found.sort_unstable();
        }
        assert_eq!(found, want, "order of eviction");
        for k in &m.pinned {
            assert!(is_marked(self.cache.bytes(self.ids[k]), *k), "{k:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn behaves_like_the_model(slots in 1..7u32, ops in prop::collection::vec(op(), 1..120)) {
        for eviction in [Eviction::Lru, Eviction::Lrfu] {
            let mut world = World::new(slots, eviction);
            for op in &ops {
                world.step(op);
            }
        }
    }
}
