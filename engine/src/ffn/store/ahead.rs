//! Reading ahead of the computation: the clusters of the next bank whose need is certain
//! before its gates are known. They come while this bank is still computed, and attention
//! after it.

use emberflow_storage::cache::Key;

use super::NeuronStore;
use crate::Error;

impl NeuronStore {
    /// Whether a missing cluster is read as a whole whichever neurons are needed.
    pub(super) fn comes_whole(&self, bank: u32, c: u32) -> bool {
        self.scans && self.cold.slots() == 0 || self.hot.wants(bank, c)
    }

    /// Whether a cluster was read ahead.
    pub(super) fn is_coming(&self, bank: u32, c: u32) -> bool {
        let arrived = &self.layer.arrived;
        self.layer.coming.contains(&(bank, c)) || arrived.iter().any(|a| (a.0, a.1) == (bank, c))
    }

    /// Whether it can be said before the gates are known that a missing cluster will be
    /// read as a whole: always in a scan, and for many tokens, of which some need nearly
    /// every neuron.
    fn will_come_whole(&self, bank: u32, c: u32) -> bool {
        if self.scans || !self.layer.many || self.hot.wants(bank, c) {
            return self.comes_whole(bank, c);
        }
        let neurons = self.banks.cluster_neurons(c as usize);
        let missing = neurons
            .filter(|&n| {
                !self.cold.contains(Key {
                    bank,
                    neuron: n as u32,
                })
            })
            .count();
        // Some of them may not be needed after all.
        self.policy.bundles() && self.costs.whole_cluster(missing / 2)
    }

    /// In a scan, or for many tokens, the next bank's clusters are needed for certain: reads the first
    /// missing ones while this bank is still computed, and attention after it.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        let bank = (self.layer.bank + 1) % self.banks.count as u32;
        while self.layer.ahead < self.banks.clusters() && self.stream.free() > 0 {
            let c = self.layer.ahead;
            self.layer.ahead += 1;
            let missing = !self.hot.contains(bank, c as u32);
            if bank != self.layer.bank && missing && self.will_come_whole(bank, c as u32) {
                self.request_cluster(bank, c)?;
            }
        }
        Ok(())
    }
}
