//! Prefetch of certain needs: whole clusters of the next layer. The reads overlap with the rest of
//! this layer and with attention.

use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;
use crate::error::Error;

impl NeuronStore {
    /// Notes the next layer's bank. Of several, it is not certain which are visited.
    pub(super) fn expect_next_layer(&mut self, number: usize) {
        let next = (number + 1) % self.layout.layers();
        let mut banks = self.layout.banks_of(next);
        if let (Some(bank), None, true) = (banks.next(), banks.next(), next != number) {
            self.layer.after.push(bank);
        }
    }

    /// In a scan, or with many tokens, all clusters of the banks that follow are needed: reads the
    /// first missing ones while stream buffers are free.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        let mut before = 0;
        for i in 0..self.layer.after.len() {
            let bank = self.layer.after[i];
            let (rules, clusters) = (self.rules(bank), self.layout.clusters(bank));
            if !(rules.scans || rules.many) {
                return Ok(());
            }
            while self.layer.ahead < before + clusters && self.reader.stream.free() > 0 {
                let cluster = (self.layer.ahead - before) as u32;
                self.layer.ahead += 1;
                let belongs_hot = self.belongs_hot(bank, cluster);
                let missing = !self.hot.contains(bank, cluster);
                if missing && rules.read_ahead(belongs_hot, || self.absent(bank, cluster)) {
                    self.request_cluster(bank, cluster)?;
                }
            }
            before += clusters;
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
