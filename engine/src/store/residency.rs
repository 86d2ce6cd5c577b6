//! Neurons in memory: resident Gate rows, hot clusters, cold neurons, and the border between the
//! regions. Looks up, pins, admits and evicts; never reads.
//!
//! ```text
//! a bank   │ on a device │ hot: whole clusters │ cold: single neurons … │
//!          └─ first ─────┴─ prefix ────────────┘
//! ```

mod banks;
mod border;
mod cold;
mod fill;
mod hot;
mod resident;
mod spread;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use emberflow_kernels::Cpu;
use emberflow_storage::arena::{ArenaOptions, Slot};
use emberflow_storage::cache::Key;

use super::layout::Layout;
use super::rules::BankState;
use crate::ablation::Keep;
use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::memory::MemoryPlan;
pub(super) use banks::Banks;
pub(crate) use banks::Naming;
use border::Goal;
pub(super) use cold::{Cold, Leave};
pub(super) use hot::{HotClusters, vectors, write};
pub(crate) use resident::{Resident, region};
use spread::Spread;

/// Activation statistics by bank; both empty without any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// Each neuron's activation frequency.
    pub frequencies: Vec<Vec<f32>>,
    /// Share of the tokens that visit an expert.
    pub visits: Vec<f32>,
}

impl Known {
    pub fn new(frequencies: Vec<Vec<f32>>, visits: Vec<f32>) -> Self {
        Self {
            frequencies,
            visits,
        }
    }
}

/// Inputs that decide which neurons stay, independent of the amount of memory.
pub(super) struct Preferences<'a> {
    pub naming: Naming,
    /// By layer: every token needs all neurons, while other layers are sparse.
    pub always: Vec<bool>,
    /// Hot clusters of each bank, by the statistics.
    pub hot_wanted: Vec<u32>,
    pub known: &'a Known,
    pub keep: Keep,
    pub memory: ArenaOptions,
}

/// Resident neurons of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerResidency {
    /// All neurons.
    pub neurons: u64,
    /// Neurons on a device.
    pub device: u64,
    /// Neurons in the hot region.
    pub hot: u64,
    /// Neurons in the cold region.
    pub cold: u64,
}

/// The neurons in memory.
pub(super) struct Residency {
    layout: Arc<Layout>,
    pub(super) banks: Banks,
    /// Shared with compute threads while the active set is determined; exclusive between layers.
    gates: Arc<Resident>,
    pub(super) hot: HotClusters,
    pub(super) cold: Cold,
    /// Hot clusters of each bank, by the statistics.
    hot_wanted: Vec<u32>,
    /// By bank: share of the tokens that visit it; empty without routing statistics.
    visits: Vec<f32>,
    /// By bank: the first clusters, which are outside of these regions.
    outside: Vec<u32>,
    /// Target of the border between the two regions, while it moves.
    goal: Option<Goal>,
    /// By bank: scale of the predictor margins.
    spreads: Vec<Spread>,
    keep: Keep,
    memory: ArenaOptions,
    /// Evictions of regions that have been replaced.
    past_evictions: u64,
}

impl Residency {
    /// Empty regions for plans whose Gate rows are resident as in `plan`.
    pub(super) fn new(
        layout: Arc<Layout>,
        plan: &MemoryPlan,
        prefers: Preferences<'_>,
    ) -> Result<Self, Error> {
        let Preferences { keep, memory, .. } = prefers;
        let banks = Banks::new(&layout, prefers.naming, prefers.always);
        let content = banks.slots(plan.gate_banks > 0);
        let mut cold = Cold::new(&layout, content, memory, keep.eviction())?;
        for (bank, frequencies) in (0..).zip(&prefers.known.frequencies) {
            for (neuron, &often) in (0..).zip(frequencies) {
                cold.cache.set_prior(Key { bank, neuron }, often.into());
            }
        }
        Ok(Self {
            gates: Arc::new(Resident::read(&layout)?),
            hot: HotClusters::new(&layout, content, memory)?,
            cold,
            hot_wanted: prefers.hot_wanted,
            visits: prefers.known.visits.clone(),
            outside: vec![0; layout.banks()],
            goal: None,
            spreads: vec![Spread::default(); layout.banks()],
            banks,
            keep,
            memory,
            past_evictions: 0,
            layout,
        })
    }

    /// Excludes the first clusters of each bank, which a device holds.
    pub(super) fn begin_behind(&mut self, outside: &[u32]) {
        self.outside.copy_from_slice(outside);
        self.hot.begin_behind(outside);
    }

    /// Applies a plan to empty regions.
    pub(super) fn adopt(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.banks.with_gates = plan.gate_banks as usize;
        self.hot.set_visits(&self.layout, &self.visits);
        self.set_border(plan);
        exclusive(&mut self.gates).hold_gates(&self.layout, self.banks.with_gates)
    }

    /// Switches to another plan between two passes. Frees memory before allocating. Returns the
    /// first bank from which memory must be filled, if any.
    pub(super) fn set_plan(&mut self, plan: &MemoryPlan) -> Result<Option<usize>, Error> {
        self.goal = None;
        let (before, after) = (self.banks.with_gates, plan.gate_banks as usize);
        if (after > 0) != (before > 0) {
            self.clear(plan)?;
            self.adopt(plan)?;
            return Ok(Some(0));
        }
        // Slots keep their layout: some banks gain or lose their Gate rows, and the neurons of the
        // others remain.
        self.banks.with_gates = after;
        if after < before {
            for bank in after as u32..before as u32 {
                self.forget_bank(bank);
            }
            let gates = exclusive(&mut self.gates);
            gates.unshare();
            gates.hold_gates(&self.layout, after)?;
        }
        self.set_border(plan);
        if after <= before {
            return Ok(None);
        }
        exclusive(&mut self.gates).hold_gates(&self.layout, after)?;
        Ok(Some(before))
    }

    /// Empties the regions and gives them the slot layout of `plan`.
    fn clear(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.hot.set_border(0, &vec![0; self.layout.banks()]);
        self.past_evictions += self.hot.evictions();
        let gates = exclusive(&mut self.gates);
        gates.unshare();
        gates.hold_gates(&self.layout, 0)?;
        let content = self.banks.slots(plan.gate_banks > 0);
        self.hot = HotClusters::new(&self.layout, content, self.memory)?;
        self.hot.begin_behind(&self.outside);
        self.cold.replace_slots(&self.layout, content, self.memory)
    }

    /// Begins a pass over all layers.
    pub(super) fn begin_pass(&mut self) {
        self.cold.cache.begin_pass();
        self.hot.begin_pass();
    }

    /// Begins a layer, or a part of it, whose last bank is `last`.
    pub(super) fn begin_layer(&mut self, last: u32) {
        self.cold.cache.begin_layer(last);
        self.hot.begin_layer(last);
    }

    /// Whether a bank's neurons can be in the cold region. If any bank has resident Gate rows, cold
    /// slots hold only Up and Down.
    pub(super) fn has_cold(&self, bank: u32) -> bool {
        self.cold.cache.slots() > 0 && self.banks.suits_cold(bank)
    }

    /// Inputs of the rules of a bank.
    pub(super) fn bank(&self, bank: u32) -> BankState {
        BankState {
            scans: self.banks.scans(bank),
            cold: self.has_cold(bank),
            gates_resident: self.banks.gates_resident(bank),
        }
    }

    /// Whether any cluster of a bank may become hot: in models with experts, if the clusters of
    /// chosen experts are read whole.
    fn may_become_hot(&self, bank: u32) -> bool {
        self.layout.has_experts() && self.banks.scans(bank) && self.hot.units() > 0
    }

    /// Whether a cluster goes to the hot region when it is read.
    pub(super) fn belongs_hot(&self, bank: u32, cluster: u32) -> bool {
        self.hot.wants(bank, cluster) || self.may_become_hot(bank)
    }

    /// Whether a bank's clusters are not cached: the hot region is full, and the next token is unlikely
    /// to visit the expert (`again` is false).
    fn is_transient(&self, bank: u32, again: bool) -> bool {
        self.may_become_hot(bank) && !again && !self.hot.has_room()
    }

    /// Resident Gate rows and scales. Drop the reference before the layer ends.
    pub fn resident(&self) -> Arc<Resident> {
        Arc::clone(&self.gates)
    }

    /// Gate rows and scales, for reading.
    #[inline]
    pub fn gates(&self) -> &Resident {
        &self.gates
    }

    /// Exclusive access between two layers.
    pub fn gates_mut(&mut self) -> &mut Resident {
        exclusive(&mut self.gates)
    }

    /// Whether the hot region can hold the whole model.
    pub(super) fn is_whole(&self) -> bool {
        self.hot.units() >= self.layout.total_clusters()
    }

    /// Whether the cold region is smaller than the model, so that it may evict.
    pub fn evicts(&self) -> bool {
        u64::from(self.cold.cache.slots()) < self.layout.total()
    }

    /// Reports the predictor `margins` of `bank`'s neurons from `first` on, in order. Eviction
    /// spares neurons close to their threshold: recency and frequency give a neuron's average
    /// value, while its margin says more about the next tokens, since the predictor's input changes
    /// slowly. `consecutive`: the last report was for the previous token.
    pub fn set_margins(
        &mut self,
        cpu: Cpu,
        bank: u32,
        first: usize,
        margins: &[f32],
        consecutive: bool,
    ) {
        let (neurons, squares) = (self.layout.neurons(bank), cpu.dot_f32(margins, margins));
        let scale = self.spreads[bank as usize].scale(squares, first == 0, neurons);
        let steps = margins.iter().map(|m| (m * scale) as i8);
        let key = Key::new(bank, first as u32);
        self.cold.cache.set_margins(key, steps, consecutive);
    }

    /// The bytes of the resident hot clusters.
    pub fn hot_bytes(&mut self) -> Vec<&[u8]> {
        self.hot.resident(&self.layout.clusters_of_each())
    }

    /// Largest number of neurons that can be resident at once.
    pub fn capacity(&self) -> u64 {
        let total = self.layout.total();
        let hot = self.hot.units() * CLUSTER as u64;
        total.min(hot + u64::from(self.cold.cache.slots()))
    }

    /// Looks up every neuron: milliseconds for a large model.
    pub fn by_layer(&self, outside: impl Fn(u32) -> usize) -> Vec<LayerResidency> {
        let residency = |layer| {
            let mut found = LayerResidency::default();
            for bank in self.layout.banks_of(layer) {
                found.neurons += self.layout.neurons(bank) as u64;
                for cluster in 0..self.layout.clusters(bank) as u32 {
                    let neurons = self.layout.cluster_neurons(bank, cluster).len();
                    if (cluster as usize) < outside(bank) {
                        found.device += neurons as u64;
                    } else if self.hot.contains(bank, cluster) {
                        found.hot += neurons as u64;
                    } else {
                        let missing = self.cold.missing(&self.layout, bank, cluster);
                        found.cold += (neurons - missing) as u64;
                    }
                }
            }
            found
        };
        (0..self.layout.layers()).map(residency).collect()
    }

    /// Whether neurons stay after their layer.
    pub(super) fn keeps_neurons(&self) -> bool {
        self.keep != Keep::Nothing
    }

    /// Number of evictions so far.
    pub(super) fn evictions(&self) -> u64 {
        self.past_evictions + self.cold.cache.stats().evictions + self.hot.evictions()
    }

    /// Moves the border to the plan's position. Nothing is pinned between layers, so both regions
    /// can be resized. New hot clusters are loaded on first use.
    fn set_border(&mut self, plan: &MemoryPlan) {
        let prefix = self.prefixes(plan.hot_clusters);
        self.resize(plan.hot_clusters, plan.slots, &prefix);
    }

    /// Hot clusters of each bank for a hot region of `units` clusters.
    fn prefixes(&self, units: u64) -> Vec<u32> {
        let clusters = self.layout.clusters_of_each();
        if !self.visits.is_empty() && self.banks.scans(0) {
            border::most_visited(units, &self.visits, &clusters, &self.outside)
        } else {
            border::behind(units, &self.wanted(), &clusters, &self.outside)
        }
    }

    /// Number of hot clusters wanted per bank.
    pub fn wanted(&self) -> Vec<u32> {
        let clusters = self.layout.clusters_of_each();
        (0..)
            .zip(self.hot_wanted.iter().zip(&clusters))
            .map(|(bank, (&hot, &all))| if self.banks.scans(bank) { all } else { hot })
            .collect()
    }

    /// Shrinks one region before growing the other, so that their sum never exceeds the budget.
    fn resize(&mut self, hot: u64, cold: u64, prefix: &[u32]) {
        let cold = u32::try_from(cold.min(self.layout.total())).unwrap_or(u32::MAX);
        if cold < self.cold.cache.slots() {
            self.cold.cache.resize(cold);
            self.hot.set_border(hot, prefix);
        } else {
            self.hot.set_border(hot, prefix);
            self.cold.cache.resize(cold);
        }
    }

    /// Bytes of a cold slot including bookkeeping.
    fn slot_charge(&self) -> u64 {
        let (resident, eviction) = (self.banks.with_gates > 0, self.keep.eviction());
        self.layout.slot_charge(resident, eviction).max(1)
    }

    /// Sets the target of the border to that of `plan`, which has the same budget, with `wanted`
    /// hot clusters per bank.
    pub fn aim_border(&mut self, plan: &MemoryPlan, wanted: &[u32]) {
        self.hot_wanted.copy_from_slice(wanted);
        self.goal = Some(Goal {
            hot: plan.hot_clusters,
            cold: plan.slots,
            bytes: plan.hot_clusters * self.hot.unit_len() + plan.slots * self.slot_charge(),
        });
    }

    /// Whether the border has not reached its target.
    pub(super) fn border_moves(&self) -> bool {
        self.goal.is_some()
    }

    /// Moves the border one step towards its target, between two passes. Evicted clusters are
    /// demoted one at a time, coldest first over all banks, so that both regions and the copy
    /// `buffer` stay within the budget.
    pub(super) fn step_border(&mut self, mut buffer: Option<&mut Slot>) {
        let Some(goal) = self.goal else { return };
        let (now, unit) = (self.hot.units(), self.hot.unit_len().max(1));
        let [hot, cold] = goal.step(now, unit, self.slot_charge());
        if hot == goal.hot {
            self.goal = None;
        }
        let prefix = self.prefixes(hot);
        let most = self.layout.clusters_of_each().into_iter().max();
        for cluster in (0..most.unwrap_or(0)).rev() {
            for (bank, &end) in (0..).zip(&prefix) {
                if self.hot.held() > hot && cluster >= end {
                    self.demote(bank, cluster, cold, buffer.as_deref_mut());
                }
            }
        }
        self.resize(hot, cold, &prefix);
    }

    /// Demotes a hot cluster: copies its neurons to the cold region, which may grow to `cold`
    /// slots.
    fn demote(&mut self, bank: u32, cluster: u32, cold: u64, mut buffer: Option<&mut Slot>) {
        if cluster as usize >= self.layout.clusters(bank) {
            return;
        }
        let Some(unit) = self.hot.get_pin(bank, cluster) else {
            return;
        };
        if let Some(buffer) = &mut buffer {
            let bytes = self.hot.bytes(unit);
            buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        }
        self.hot.unpin(bank, cluster);
        self.hot.remove(bank, cluster);
        let Some(buffer) = buffer else { return };
        self.hot.shrink();
        let more = self.hot.unit_len() / self.slot_charge();
        let slots = u64::from(self.cold.cache.slots());
        let slots = (slots + more).min(cold.max(slots));
        (self.cold.cache).resize(u32::try_from(slots).unwrap_or(u32::MAX));
        if self.has_cold(bank) {
            let content = *self.banks.content(bank);
            let key = [bank, cluster];
            (self.cold).keep_from_hot(&self.layout, &content, key, buffer.as_slice());
        }
    }

    /// Caches the retained part of a whole cluster in `buffer`: in the hot region if it belongs
    /// there, otherwise in the cold region those of its needed neurons `ids` for which `keeps`
    /// returns true. `again`: the next token is likely to visit its bank.
    pub(super) fn keep_read(
        &mut self,
        [bank, cluster]: [u32; 2],
        ids: &[u32],
        again: bool,
        keeps: impl Fn(u32) -> bool,
        buffer: &[u8],
    ) {
        if self.hot.contains(bank, cluster) || self.is_transient(bank, again) {
            // Already copied by the thread that computed it, or not to be cached.
        } else if self.belongs_hot(bank, cluster) {
            self.keep_cluster(bank, cluster, buffer);
            self.forget_neurons(bank, cluster);
        } else if !self.banks.scans(bank) && self.keeps_neurons() {
            let (first, content) = (cluster * CLUSTER as u32, *self.banks.content(bank));
            let bundles = &buffer[self.layout.shift(bank, first, 0)..];
            for &neuron in ids.iter().filter(|&&neuron| keeps(neuron)) {
                let bundle = &bundles[(neuron - first) as usize * content.stride..];
                let key = Key { bank, neuron };
                if !self.cold.keep(&self.layout, &content, key, bundle) {
                    break;
                }
            }
        }
    }

    /// Copies a whole cluster from its stream buffer to the hot region.
    fn keep_cluster(&mut self, bank: u32, cluster: u32, buffer: &[u8]) {
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let shift = self.layout.shift(bank, neurons.start, 0);
        let (content, format) = (*self.banks.content(bank), self.layout.format);
        let bundles = content.bundles(&buffer[shift..], neurons.len(), format);
        self.hot.admit(bank, cluster, &content, bundles);
    }

    /// A slot of the hot region for a cluster that [`Residency::keep_read`] would copy there. The
    /// thread that computes the cluster copies it, since its bytes are in the CPU's cache.
    pub(super) fn reserve_hot(&mut self, bank: u32, cluster: u32, again: bool) -> Option<Slot> {
        if self.belongs_hot(bank, cluster) && !self.is_transient(bank, again) {
            self.hot.reserve(bank, cluster)
        } else {
            None
        }
    }

    /// Makes the cluster copied to `slot` resident; takes the slot back if it is damaged.
    pub(super) fn settle_hot(&mut self, bank: u32, cluster: u32, slot: Slot, intact: bool) {
        if !intact {
            return self.hot.abandon(bank, cluster, slot);
        }
        self.hot.settle(bank, cluster, slot);
        self.forget_neurons(bank, cluster);
    }

    /// Removes a bank's clusters and neurons from both regions.
    fn forget_bank(&mut self, bank: u32) {
        for cluster in 0..self.layout.clusters(bank) as u32 {
            self.hot.remove(bank, cluster);
            self.forget_neurons(bank, cluster);
        }
    }

    /// Removes a hot cluster's neurons from the cold region, so that there is one copy.
    fn forget_neurons(&mut self, bank: u32, cluster: u32) {
        for neuron in self.layout.cluster_neurons(bank, cluster) {
            self.cold.cache.remove(Key { bank, neuron });
        }
    }
}

/// Exclusive access to Gate rows and scales, between two layers.
fn exclusive(gates: &mut Arc<Resident>) -> &mut Resident {
    match Arc::get_mut(gates) {
        Some(gates) => gates,
        None => unreachable!("shared only while a layer's active set is determined"),
    }
}
