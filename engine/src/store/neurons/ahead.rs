//! Reads ahead: of what [`Prefetch`] proposes, whole clusters that
//! are missing while buffers are free; and of single neurons that a predictor names before their
//! layer's input is known. (PowerInfer-2 §4.3 leaves the device idle during attention; these reads
//! use that time.)
//!
//! On completion such a neuron becomes resident, unpinned and not counted as used. The thread that
//! first computes it verifies its checksums. If its layer needs it while the read is in flight, its
//! cluster waits for the completion as for any miss.

use std::time::Duration;

use emberflow_storage::cache::Key;

use super::{NeuronStore, rules};
use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::store::job::Job;
use crate::store::prefetch::{Prefetch, Want};
use crate::store::reads::{Reads, Tag};

/// Queue depth at which speculation stops: more reads would only wait in the queue.
const MAX_DEPTH: usize = 768;

/// Returns the buffers of clusters that are neither visited nor follow from here on.
pub(super) fn drop_strays(reads: &mut Reads, prefetch: &Prefetch, job: &Job) {
    reads.drop_kept(|bank, cluster| prefetch.follows(bank, cluster, job.visits(bank)));
}

impl NeuronStore {
    /// Reads what is proposed while stream buffers are free. Call once all of the layer is requested.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        let partly = self.residency.banks.gates_partly();
        while self.reads.free_buffers() > 0 {
            let rules = rules(self.policy, &self.residency, &self.job, &self.device);
            let Some(want) = self.prefetch.next(rules, partly) else {
                break;
            };
            self.read_if_missing(want)?;
        }
        Ok(())
    }

    /// Takes a guess at the banks of the next layer, the likeliest first, and reads what is missing
    /// of them behind what this layer needs, while stream buffers are free.
    pub fn read_guessed(&mut self, banks: &[u32]) -> Result<(), Error> {
        self.prefetch.guess(banks.iter().copied());
        if self.job.is_requested() {
            self.read_ahead()?;
        }
        self.reads.submit()
    }

    /// Reads what is missing of the `banks` that layer `number`, the next one, is going to visit: its
    /// router has chosen before attention, which these reads overlap with. For passes of one token.
    pub fn read_chosen(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32> + Clone,
    ) -> Result<(), Error> {
        let read = self.layout.has_experts()
            && self.policy.ablation.looks_ahead()
            && !self.residency.is_whole();
        if !read {
            return Ok(());
        }
        self.latch.check()?;
        self.judge(number, banks.clone())?;
        self.prefetch.choose(banks);
        drop_strays(&mut self.reads, &self.prefetch, &self.job);
        while self.reads.free_buffers() > 0 {
            let Some(want) = self.prefetch.next_guessed() else {
                break;
            };
            self.read_if_missing(want)?;
        }
        self.reads.submit()
    }

    /// Begins to read what is missing of the layer's `banks`, before its neurons are named: where all
    /// of them are needed and pass through stream buffers, nothing else can come of it.
    pub(super) fn read_certain(&mut self, banks: impl Iterator<Item = u32>) -> Result<(), Error> {
        for bank in banks {
            if !rules(self.policy, &self.residency, &self.job, &self.device)(bank).streams() {
                continue;
            }
            for cluster in 0..self.layout.clusters(bank) as u32 {
                if self.reads.free_buffers() == 0 {
                    return self.reads.submit();
                }
                self.read_if_missing(Want::now(bank, cluster))?;
            }
        }
        self.reads.submit()
    }

    /// Compares the guess for layer `number` with the `banks` that it visits, and cancels what has
    /// not begun to be read for it.
    pub(super) fn judge(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        let reads = &self.reads;
        let underway = |bank| reads.underway().filter(|of| of.0 == bank).count();
        if self.prefetch.judge(number, banks, underway) {
            self.reads.cancel_prefetches()
        } else {
            Ok(())
        }
    }

    /// Reads a cluster that is proposed, if it is missing and will be read whole.
    fn read_if_missing(&mut self, want: Want) -> Result<(), Error> {
        let Want { bank, cluster, .. } = want;
        let belongs_hot = self.residency.belongs_hot(bank, cluster);
        let known = (cluster as usize) < self.device.holds(bank)
            || self.residency.hot.contains(bank, cluster)
            || self.reads.is_underway(bank, cluster);
        let rules = rules(self.policy, &self.residency, &self.job, &self.device)(bank);
        let missing = || self.residency.cold.missing(&self.layout, bank, cluster);
        if !known
            && rules.read_ahead(belongs_hot, missing)
            && self.reads.cluster(bank, cluster, want.priority)?
        {
            self.prefetch.accepted(want);
        }
        Ok(())
    }

    /// Whether guesses at the experts of layer `next` are worth reading in this pass.
    pub fn foresees(&self, next: usize) -> bool {
        let mut banks = self.layout.banks_of(next);
        let several = banks.len() > 1;
        several
            && self.prefetch.guesses_experts()
            && self.policy.ablation.looks_ahead()
            && !self.residency.is_whole()
            && banks
                .next()
                .is_some_and(|bank| self.residency.banks.scans(bank))
    }

    /// What the device takes for the reads that `layer` missed in the last pass: as much as guesses
    /// for it could save. `None` if they do not pay.
    pub fn guesses_save(&self, layer: usize) -> Option<Duration> {
        let bank = self.layout.banks_of(layer).next();
        let reads = |bank| {
            let bank = self.residency.bank(bank);
            !bank.scans && !self.policy.reads_gates_first(bank)
        };
        let pays = self.residency.cold.cache.slots() > 0
            && self.policy.ablation.looks_ahead()
            && bank.is_some_and(reads)
            && self.prefetch.neurons.pays(layer);
        let missed = f64::from(self.prefetch.neurons.missed(layer));
        pays.then(|| Duration::from_nanos((missed * self.policy.costs.rest) as u64))
    }

    /// Requests the neurons `ids` of `bank` in the next layer, `layer`, that miss. Stops when the
    /// cold region has no free slot.
    pub fn guess(&mut self, layer: usize, bank: u32, ids: &[u32]) -> Result<(), Error> {
        self.prefetch.neurons.age(layer);
        for &neuron in ids {
            if self.reads.pending() >= MAX_DEPTH {
                break;
            }
            let (key, cluster) = (Key { bank, neuron }, neuron / CLUSTER as u32);
            let cache = &self.residency.cold.cache;
            let held = cache.contains(key) || cache.is_loading(key);
            if held
                || (cluster as usize) < self.device.holds(bank)
                || self.residency.hot.contains(bank, cluster)
                || self.residency.belongs_hot(bank, cluster)
            {
                continue;
            }
            let Some(slot) = self.residency.cold.cache.reserve(key) else {
                break;
            };
            self.prefetch.neurons.put(layer, key);
            self.counters.guessed += 1;
            let content = self.residency.banks.content(bank);
            let part = (self.layout).cover(bank, neuron, content.start, content.len);
            let tag = Tag::Ahead { bank, neuron };
            self.reads.part(tag, part, slot, 0)?;
        }
        self.reads.submit()
    }
}
