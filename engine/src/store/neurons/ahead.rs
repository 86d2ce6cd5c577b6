//! Prefetching: whole clusters that [`Prefetch`] proposes, while stream buffers are free; and
//! single neurons that a predictor selects before their layer's input is known. (PowerInfer-2 §4.3
//! leaves storage idle during attention; these reads use that time.)
//!
//! A prefetched neuron becomes resident, unpinned, and does not count as used. The first thread to
//! compute it verifies its checksums. If its layer needs it while the read is in flight, its
//! cluster waits for the completion as for any miss.

use std::time::Duration;

use emberflow_storage::cache::Key;

use super::{NeuronStore, rules};
use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::store::job::Job;
use crate::store::prefetch::{Prefetch, Want};
use crate::store::reads::{Reads, Tag};

/// Queue depth at which prefetching stops: further reads would only wait in the queue.
const MAX_DEPTH: usize = 768;

/// Frees the buffers of clusters that neither the current layer nor a later one needs.
pub(super) fn drop_strays(reads: &mut Reads, prefetch: &Prefetch, job: &Job) {
    reads.drop_unclaimed(|bank, cluster| prefetch.follows(bank, cluster, job.visits(bank)));
}

impl NeuronStore {
    /// Reads proposed clusters while stream buffers are free. Call once the whole layer is
    /// requested.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        let partly = self.residency.banks.gates_partly();
        while self.reads.free_buffers() > 0 {
            let rules = rules(self.settings, &self.residency, &self.job, &self.outside);
            let Some(want) = self.prefetch.next(rules, partly) else {
                break;
            };
            self.read_if_missing(want)?;
        }
        Ok(())
    }

    /// Prefetches missing clusters of the next layer's `banks`, a guess ordered by likelihood,
    /// after the reads of this layer and while stream buffers are free.
    pub fn read_guessed(&mut self, banks: &[u32]) -> Result<(), Error> {
        self.prefetch.guess(banks.iter().copied());
        if self.job.is_requested() {
            self.read_ahead()?;
        }
        self.reads.submit()
    }

    /// Prefetches missing clusters of `banks` in layer `number`, the next one, whose router has
    /// already chosen. These reads overlap with attention.
    pub fn read_chosen(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32> + Clone,
    ) -> Result<(), Error> {
        let read = self.layout.has_experts() && self.prefetch.is_on() && !self.residency.is_whole();
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

    /// Starts reading missing clusters of the layer's `banks` before the active set is known: if
    /// all neurons are needed and pass through stream buffers, the outcome is certain.
    pub(super) fn read_certain(&mut self, banks: impl Iterator<Item = u32>) -> Result<(), Error> {
        for bank in banks {
            if !rules(self.settings, &self.residency, &self.job, &self.outside)(bank).streams() {
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

    /// Compares the guess for layer `number` with the visited `banks`, and cancels guessed reads
    /// that have not begun.
    pub(super) fn judge(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        let reads = &self.reads;
        let underway = |bank| reads.underway().filter(|read| read.0 == bank).count();
        if self.prefetch.judge(number, banks, underway) {
            self.reads.cancel_prefetches()
        } else {
            Ok(())
        }
    }

    /// Reads a proposed cluster, if it is missing and would be read whole.
    fn read_if_missing(&mut self, want: Want) -> Result<(), Error> {
        let Want { bank, cluster, .. } = want;
        let belongs_hot = self.residency.belongs_hot(bank, cluster);
        let known = (cluster as usize) < self.outside.holds(bank)
            || self.residency.hot.contains(bank, cluster)
            || self.reads.is_underway(bank, cluster);
        let rules = rules(self.settings, &self.residency, &self.job, &self.outside)(bank);
        let missing = || self.residency.cold.missing(&self.layout, bank, cluster);
        if !known
            && rules.read_ahead(belongs_hot, missing)
            && self.reads.cluster(bank, cluster, want.priority)?
        {
            self.prefetch.accepted(want);
        }
        Ok(())
    }

    /// Whether guessing the experts of layer `next` pays off in this pass.
    pub fn foresees(&self, next: usize) -> bool {
        let mut banks = self.layout.banks_of(next);
        let several = banks.len() > 1;
        several
            && self.prefetch.guesses_experts()
            && !self.residency.is_whole()
            && banks
                .next()
                .is_some_and(|bank| self.residency.banks.scans(bank))
    }

    /// Device time of the reads that `layer` missed in the last pass: an upper bound of what
    /// prefetching saves. `None` if prefetching does not pay off.
    pub fn guesses_save(&self, layer: usize) -> Option<Duration> {
        let bank = self.layout.banks_of(layer).next();
        let reads = |bank| {
            let bank = self.residency.bank(bank);
            !bank.scans && !self.settings.reads_gates_first(bank)
        };
        let pays = self.residency.cold.cache.slots() > 0
            && self.prefetch.is_on()
            && bank.is_some_and(reads)
            && self.prefetch.neurons.pays(layer);
        let missed = f64::from(self.prefetch.neurons.missed(layer));
        pays.then(|| Duration::from_nanos((missed * self.settings.costs.rest) as u64))
    }

    /// Requests the missing neurons among `ids` of `bank` in the next layer, `layer`. Stops when
    /// the cold region has no free slot.
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
                || (cluster as usize) < self.outside.holds(bank)
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
