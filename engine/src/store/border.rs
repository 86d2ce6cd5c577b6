//! The border between the hot and the cold region. It moves at once when the budget changes, and
//! gradually, pass by pass, when the number of sequences changes, so that no token stalls on it.

use super::neurons::{Goal, NeuronStore};
use super::regions::prefixes;
use crate::error::Error;
use crate::memory::MemoryPlan;

/// Bytes moved between the regions per pass: a few milliseconds of copying.
const STEP: u64 = 4 << 20;

impl NeuronStore {
    /// Moves the border to the plan's position. Nothing is pinned between layers, so both regions
    /// can resize. New hot clusters are loaded on first use.
    pub(super) fn set_border(&mut self, plan: &MemoryPlan) {
        let prefix = self.prefixes(plan.hot_clusters);
        self.resize(plan.hot_clusters, plan.slots, &prefix);
    }

    /// Hot clusters of each bank, for a hot region of `units` clusters.
    fn prefixes(&self, units: u64) -> Vec<u32> {
        let clusters = self.layout.clusters_of_each();
        if !self.visits.is_empty() && self.scans(0) {
            return self.most_visited(units, &clusters);
        }
        let mut wanted = self.wanted();
        let Some(tier) = &self.tier else {
            return prefixes(units, &wanted, &clusters);
        };
        // Behind those on the device.
        let (first, mut rest) = (tier.prefixes(), clusters);
        for (counts, &n) in wanted.iter_mut().zip(&mut rest).zip(first) {
            *counts.0 = counts.0.saturating_sub(n);
            *counts.1 -= n;
        }
        let behind = prefixes(units, &wanted, &rest);
        first.iter().zip(behind).map(|(a, b)| a + b).collect()
    }

    /// How many clusters of each bank are to be hot.
    pub(super) fn wanted(&self) -> Vec<u32> {
        let clusters = self.layout.clusters_of_each();
        (0..)
            .zip(self.hot_wanted.iter().zip(&clusters))
            .map(|(bank, (&hot, &all))| if self.scans(bank) { all } else { hot })
            .collect()
    }

    /// The clusters of the banks that most tokens visit, as many as `units`.
    fn most_visited(&self, units: u64, clusters: &[u32]) -> Vec<u32> {
        let mut banks: Vec<usize> = (0..clusters.len()).collect();
        banks.sort_by(|&a, &b| self.visits[b].total_cmp(&self.visits[a]));
        let (mut prefix, mut left) = (vec![0; clusters.len()], units);
        for bank in banks {
            let taken = u64::from(clusters[bank]).min(left);
            prefix[bank] = taken as u32;
            left -= taken;
        }
        prefix
    }

    /// Shrinks one region before it grows the other, so that their sum never exceeds the budget.
    fn resize(&mut self, hot: u64, cold: u64, prefix: &[u32]) {
        let cold = u32::try_from(cold.min(self.layout.total())).unwrap_or(u32::MAX);
        if cold < self.cold.slots() {
            self.cold.resize(cold);
            self.hot.set_border(hot, prefix);
        } else {
            self.hot.set_border(hot, prefix);
            self.cold.resize(cold);
        }
    }

    /// Bytes of a cold slot and its bookkeeping.
    fn slot_charge(&self) -> u64 {
        let resident = self.slots_lack_gates();
        let eviction = self.ablation.eviction();
        self.layout.slot_charge(resident, eviction).max(1)
    }

    /// Sets the target of the border: that of `plan`, made for the same budget, with `wanted` hot
    /// clusters per bank.
    pub fn aim_border(&mut self, plan: &MemoryPlan, wanted: &[u32]) {
        self.hot_wanted.copy_from_slice(wanted);
        self.goal = Some(Goal {
            hot: plan.hot_clusters,
            cold: plan.slots,
            bytes: plan.hot_clusters * self.hot.unit_len() + plan.slots * self.slot_charge(),
        });
    }

    /// Moves the border one step towards its target, between two passes.
    pub fn step_border(&mut self) -> Result<(), Error> {
        let Some(goal) = &self.goal else {
            return Ok(());
        };
        self.usable()?;
        let unit = self.hot.unit_len().max(1);
        let (now, step) = (self.hot.units(), (STEP / unit).max(1));
        let hot = goal.hot.clamp(now.saturating_sub(step), now + step);
        let mut cold = (goal.bytes - (hot * unit).min(goal.bytes)) / self.slot_charge();
        if hot == goal.hot {
            cold = goal.cold;
            self.goal = None;
        }
        self.move_border(hot, cold);
        Ok(())
    }

    fn move_border(&mut self, hot: u64, cold: u64) {
        let prefix = self.prefixes(hot);
        // Demote evicted clusters one at a time, coldest first over all banks, so that both regions
        // and the copy buffer stay within the budget.
        let most = self.layout.clusters_of_each().into_iter().max();
        for cluster in (0..most.unwrap_or(0)).rev() {
            for (bank, &end) in (0..).zip(&prefix) {
                if self.hot.held() > hot && cluster >= end {
                    self.demote(bank, cluster, cold);
                }
            }
        }
        self.resize(hot, cold, &prefix);
    }

    /// Demotes a hot cluster: copies its neurons to the cold region, which may grow to `cold`
    /// slots.
    fn demote(&mut self, bank: u32, cluster: u32, cold: u64) {
        if cluster as usize >= self.layout.clusters(bank) {
            return;
        }
        let Some(unit) = self.hot.get_pin(bank, cluster) else {
            return;
        };
        let mut buffer = self.reader.stream.take();
        if let Some(buffer) = &mut buffer {
            let bytes = self.hot.bytes(unit);
            buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        }
        self.hot.unpin(bank, cluster);
        self.hot.remove(bank, cluster);
        let Some(buffer) = buffer else { return };
        self.hot.set_border(self.hot.held(), &self.hot.prefixes());
        let more = self.hot.unit_len() / self.slot_charge();
        let slots = u64::from(self.cold.slots());
        let slots = (slots + more).min(cold.max(slots));
        self.cold.resize(u32::try_from(slots).unwrap_or(u32::MAX));
        self.keep_from_hot(bank, cluster, buffer.as_slice());
        self.reader.put(buffer);
    }
}
