//! State of the current layer: its units, clusters and residency.
//!
//! A layer has one *unit* of work per visited bank. The clusters of all units in sequence are the
//! layer's *items*; the needed neurons of all items are its *places*.

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::SlotId;

use super::layout::Layout;
use super::plan::Rules;

/// Batch size from which nearly every neuron of a layer is needed by some token (PowerInfer-2 §3.1:
/// 75 % at 32), so that layers are read whole.
pub(super) const MANY: usize = 32;

/// Residency of a needed neuron in the cold region.
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
    /// Gate parts have arrived; [`NeuronStore::resolve`] follows.
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

/// A place in the order in which a scan needs clusters: layer after layer, and from the last layer
/// on to the first one of the next pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ahead {
    /// Layers after the current one.
    pub layers: usize,
    /// Cluster of that layer.
    pub cluster: usize,
}

/// The current layer.
pub(super) struct LayerWork {
    /// Its index in the model.
    pub number: usize,
    /// Whether the pass has at least [`MANY`] tokens.
    pub many: bool,
    pub units: Vec<UnitWork>,
    /// By bank of the model: its unit, if visited.
    pub unit_of: Vec<Option<u32>>,
    /// Clusters of all units.
    pub total: usize,
    pub items: Vec<Item>,
    /// By place: packed id and residency.
    pub ids: Vec<u32>,
    pub held: Vec<Held>,
    /// All reads of items before this one are requested.
    pub next: usize,
    pub ready: Vec<u32>,
    /// Whole clusters that have arrived and are not claimed: bank, cluster, bytes.
    pub arrived: Vec<(u32, u32, Slot)>,
    /// Whole clusters in flight.
    pub coming: Vec<(u32, u32)>,
    /// The next cluster to consider for prefetch from the layers to come.
    pub ahead: Ahead,
    /// Banks of the same layer that are certain to be visited next.
    pub after: Vec<u32>,
    /// Clusters of these considered for prefetch.
    pub after_taken: usize,
    /// Banks of the next layer that a guess names, and how many of their clusters were considered.
    pub guessed: Vec<u32>,
    pub guessed_taken: usize,
    /// Whether these are no guess: the layer's router has chosen them.
    pub certain: bool,
    /// Whether a cluster is being read into the hot region.
    pub promoting: bool,
}

impl LayerWork {
    pub fn new(layout: &Layout) -> Self {
        let (neurons, clusters) = (layout.neurons_at_once(), layout.clusters_at_once());
        Self {
            number: 0,
            many: false,
            units: Vec::with_capacity(16),
            unit_of: vec![None; layout.banks()],
            total: 0,
            items: Vec::with_capacity(clusters),
            ids: Vec::with_capacity(neurons),
            held: Vec::with_capacity(neurons),
            next: 0,
            ready: Vec::with_capacity(clusters),
            arrived: Vec::with_capacity(64),
            coming: Vec::with_capacity(64),
            ahead: Ahead::default(),
            after: Vec::with_capacity(16),
            after_taken: 0,
            guessed: Vec::with_capacity(16),
            guessed_taken: 0,
            certain: false,
            promoting: false,
        }
    }

    /// Whether a whole cluster is in flight or has arrived.
    pub fn is_underway(&self, bank: u32, cluster: u32) -> bool {
        let key = (bank, cluster);
        self.coming.contains(&key) || self.arrived.iter().any(|a| (a.0, a.1) == key)
    }

    /// The item of a cluster of a visited bank, if already requested.
    pub fn item_of(&self, bank: u32, cluster: u32) -> Option<usize> {
        let unit = self.units.get(self.unit_of[bank as usize]? as usize)?;
        Some(unit.first + cluster as usize).filter(|&item| item < self.items.len())
    }

    /// Takes the buffer of a whole cluster that has arrived.
    pub fn claim(&mut self, bank: u32, cluster: u32) -> Option<Slot> {
        let mut arrived = self.arrived.iter();
        let i = arrived.position(|a| (a.0, a.1) == (bank, cluster))?;
        Some(self.arrived.swap_remove(i).2)
    }

    /// Whether every needed neuron of a cluster is all there is of it, so that the threads that
    /// compute them check all of its bytes.
    pub fn needs_all(&self, item: usize, neurons: usize) -> bool {
        let it = &self.items[item];
        it.end - it.first == neurons
    }

    /// Clears the items: between layers no place is valid.
    pub fn close(&mut self) {
        self.items.clear();
        self.held.clear();
        self.ids.clear();
        for unit in self.units.drain(..) {
            self.unit_of[unit.bank as usize] = None;
        }
        self.total = 0;
    }
}
