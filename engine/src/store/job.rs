//! The current layer: what is needed of it, and what each cluster still waits for.
//!
//! A layer has one *unit* of work per visited bank. The clusters of all units in sequence are the
//! layer's *items*; the needed neurons of all items are its *places*. Bookkeeping over indices:
//! nothing here looks up, reads or evicts.

#[cfg(test)]
mod tests;

use std::ops::Range;

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::SlotId;

use super::rules::Rules;
use crate::cluster::CLUSTER;

/// Batch size from which nearly every neuron of a layer is needed by some token (PowerInfer-2 §3.1:
/// 75 % at 32), so that layers are read whole.
pub(super) const MANY: usize = 32;

/// Where a needed neuron of a cluster is that is served neuron by neuron.
#[derive(Debug)]
pub(super) enum Held {
    Nothing,
    /// Resident and pinned.
    Pinned(SlotId),
    /// Resident, pinned and unverified: the thread that computes it checks its checksums.
    Read(SlotId),
    /// Only its Gate part has arrived.
    Gate(Slot),
    /// Prefetched, still in flight.
    Coming,
}

/// Source of a cluster's bytes.
#[derive(Debug)]
pub(super) enum Source {
    /// Nothing of it is needed, or it was released.
    Unused,
    Hot(SlotId),
    /// A device's memory, which is the machine's.
    Shared,
    /// A stream buffer; `None` until the read completes.
    Stream(Option<Slot>),
    /// Cold slots, neuron by neuron.
    Cold,
    /// The mapped file.
    Mapped,
    /// A device, which computes it.
    Device,
}

/// The step that a cluster is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Gate parts have arrived; [`super::NeuronStore::resolve`] follows.
    Gates,
    /// All needed bytes have arrived.
    Sums,
}

/// A visited bank.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnitWork {
    pub bank: u32,
    /// Item of its first cluster.
    pub first: usize,
    pub rules: Rules,
}

/// A cluster of the layer.
#[derive(Debug)]
pub(super) struct Item {
    pub bank: u32,
    pub cluster: u32,
    /// Places of its needed neurons: first, and one past the last.
    pub first: usize,
    pub end: usize,
    pub source: Source,
    pub step: Step,
    /// Two-phase: its gates are computed from Gate parts before its sums.
    pub gates_first: bool,
    /// The threads that compute a whole cluster check its bytes.
    pub unchecked: bool,
    /// Reads in flight.
    pub waiting: usize,
    /// Places before this one are held or requested.
    pub issued: usize,
}

impl Item {
    /// A cluster whose needed neurons are at `places`; none of them is requested.
    pub fn new(bank: u32, cluster: u32, places: Range<usize>, source: Source) -> Self {
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

    /// Whether it waits for a whole cluster.
    fn awaits_whole(&self) -> bool {
        matches!(self.source, Source::Stream(None))
    }
}

/// The current layer.
pub(crate) struct Job {
    /// Its index in the model.
    layer: usize,
    /// Whether the pass has at least [`MANY`] tokens.
    pub(super) many: bool,
    units: Vec<UnitWork>,
    /// By bank of the model: its unit, if visited.
    unit_of: Vec<Option<u32>>,
    /// Clusters of all units.
    total: usize,
    pub(super) items: Vec<Item>,
    /// By place: packed id and residency.
    pub(super) ids: Vec<u32>,
    pub(super) held: Vec<Held>,
    /// All reads of items before this one are requested.
    next: usize,
    ready: Vec<u32>,
    /// Whether a cluster is being read into the hot region.
    pub(super) promoting: bool,
}

impl Job {
    /// For layers of a model of `banks` banks, of which up to so many neurons and clusters are
    /// visited at once.
    pub(super) fn new(banks: usize, neurons: usize, clusters: usize) -> Self {
        Self {
            layer: 0,
            many: false,
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

    /// Begins a layer of a pass of so many `rows`.
    pub(super) fn begin(&mut self, layer: usize, rows: usize) {
        self.close();
        self.ready.clear();
        (self.layer, self.many, self.next) = (layer, rows >= MANY, 0);
        self.promoting = false;
    }

    /// Adds a visited bank of so many clusters.
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

    /// The next cluster of a unit.
    pub(super) fn next_cluster(&self, unit: usize) -> u32 {
        (self.items.len() - self.units[unit].first) as u32
    }

    /// Adds the needed neurons of the next cluster; their places.
    pub(super) fn add_places(&mut self, ids: &[u32]) -> Range<usize> {
        let places = self.ids.len()..self.ids.len() + ids.len();
        self.ids.extend_from_slice(ids);
        self.held.resize_with(places.end, || Held::Nothing);
        places
    }

    /// Leaves the next cluster of unit `unit` to a device.
    pub fn leave_to_device(&mut self, unit: usize) {
        let (bank, cluster) = (self.units[unit].bank, self.next_cluster(unit));
        let none = self.ids.len()..self.ids.len();
        (self.items).push(Item::new(bank, cluster, none, Source::Device));
    }

    /// The next item to request, if its neurons are known.
    pub(super) fn next_item(&self) -> Option<usize> {
        Some(self.next).filter(|&next| next < self.items.len())
    }

    /// All reads of items before this one are requested.
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// All of the next item is requested.
    pub(super) fn requested(&mut self) {
        self.next += 1;
        self.mark_if_ready(self.next - 1);
    }

    /// Whether all clusters of the layer are requested.
    pub(super) fn is_requested(&self) -> bool {
        self.next == self.total
    }

    /// The item of a cluster of a visited bank, once its neurons are known.
    fn item_of(&self, bank: u32, cluster: u32) -> Option<usize> {
        let unit = self.units.get(self.unit_of[bank as usize]? as usize)?;
        Some(unit.first + cluster as usize).filter(|&item| item < self.items.len())
    }

    /// The item that waits for a whole cluster.
    pub(super) fn awaits_cluster(&self, bank: u32, cluster: u32) -> Option<usize> {
        let item = self.item_of(bank, cluster)?;
        (item < self.next && self.items[item].awaits_whole()).then_some(item)
    }

    /// The item and place that wait for a neuron that was read ahead.
    pub(super) fn awaits_neuron(&self, bank: u32, neuron: u32) -> Option<(usize, usize)> {
        let item = self.item_of(bank, neuron / CLUSTER as u32)?;
        let it = &self.items[item];
        let ids = &self.ids[it.places()];
        let place = it.first + ids.binary_search(&neuron).ok()?;
        matches!(self.held[place], Held::Coming).then_some((item, place))
    }

    /// A neuron of an item has arrived.
    pub(super) fn arrived(&mut self, item: usize, place: usize, held: Held) {
        self.held[place] = held;
        self.items[item].waiting -= 1;
        self.mark_if_ready(item);
    }

    /// The whole cluster of an item is in `buffer`. Where it is unchecked, the threads that compute
    /// it check it.
    pub(super) fn attach(&mut self, item: usize, buffer: Slot, unchecked: bool) {
        let it = &mut self.items[item];
        (it.source, it.unchecked) = (Source::Stream(Some(buffer)), unchecked);
        it.waiting = 0;
    }

    /// Marks an item ready once it is fully requested and nothing is in flight.
    pub(super) fn mark_if_ready(&mut self, item: usize) {
        let it = &self.items[item];
        let requested = match it.source {
            Source::Unused | Source::Device => false,
            Source::Hot(_) | Source::Shared | Source::Stream(_) | Source::Mapped => true,
            Source::Cold => it.issued == it.end,
        };
        if requested && it.waiting == 0 {
            self.ready.push(item as u32);
        }
    }

    /// Whether any item is ready.
    pub(super) fn any_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Moves up to `most` of the ready items below `end` to `out`: first those in stream buffers,
    /// which are wanted for further reads. Up to `longer` if none of them is.
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
                let is_read = matches!(it.source, Source::Stream(_));
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

    /// Whether the layer is a scan whose missing clusters pass through stream buffers, and any is
    /// missing.
    pub fn streams(&self) -> bool {
        let misses = |item: &Item| matches!(item.source, Source::Stream(_));
        self.units.iter().any(|unit| unit.rules.streams()) && self.items.iter().any(misses)
    }

    /// Whether clusters wait for slots that others hold.
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

    /// Whether a device computes an item.
    #[inline]
    pub fn is_on_device(&self, item: usize) -> bool {
        matches!(self.items[item].source, Source::Device)
    }

    /// Whether any neuron of an item is needed.
    #[inline]
    pub fn is_needed(&self, item: usize) -> bool {
        let it = &self.items[item];
        it.first < it.end || self.is_on_device(item)
    }

    /// Whether an item's gates are computed before its sums, whose Gate rows are resident or not.
    #[inline]
    pub fn gates_known(&self, item: usize) -> bool {
        let it = &self.items[item];
        let unit = self.unit_of[it.bank as usize].map(|unit| &self.units[unit as usize]);
        unit.is_some_and(|unit| unit.rules.gates_resident)
            || it.gates_first && matches!(it.source, Source::Cold)
    }

    /// Drops what is ready, after an error.
    pub(super) fn forget_ready(&mut self) {
        self.ready.clear();
    }

    /// Clears the items: between layers no place is valid.
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
