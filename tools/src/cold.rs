//! The engine's cache of cold neurons, run without weights: it counts hits and misses only.

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};

use crate::Failure;

/// A cold region without weights.
pub struct Cold {
    cache: SlotCache,
    /// Neurons that the current layer needs and that are not cached.
    missing: Vec<Key>,
    /// Cached neurons that the current layer uses.
    pinned: Vec<Key>,
}

/// A cache of `slots` neurons or experts without their bytes; `banks` holds the number of units per bank.
pub fn cache_of(slots: u64, banks: &[u32], eviction: Eviction) -> Result<SlotCache, Failure> {
    let too_large = || Failure::usage("more neurons than a cache can index");
    // The cache needs at least one slot, even for an empty region.
    let slots = u32::try_from(slots.max(1)).map_err(|_| too_large())?;
    let arena =
        Arena::new(slots, 1, 1, ArenaOptions::default()).map_err(emberflow_storage::Error::from)?;
    SlotCache::with_eviction(arena, banks, eviction).ok_or_else(too_large)
}

impl Cold {
    /// An empty region of `slots` neurons; `banks` holds the number of neurons per bank.
    pub fn new(slots: u64, banks: &[u32]) -> Result<Self, Failure> {
        Ok(Self {
            cache: cache_of(slots, banks, Eviction::Lrfu)?,
            missing: Vec::new(),
            pinned: Vec::new(),
        })
    }

    /// A region of `slots` experts, filled with the most popular ones. `visits` counts visits per layer and expert
    /// over `tokens` tokens. A layer is a bank and an expert is its neuron.
    pub fn of_experts(slots: u64, visits: &[Vec<u64>], tokens: u64) -> Result<Self, Failure> {
        let sizes: Vec<u32> = visits.iter().map(|layer| layer.len() as u32).collect();
        let mut cold = Self::new(slots, &sizes)?;
        let mut all: Vec<(u64, Key)> = Vec::new();
        for (layer, visits) in (0..).zip(visits) {
            let keys = (0..).map(|expert| Key::new(layer, expert));
            all.extend(visits.iter().copied().zip(keys));
        }
        for (visits, key) in &all {
            cold.set_prior(*key, *visits as f64 / tokens.max(1) as f64);
        }
        all.sort_by_key(|(visits, _)| std::cmp::Reverse(*visits));
        all.iter().for_each(|(_, key)| cold.fill(*key));
        Ok(cold)
    }

    /// Sets a neuron's prior: `rate` expected uses per token.
    pub fn set_prior(&mut self, key: Key, rate: f64) {
        self.cache.set_prior(key, rate);
    }

    /// Loads a neuron if a slot is free. Used to fill the region at the start.
    pub fn fill(&mut self, key: Key) {
        if let Some(slot) = self.cache.reserve_if_free(key) {
            self.cache.admit(key, slot);
            self.cache.unpin(key);
        }
    }

    /// Begins the layer of this bank. The first layer begins a new token.
    pub fn begin_layer(&mut self, bank: u32) {
        if bank == 0 {
            self.cache.begin_pass();
        }
        self.cache.begin_layer(bank);
    }

    /// Whether a needed neuron is cached. Pins it if so, records a miss otherwise.
    pub fn find(&mut self, key: Key) -> bool {
        let found = self.cache.get_pin(key).is_some();
        if found {
            self.pinned.push(key)
        } else {
            self.missing.push(key)
        }
        found
    }

    /// Loads the missing neurons while slots can be freed, then unpins the layer's neurons.
    pub fn end_layer(&mut self) {
        for key in self.missing.drain(..) {
            let mut slot = self.cache.reserve(key);
            if slot.is_none() {
                // Every slot is pinned. The earlier clusters are done, so unpin them.
                self.pinned.drain(..).for_each(|key| self.cache.unpin(key));
                slot = self.cache.reserve(key);
            }
            if let Some(slot) = slot {
                self.cache.admit(key, slot);
                self.pinned.push(key);
            }
        }
        self.pinned.drain(..).for_each(|key| self.cache.unpin(key));
    }
}
