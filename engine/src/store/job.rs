//! The current layer: the neurons it needs, and the outstanding reads of each cluster.
//!
//! A layer has one *unit* per visited bank. The clusters of all units in sequence are the layer's
//! *items*; the needed neurons of all items are its *places*. This module only keeps indices; it
//! neither looks up, reads nor evicts.

#[cfg(test)]
mod tests;

use std::ops::Range;

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::SlotId;

use super::rules::Rules;
use crate::cluster::CLUSTER;

/// Batch size from which nearly every neuron of a layer is needed by some token (75 % at 32,
/// PowerInfer-2 §3.1), so layers are read whole.
pub(super) const MANY: usize = 32;

/// State of a needed neuron in a cluster that is read neuron by neuron.
#[derive(Debug)]
pub(super) enum Held {
    Nothing,
    /// Resident and pinned.
    Pinned(SlotId),
    /// Resident and pinned, not verified: the thread that computes it verifies its checksums.
    Read(SlotId),
    /// Only the Gate row has arrived.
    Gate(Slot),
    /// Prefetched, still in flight.
    Coming,
}

/// Source of a cluster's bytes.
#[derive(Debug)]
pub(super) enum ByteSource {
    /// No neuron is needed, or the cluster was released.
    Unused,
    Hot(SlotId),
    /// Device memory that the CPU can read.
    Shared,
    /// A stream buffer; `None` until its read completes.
    Stream(Option<Slot>),
    /// Cold slots, neuron by neuron.
    Cold,
    /// The mapped file.
    Mapped,
    /// A lane, which computes the cluster.
    Left,
}

/// The step for which a cluster is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Gate rows have arrived; [`super::NeuronStore::resolve`] follows.
    Gates,
    /// All needed bytes have arrived.
    Sums,
}

/// A visited bank.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnitWork {
    pub bank: u32,
    /// Item index of its first cluster.
    pub first: usize,
    pub rules: Rules,
}

/// A cluster of the layer.
#[derive(Debug)]
pub(super) struct Item {
    pub bank: u32,
    pub cluster: u32,
    /// Place of its first needed neuron; one past the last (`end`).
    pub first: usize,
    pub end: usize,
    pub source: ByteSource,
    pub step: Step,
    /// Two-phase: gates are computed from the Gate rows before the sums.
    pub gates_first: bool,
    /// The threads that compute the cluster verify its checksums.
    pub unchecked: bool,
    /// Reads in flight.
    pub waiting: usize,
    /// All places before this one are held or requested.
    pub issued: usize,
}

impl Item {
    /// A cluster with its needed neurons at `places`, none of them requested.
    pub fn new(bank: u32, cluster: u32, places: Range<usize>, source: ByteSource) -> Self {
        Self {
            bank,
            cluster,
            first: places.start,
            end: places.end,
            source,
            step: Step::Sums,
            gates_first: false,
            unchecked: false,
            waiting: 0,
            issued: places.start,
        }
    }

    /// Places of its needed neurons.
    pub fn places(&self) -> Range<usize> {
        self.first..self.end
    }

    /// Whether the item waits for the read of a whole cluster.
    fn awaits_whole(&self) -> bool {
        matches!(self.source, ByteSource::Stream(None))
    }
}

/// The current layer.
pub(super) struct Job {
    /// Index of the layer in the model.
    layer: usize,
    /// Whether the pass has at least [`MANY`] tokens.
    pub(super) many: bool,
    /// Neurons that are not in memory are left out: the pass makes drafts.
    pub(super) held_only: bool,
    units: Vec<UnitWork>,
    /// By bank of the model: index of its unit, if visited.
    unit_of: Vec<Option<u32>>,
    /// Number of clusters in all units.
    total: usize,
    pub(super) items: Vec<Item>,
    /// By place: packed id, and location of the neuron.
    pub(super) ids: Vec<u32>,
    pub(super) held: Vec<Held>,
    /// All reads of items before this one have been requested.
    next: usize,
    ready: Vec<u32>,
    /// Whether a cluster is being read into the hot region.
    pub(super) promoting: bool,
}

impl Job {
    /// For a model with `banks` banks, of which one layer visits at most `neurons` neurons in
    /// `clusters` clusters at once.
    pub(super) fn new(banks: usize, neurons: usize, clusters: usize) -> Self {
        Self {
            layer: 0,
            many: false,
            held_only: false,
            units: Vec::with_capacity(16),
            unit_of: vec![None; banks],
            total: 0,
            items: Vec::with_capacity(clusters),
            ids: Vec::with_capacity(neurons),
            held: Vec::with_capacity(neurons),
            next: 0,
            ready: Vec::with_capacity(clusters),
            promoting: false,
        }
    }

    /// Begins a layer of a pass with `rows` rows.
    pub(super) fn begin(&mut self, layer: usize, rows: usize) {
        self.close();
        self.ready.clear();
        (self.layer, self.many, self.next) = (layer, rows >= MANY, 0);
        self.promoting = false;
    }

    /// Adds a visited bank with `clusters` clusters.
    pub(super) fn add_unit(&mut self, bank: u32, clusters: usize, rules: Rules) {
        self.unit_of[bank as usize] = Some(self.units.len() as u32);
        self.units.push(UnitWork {
            bank,
            first: self.total,
            rules,
        });
        self.total += clusters;
    }

    /// A visited bank.
    pub(super) fn unit(&self, unit: usize) -> UnitWork {
        self.units[unit]
    }

    /// Whether a bank is visited.
    pub(super) fn visits(&self, bank: u32) -> bool {
        self.unit_of[bank as usize].is_some()
    }

    /// Index of the next cluster of a unit.
    pub(super) fn next_cluster(&self, unit: usize) -> u32 {
        (self.items.len() - self.units[unit].first) as u32
    }

    /// Adds the needed neurons of the next cluster; returns their places.
    pub(super) fn add_places(&mut self, ids: &[u32]) -> Range<usize> {
        let places = self.ids.len()..self.ids.len() + ids.len();
        self.ids.extend_from_slice(ids);
        self.held.resize_with(places.end, || Held::Nothing);
        places
    }

    /// Leaves the next cluster of a unit to a lane.
    pub fn leave(&mut self, unit: usize) {
        let (bank, cluster) = (self.units[unit].bank, self.next_cluster(unit));
        let none = self.ids.len()..self.ids.len();
        (self.items).push(Item::new(bank, cluster, none, ByteSource::Left));
    }

    /// The next item to request, if its needed neurons are known.
    pub(super) fn next_item(&self) -> Option<usize> {
        Some(self.next).filter(|&next| next < self.items.len())
    }

    /// All reads of items before this one have been requested.
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// The next item is completely requested.
    pub(super) fn requested(&mut self) {
        self.next += 1;
        self.mark_if_ready(self.next - 1);
    }

    /// Whether all clusters of the layer are requested.
    pub(super) fn is_requested(&self) -> bool {
        self.next == self.total
    }

    /// The item of a cluster of a visited bank, if its needed neurons are known.
    fn item_of(&self, bank: u32, cluster: u32) -> Option<usize> {
        let unit = self.units.get(self.unit_of[bank as usize]? as usize)?;
        Some(unit.first + cluster as usize).filter(|&item| item < self.items.len())
    }

    /// The item that waits for the read of this whole cluster.
    pub(super) fn awaits_cluster(&self, bank: u32, cluster: u32) -> Option<usize> {
        let item = self.item_of(bank, cluster)?;
        (item < self.next && self.items[item].awaits_whole()).then_some(item)
    }

    /// The (item, place) that waits for a prefetched neuron.
    pub(super) fn awaits_neuron(&self, bank: u32, neuron: u32) -> Option<(usize, usize)> {
        let item = self.item_of(bank, neuron / CLUSTER as u32)?;
        let it = &self.items[item];
        let ids = &self.ids[it.places()];
        let place = it.first + ids.binary_search(&neuron).ok()?;
        matches!(self.held[place], Held::Coming).then_some((item, place))
    }

    /// Records the arrival of one neuron of an item.
    pub(super) fn arrived(&mut self, item: usize, place: usize, held: Held) {
        self.held[place] = held;
        self.items[item].waiting -= 1;
        self.mark_if_ready(item);
    }

    /// Attaches the buffer that holds an item's whole cluster. `unchecked`: the threads that
    /// compute the cluster verify it.
    pub(super) fn attach(&mut self, item: usize, buffer: Slot, unchecked: bool) {
        let it = &mut self.items[item];
        (it.source, it.unchecked) = (ByteSource::Stream(Some(buffer)), unchecked);
        it.waiting = 0;
    }

    /// Marks an item ready once it is completely requested and no read is in flight.
    pub(super) fn mark_if_ready(&mut self, item: usize) {
        let it = &self.items[item];
        let requested = match it.source {
            ByteSource::Unused | ByteSource::Left => false,
            ByteSource::Hot(_)
            | ByteSource::Shared
            | ByteSource::Stream(_)
            | ByteSource::Mapped => true,
            ByteSource::Cold => it.issued == it.end,
        };
        if requested && it.waiting == 0 {
            self.ready.push(item as u32);
        }
    }

    /// Whether any item is ready.
    pub(super) fn any_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Moves up to `most` ready items below `end` to `out`. Items in stream buffers come first,
    /// because further reads need the buffers; if there are none, up to `longer` items are moved.
    pub fn take_ready(
        &mut self,
        end: usize,
        most: usize,
        longer: usize,
        out: &mut Vec<(u32, Step)>,
    ) {
        out.clear();
        let items = &self.items;
        let mut take = |read: bool, most: usize, out: &mut Vec<(u32, Step)>| {
            self.ready.retain(|&item| {
                let it = &items[item as usize];
                let is_read = matches!(it.source, ByteSource::Stream(_));
                let takes = (item as usize) < end && is_read == read && out.len() < most;
                if takes {
                    out.push((item, it.step));
                }
                !takes
            });
        };
        take(true, most, out);
        let most = if out.is_empty() { longer } else { most };
        take(false, most, out);
    }

    /// Whether the layer is a scan with at least one missing cluster that passes through a stream
    /// buffer.
    pub fn streams(&self) -> bool {
        let misses = |item: &Item| matches!(item.source, ByteSource::Stream(_));
        self.units.iter().any(|unit| unit.rules.streams()) && self.items.iter().any(misses)
    }

    /// Whether clusters wait for slots held by others.
    pub fn is_short_of_memory(&self) -> bool {
        self.next < self.items.len()
    }

    /// Index of the layer in the model.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The needed neurons of a unit.
    pub fn needed_of(&self, unit: usize) -> &[u32] {
        let first = self.units[unit].first;
        let end = self
            .units
            .get(unit + 1)
            .map_or(self.total, |next| next.first);
        let items = &self.items[first..end];
        let start = items.first().map_or(0, |item| item.first);
        &self.ids[start..items.last().map_or(start, |item| item.end)]
    }

    /// Whether an item is left to a lane.
    #[inline]
    pub fn is_left(&self, item: usize) -> bool {
        matches!(self.items[item].source, ByteSource::Left)
    }

    /// Whether at least one neuron of an item is needed.
    #[inline]
    pub fn is_needed(&self, item: usize) -> bool {
        let it = &self.items[item];
        it.first < it.end || self.is_left(item)
    }

    /// Whether an item's gates are computed before its sums, from resident or from read Gate rows.
    #[inline]
    pub fn gates_known(&self, item: usize) -> bool {
        let it = &self.items[item];
        let unit = self.unit_of[it.bank as usize].map(|unit| &self.units[unit as usize]);
        unit.is_some_and(|unit| unit.rules.gates_resident)
            || it.gates_first && matches!(it.source, ByteSource::Cold)
    }

    /// Drops the list of ready items after an error.
    pub(super) fn forget_ready(&mut self) {
        self.ready.clear();
    }

    /// Clears the items. Places are invalid between layers.
    pub(super) fn close(&mut self) {
        self.items.clear();
        self.held.clear();
        self.ids.clear();
        for unit in self.units.drain(..) {
            self.unit_of[unit.bank as usize] = None;
        }
        self.total = 0;
    }
}
