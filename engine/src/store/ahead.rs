//! Prefetch of certain needs: whole clusters of the next layer. The reads overlap with the rest of
//! this layer and with attention.

use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;
use crate::error::Error;

impl NeuronStore {
    /// In a scan, or with many tokens, all clusters of the next layer are needed: reads the first
    /// missing ones while stream buffers are free.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        let next = (self.layer.number + 1) % self.layout.layers();
        let mut banks = self.layout.banks_of(next);
        let (Some(bank), None) = (banks.next(), banks.next()) else {
            // With experts, the next banks are not certain.
            return Ok(());
        };
        let rules = self.rules(bank);
        if next == self.layer.number || !(rules.scans || rules.many) {
            return Ok(());
        }
        while self.layer.ahead < self.layout.clusters(bank) && self.reader.stream.free() > 0 {
            let cluster = self.layer.ahead as u32;
            self.layer.ahead += 1;
            let belongs_hot = self.hot.wants(bank, cluster);
            let missing = !self.hot.contains(bank, cluster);
            if missing && rules.read_ahead(belongs_hot, || self.absent(bank, cluster)) {
                self.request_cluster(bank, cluster)?;
            }
        }
        Ok(())
    }

    /// Number of a cluster's neurons that are not in the cold region.
    fn absent(&self, bank: u32, cluster: u32) -> usize {
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let missing = |&neuron: &u32| !self.cold.contains(Key { bank, neuron });
        neurons.filter(missing).count()
    }
}
