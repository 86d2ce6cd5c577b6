//! Per-item scheduling state of a layer.

use emberflow_storage::arena::Slot;

use crate::store::Step;

/// Most clusters that are computed at once in a scan.
pub(super) const FEW: usize = 64;

/// Per-item scheduling state of a layer.
pub(super) struct Schedule {
    /// Items that are ready, and their next step.
    pub ready: Vec<(u32, Step)>,
    /// By item: the step to run now.
    pub now: Vec<Option<Step>>,
    /// Computed items that still hold their slots.
    pub done: Vec<u32>,
    /// Items that are being computed and then become resident, ascending, and their slots of the
    /// hot region.
    pub copies: Vec<(usize, Slot)>,
    /// By item of a group: whether any of its neurons is needed.
    pub used: Vec<bool>,
}

impl Schedule {
    /// For layers of up to `clusters` clusters.
    pub fn new(clusters: usize) -> Self {
        Self {
            ready: Vec::with_capacity(clusters),
            now: vec![None; clusters],
            done: Vec::with_capacity(clusters),
            copies: Vec::with_capacity(FEW.min(clusters)),
            used: Vec::with_capacity(clusters),
        }
    }

    pub fn begin_layer(&mut self) {
        self.done.clear();
    }
}
