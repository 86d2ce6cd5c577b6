//! Speculative prefetch: reads neurons of the next layer before its input is known. A predictor on
//! this layer's residual stream names most of them. (PowerInfer-2 §4.3 leaves the device idle
//! during attention; these reads use that time.)
//!
//! On completion such a neuron becomes resident, unpinned and not counted as used. The thread that
//! first computes it verifies its checksums. If its layer needs it while the read is in flight, its
//! cluster waits for the completion as for any miss.

use std::time::Duration;

use emberflow_storage::cache::Key;
use emberflow_storage::io::Read;

use super::neurons::NeuronStore;
use super::regions::CLUSTER;
use super::tag::Tag;
use crate::error::Error;

/// Queue depth at which speculation stops: more reads would only wait in the queue.
const MAX_DEPTH: usize = 768;

impl NeuronStore {
    /// Whether speculative reads for `layer` pay.
    pub fn guesses_pay(&self, layer: usize) -> bool {
        let bank = self.layout.banks_of(layer).next();
        let reads = |bank| !self.scans(bank) && !self.reads_gates_first(bank);
        self.cold.slots() > 0
            && self.ablation.looks_ahead()
            && bank.is_some_and(reads)
            && self.guesses.pays(layer)
    }

    /// What the device takes for the reads that `layer` missed in the last pass: as much as guesses
    /// for it could save.
    pub fn guesses_save(&self, layer: usize) -> Duration {
        let missed = f64::from(self.guesses.missed(layer));
        Duration::from_nanos((missed * self.costs.rest) as u64)
    }

    /// Requests the neurons `ids` of `bank` in the next layer, `layer`, that miss. Stops when the
    /// cold region has no free slot.
    pub fn guess(&mut self, layer: usize, bank: u32, ids: &[u32]) -> Result<(), Error> {
        self.guesses.age(layer);
        for &neuron in ids {
            if self.reader.pending() >= MAX_DEPTH {
                break;
            }
            let (key, cluster) = (Key { bank, neuron }, neuron / CLUSTER as u32);
            let held = self.cold.contains(key) || self.cold.is_loading(key);
            if held
                || (cluster as usize) < self.held_on_device(bank)
                || self.hot.contains(bank, cluster)
                || self.belongs_hot(bank, cluster)
            {
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
