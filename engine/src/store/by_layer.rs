//! What is resident of each layer.

use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;

/// Resident neurons of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerResidency {
    /// All neurons.
    pub neurons: u64,
    /// Those on a device.
    pub device: u64,
    /// Those in the hot region.
    pub hot: u64,
    /// Those in the cold region.
    pub cold: u64,
}

impl NeuronStore {
    /// Looks up every neuron: milliseconds for a large model.
    pub fn by_layer(&self) -> Vec<LayerResidency> {
        let layout = self.layout();
        let of_layer = |layer| {
            let mut found = LayerResidency::default();
            for bank in layout.banks_of(layer) {
                found.neurons += layout.neurons(bank) as u64;
                for cluster in 0..layout.clusters(bank) as u32 {
                    let mut neurons = layout.cluster_neurons(bank, cluster);
                    if (cluster as usize) < self.held_on_device(bank) {
                        found.device += neurons.len() as u64;
                    } else if self.hot.contains(bank, cluster) {
                        found.hot += neurons.len() as u64;
                    } else {
                        let cold = |&neuron: &u32| self.cold.contains(Key::new(bank, neuron));
                        found.cold += neurons.by_ref().filter(cold).count() as u64;
                    }
                }
            }
            found
        };
        (0..layout.layers()).map(of_layer).collect()
    }
}
