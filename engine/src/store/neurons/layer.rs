//! The current layer: each cluster is requested in order with its needed neurons, looked up or
//! read, handed out when complete, and released.
//!
//! ```text
//! need ── all resident ─────────────────────────────────────────► ready ─► release
//!   │                                                              ▲
//!   ├─ whole cluster missing ── one sequential read ───────────────┤
//!   ├─ some neurons missing ─── one read each ─────────────────────┤
//!   └─ two phases cheaper ───── Gate parts ─► gates ─► resolve ────┘
//!                                              Up/Down where the gate fires
//! ```

use std::ops::Range;

use arrayvec::ArrayVec;
use emberflow_storage::arena::Slot;
use emberflow_storage::cache::Key;
use emberflow_storage::io::Priority;

use super::ahead::drop_strays;
use super::{NeuronStore, rules};
use crate::bundle::NeuronRows;
use crate::cluster::CLUSTER;
use crate::counters::Counters;
use crate::error::Error;
use crate::lane::Outside;
use crate::store::bytes::{ClusterBytes, ClusterMemory, Place};
use crate::store::job::{ByteSource, Held, Item, Job, Step, UnitWork};
use crate::store::prefetch::Guesses;
use crate::store::reads::{Half, Tag};
use crate::store::residency::{Cold, Leave};
use crate::store::rules::{ClusterSource, ClusterState};

/// Looks up a neuron in the cold region and pins it on a hit.
#[inline]
fn pin(cold: &mut Cold, key: Key) -> Option<Held> {
    let (slot, unchecked) = cold.pin(key)?;
    Some(if unchecked {
        Held::Read(slot)
    } else {
        Held::Pinned(slot)
    })
}

/// Pins the needed neurons of an item that hit in the cold region. Returns the number that is
/// neither resident nor in flight.
fn look_up(
    job: &mut Job,
    item: &Item,
    cold: &mut Cold,
    guesses: &mut Guesses,
    counters: &mut Counters,
) -> usize {
    let (mut coming, mut absent, bank) = (0, 0, item.bank);
    let ids = &job.ids[item.places()];
    for (&neuron, held) in ids.iter().zip(&mut job.held[item.places()]) {
        let key = Key { bank, neuron };
        let guessed = guesses.has(key);
        coming += usize::from(guessed);
        match pin(cold, key) {
            Some(found) => *held = found,
            None if guessed => {}
            None => absent += 1,
        }
    }
    let missing = coming + absent;
    counters.guessed_needed += coming as u64;
    counters.looked_up += ids.len() as u64;
    counters.hits += (ids.len() - missing) as u64;
    counters.misses += missing as u64;
    guesses.count(job.layer(), missing, coming);
    absent
}

/// Unpins neurons that were not computed.
pub(super) fn unpin(job: &mut Job, cold: &mut Cold, bank: u32, places: Range<usize>) {
    let ids = &job.ids[places.clone()];
    for (held, &neuron) in job.held[places].iter_mut().zip(ids) {
        match held {
            Held::Read(_) => cold.give_back(Key { bank, neuron }, true),
            Held::Pinned(_) => cold.give_back(Key { bank, neuron }, false),
            _ => continue,
        }
        *held = Held::Nothing;
    }
}

/// The bytes of an item, including readable ones `outside` the regions.
#[inline]
fn bytes<'a>(
    job: &'a Job,
    memory: ClusterMemory<'a>,
    outside: &'a Outside,
    item: usize,
) -> ClusterBytes<'a> {
    let it = &job.items[item];
    let place = match &it.source {
        ByteSource::Hot(slot) => Place::Hot(memory.residency.hot.bytes(*slot)),
        ByteSource::Shared => (outside.shared(it.bank, it.cluster))
            .map_or(Place::Nowhere, |(part, neurons)| {
                Place::Shared(part, neurons)
            }),
        ByteSource::Stream(Some(slot)) => {
            let first = it.cluster * CLUSTER as u32;
            let shift = memory.layout.shift(it.bank, first, 0);
            Place::Stream {
                bundles: &slot.as_slice()[shift..],
                unchecked: it.unchecked,
            }
        }
        ByteSource::Cold => Place::Cold(&job.held[it.places()]),
        ByteSource::Mapped => Place::Mapped,
        ByteSource::Unused | ByteSource::Stream(None) | ByteSource::Left => Place::Nowhere,
    };
    ClusterBytes {
        memory,
        layer: job.layer(),
        bank: it.bank,
        cluster: it.cluster,
        ids: &job.ids[it.places()],
        content: memory.residency.banks.content(it.bank),
        place,
        gates_known: job.gates_known(item),
    }
}

impl NeuronStore {
    /// Begins layer `number`, or a part of it, for `rows` rows. It visits `banks` of that layer, in
    /// this order. `after`: the banks of the layer's next part.
    pub fn begin_layer(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32> + Clone,
        after: impl Iterator<Item = u32> + Clone,
        rows: usize,
    ) -> Result<(), Error> {
        self.latch.check()?;
        if let Some(mapped) = &mut self.mapped {
            let begun = mapped.begin(&self.layout, banks.clone());
            self.latch.keep(begun)?;
        }
        let next = after.clone().next();
        let end = next.unwrap_or_else(|| self.layout.banks_of(number).end);
        self.residency.begin_layer(end.saturating_sub(1));
        if !self.job.held_only {
            self.judge(number, banks.clone())?;
            self.prefetch.begin_layer(number, after);
        }
        self.job.begin(number, rows);
        for bank in banks.clone() {
            let rules = rules(self.settings, &self.residency, &self.job, &self.outside)(bank);
            (self.job).add_unit(bank, self.layout.clusters(bank), rules);
        }
        if self.job.held_only {
            return Ok(());
        }
        drop_strays(&mut self.reads, &self.prefetch, &self.job);
        self.read_certain(banks)
    }

    /// Requests the next cluster of `unit` with its needed neurons `ids`, ascending. Units and
    /// their clusters are requested in order, each once.
    pub fn need(&mut self, unit: usize, ids: &[u32]) {
        let UnitWork { bank, rules, .. } = self.job.unit(unit);
        let cluster = self.job.next_cluster(unit);
        let held: ArrayVec<u32, CLUSTER>;
        let ids = match self.job.held_only && !self.is_hot(bank, cluster) {
            true => {
                let cold = &self.residency.cold.cache;
                let is_held = |&neuron: &u32| cold.contains(Key { bank, neuron });
                held = ids.iter().copied().filter(is_held).collect();
                &held[..]
            }
            false => ids,
        };
        let needed = ids.len() as u64;
        let places = self.job.add_places(ids);
        let mut found = ClusterState {
            needed: ids.len(),
            ..ClusterState::default()
        };
        let shared = (cluster as usize) < self.outside.holds(bank);
        let hot = if found.needed > 0 && !rules.mapped && !shared {
            self.residency.hot.get_pin(bank, cluster)
        } else {
            None
        };
        found.hot = hot.is_some() || shared;
        // What is left for drafts is in memory, neuron by neuron.
        if found.needed > 0 && !found.hot && !self.job.held_only {
            found.belongs_hot = self.residency.belongs_hot(bank, cluster);
            found.underway = self.reads.is_underway(bank, cluster);
            found.promoting = self.job.promoting;
        }
        let mut item = Item::new(bank, cluster, places, ByteSource::Unused);
        let source = rules.before_lookup(&found).unwrap_or_else(|| {
            let (cold, guesses) = (&mut self.residency.cold, &mut self.prefetch.neurons);
            let counters = &mut self.counters;
            found.absent = look_up(&mut self.job, &item, cold, guesses, counters);
            rules.after_lookup(&found)
        });
        item.source = match (source, hot) {
            (ClusterSource::Hot, hot) => {
                self.counters.hot_hits += needed;
                hot.map_or(ByteSource::Shared, ByteSource::Hot)
            }
            (ClusterSource::Whole, _) => {
                if found.absent == 0 {
                    // No lookup took place.
                    self.counters.misses += needed;
                } else {
                    let cold = &mut self.residency.cold;
                    unpin(&mut self.job, cold, bank, item.places());
                }
                self.job.promoting |= found.belongs_hot;
                ByteSource::Stream(None)
            }
            (ClusterSource::Neurons { .. }, _) => ByteSource::Cold,
            (ClusterSource::Mapped, _) => ByteSource::Mapped,
            (ClusterSource::Unused, _) => ByteSource::Unused,
        };
        if source == (ClusterSource::Neurons { gates_first: true }) {
            (item.step, item.gates_first) = (Step::Gates, true);
        }
        self.job.items.push(item);
    }

    /// Whether a cluster is in memory as a whole.
    fn is_hot(&self, bank: u32, cluster: u32) -> bool {
        (cluster as usize) < self.outside.holds(bank) || self.residency.hot.contains(bank, cluster)
    }

    /// Requests the misses of the clusters added so far, in order, as free slots allow.
    pub fn advance(&mut self) -> Result<(), Error> {
        while let Some(item) = self.job.next_item() {
            if !self.issue(item)? {
                break;
            }
            self.job.requested();
        }
        if self.job.is_requested() && !self.job.held_only {
            self.read_ahead()?;
        }
        self.reads.submit()
    }

    /// Requests the misses of an item. Returns false if no slot is available.
    fn issue(&mut self, item: usize) -> Result<bool, Error> {
        let Item { bank, cluster, .. } = self.job.items[item];
        match self.job.items[item].source {
            ByteSource::Unused
            | ByteSource::Hot(_)
            | ByteSource::Shared
            | ByteSource::Mapped
            | ByteSource::Left => Ok(true),
            ByteSource::Cold => self.issue_neurons(item),
            ByteSource::Stream(_) => {
                if let Some(slot) = self.reads.claim(bank, cluster) {
                    let attached = self.attach(item, slot);
                    if attached.is_err() {
                        self.abandon_layer();
                    }
                    return attached.map(|()| true);
                }
                let coming = self.reads.is_coming(bank, cluster);
                if !coming && !self.reads.cluster(bank, cluster, Priority::Now)? {
                    return Ok(false);
                }
                self.job.items[item].waiting = 1;
                Ok(true)
            }
        }
    }

    /// Requests the misses of an item, from the place where it stopped before.
    fn issue_neurons(&mut self, item: usize) -> Result<bool, Error> {
        let Item {
            bank, end, issued, ..
        } = self.job.items[item];
        let step = self.job.items[item].step;
        for place in issued..end {
            self.job.items[item].issued = place;
            if matches!(self.job.held[place], Held::Pinned(_) | Held::Read(_)) {
                continue;
            }
            let neuron = self.job.ids[place];
            let (key, cold) = (Key { bank, neuron }, &mut self.residency.cold);
            // The pin may have been released to free a slot.
            if let Some(found) = pin(cold, key) {
                self.job.held[place] = found;
                continue;
            }
            if cold.cache.is_loading(key) {
                self.job.held[place] = Held::Coming;
                self.job.items[item].waiting += 1;
                continue;
            }
            let Some(slot) = cold.cache.reserve(key) else {
                return Ok(false);
            };
            self.job.items[item].waiting += 1;
            let content = self.residency.banks.content(bank);
            let part = match step {
                Step::Gates => content.gate_span,
                Step::Sums => content.len,
            };
            let whole = self.layout.cover(bank, neuron, content.start, part);
            let apart = !self.settings.bundles && step == Step::Sums;
            let (part, half) = if apart {
                (self.layout.halves(whole)[0], Half::First)
            } else {
                (whole, Half::Whole)
            };
            let (item, place) = (item as u32, place as u32);
            let tag = Tag::Neuron { item, place, half };
            self.reads.part(tag, part, slot, 0)?;
        }
        self.job.items[item].issued = end;
        Ok(true)
    }

    /// The bytes of a ready item.
    #[inline]
    pub fn cluster(&self, item: usize) -> ClusterBytes<'_> {
        let memory = ClusterMemory {
            layout: &self.layout,
            residency: &self.residency,
            mapped: self.mapped.as_ref(),
            latch: &self.latch,
            tracer: &self.tracer,
        };
        bytes(&self.job, memory, &self.outside, item)
    }

    /// Returns the result of `then` for the rows of a complete item that needs all its neurons.
    pub fn with_rows<T>(
        &self,
        item: usize,
        then: impl FnOnce(&mut dyn Iterator<Item = NeuronRows<'_>>) -> T,
    ) -> T {
        let (bytes, format) = (self.cluster(item), self.layout.format);
        let gates = self.residency.gates();
        let mut rows = bytes.ids().iter().enumerate().filter_map(|(i, &neuron)| {
            // `NeuronStore::intact` reports damaged bytes.
            let vectors = bytes.neuron(i)?;
            Some(NeuronRows {
                gate: match vectors.gate {
                    [] => gates.gate(bytes.bank, neuron)?,
                    gate => format.gate(gate, vectors.scales),
                },
                up: (!format.ungated).then(|| format.up(vectors.up, vectors.scales)),
                down: format.down(vectors.down, vectors.scales),
            })
        });
        then(&mut rows)
    }

    /// Called after an item's gates are computed: requests Up and Down of the neurons that fire and
    /// drops the others.
    pub fn resolve(&mut self, item: u32, fires: impl Fn(u32) -> bool) -> Result<(), Error> {
        let it = &mut self.job.items[item as usize];
        it.step = Step::Sums;
        let (bank, content) = (it.bank, *self.residency.banks.content(it.bank));
        for place in it.places() {
            let neuron = self.job.ids[place];
            match std::mem::replace(&mut self.job.held[place], Held::Nothing) {
                Held::Gate(slot) if fires(neuron) => {
                    let (start, len) = (content.start, content.gate_span);
                    let before = self.layout.cover(bank, neuron, start, len);
                    let rest = content.stride - content.rest_read;
                    let part = self.layout.cover(bank, neuron, content.rest_read, rest);
                    let (place, half) = (place as u32, Half::Whole);
                    let tag = Tag::Neuron { item, place, half };
                    let shift = (part.offset - before.offset) as u32;
                    self.job.items[item as usize].waiting += 1;
                    self.reads.part(tag, part, slot, shift)?;
                }
                Held::Gate(slot) => {
                    (self.residency.cold.cache).abandon(Key { bank, neuron }, slot);
                }
                other => self.job.held[place] = other,
            }
        }
        self.job.mark_if_ready(item as usize);
        Ok(())
    }

    /// A slot of the hot region for a streamed item that [`NeuronStore::release`] would copy there.
    /// The thread that computes the item copies it, since its bytes are in the CPU's cache.
    pub fn reserve_hot(&mut self, item: usize, again: bool) -> Option<Slot> {
        let it = &self.job.items[item];
        match it.source {
            ByteSource::Stream(Some(_)) => self.residency.reserve_hot(it.bank, it.cluster, again),
            _ => None,
        }
    }

    /// Makes the cluster copied to `slot` resident in the hot region; takes the slot back if a
    /// compute thread found damage.
    pub fn settle_hot(&mut self, item: usize, slot: Slot) {
        let it = &self.job.items[item];
        let intact = !self.latch.is_damaged();
        (self.residency).settle_hot(it.bank, it.cluster, slot, intact);
    }

    /// Ends the use of an item. A streamed cluster that belongs in the hot region is moved there.
    /// Otherwise its needed neurons for which `keeps` returns true move to the cold region, as if
    /// read individually. `again`: the next token is likely to visit its bank.
    pub fn release(&mut self, item: usize, again: bool, keeps: impl Fn(u32) -> bool) {
        // Drafts count as no use.
        let draft = self.job.held_only;
        let it = &mut self.job.items[item];
        let (bank, cluster, places) = (it.bank, it.cluster, it.places());
        let ids = &self.job.ids[places.clone()];
        match std::mem::replace(&mut it.source, ByteSource::Unused) {
            ByteSource::Hot(_) if again && !draft => self.residency.hot.unpin(bank, cluster),
            ByteSource::Hot(_) => self.residency.hot.unpin_unused(bank, cluster),
            ByteSource::Stream(Some(slot)) => {
                let (key, bytes) = ([bank, cluster], slot.as_slice());
                self.residency.keep_read(key, ids, again, keeps, bytes);
                self.reads.put(slot);
            }
            ByteSource::Cold => {
                let cold = &mut self.residency.cold;
                for (held, &neuron) in self.job.held[places].iter_mut().zip(ids) {
                    let key = Key { bank, neuron };
                    match std::mem::replace(held, Held::Nothing) {
                        Held::Pinned(_) | Held::Read(_) if draft => cold.unpin(key, Leave::Unused),
                        Held::Pinned(_) | Held::Read(_) if keeps(neuron) => {
                            cold.unpin(key, Leave::Used);
                        }
                        Held::Pinned(_) => cold.unpin(key, Leave::Unused),
                        Held::Read(_) => cold.unpin(key, Leave::First),
                        Held::Nothing | Held::Gate(_) | Held::Coming => {}
                    }
                }
            }
            ByteSource::Shared
            | ByteSource::Mapped
            | ByteSource::Unused
            | ByteSource::Stream(None)
            | ByteSource::Left => {}
        }
    }

    /// Ends a layer; evicts its neurons if none are kept.
    pub fn end_layer(&mut self) {
        if !self.residency.keeps_neurons() {
            for item in &self.job.items {
                for &neuron in &self.job.ids[item.places()] {
                    let key = Key::new(item.bank, neuron);
                    self.residency.cold.cache.remove(key);
                }
            }
        }
        self.job.close();
    }
}
