//! The hot region: an LRU cache of whole clusters of the hottest neurons (PowerInfer-2 §4.2).
//!
//! Neurons are sorted by temperature, so a bank's hot neurons are a prefix of its clusters. A slot
//! holds the [`CLUSTER`] neurons of one cluster: one sequential read, and no lookup per neuron. In
//! memory it is a structure of arrays: all Gate rows (unless resident elsewhere), then all Up rows,
//! then all Down columns. Each kernel then streams contiguous rows, which suits the hardware
//! prefetcher. (Kernels alone, two threads: 20 to 25 GB/s contiguous, 16 to 17 with stride three. A
//! whole dense layer shows no difference.)

use std::ops::Range;

use emberflow_kernels::PastCaches;
use emberflow_storage::arena::{Arena, ArenaOptions, ArenaPages, Slot};
use emberflow_storage::cache::{Eviction, Key, SlotCache, SlotId};

use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::store::content::SlotContent;
use crate::store::layout::Layout;

/// The hot region's cache.
pub(crate) struct HotClusters {
    cache: SlotCache,
    /// Hot clusters of each bank: from the first to the end of a prefix. Those before are on a
    /// device.
    first: Vec<u32>,
    prefix: Vec<u32>,
}

/// The key of a cluster.
fn key(bank: u32, cluster: u32) -> Key {
    Key::new(bank, cluster)
}

impl HotClusters {
    /// An empty region with capacity for every cluster of slots with `content`;
    /// [`HotClusters::set_border`] sets how many may be used.
    pub fn new(
        layout: &Layout,
        content: &SlotContent,
        memory: ArenaOptions,
    ) -> Result<Self, Error> {
        let units = u32::try_from(layout.total_clusters()).map_err(|_| layout.too_many())?;
        let len = unit_len(content);
        let arena =
            Arena::with_limit(0, units, len, 1, memory).map_err(emberflow_storage::Error::from)?;
        // Which experts a token visits changes; of a scan, the first clusters stay.
        let eviction = if layout.has_experts() {
            Eviction::Lrfu
        } else {
            Eviction::Lru
        };
        Ok(Self {
            cache: SlotCache::with_eviction(arena, &layout.clusters_of_each(), eviction)
                .ok_or_else(|| layout.too_many())?,
            first: vec![0; layout.banks()],
            prefix: vec![0; layout.banks()],
        })
    }

    /// Values the clusters of each bank at first as if `visits[b]` of the tokens had used them.
    pub fn set_visits(&mut self, layout: &Layout, visits: &[f32]) {
        for (bank, &often) in (0..).zip(visits) {
            for cluster in 0..layout.clusters(bank) as u32 {
                self.cache.set_prior(key(bank, cluster), often.into());
            }
        }
    }

    /// The region's memory.
    pub fn pages(&self) -> ArenaPages {
        self.cache.arena().pages()
    }

    /// Moves the border to the cold region: at most `units` resident clusters, and the first
    /// `prefix[b]` clusters of bank `b` are hot.
    pub fn set_border(&mut self, units: u64, prefix: &[u32]) {
        self.prefix.copy_from_slice(prefix);
        self.cache.resize(u32::try_from(units).unwrap_or(u32::MAX));
    }

    /// Gives up the slots that are free.
    pub fn shrink(&mut self) {
        self.cache.resize(self.cache.resident());
    }

    /// Leaves the first clusters of each bank to a device.
    pub fn begin_behind(&mut self, first: &[u32]) {
        self.first.copy_from_slice(first);
    }

    /// Capacity in clusters.
    pub fn units(&self) -> u64 {
        u64::from(self.cache.slots())
    }

    /// Resident clusters.
    pub fn held(&self) -> u64 {
        u64::from(self.cache.resident())
    }

    /// Bytes of a cluster.
    pub fn unit_len(&self) -> u64 {
        self.cache.arena().slot_len() as u64
    }

    /// End of the hot clusters of a bank.
    pub fn prefix(&self, bank: u32) -> u32 {
        self.prefix[bank as usize]
    }

    /// Whether a cluster is hot.
    pub fn wants(&self, bank: u32, cluster: u32) -> bool {
        (self.first[bank as usize]..self.prefix[bank as usize]).contains(&cluster)
    }

    /// Whether a cluster is resident.
    pub fn contains(&self, bank: u32, cluster: u32) -> bool {
        self.cache.contains(key(bank, cluster))
    }

    /// Pins a resident cluster.
    pub fn get_pin(&mut self, bank: u32, cluster: u32) -> Option<SlotId> {
        self.cache.get_pin(key(bank, cluster))
    }

    /// Unpins a cluster.
    pub fn unpin(&mut self, bank: u32, cluster: u32) {
        self.cache.unpin(key(bank, cluster));
    }

    /// Unpins a cluster that the next token is not likely to need.
    pub fn unpin_unused(&mut self, bank: u32, cluster: u32) {
        self.cache.unpin_unused(key(bank, cluster));
    }

    /// Whether a cluster can be added without evicting another.
    pub fn has_room(&self) -> bool {
        self.cache.resident() < self.cache.slots()
    }

    /// Begins a pass; see [`SlotCache::begin_pass`].
    pub fn begin_pass(&mut self) {
        self.cache.begin_pass();
    }

    /// Begins a layer; see [`SlotCache::begin_layer`].
    pub fn begin_layer(&mut self, last: u32) {
        self.cache.begin_layer(last);
    }

    /// Removes an unpinned cluster.
    pub fn remove(&mut self, bank: u32, cluster: u32) {
        self.cache.remove(key(bank, cluster));
    }

    /// The bytes of a pinned cluster, for [`vectors`].
    #[inline]
    pub fn bytes(&self, slot: SlotId) -> &[u8] {
        self.cache.bytes(slot)
    }

    /// Inserts a cluster: `neurons` yields Gate (empty where resident elsewhere), Up and Down of
    /// each neuron in order. Does nothing if no slot is available.
    pub fn admit<'a>(
        &mut self,
        bank: u32,
        cluster: u32,
        content: &SlotContent,
        neurons: impl Iterator<Item = [&'a [u8]; 3]>,
    ) {
        if let Some(mut slot) = self.reserve(bank, cluster) {
            write(content, &mut slot, neurons);
            self.settle(bank, cluster, slot);
        }
    }

    /// A slot for a cluster, for [`write`]; `None` if none is available. [`HotClusters::settle`] or
    /// [`HotClusters::abandon`] takes it back.
    pub fn reserve(&mut self, bank: u32, cluster: u32) -> Option<Slot> {
        self.cache.reserve(key(bank, cluster))
    }

    /// Makes a cluster resident whose slot was written.
    pub fn settle(&mut self, bank: u32, cluster: u32, slot: Slot) {
        self.cache.admit(key(bank, cluster), slot);
        self.cache.unpin(key(bank, cluster));
    }

    /// Takes back a reserved slot.
    pub fn abandon(&mut self, bank: u32, cluster: u32, slot: Slot) {
        self.cache.abandon(key(bank, cluster), slot);
    }

    /// The bytes of every resident cluster.
    pub fn resident(&mut self, clusters: &[u32]) -> Vec<&[u8]> {
        let mut slots = Vec::new();
        for (bank, &count) in (0..).zip(clusters) {
            for cluster in 0..count {
                if let Some(slot) = self.get_pin(bank, cluster) {
                    slots.push(slot);
                    self.unpin(bank, cluster);
                }
            }
        }
        slots.iter().map(|&slot| self.cache.bytes(slot)).collect()
    }

    /// Clusters evicted for others.
    pub fn evictions(&self) -> u64 {
        self.cache.stats().evictions
    }
}

/// Bytes of a cluster whose neurons have `content`.
fn unit_len(content: &SlotContent) -> usize {
    CLUSTER * content.vectors().iter().sum::<usize>()
}

/// Writes a cluster into its slot, as [`HotClusters::admit`] does. It is not read again soon.
pub(in crate::store) fn write<'a>(
    content: &SlotContent,
    slot: &mut Slot,
    neurons: impl Iterator<Item = [&'a [u8]; 3]>,
) {
    let unit = slot.as_mut_slice();
    PastCaches::run(|past| {
        for (i, pieces) in neurons.enumerate() {
            for (kind, piece) in pieces.into_iter().enumerate() {
                past.copy(&mut unit[place(content, kind, i)], piece);
            }
        }
    });
}

/// Range of vector `kind` of the `i`-th neuron in a cluster's bytes.
#[inline]
fn place(content: &SlotContent, kind: usize, i: usize) -> Range<usize> {
    let lens = content.vectors();
    let before: usize = lens[..kind].iter().sum();
    let start = CLUSTER * before + i * lens[kind];
    start..start + lens[kind]
}

/// Gate (empty where resident elsewhere), Up and Down of the `i`-th neuron in a cluster's bytes.
#[inline]
pub(in crate::store) fn vectors<'a>(
    content: &SlotContent,
    unit: &'a [u8],
    i: usize,
) -> [&'a [u8]; 3] {
    [0, 1, 2].map(|kind| &unit[place(content, kind, i)])
}
