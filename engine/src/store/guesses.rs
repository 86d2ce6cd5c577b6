//! Reading neurons of the next layer before its own input is known: a predictor that sees this
//! layer's residual stream names most of them (PowerInfer-2 §4.3 leaves the device idle during
//! attention; these reads use that time).
//!
//! Such a neuron becomes resident when it arrives, unpinned and not counted as used. Its checksums
//! are verified when it is first needed, by the thread that computes it. If its layer asks for it
//! while it is on its way, its cluster waits for it like for any other.

use emberflow_storage::cache::Key;
use emberflow_storage::io::Read;

use super::neurons::NeuronStore;
use super::regions::CLUSTER;
use super::tag::Tag;
use crate::error::Error;

/// Reads under way beyond which nothing is guessed: more would only wait in the queue.
const ENOUGH: usize = 768;

impl NeuronStore {
    /// Whether it pays to guess what `layer` needs.
    pub fn guesses_pay(&self, layer: usize) -> bool {
        let bank = self.layout.banks_of(layer).next();
        let reads = |bank| !self.scans(bank) && !self.reads_gates_first(bank);
        self.cold.slots() > 0
            && self.ablation.looks_ahead()
            && bank.is_some_and(reads)
            && self.guesses.pays(layer)
    }

    /// Requests what memory misses of `ids`, neurons of `bank` of `layer`, the next one. Stops where
    /// the cold region has no slot to give.
    pub fn guess(&mut self, layer: usize, bank: u32, ids: &[u32]) -> Result<(), Error> {
        self.guesses.age(layer);
        for &neuron in ids {
            if self.reader.pending() >= ENOUGH {
                break;
            }
            let (key, cluster) = (Key { bank, neuron }, neuron / CLUSTER as u32);
            let held = self.cold.contains(key) || self.cold.is_loading(key);
            if held || self.hot.contains(bank, cluster) || self.hot.wants(bank, cluster) {
                continue;
            }
            let Some(slot) = self.cold.reserve(key) else {
                break;
            };
            self.guesses.put(layer, key);
            self.counters.guessed += 1;
            let content = self.content(bank);
            let (offset, len) = self.layout.cover(bank, neuron, content.start, content.len);
            let tag = Tag::Ahead { bank, neuron }.bits();
            self.request(Read::new(tag, offset, len, slot).prefetch())?;
        }
        self.submit()
    }
}
