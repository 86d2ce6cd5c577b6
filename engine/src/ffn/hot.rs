//! The hot region: whole clusters of the hottest neurons, least recently used
//! clusters first out (PowerInfer-2 §4.2).
//!
//! Neurons lie in temperature order, so the hot neurons of a bank are a prefix of
//! its clusters. A unit of the region holds the [`CLUSTER`] neurons of one cluster:
//! they come from flash in one sequential read and are computed without a look-up per
//! neuron. In memory the vectors of a kind follow each other, first all Gate rows (where
//! they are not resident anyway), then all Up rows, then all Down columns:
//! computing all rows of a kind is then one forward stream, which is what processors
//! fetch ahead. (Kernels alone, two threads: rows one after the other 20 to 25 GB/s, rows
//! with two others between them 16 to 17. A whole dense layer does not show it.)

use std::ops::Range;

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{ColdCache, Key, SlotId};

use super::CLUSTER;
use super::banks::{Banks, Part};
use crate::Error;

/// Resident clusters.
pub(super) struct HotRegion {
    cache: ColdCache,
    /// Clusters at the start of each bank that belong here.
    prefix: Vec<u32>,
    /// Bytes of a neuron's Gate (0 where it is not here), Up and Down.
    lens: [usize; 3],
}

impl HotRegion {
    /// An empty region with room for every cluster; [`HotRegion::set_border`]
    /// says how many may be used.
    pub fn new(banks: &Banks, part: &Part, memory: ArenaOptions) -> Result<Self, Error> {
        let gate = if part.has_gate { part.gate_len } else { 0 };
        let lens = [gate, part.rest_len / 2, part.rest_len / 2];
        let too_many = || banks.too_many();
        let units = u32::try_from(banks.total_clusters()).map_err(|_| too_many())?;
        let len = CLUSTER * part.payload();
        let arena =
            Arena::with_limit(0, units, len, 1, memory).map_err(emberflow_storage::Error::from)?;
        let per_bank = vec![banks.clusters() as u32; banks.count];
        Ok(Self {
            cache: ColdCache::new(arena, &per_bank).ok_or_else(too_many)?,
            prefix: vec![0; banks.count],
            lens,
        })
    }

    /// Moves the border to the cold region: at most `units` clusters of memory,
    /// and the first `prefix[b]` clusters of bank `b` belong here.
    pub fn set_border(&mut self, units: u64, prefix: &[u32]) {
        self.prefix.copy_from_slice(prefix);
        self.cache.resize(u32::try_from(units).unwrap_or(u32::MAX));
    }

    /// Clusters that it may hold at once.
    pub fn units(&self) -> u64 {
        u64::from(self.cache.slots())
    }

    /// Clusters that it holds.
    pub fn held(&self) -> u64 {
        u64::from(self.cache.resident())
    }

    /// Drops a cluster that nobody uses.
    pub fn remove(&mut self, bank: u32, cluster: u32) {
        let neuron = cluster;
        self.cache.remove(Key { bank, neuron });
    }

    /// Bytes of a cluster.
    pub fn unit_len(&self) -> u64 {
        (CLUSTER * self.lens.iter().sum::<usize>()) as u64
    }

    /// The bytes of a pinned cluster, for [`HotRegion::vectors`].
    pub fn cluster(&self, slot: SlotId) -> &[u8] {
        self.cache.bytes(slot)
    }

    /// Clusters at the start of a bank that belong here.
    pub fn prefix(&self, bank: u32) -> u32 {
        self.prefix[bank as usize]
    }

    /// Whether a cluster belongs here.
    pub fn wants(&self, bank: u32, cluster: u32) -> bool {
        cluster < self.prefix[bank as usize]
    }

    /// Whether a cluster is resident.
    pub fn contains(&self, bank: u32, cluster: u32) -> bool {
        let neuron = cluster;
        self.cache.contains(Key { bank, neuron })
    }

    /// Pins a resident cluster.
    pub fn get_pin(&mut self, bank: u32, cluster: u32) -> Option<SlotId> {
        let neuron = cluster;
        self.cache.get_pin(Key { bank, neuron })
    }

    /// Ends the use of a cluster.
    pub fn unpin(&mut self, bank: u32, cluster: u32) {
        let neuron = cluster;
        self.cache.unpin(Key { bank, neuron });
    }

    /// Takes in a cluster: `neurons` yields the payload pieces of each neuron in
    /// order. Does nothing where no unit can be had.
    pub fn admit<'a>(
        &mut self,
        bank: u32,
        cluster: u32,
        neurons: impl Iterator<Item = [&'a [u8]; 3]>,
    ) {
        let neuron = cluster;
        let key = Key { bank, neuron };
        let Some(mut slot) = self.cache.reserve(key) else {
            return;
        };
        let unit = slot.as_mut_slice();
        for (i, pieces) in neurons.enumerate() {
            for (kind, piece) in pieces.into_iter().enumerate() {
                unit[self.place(kind, i)].copy_from_slice(piece);
            }
        }
        self.cache.admit(key, slot);
        self.cache.unpin(key);
    }

    /// Gate (empty where it is not here), Up and Down of the `i`-th neuron of a pinned
    /// cluster.
    #[inline]
    pub fn neuron(&self, slot: SlotId, i: usize) -> [&[u8]; 3] {
        self.vectors(self.cache.bytes(slot), i)
    }

    /// The same, of the `i`-th neuron of a cluster's bytes.
    #[inline]
    pub fn vectors<'a>(&self, unit: &'a [u8], i: usize) -> [&'a [u8]; 3] {
        [0, 1, 2].map(|kind| &unit[self.place(kind, i)])
    }

    /// Where a vector of the `i`-th neuron lies in a unit.
    #[inline]
    fn place(&self, kind: usize, i: usize) -> Range<usize> {
        let before: usize = self.lens[..kind].iter().sum();
        let start = CLUSTER * before + i * self.lens[kind];
        start..start + self.lens[kind]
    }

    /// The bytes of every resident cluster.
    pub fn resident(&mut self, banks: u32, clusters: u32) -> Vec<&[u8]> {
        let mut slots = Vec::new();
        for (bank, c) in (0..banks).flat_map(|b| (0..clusters).map(move |c| (b, c))) {
            if let Some(slot) = self.get_pin(bank, c) {
                slots.push(slot);
                self.unpin(bank, c);
            }
        }
        slots.iter().map(|&slot| self.cache.bytes(slot)).collect()
    }

    /// Clusters that left for others.
    pub fn evictions(&self) -> u64 {
        self.cache.stats().evictions
    }
}
