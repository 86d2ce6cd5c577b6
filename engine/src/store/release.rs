//! Release: what happens to a cluster's bytes after its computation.

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::Key;

use super::hot::vectors;
use super::neurons::NeuronStore;
use super::regions::CLUSTER;
use super::work::{Held, Item, Source};
use crate::ablation::Keep;

impl NeuronStore {
    /// Ends the use of an item. A streamed cluster goes to the hot region if it belongs there.
    /// Otherwise its needed neurons for which `keeps` holds go to the cold region, as if read
    /// individually. `again`: the next token may well visit its bank.
    pub fn release(&mut self, item: usize, again: bool, keeps: impl Fn(u32) -> bool) {
        let it = &mut self.layer.items[item];
        let (bank, cluster, places) = (it.bank, it.cluster, it.first..it.end);
        match std::mem::replace(&mut it.source, Source::Unused) {
            Source::Hot(_) if again => self.hot.unpin(bank, cluster),
            Source::Hot(_) => self.hot.unpin_unused(bank, cluster),
            Source::Stream(Some(slot)) => {
                if self.hot.contains(bank, cluster) || self.is_passing(bank, again) {
                    // The thread that computed it has copied it, or it does not stay.
                } else if self.belongs_hot(bank, cluster) {
                    self.keep_cluster(bank, cluster, slot.as_slice());
                    self.forget_neurons(bank, cluster);
                } else if !self.scans(bank) && self.ablation.keep() != Keep::Nothing {
                    for place in places {
                        let neuron = self.layer.ids[place];
                        if keeps(neuron) && !self.keep_neuron(bank, neuron, slot.as_slice()) {
                            break;
                        }
                    }
                }
                self.reader.put(slot);
            }
            Source::Cold => {
                let ids = &self.layer.ids[places.clone()];
                for (held, &neuron) in self.layer.held[places].iter_mut().zip(ids) {
                    let held = std::mem::replace(held, Held::Nothing);
                    let key = Key { bank, neuron };
                    match held {
                        Held::Pinned(_) | Held::Read(_) if keeps(neuron) => self.cold.unpin(key),
                        Held::Pinned(_) => self.cold.unpin_unused(key),
                        Held::Read(_) => self.cold.unpin_first_victim(key),
                        Held::Nothing | Held::Gate(_) | Held::Coming => {}
                    }
                }
            }
            Source::Shared
            | Source::Mapped
            | Source::Unused
            | Source::Stream(None)
            | Source::Device => {}
        }
    }

    /// Whether what was read of a bank does not stay: an expert that only others of the pass's rows
    /// visited than those that count, with no room left for it.
    fn is_passing(&self, bank: u32, again: bool) -> bool {
        self.roams(bank) && !again && !self.hot.has_room()
    }

    /// A slot of the hot region for a streamed item that [`NeuronStore::release`] would copy there,
    /// so that the thread that computes it copies it, with its bytes at hand.
    pub fn reserve_hot(&mut self, item: usize, again: bool) -> Option<Slot> {
        let it = &self.layer.items[item];
        let (bank, cluster) = (it.bank, it.cluster);
        let streamed = matches!(it.source, Source::Stream(Some(_)));
        let stays = self.belongs_hot(bank, cluster) && !self.is_passing(bank, again);
        match streamed && stays {
            true => self.hot.reserve(bank, cluster),
            false => None,
        }
    }

    /// Makes an item resident in the hot region: its cluster was copied to `slot`.
    pub fn settle_hot(&mut self, item: usize, slot: Slot) {
        let Item { bank, cluster, .. } = self.layer.items[item];
        self.hot.settle(bank, cluster, slot);
        self.forget_neurons(bank, cluster);
    }

    /// Takes back the slot of an item whose bytes are damaged.
    pub fn abandon_hot(&mut self, item: usize, slot: Slot) {
        let Item { bank, cluster, .. } = self.layer.items[item];
        self.hot.abandon(bank, cluster, slot);
    }

    /// Removes a bank's clusters and neurons from both regions.
    pub(super) fn forget_bank(&mut self, bank: u32) {
        for cluster in 0..self.layout.clusters(bank) as u32 {
            self.hot.remove(bank, cluster);
            self.forget_neurons(bank, cluster);
        }
    }

    /// Removes a hot cluster's neurons from the cold region: one copy is enough.
    fn forget_neurons(&mut self, bank: u32, cluster: u32) {
        for neuron in self.layout.cluster_neurons(bank, cluster) {
            self.cold.remove(Key { bank, neuron });
        }
    }

    /// Copies a whole cluster from its stream buffer to the hot region.
    pub(super) fn keep_cluster(&mut self, bank: u32, cluster: u32, buffer: &[u8]) {
        let neurons = self.layout.cluster_neurons(bank, cluster);
        let shift = self.layout.shift(bank, neurons.start, 0);
        let content = *self.content(bank);
        let format = self.layout.format;
        let bundles = content.bundles(&buffer[shift..], neurons.len(), format);
        self.hot.admit(bank, cluster, &content, bundles);
    }

    /// Copies a neuron from its cluster's stream buffer to the cold region. False if no slot is
    /// available.
    fn keep_neuron(&mut self, bank: u32, neuron: u32, buffer: &[u8]) -> bool {
        let key = Key { bank, neuron };
        if self.cold.get_pin(key).is_some() {
            self.cold.unpin(key);
            return true;
        }
        if self.cold.is_loading(key) {
            return true;
        }
        let Some(mut slot) = self.cold.reserve(key) else {
            return false;
        };
        let (first, content) = (neuron - neuron % CLUSTER as u32, self.content(bank));
        let from = self.layout.shift(bank, first, 0);
        let at = from + (neuron - first) as usize * content.stride;
        let to = self.layout.shift(bank, neuron, content.start);
        slot.as_mut_slice()[to..to + content.len]
            .copy_from_slice(&buffer[at + content.start..at + content.stride]);
        self.cold.admit(key, slot);
        self.cold.unpin(key);
        true
    }

    /// Copies a neuron's bundle, as on flash, to a free slot of the cold region. False if no slot
    /// is free, or if the neuron is resident or in flight.
    pub(super) fn keep_if_free(&mut self, bank: u32, neuron: u32, bundle: &[u8]) -> bool {
        let key = Key { bank, neuron };
        let Some(mut slot) = self.cold.reserve_if_free(key) else {
            return false;
        };
        let content = self.content(bank);
        let to = self.layout.shift(bank, neuron, content.start);
        slot.as_mut_slice()[to..to + content.len].copy_from_slice(&bundle[content.start..]);
        self.cold.admit(key, slot);
        self.cold.unpin(key);
        true
    }

    /// Copies the neurons of a hot cluster to free cold slots; evicts nothing. `unit`: the
    /// cluster's bytes in the hot region.
    pub(super) fn keep_from_hot(&mut self, bank: u32, cluster: u32, unit: &[u8]) {
        if !self.has_cold(bank) {
            return;
        }
        let content = *self.content(bank);
        for (i, neuron) in self.layout.cluster_neurons(bank, cluster).enumerate() {
            let key = Key { bank, neuron };
            let Some(mut slot) = self.cold.reserve_if_free(key) else {
                continue;
            };
            let shift = self.layout.shift(bank, neuron, content.start);
            let to = &mut slot.as_mut_slice()[shift..];
            let [gate, up, down] = vectors(&content, unit, i);
            to[..gate.len()].copy_from_slice(gate);
            let rest = &mut to[content.gate_span - content.start..];
            rest[..up.len()].copy_from_slice(up);
            rest[up.len()..][..down.len()].copy_from_slice(down);
            self.cold.admit(key, slot);
            self.cold.unpin(key);
        }
    }
}
