//! The cache of real runs, replayed: its own code over slots that hold nothing.

use emberflow_engine::CLUSTER;
use emberflow_engine::regions::{hot_prefix, prefixes, split};
use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};

use super::eviction::Cache;
use super::format::Header;
use crate::Failure;

/// Hot clusters and cold neurons, as the engine holds them where Gate rows are
/// resident.
pub struct Shipped {
    neurons: u32,
    /// Clusters at the start of each layer that belong to the hot region.
    prefix: Vec<u32>,
    hot: SlotCache,
    cold: SlotCache,
    /// Needed neurons of the present layer that are to be read.
    wanted: Vec<Key>,
    /// Those that are there.
    pinned: Vec<Key>,
}

impl Shipped {
    /// A cache of `capacity` neurons, divided as the engine divides it.
    pub fn new(header: &Header, capacity: usize) -> Result<Self, Failure> {
        let clusters = header.neurons.div_ceil(CLUSTER) as u32;
        let wanted: Vec<u32> = match header.counts.is_empty() {
            true => vec![0; header.layers],
            false => (header.counts.iter())
                .map(|counts| hot_prefix(counts, header.stats_tokens, 1.0))
                .collect(),
        };
        let sum = wanted.iter().map(|&w| u64::from(w)).sum();
        let (units, slots) = split(capacity as u64, CLUSTER as u64, 1, sum, 0);
        let per_layer = vec![header.neurons as u32; header.layers];
        let too_large = || Failure::usage("more neurons than a cache can number");
        let cache = |slots: u64, banks: &[u32], eviction: Eviction| {
            // an empty region, as the hot one without statistics, still wants an arena
            let slots = u32::try_from(slots.max(1)).map_err(|_| too_large())?;
            let arena = Arena::new(slots, 1, 1, ArenaOptions::default())
                .map_err(emberflow_storage::Error::from)?;
            SlotCache::with_eviction(arena, banks, eviction).ok_or_else(too_large)
        };
        let mut cold = cache(slots, &per_layer, Eviction::Lrfu)?;
        for (bank, counts) in (0..).zip(&header.counts) {
            for (neuron, &count) in (0..).zip(counts) {
                let rate = count as f64 / header.stats_tokens.max(1) as f64;
                cold.set_prior(Key::new(bank, neuron), rate);
            }
        }
        Ok(Self {
            neurons: header.neurons as u32,
            prefix: prefixes(units, &wanted, &vec![clusters; wanted.len()]),
            hot: cache(units, &vec![clusters; header.layers], Eviction::Lru)?,
            cold,
            wanted: Vec::new(),
            pinned: Vec::new(),
        })
    }

    /// Reads a whole cluster into the hot region, as the engine does when one of
    /// its neurons is missing there.
    fn read_cluster(&mut self, key: Key) {
        if let Some(slot) = self.hot.reserve(key) {
            self.hot.admit(key, slot);
            self.hot.unpin(key);
        }
    }

    /// Reads what is missing as far as slots go, then lets go of the layer so far.
    fn read(&mut self) {
        for key in self.wanted.drain(..) {
            let slot = match self.cold.reserve(key) {
                Some(slot) => Some(slot),
                None => {
                    // everything is pinned: clusters before this one are done
                    release(&mut self.cold, &mut self.pinned);
                    self.cold.reserve(key)
                }
            };
            if let Some(slot) = slot {
                self.cold.admit(key, slot);
                self.pinned.push(key);
            }
        }
    }
}

impl Cache for Shipped {
    fn step(&mut self, step: usize, keys: &[u32], missing: &mut Vec<u32>) {
        let bank = step % self.prefix.len();
        if bank == 0 {
            self.cold.begin_pass();
        }
        self.cold.begin_layer(bank as u32);
        let neurons = self.neurons;
        let cluster_of = |key: u32| (key / neurons, key % neurons / CLUSTER as u32);
        for cluster in keys.chunk_by(|a, b| cluster_of(*a) == cluster_of(*b)) {
            let (bank, c) = cluster_of(cluster[0]);
            if c < self.prefix[bank as usize] {
                let key = Key::new(bank, c);
                match self.hot.get_pin(key) {
                    Some(_) => self.hot.unpin(key),
                    None => {
                        missing.extend_from_slice(cluster);
                        self.read_cluster(key);
                    }
                }
                continue;
            }
            for &key in cluster {
                let cold = Key::new(bank, key % neurons);
                match self.cold.get_pin(cold) {
                    Some(_) => self.pinned.push(cold),
                    None => {
                        missing.push(key);
                        self.wanted.push(cold);
                    }
                }
            }
        }
        self.read();
        release(&mut self.cold, &mut self.pinned);
    }
}

fn release(cold: &mut SlotCache, pinned: &mut Vec<Key>) {
    pinned.drain(..).for_each(|key| cold.unpin(key));
}
