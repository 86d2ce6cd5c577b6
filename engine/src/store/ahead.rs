//! Reading ahead what is certain: clusters of the next layer that it will need as a whole. They come
//! while this layer is still computed, and attention after it.

use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;
use crate::error::Error;

impl NeuronStore {
    /// In a scan, or for many tokens, the next layer's clusters are needed for certain: reads the
    /// first missing ones as far as there are buffers.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        let next = (self.layer.number + 1) % self.layout.layers();
        let mut banks = self.layout.banks_of(next);
        let (Some(bank), None) = (banks.next(), banks.next()) else {
            // Which experts come next is not certain.
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

    /// Neurons of a cluster that are not in the cold region.
    fn absent(&self, bank: u32, cluster: u32) -> usize {
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let missing = |&neuron: &u32| !self.cold.contains(Key { bank, neuron });
        neurons.filter(missing).count()
    }
}
