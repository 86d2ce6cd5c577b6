//! Contents of memory when a plan takes effect.

use emberflow_storage::arena::ArenaPages;
use emberflow_storage::cache::Key;

use super::{Residency, exclusive};
use crate::ablation::Keep;
use crate::cluster::CLUSTER;

/// Approximate bytes that a thread clears at a time.
const PART: usize = 8 << 20;

impl Residency {
    /// Memory filled by the banks from `first` on, in this order, in parts of [`PART`] bytes.
    pub(in crate::store) fn memory_to_fill(&self, first: usize) -> Vec<ArenaPages> {
        if self.keep != Keep::All {
            return Vec::new();
        }
        let regions = [self.hot.pages(), self.cold.cache.arena().pages()];
        let (banks, whole) = (
            self.layout.banks(),
            regions.iter().map(ArenaPages::len).sum(),
        );
        let steps = banks.clamp(1, 1 + usize::div_ceil(whole, PART));
        let gates = |step: usize| {
            let step_banks = banks * step / steps..banks * (step + 1) / steps;
            let filled = step_banks.filter(move |&bank| bank >= first);
            filled.filter_map(|bank| self.gates.gate_pages(bank as u32))
        };
        let parts = |step: usize| {
            let region_parts = regions.iter().map(move |pages| pages.part(step, steps));
            gates(step).chain(region_parts)
        };
        (0..steps).flat_map(parts).collect()
    }

    /// Neurons of each bank that fill the cold region.
    pub(in crate::store) fn cold_per_bank(&self) -> usize {
        let banks = 0..self.layout.banks() as u32;
        let with_cold = banks.filter(|&bank| self.has_cold(bank)).count();
        (self.cold.cache.slots() as usize).div_ceil(with_cold.max(1))
    }

    /// Clusters that fill memory, bank by bank from `first` on: all clusters if Gate rows are
    /// resident; otherwise the hot ones, then those for the cold region.
    pub(in crate::store) fn clusters_to_fill(&self, first: usize) -> Vec<(u32, u32)> {
        let cold_per_bank = self.cold_per_bank();
        let wanted = |bank: u32| {
            let clusters = self.layout.clusters(bank) as u32;
            if self.banks.gates_resident(bank) {
                return clusters;
            }
            let behind = if self.has_cold(bank) {
                cold_per_bank.div_ceil(CLUSTER) as u32
            } else {
                0
            };
            (self.hot.prefix(bank) + behind).min(clusters)
        };
        (first as u32..self.layout.banks() as u32)
            .flat_map(|bank| (0..wanted(bank)).map(move |cluster| (bank, cluster)))
            .collect()
    }

    /// Copies the Gate rows of a whole cluster, if those of its bank are resident.
    pub(in crate::store) fn fill_gates(&mut self, bank: u32, cluster: u32, buffer: &[u8]) {
        let gate_len = self.layout.format.gate_len();
        let stride = self.banks.content(bank).stride;
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let shift = self.layout.shift(bank, neurons.start, 0);
        if let Some(gates) = exclusive(&mut self.gates).gates_mut(bank) {
            for (neuron, bundle) in neurons.zip(buffer[shift..].chunks_exact(stride)) {
                let offset = neuron as usize * gate_len;
                gates[offset..offset + gate_len].copy_from_slice(&bundle[..gate_len]);
            }
        }
    }

    /// Copies a whole cluster to the hot region if it belongs there; otherwise to the remainder of
    /// the bank's share of the cold region.
    pub(in crate::store) fn fill(
        &mut self,
        bank: u32,
        cluster: u32,
        cold_per_bank: usize,
        buffer: &[u8],
    ) {
        if self.hot.wants(bank, cluster) {
            return self.keep_cluster(bank, cluster, buffer);
        }
        if !self.keeps_neurons() || !self.has_cold(bank) {
            return;
        }
        let content = *self.banks.content(bank);
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let shift = self.layout.shift(bank, neurons.start, 0);
        let first_cold = self.hot.prefix(bank) as usize * CLUSTER;
        for (neuron, bundle) in neurons.zip(buffer[shift..].chunks_exact(content.stride)) {
            let behind = neuron as usize - first_cold;
            let key = Key { bank, neuron };
            if behind >= cold_per_bank
                || !(self.cold).keep_if_free(&self.layout, &content, key, bundle)
            {
                return;
            }
        }
    }
}
