//! Which items of a layer are to do what.

use crate::store::Step;

/// Which items are to do what.
pub(super) struct Schedule {
    /// Items that are ready.
    pub ready: Vec<(u32, Step)>,
    /// By item: what it is to do now.
    pub now: Vec<Option<Step>>,
    /// Items that were computed and still hold their bytes.
    pub done: Vec<u32>,
    /// Items of a group of which some neuron is needed.
    pub used: Vec<bool>,
}

impl Schedule {
    /// For layers of up to `clusters` clusters.
    pub fn new(clusters: usize) -> Self {
        Self {
            ready: Vec::with_capacity(clusters),
            now: vec![None; clusters],
            done: Vec::with_capacity(clusters),
            used: Vec::with_capacity(clusters),
        }
    }

    pub fn begin_layer(&mut self) {
        self.done.clear();
    }
}
