//! The state of a layer at work: its units, its clusters and where their bytes are.
//!
//! A layer has a *unit* of work for each bank that is visited. The clusters of all units, unit after
//! unit, are the layer's *items*; the needed neurons of all items are its *places*.

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::SlotId;

use super::layout::Layout;
use super::plan::Rules;
use super::regions::CLUSTER;

/// Tokens of a pass from which on nearly every neuron of a layer is needed by some token
/// (PowerInfer-2 §3.1: 75 % at 32), so that layers are read as a whole.
pub(crate) const MANY: usize = 32;

/// How a needed neuron of the cold region is held.
pub(super) enum Held {
    Nothing,
    /// Resident and pinned.
    Pinned(SlotId),
    /// The same, just read: its checksums are verified by the thread that computes it.
    Read(SlotId),
    /// Its Gate part is there.
    Gate(Slot),
    /// On its way since before the layer began.
    Coming,
}

/// Where a cluster's bytes are or will be.
pub(super) enum Source {
    /// No neuron of it is needed, or it was released.
    Unused,
    Hot(SlotId),
    /// A stream buffer; `None` until it is there.
    Stream(Option<Slot>),
    /// Slots of the cold region, neuron by neuron.
    Cold,
    /// The mapped file.
    Mapped,
}

/// What a cluster is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Its Gate parts are there; [`NeuronStore::resolve`] comes next.
    Gates,
    /// Everything that is needed is there.
    Sums,
}

/// A bank that is visited.
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
    /// Places of its needed neurons.
    pub first: usize,
    pub end: usize,
    pub source: Source,
    pub step: Step,
    /// Its gates are computed before its sums, from Gate parts.
    pub gates_first: bool,
    /// Reads under way.
    pub waiting: usize,
    /// Places before this one are held or requested.
    pub issued: usize,
}

/// The layer being worked on.
pub(super) struct LayerWork {
    /// Its number in the model.
    pub number: usize,
    /// Many tokens are computed at once.
    pub many: bool,
    pub units: Vec<UnitWork>,
    /// The unit of each bank of the model that is visited.
    pub unit_of: Vec<Option<u32>>,
    /// Clusters of all units, and those named so far.
    pub total: usize,
    pub items: Vec<Item>,
    /// By place: the neurons' numbers in their banks, and how they are held.
    pub ids: Vec<u32>,
    pub held: Vec<Held>,
    /// Items before this one have all their reads requested.
    pub next: usize,
    pub ready: Vec<u32>,
    /// Whole clusters that nobody has claimed: bank, cluster, bytes.
    pub arrived: Vec<(u32, u32, Slot)>,
    /// Whole clusters under way.
    pub coming: Vec<(u32, u32)>,
    /// Clusters of the next layer that were looked at for reading ahead.
    pub ahead: usize,
    /// Whether a cluster is on its way into the hot region.
    pub promoting: bool,
}

impl LayerWork {
    pub fn new(layout: &Layout) -> Self {
        let neurons = layout.most_in_layer();
        let clusters = neurons.div_ceil(CLUSTER) + layout.banks() / layout.layers().max(1);
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
            arrived: Vec::with_capacity(16),
            coming: Vec::with_capacity(16),
            ahead: 0,
            promoting: false,
        }
    }

    /// Whether a whole cluster was read ahead, or is being read.
    pub fn is_underway(&self, bank: u32, cluster: u32) -> bool {
        let key = (bank, cluster);
        self.coming.contains(&key) || self.arrived.iter().any(|a| (a.0, a.1) == key)
    }

    /// The item of a cluster of a visited bank, if it was named.
    pub fn item_of(&self, bank: u32, cluster: u32) -> Option<usize> {
        let unit = self.units.get(self.unit_of[bank as usize]? as usize)?;
        Some(unit.first + cluster as usize).filter(|&item| item < self.items.len())
    }

    /// Takes a whole cluster that has arrived.
    pub fn claim(&mut self, bank: u32, cluster: u32) -> Option<Slot> {
        let mut arrived = self.arrived.iter();
        let i = arrived.position(|a| (a.0, a.1) == (bank, cluster))?;
        Some(self.arrived.swap_remove(i).2)
    }

    /// Forgets the items: between two layers nobody can be asked for by its place.
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
