//! The border between the hot and the cold region: moved at once when the budget changes, and a
//! little with each pass when the number of sequences does, so that no token waits for it.

use emberflow_storage::cache::Key;

use super::super::regions::prefixes;
use super::NeuronStore;
use crate::Error;
use crate::memory::MemoryPlan;

/// Bytes that change regions in one pass: a few milliseconds of copying.
const STEP: u64 = 4 << 20;

/// Where the border is to be.
#[derive(Debug)]
pub(super) struct Goal {
    /// Clusters of the hot region.
    hot: u64,
    /// Slots of the cold region.
    cold: u64,
    /// Bytes of both together.
    bytes: u64,
}

impl NeuronStore {
    /// Moves the border to where the plan wants it. Nothing is pinned between layers, so both
    /// regions can comply. New hot clusters come when they are first used.
    pub(super) fn set_border(&mut self, plan: &MemoryPlan) {
        self.scans = self.banks.dense || !(self.gates_resident() || self.banks.predicts);
        let prefix = self.prefixes(plan.hot_clusters);
        self.resize(plan.hot_clusters, plan.slots, &prefix);
    }

    /// The clusters of each bank that belong in a hot region of `units` clusters.
    fn prefixes(&self, units: u64) -> Vec<u32> {
        let clusters = self.banks.clusters() as u32;
        let all = vec![clusters; self.banks.count];
        let wanted = if self.scans { &all } else { &self.hot_wanted };
        prefixes(units, wanted, clusters)
    }

    /// The shrinking region first, so that both never add up to more than before.
    fn resize(&mut self, hot: u64, cold: u64, prefix: &[u32]) {
        let cold = u32::try_from(cold.min(self.banks.total())).unwrap_or(u32::MAX);
        if cold < self.cold.slots() {
            self.cold.resize(cold);
            self.hot.set_border(hot, prefix);
        } else {
            self.hot.set_border(hot, prefix);
            self.cold.resize(cold);
        }
    }

    /// From now on the border moves to where `plan`, made for the same budget, wants it for the
    /// hot clusters `wanted`.
    pub fn aim_border(&mut self, plan: &MemoryPlan, wanted: &[u32]) {
        self.hot_wanted.copy_from_slice(wanted);
        let slot = self.banks.slot_charge(self.residency);
        self.goal = Some(Goal {
            hot: plan.hot_clusters,
            cold: plan.slots,
            bytes: plan.hot_clusters * self.hot.unit_len() + plan.slots * slot,
        });
    }

    /// Moves the border a step, between two passes.
    pub fn step_border(&mut self) -> Result<(), Error> {
        let Some(goal) = &self.goal else {
            return Ok(());
        };
        self.usable()?;
        let unit = self.hot.unit_len().max(1);
        let (now, step) = (self.hot.units(), (STEP / unit).max(1));
        let hot = goal.hot.clamp(now.saturating_sub(step), now + step);
        let slot = self.banks.slot_charge(self.residency).max(1);
        let cold = (goal.bytes - (hot * unit).min(goal.bytes)) / slot;
        if hot == goal.hot {
            let (hot, cold) = (goal.hot, goal.cold);
            self.goal = None;
            self.move_border(hot, cold);
        } else {
            self.move_border(hot, cold);
        }
        Ok(())
    }

    fn move_border(&mut self, hot: u64, cold: u64) {
        let prefix = self.prefixes(hot);
        // Clusters that leave go over to the cold region, one after the other, so that both
        // regions and the buffer on the way stay within their bytes.
        // The coldest of all banks first.
        for c in (0..self.banks.clusters() as u32).rev() {
            for (bank, &end) in prefix.iter().enumerate() {
                if self.hot.held() > hot && c >= end {
                    self.demote(bank as u32, c, cold);
                }
            }
        }
        self.resize(hot, cold, &prefix);
    }

    /// Makes a hot cluster leave for the cold region, as far as that may grow to `cold` slots.
    fn demote(&mut self, bank: u32, c: u32, cold: u64) {
        let Some(unit) = self.hot.get_pin(bank, c) else {
            return;
        };
        let mut buffer = self.stream.take();
        if let Some(buffer) = &mut buffer {
            let bytes = self.hot.cluster(unit);
            buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        }
        self.hot.unpin(bank, c);
        self.hot.remove(bank, c);
        let Some(buffer) = buffer else { return };
        let units = self.hot.held();
        let prefix: Vec<u32> = (0..self.banks.count as u32)
            .map(|b| self.hot.prefix(b))
            .collect();
        self.hot.set_border(units, &prefix);
        let slot = self.banks.slot_charge(self.residency).max(1);
        let more = self.hot.unit_len() / slot;
        let slots = (u64::from(self.cold.slots()) + more).min(cold.max(self.cold.slots().into()));
        self.cold.resize(u32::try_from(slots).unwrap_or(u32::MAX));
        let part = self.part;
        let neurons = self.banks.cluster_neurons(c as usize);
        for (i, n) in neurons.enumerate() {
            let neuron = n as u32;
            let key = Key { bank, neuron };
            // Not at the price of neurons that were used for their own sake.
            let Some(mut slot) = self.cold.reserve_if_free(key) else {
                continue;
            };
            let shift = self.banks.shift(bank as usize, neuron, part.start);
            let to = &mut slot.as_mut_slice()[shift..];
            let [gate, up, down] = self.hot.vectors(buffer.as_slice(), i);
            to[..gate.len()].copy_from_slice(gate);
            let rest = &mut to[part.gate_span - part.start..];
            rest[..up.len()].copy_from_slice(up);
            rest[up.len()..][..down.len()].copy_from_slice(down);
            self.cold.admit(key, slot);
            self.cold.unpin(key);
        }
        self.stream.put(buffer);
    }
}
