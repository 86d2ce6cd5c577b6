//! The hot region: whole clusters of the hottest neurons, least recently used
//! clusters first out (PowerInfer-2 §4.2).
//!
//! Neurons lie in temperature order, so the hot neurons of a bank are a prefix of
//! its clusters. A unit of the region holds the [`CLUSTER`] neurons of one cluster
//! without padding: they come from flash in one sequential read and are computed
//! at one fixed stride, without a look-up per neuron.

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
    /// Bytes of one neuron in a unit.
    pub neuron_len: usize,
}

impl HotRegion {
    /// An empty region with room for every cluster; [`HotRegion::set_border`]
    /// says how many may be used.
    pub fn new(banks: &Banks, part: &Part, memory: ArenaOptions) -> Result<Self, Error> {
        let neuron_len = part.payload();
        let too_many = || banks.too_many();
        let units = u32::try_from(banks.total_clusters()).map_err(|_| too_many())?;
        let len = CLUSTER * neuron_len;
        let arena =
            Arena::with_limit(0, units, len, 1, memory).map_err(emberflow_storage::Error::from)?;
        let per_bank = vec![banks.clusters() as u32; banks.count];
        Ok(Self {
            cache: ColdCache::new(arena, &per_bank).ok_or_else(too_many)?,
            prefix: vec![0; banks.count],
            neuron_len,
        })
    }

    /// Moves the border to the cold region: at most `units` clusters of memory,
    /// and the first `prefix[b]` clusters of bank `b` belong here.
    pub fn set_border(&mut self, units: u64, prefix: &[u32]) {
        self.prefix.copy_from_slice(prefix);
        self.cache.resize(u32::try_from(units).unwrap_or(u32::MAX));
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
    pub fn unpin(&mut self, slot: SlotId) {
        self.cache.unpin(slot);
    }

    /// Takes in a cluster: `neurons` yields the payload pieces of each neuron in
    /// order. Does nothing where no unit can be had.
    pub fn admit<'a>(
        &mut self,
        bank: u32,
        cluster: u32,
        neurons: impl Iterator<Item = [&'a [u8]; 2]>,
    ) {
        let neuron = cluster;
        let key = Key { bank, neuron };
        let Some(mut slot) = self.cache.reserve(key) else {
            return;
        };
        let unit = slot.as_mut_slice();
        for (to, [gate, rest]) in unit.chunks_exact_mut(self.neuron_len).zip(neurons) {
            let (a, b) = to.split_at_mut(gate.len());
            a.copy_from_slice(gate);
            b.copy_from_slice(rest);
        }
        let id = self.cache.admit(key, slot);
        self.cache.unpin(id);
    }

    /// The payload of the `i`-th neuron of a pinned cluster.
    #[inline]
    pub fn neuron(&self, slot: SlotId, i: usize) -> &[u8] {
        &self.cache.bytes(slot)[i * self.neuron_len..(i + 1) * self.neuron_len]
    }

    /// The bytes of every resident cluster.
    pub fn resident(&mut self, banks: u32, clusters: u32) -> Vec<&[u8]> {
        let mut slots = Vec::new();
        for bank in 0..banks {
            slots.extend((0..clusters).filter_map(|c| self.get_pin(bank, c)));
        }
        for &slot in &slots {
            self.cache.unpin(slot);
        }
        slots.iter().map(|&slot| self.cache.bytes(slot)).collect()
    }

    /// Clusters that left for others.
    pub fn evictions(&self) -> u64 {
        self.cache.stats().evictions
    }
}

/// Divides `units` clusters over the banks, in proportion to how many each wants.
/// All wishes together may be more; `units` of all clusters fulfil any wish.
pub(crate) fn prefixes(units: u64, wanted: &[u32], clusters: u32) -> Vec<u32> {
    let all = u64::from(clusters) * wanted.len() as u64;
    if units >= all {
        return vec![clusters; wanted.len()];
    }
    let sum: u64 = wanted.iter().map(|&w| u64::from(w)).sum();
    if units >= sum {
        return wanted.to_vec();
    }
    let mut prefix: Vec<u32> = wanted
        .iter()
        .map(|&w| (u64::from(w) * units / sum) as u32)
        .collect();
    let mut left = units - prefix.iter().map(|&p| u64::from(p)).sum::<u64>();
    for (p, &w) in prefix.iter_mut().zip(wanted) {
        if left > 0 && *p < w {
            *p += 1;
            left -= 1;
        }
    }
    prefix
}

#[cfg(test)]
mod tests {
    use super::prefixes;

    #[test]
    fn units_are_divided_by_wishes_and_none_is_lost() {
        assert_eq!(prefixes(10, &[4, 4, 4], 8), [4, 3, 3]);
        assert_eq!(prefixes(12, &[4, 4, 4], 8), [4, 4, 4]);
        assert_eq!(prefixes(20, &[4, 4, 4], 8), [4, 4, 4]);
        assert_eq!(prefixes(24, &[4, 0, 4], 8), [8, 8, 8]);
        assert_eq!(prefixes(3, &[6, 0, 3], 8), [2, 0, 1]);
        assert_eq!(prefixes(0, &[0, 0], 8), [0, 0]);
    }
}
