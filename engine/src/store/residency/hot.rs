//! The hot region: an LRU cache of whole clusters of the hottest neurons (PowerInfer-2 §4.2).
//!
//! Neurons are sorted by temperature, so a bank's hot neurons are a prefix of its clusters. A slot
//! holds the [`CLUSTER`] neurons of one cluster: one sequential read, and no lookup per neuron. In
//! memory a cluster is a structure of arrays: all Gate rows (unless resident elsewhere), all Up
//! rows, all Down columns. Kernels then stream contiguous rows, which suits the hardware
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
    /// Hot clusters of bank b: `first[b]..prefix[b]`. Those before `first` are on a device.
    first: Vec<u32>,
    prefix: Vec<u32>,
}

/// The key of a cluster.
fn key(bank: u32, cluster: u32) -> Key {
    Key::new(bank, cluster)
}

impl HotClusters {
    /// An empty region with capacity for every cluster, in slots with layout `content`.
    /// [`HotClusters::set_border`] sets the number in use.
    pub fn new(
        layout: &Layout,
        content: &SlotContent,
        memory: ArenaOptions,
    ) -> Result<Self, Error> {
        let units = u32::try_from(layout.total_clusters()).map_err(|_| layout.too_many())?;
        let len = unit_len(content);
        let arena = Arena::with_limit(0, units.max(1), len, 1, memory)
            .map_err(emberflow_storage::Error::from)?;
        // LRFU for experts, since the visited ones change. In a scan the first clusters must
        // remain.
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

    /// Initial value of each bank's clusters, as if a share `visits[b]` of the tokens had used
    /// them.
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

    /// Moves the border to the cold region: at most `units` resident clusters; the first
    /// `prefix[b]` clusters of bank `b` are hot.
    pub fn set_border(&mut self, units: u64, prefix: &[u32]) {
        self.prefix.copy_from_slice(prefix);
        self.cache.resize(u32::try_from(units).unwrap_or(u32::MAX));
    }

    /// Releases the free slots.
    pub fn shrink(&mut self) {
        self.cache.resize(self.cache.resident());
    }

    /// Sets the number of leading clusters of each bank that a device holds.
    pub fn begin_behind(&mut self, first: &[u32]) {
        self.first.copy_from_slice(first);
    }

    /// Capacity in clusters.
    pub fn units(&self) -> u64 {
        u64::from(self.cache.slots())
    }

    /// Number of resident clusters.
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

    /// Unpins a cluster without counting the use: the next token is unlikely to need it.
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

    /// Inserts a cluster. `neurons` yields [Gate (empty if resident elsewhere), Up, Down] of each
    /// neuron in order. Does nothing if no slot is available.
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

    /// Reserves a slot for a cluster, to be filled by [`write`]; `None` if no slot is available.
    /// Ends with [`HotClusters::settle`] or [`HotClusters::abandon`].
    pub fn reserve(&mut self, bank: u32, cluster: u32) -> Option<Slot> {
        self.cache.reserve(key(bank, cluster))
    }

    /// Makes a cluster resident whose slot has been written.
    pub fn settle(&mut self, bank: u32, cluster: u32, slot: Slot) {
        self.cache.admit(key(bank, cluster), slot);
        self.cache.unpin(key(bank, cluster));
    }

    /// Returns a reserved slot.
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

    /// Number of clusters evicted.
    pub fn evictions(&self) -> u64 {
        self.cache.stats().evictions
    }
}

/// Bytes of a cluster whose neurons have layout `content`.
fn unit_len(content: &SlotContent) -> usize {
    CLUSTER * content.vectors().iter().sum::<usize>()
}

/// Writes a cluster into its slot, past the CPU caches: it is not read again soon.
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

/// Byte range of vector `kind` (Gate, Up, Down) of the `i`-th neuron of a cluster.
#[inline]
fn place(content: &SlotContent, kind: usize, i: usize) -> Range<usize> {
    let lens = content.vectors();
    let before: usize = lens[..kind].iter().sum();
    let start = CLUSTER * before + i * lens[kind];
    start..start + lens[kind]
}

/// [Gate (empty if resident elsewhere), Up, Down] of the `i`-th neuron of a cluster.
#[inline]
pub(in crate::store) fn vectors<'a>(
    content: &SlotContent,
    unit: &'a [u8],
    i: usize,
) -> [&'a [u8]; 3] {
    [0, 1, 2].map(|kind| &unit[place(content, kind, i)])
}
