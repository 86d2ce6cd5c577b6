//! The engine's own cache code, replayed with empty slots.

use emberflow_engine::CLUSTER;
use emberflow_engine::cluster::{hot_prefix, prefixes, split};
use emberflow_storage::cache::{Eviction, Key, SlotCache};

use super::eviction::Cache;
use super::format::Header;
use emberflow::Failure;
use emberflow::cold::{Cold, cache_of};

/// Hot clusters and cold neurons, divided as by the engine with resident Gate rows.
pub struct Shipped {
    neurons: u32,
    /// Hot clusters at the start of each layer.
    prefix: Vec<u32>,
    hot: SlotCache,
    cold: Cold,
}

impl Shipped {
    /// A cache of `capacity` neurons, divided as the engine does.
    pub fn new(header: &Header, capacity: usize) -> Result<Self, Failure> {
        let clusters = header.neurons.div_ceil(CLUSTER) as u32;
        let wanted: Vec<u32> = if header.counts.is_empty() {
            vec![0; header.layers]
        } else {
            (header.counts.iter())
                .map(|counts| hot_prefix(counts, header.stats_tokens, 1.0))
                .collect()
        };
        let sum = wanted.iter().map(|&w| u64::from(w)).sum();
        let (units, slots) = split(capacity as u64, [CLUSTER as u64, 1], [sum, 0], 0);
        let per_layer = vec![header.neurons as u32; header.layers];
        let mut cold = Cold::new(slots, &per_layer)?;
        for (bank, counts) in (0..).zip(&header.counts) {
            for (neuron, &count) in (0..).zip(counts) {
                let rate = count as f64 / header.stats_tokens.max(1) as f64;
                cold.set_prior(Key::new(bank, neuron), rate);
            }
        }
        Ok(Self {
            neurons: header.neurons as u32,
            prefix: prefixes(units, &wanted, &vec![clusters; wanted.len()]),
            hot: cache_of(units, &vec![clusters; header.layers], Eviction::Lru)?,
            cold,
        })
    }

    /// Reads a whole cluster into the hot region, as the engine does when one of its neurons is
    /// missing there.
    fn read_cluster(&mut self, key: Key) {
        if let Some(slot) = self.hot.reserve(key) {
            self.hot.admit(key, slot);
            self.hot.unpin(key);
        }
    }
}

impl Cache for Shipped {
    fn step(&mut self, step: usize, keys: &[u32], missing: &mut Vec<u32>) {
        let bank = step % self.prefix.len();
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
                if !self.cold.find(Key::new(bank, key % neurons)) {
                    missing.push(key);
                }
            }
        }
        self.cold.end_layer();
    }
}

/// Whole experts as cached by the engine: any may become hot, and the most popular ones are
/// resident at first.
pub struct ShippedExperts {
    layers: usize,
    experts: u32,
    held: Cold,
}

impl ShippedExperts {
    /// A cache of `capacity` experts.
    pub fn new(header: &Header, capacity: usize) -> Result<Self, Failure> {
        let none = vec![vec![0; header.neurons]; header.layers];
        let visits = if header.counts.is_empty() {
            &none
        } else {
            &header.counts
        };
        Ok(Self {
            layers: header.layers,
            experts: header.neurons as u32,
            held: Cold::of_experts(capacity as u64, visits, header.stats_tokens)?,
        })
    }
}

impl Cache for ShippedExperts {
    fn step(&mut self, step: usize, keys: &[u32], missing: &mut Vec<u32>) {
        self.held.begin_layer((step % self.layers) as u32);
        for &key in keys {
            let at = Key::new(key / self.experts, key % self.experts);
            if !self.held.find(at) {
                missing.push(key);
            }
        }
        self.held.end_layer();
    }
}
