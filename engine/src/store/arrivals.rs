//! Completions: routes each to its requester.

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::Key;
use emberflow_storage::io::{Completion, IoError};

use super::neurons::NeuronStore;
use super::reader::Reader;
use super::regions::CLUSTER;
use super::tag::{Half, Tag};
use super::work::{Held, Item, Source, Step};
use crate::error::Error;

impl NeuronStore {
    /// Handles completions without waiting.
    pub fn poll(&mut self) -> Result<(), Error> {
        let arrived = self.reader.poll();
        let arrived = self.latch(arrived)?;
        self.take_arrived(arrived)
    }

    /// Blocks until a completion, or frees slots if no read is in flight. Called when no cluster is
    /// ready.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.submit_last()?;
        if self.reader.outstanding() == 0 {
            return self.make_room();
        }
        self.sleep()
    }

    /// Waits for a read and handles the completions.
    pub(super) fn sleep(&mut self) -> Result<(), Error> {
        let arrived = self.reader.wait(self.layer.number);
        let arrived = self.latch(arrived)?;
        self.take_arrived(arrived)
    }

    /// Handles completions. After an error the layer is aborted.
    pub(super) fn take_arrived(&mut self, mut arrived: Vec<Completion>) -> Result<(), Error> {
        let mut outcome = Ok(());
        for done in arrived.drain(..) {
            let taken = self.take_one(done);
            outcome = outcome.and(taken);
        }
        self.reader.give_back(arrived);
        if outcome.is_err() {
            self.abandon_layer();
        }
        self.latch(outcome)?;
        self.submit_last()
    }

    /// Ablation without bundles: submits the reads of the second matrix once those of the first
    /// have completed.
    pub(super) fn submit_last(&mut self) -> Result<(), Error> {
        if self.reader.outstanding() > 0 {
            return Ok(());
        }
        self.submit()
    }

    /// Handles one completion.
    pub(super) fn take_one(&mut self, done: Completion) -> Result<(), Error> {
        let Completion { tag, slot, result } = done;
        let cancelled = matches!(result, Err(IoError::Cancelled));
        let result = result.map_err(|e| Error::from(emberflow_storage::Error::from(e)));
        match Tag::from_bits(tag) {
            Tag::Cluster { bank, cluster } if cancelled => self.read_again(bank, cluster, slot),
            Tag::Cluster { bank, cluster } => self.take_cluster(bank, cluster, slot, result),
            Tag::Ahead { bank, neuron } => self.take_ahead(Key { bank, neuron }, slot, result),
            Tag::Row { number, row } => {
                self.rows.arrived.push((number, row, slot));
                result
            }
            Tag::Neuron { item, place, half } => match half {
                Half::First if result.is_ok() => self.request_second_half(item, place, slot),
                _ => self.take_neuron(item, place, slot, result),
            },
        }
    }

    /// A needed neuron, or its Gate part.
    fn take_neuron(
        &mut self,
        item: u32,
        place: u32,
        slot: Slot,
        result: Result<(), Error>,
    ) -> Result<(), Error> {
        let (item, place) = (item as usize, place as usize);
        let (bank, step) = (self.layer.items[item].bank, self.layer.items[item].step);
        let neuron = self.layer.ids[place];
        let key = Key { bank, neuron };
        let checked = match step {
            Step::Gates => result.and_then(|()| self.check(key, slot.as_slice(), step)),
            Step::Sums => result,
        };
        if let Err(e) = checked {
            self.cold.abandon(key, slot);
            return Err(e);
        }
        self.layer.held[place] = match step {
            Step::Gates => Held::Gate(slot),
            Step::Sums => Held::Read(self.cold.admit(key, slot)),
        };
        self.layer.items[item].waiting -= 1;
        self.ready_if_complete(item);
        Ok(())
    }

    /// A whole cluster that was guessed and has not been read: it is read now if an item waits for it.
    fn read_again(&mut self, bank: u32, cluster: u32, slot: Slot) -> Result<(), Error> {
        let item = self.layer.item_of(bank, cluster);
        let waits = item.is_some_and(|item| {
            item < self.layer.next && matches!(self.layer.items[item].source, Source::Stream(None))
        });
        if !waits {
            self.layer.coming.retain(|&key| key != (bank, cluster));
            self.reader.put(slot);
            return Ok(());
        }
        let read = Reader::read_cluster(&self.layout, bank, cluster, slot);
        self.request(read)?;
        self.submit()
    }

    /// A whole cluster, of this layer or prefetched for the next one.
    fn take_cluster(
        &mut self,
        bank: u32,
        cluster: u32,
        slot: Slot,
        result: Result<(), Error>,
    ) -> Result<(), Error> {
        self.layer.coming.retain(|&key| key != (bank, cluster));
        if let Err(e) = result {
            self.reader.put(slot);
            return Err(e);
        }
        let item = self.layer.item_of(bank, cluster);
        match item.filter(|&item| item < self.layer.next) {
            Some(item) if matches!(self.layer.items[item].source, Source::Stream(None)) => {
                self.attach(item, slot)?;
                self.layer.items[item].waiting = 0;
                self.ready_if_complete(item);
            }
            _ if self.follows(bank, cluster) => self.layer.arrived.push((bank, cluster, slot)),
            _ => self.reader.put(slot),
        }
        Ok(())
    }

    /// Gives an item its whole cluster. Where all its neurons are needed, the threads that compute
    /// them check them; otherwise they are checked here.
    pub(super) fn attach(&mut self, item: usize, slot: Slot) -> Result<(), Error> {
        let Item { bank, cluster, .. } = self.layer.items[item];
        let neurons = self.layout.cluster_neurons(bank, cluster).len();
        let unchecked = self.scans(bank) && self.layer.needs_all(item, neurons);
        if !unchecked {
            let checked = self.check_cluster(bank, cluster, slot.as_slice());
            if let Err(e) = checked {
                self.reader.put(slot);
                return self.latch(Err(e));
            }
        }
        let it = &mut self.layer.items[item];
        (it.source, it.unchecked) = (Source::Stream(Some(slot)), unchecked);
        Ok(())
    }

    /// A prefetched neuron. It becomes resident unless a cluster of the current layer waits for it.
    fn take_ahead(&mut self, key: Key, slot: Slot, result: Result<(), Error>) -> Result<(), Error> {
        let awaited = self.awaited(key);
        if let Err(e) = result {
            self.cold.abandon(key, slot);
            return Err(e);
        }
        let Some((item, place)) = awaited else {
            self.cold.admit_ahead(key, slot);
            self.guesses.set_unchecked(key);
            return Ok(());
        };
        self.layer.held[place] = Held::Read(self.cold.admit(key, slot));
        self.layer.items[item].waiting -= 1;
        self.ready_if_complete(item);
        Ok(())
    }

    /// The item and place that wait for a neuron.
    fn awaited(&self, key: Key) -> Option<(usize, usize)> {
        let cluster = key.neuron / CLUSTER as u32;
        let number = self.layer.item_of(key.bank, cluster)?;
        let item = &self.layer.items[number];
        let ids = &self.layer.ids[item.first..item.end];
        let place = item.first + ids.binary_search(&key.neuron).ok()?;
        matches!(self.layer.held[place], Held::Coming).then_some((number, place))
    }
}
