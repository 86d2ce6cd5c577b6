//! The hot region: whole clusters of the hottest neurons, least recently used clusters first out
//! (PowerInfer-2 §4.2).
//!
//! Neurons lie in temperature order, so the hot neurons of a bank are a prefix of its clusters. A
//! slot holds the [`CLUSTER`] neurons of one cluster: they come from flash in one sequential read and
//! are computed without a look-up per neuron. In memory the vectors of a kind follow each other,
//! first all Gate rows (where they are not resident anyway), then all Up rows, then all Down columns:
//! computing all rows of a kind is then one forward stream, which is what processors fetch ahead.
//! (Kernels alone, two threads: rows one after the other 20 to 25 GB/s, rows with two others between
//! them 16 to 17. A whole dense layer does not show it.)

use std::ops::Range;

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Key, SlotCache, SlotId};

use super::content::SlotContent;
use super::layout::Layout;
use super::regions::CLUSTER;
use crate::error::Error;

/// Resident clusters.
pub(super) struct HotClusters {
    cache: SlotCache,
    /// Clusters at the start of each bank that belong here.
    prefix: Vec<u32>,
}

/// The key of a cluster.
fn key(bank: u32, cluster: u32) -> Key {
    Key::new(bank, cluster)
}

impl HotClusters {
    /// An empty region with room for every cluster, as slots hold `content`;
    /// [`HotClusters::set_border`] says how many may be used.
    pub fn new(
        layout: &Layout,
        content: &SlotContent,
        memory: ArenaOptions,
    ) -> Result<Self, Error> {
        let units = u32::try_from(layout.total_clusters()).map_err(|_| layout.too_many())?;
        let len = unit_len(content);
        let arena =
            Arena::with_limit(0, units, len, 1, memory).map_err(emberflow_storage::Error::from)?;
        Ok(Self {
            cache: SlotCache::new(arena, &layout.clusters_of_each())
                .ok_or_else(|| layout.too_many())?,
            prefix: vec![0; layout.banks()],
        })
    }

    /// Moves the border to the cold region: at most `units` clusters of memory, and the first
    /// `prefix[b]` clusters of bank `b` belong here.
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

    /// Bytes of a cluster.
    pub fn unit_len(&self) -> u64 {
        self.cache.arena().slot_len() as u64
    }

    /// Clusters at the start of a bank that belong here.
    pub fn prefix(&self, bank: u32) -> u32 {
        self.prefix[bank as usize]
    }

    /// Those of all banks.
    pub fn prefixes(&self) -> Vec<u32> {
        self.prefix.clone()
    }

    /// Whether a cluster belongs here.
    pub fn wants(&self, bank: u32, cluster: u32) -> bool {
        cluster < self.prefix[bank as usize]
    }

    /// Whether a cluster is resident.
    pub fn contains(&self, bank: u32, cluster: u32) -> bool {
        self.cache.contains(key(bank, cluster))
    }

    /// Pins a resident cluster.
    pub fn get_pin(&mut self, bank: u32, cluster: u32) -> Option<SlotId> {
        self.cache.get_pin(key(bank, cluster))
    }

    /// Ends the use of a cluster.
    pub fn unpin(&mut self, bank: u32, cluster: u32) {
        self.cache.unpin(key(bank, cluster));
    }

    /// Drops a cluster that nobody uses.
    pub fn remove(&mut self, bank: u32, cluster: u32) {
        self.cache.remove(key(bank, cluster));
    }

    /// The bytes of a pinned cluster, for [`vectors`].
    #[inline]
    pub fn bytes(&self, slot: SlotId) -> &[u8] {
        self.cache.bytes(slot)
    }

    /// Takes in a cluster: `neurons` yields Gate (empty where it is resident), Up and Down of each
    /// neuron in order. Does nothing where no slot can be had.
    pub fn admit<'a>(
        &mut self,
        bank: u32,
        cluster: u32,
        content: &SlotContent,
        neurons: impl Iterator<Item = [&'a [u8]; 3]>,
    ) {
        let key = key(bank, cluster);
        let Some(mut slot) = self.cache.reserve(key) else {
            return;
        };
        let unit = slot.as_mut_slice();
        for (i, pieces) in neurons.enumerate() {
            for (kind, piece) in pieces.into_iter().enumerate() {
                unit[place(content, kind, i)].copy_from_slice(piece);
            }
        }
        self.cache.admit(key, slot);
        self.cache.unpin(key);
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

    /// Clusters that left for others.
    pub fn evictions(&self) -> u64 {
        self.cache.stats().evictions
    }
}

/// Bytes of a cluster whose neurons have `content`.
fn unit_len(content: &SlotContent) -> usize {
    CLUSTER * content.vectors().iter().sum::<usize>()
}

/// Where vector `kind` of the `i`-th neuron lies in a cluster's bytes.
#[inline]
fn place(content: &SlotContent, kind: usize, i: usize) -> Range<usize> {
    let lens = content.vectors();
    let before: usize = lens[..kind].iter().sum();
    let start = CLUSTER * before + i * lens[kind];
    start..start + lens[kind]
}

/// Gate (empty where it is resident), Up and Down of the `i`-th neuron of a cluster's bytes.
#[inline]
pub(super) fn vectors<'a>(content: &SlotContent, unit: &'a [u8], i: usize) -> [&'a [u8]; 3] {
    [0, 1, 2].map(|kind| &unit[place(content, kind, i)])
}
