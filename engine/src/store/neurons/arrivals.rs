//! Completed reads, and recovery of slots and reads: when slots run out, after an error, and before
//! the regions change.

use emberflow_storage::cache::Key;
use emberflow_storage::io::Priority;

use super::NeuronStore;
use super::layer::unpin;
use crate::error::Error;
use crate::store::bytes::{check, check_cluster};
use crate::store::job::{ByteSource, Held, Item, Step};
use crate::store::reads::{Arrival, Half, Tag};
use emberflow_storage::arena::Slot;

impl NeuronStore {
    /// Handles completions without waiting.
    pub fn poll(&mut self) -> Result<(), Error> {
        self.reads.poll()?;
        self.take_arrived()
    }

    /// Blocks until a read completes and handles it; frees slots if no read is in flight. Call when
    /// no cluster is ready.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.reads.submit_if_idle()?;
        if self.reads.outstanding() == 0 {
            return self.make_room();
        }
        self.reads.wait(self.job.layer())?;
        self.take_arrived()
    }

    /// Handles completions. An error aborts the layer.
    fn take_arrived(&mut self) -> Result<(), Error> {
        let mut outcome = Ok(());
        while let Some(arrival) = self.reads.next() {
            let taken = self.take_one(arrival);
            outcome = outcome.and(taken);
        }
        if outcome.is_err() {
            self.abandon_layer();
        }
        self.latch.keep(outcome)?;
        // Without bundles: reads of the second matrix follow those of the first.
        self.reads.submit_if_idle()
    }

    /// Handles one completion.
    fn take_one(&mut self, arrival: Arrival) -> Result<(), Error> {
        let Arrival {
            tag, slot, result, ..
        } = arrival;
        match tag {
            Tag::Cluster { bank, cluster } if arrival.cancelled => {
                // A cancelled guess is read now if an item waits for it.
                if self.job.awaits_cluster(bank, cluster).is_none() {
                    self.reads.put(slot);
                    return Ok(());
                }
                (self.reads).cluster_into(bank, cluster, Priority::Now, slot)?;
                self.reads.submit()
            }
            Tag::Cluster { bank, cluster } => self.take_cluster(bank, cluster, slot, result),
            Tag::Ahead { bank, neuron } => {
                let key = Key { bank, neuron };
                if let Err(e) = result {
                    self.residency.cold.cache.abandon(key, slot);
                    return Err(e);
                }
                // The neuron becomes resident, unless a cluster of the current layer waits for it.
                let Some((item, place)) = self.job.awaits_neuron(bank, neuron) else {
                    self.residency.cold.admit_ahead(key, slot);
                    return Ok(());
                };
                let held = Held::Read(self.residency.cold.cache.admit(key, slot));
                self.job.arrived(item, place, held);
                Ok(())
            }
            Tag::Row { table, row } => {
                self.reads.rows.push((table, row, slot));
                result
            }
            Tag::Tile { bank, tile } => {
                self.reads.tiles.push((bank, tile, slot));
                result
            }
            Tag::Neuron { item, place, half } if half == Half::First && result.is_ok() => {
                // Without bundles: the second read, as if from a separate matrix.
                let bank = self.job.items[item as usize].bank;
                let (neuron, content) = (
                    self.job.ids[place as usize],
                    self.residency.banks.content(bank),
                );
                let whole = (self.layout).cover(bank, neuron, content.start, content.len);
                let [first, rest] = self.layout.halves(whole);
                let half = Half::Whole;
                let tag = Tag::Neuron { item, place, half };
                self.reads.part(tag, rest, slot, first.len)
            }
            Tag::Neuron { item, place, .. } => {
                self.take_neuron(item as usize, place as usize, slot, result)
            }
        }
    }

    /// Handles a needed neuron or its Gate row.
    fn take_neuron(
        &mut self,
        item: usize,
        place: usize,
        slot: Slot,
        result: Result<(), Error>,
    ) -> Result<(), Error> {
        let Item { bank, step, .. } = self.job.items[item];
        let neuron = self.job.ids[place];
        let (key, content) = (Key { bank, neuron }, self.residency.banks.content(bank));
        let checked = match step {
            Step::Gates => {
                result.and_then(|()| check(&self.layout, content, key, slot.as_slice(), step))
            }
            Step::Sums => result,
        };
        let cache = &mut self.residency.cold.cache;
        if let Err(e) = checked {
            cache.abandon(key, slot);
            return Err(e);
        }
        let held = match step {
            Step::Gates => Held::Gate(slot),
            Step::Sums => Held::Read(cache.admit(key, slot)),
        };
        self.job.arrived(item, place, held);
        Ok(())
    }

    /// Handles a whole cluster, of this layer or prefetched for a later one.
    fn take_cluster(
        &mut self,
        bank: u32,
        cluster: u32,
        slot: Slot,
        result: Result<(), Error>,
    ) -> Result<(), Error> {
        if let Err(e) = result {
            self.reads.put(slot);
            return Err(e);
        }
        let visited = self.job.visits(bank);
        if let Some(item) = self.job.awaits_cluster(bank, cluster) {
            self.attach(item, slot)?;
            self.job.mark_if_ready(item);
        } else if self.prefetch.follows(bank, cluster, visited) {
            self.reads.keep(bank, cluster, slot);
        } else {
            self.reads.put(slot);
        }
        Ok(())
    }

    /// Gives an item its whole cluster. If all neurons are needed, the threads that compute the
    /// cluster verify it; otherwise it is verified here.
    pub(super) fn attach(&mut self, item: usize, slot: Slot) -> Result<(), Error> {
        let it = &self.job.items[item];
        let (bank, cluster) = (it.bank, it.cluster);
        let complete = self.layout.cluster_neurons(bank, cluster).len() == it.places().len();
        let unchecked = complete && self.residency.banks.scans(bank);
        if !unchecked {
            let content = self.residency.banks.content(bank);
            let key = [bank, cluster];
            let checked = check_cluster(&self.layout, content, key, slot.as_slice());
            if let Err(e) = checked {
                self.reads.put(slot);
                return self.latch.keep(Err(e));
            }
        }
        self.job.attach(item, slot, unchecked);
        Ok(())
    }

    /// Returns damage found by compute threads as an error, after aborting the layer.
    pub fn intact(&mut self) -> Result<(), Error> {
        let Some(error) = self.latch.take_damage() else {
            return Ok(());
        };
        self.abandon_layer();
        self.latch.keep(Err(error))
    }

    /// Resolves a deadlock in which incomplete clusters hold all slots: later clusters release
    /// their slots so that the first one can complete.
    fn make_room(&mut self) -> Result<(), Error> {
        let before = self.job.next();
        self.reads.drop_unclaimed(|_, _| false);
        for item in (before..self.job.items.len()).rev() {
            let it = &self.job.items[item];
            let (bank, issued) = (it.bank, it.issued);
            let places = if item == before {
                issued..it.end
            } else {
                it.places()
            };
            // Verifies neurons not yet computed, so that their slots can be released.
            let content = self.residency.banks.content(bank);
            let cache = &self.residency.cold.cache;
            for place in places.clone() {
                if let Held::Read(slot) = self.job.held[place] {
                    let key = Key::new(bank, self.job.ids[place]);
                    let bytes = cache.bytes(slot);
                    let checked = check(&self.layout, content, key, bytes, Step::Sums);
                    if self.latch.intact(checked).is_some() {
                        self.job.held[place] = Held::Pinned(slot);
                    }
                }
            }
            let cold = &mut self.residency.cold;
            unpin(&mut self.job, cold, bank, places);
        }
        self.intact()?;
        self.advance()?;
        let moved = self.job.next() > before || self.reads.outstanding() > 0;
        if moved || self.job.any_ready() {
            return Ok(());
        }
        let slots = self.residency.cold.cache.slots();
        let first = format!("none of {slots} cache slots is available");
        self.latch.keep(Err(Error::Failed { first }))
    }

    /// Aborts the layer after an error: waits for every read and unpins everything.
    pub(super) fn abandon_layer(&mut self) {
        while self.reads.outstanding() > 0 {
            if self.reads.wait(self.job.layer()).is_err() {
                break;
            }
            while let Some(arrival) = self.reads.next() {
                // Reports only the first error.
                let _ = self.take_one(arrival);
            }
            let _ = self.reads.submit_if_idle();
        }
        for item in 0..self.job.items.len() {
            let it = &mut self.job.items[item];
            let bank = it.bank;
            if let ByteSource::Stream(slot) = &mut it.source
                && let Some(slot) = slot.take()
            {
                // The buffer may be unverified, so nothing of it is cached.
                self.reads.put(slot);
            }
            for place in it.places() {
                let held = &mut self.job.held[place];
                if let Held::Gate(slot) = std::mem::replace(held, Held::Nothing) {
                    let key = Key::new(bank, self.job.ids[place]);
                    self.residency.cold.cache.abandon(key, slot);
                }
            }
            self.release(item, false, |_| false);
        }
        self.job.forget_ready();
    }
}
