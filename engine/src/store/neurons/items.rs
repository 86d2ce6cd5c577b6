//! What the FFN asks and tells about the items of the current layer.

use std::sync::Arc;

use emberflow_kernels::Cpu;

use super::NeuronStore;
use crate::ablation::Overlap;
use crate::error::Error;
use crate::store::job::Step;
use crate::store::residency::Resident;

impl NeuronStore {
    /// Leaves the next cluster of `unit` to a lane.
    pub fn leave(&mut self, unit: usize) {
        self.job.leave(unit);
    }

    /// Index of the current layer in the model.
    pub fn layer(&self) -> usize {
        self.job.layer()
    }

    /// The needed neurons of a unit.
    pub fn needed_of(&self, unit: usize) -> &[u32] {
        self.job.needed_of(unit)
    }

    /// Whether an item has a sum: some of its neurons are needed, here or on a lane.
    #[inline]
    pub fn is_needed(&self, item: usize) -> bool {
        self.job.is_needed(item)
    }

    /// Whether the compute threads sum an item.
    #[inline]
    pub fn is_summed(&self, item: usize) -> bool {
        self.job.is_needed(item) && !self.job.is_left(item)
    }

    /// Whether an item's gates are computed before its sums.
    #[inline]
    pub fn gates_known(&self, item: usize) -> bool {
        self.job.gates_known(item)
    }

    /// Whether a scan reads missing clusters through stream buffers.
    pub fn streams(&self) -> bool {
        self.job.streams()
    }

    /// Whether computed items should be released now: further reads need their memory.
    pub fn wants_memory(&self) -> bool {
        self.job.is_short_of_memory() || self.job.streams()
    }

    /// Whether clusters are requested and computed while others of their layer are still named.
    pub fn overlaps(&self) -> bool {
        self.overlap == Overlap::Clusters
    }

    /// Whether reads must complete before more of the group is computed. `begun`: some of it is.
    pub fn must_wait(&self, begun: bool) -> bool {
        let barrier = match self.overlap {
            Overlap::Clusters => false,
            Overlap::Matrix => begun,
            Overlap::Nothing => true,
        };
        barrier && self.reads.outstanding() > 0
    }

    /// Moves ready items below `end` to `out`. In a scan at most `few` of those in stream buffers,
    /// whose memory must soon be free for further reads, or if there are none twice as many others.
    pub fn take_ready(&mut self, end: usize, few: usize, out: &mut Vec<(u32, Step)>) {
        let most = if self.job.streams() { few } else { usize::MAX };
        (self.job).take_ready(end, most, most.saturating_mul(2), out);
    }

    /// Records a failure of the layer's work outside the store, if it is the first.
    pub fn keep_failure<T>(&self, outcome: Result<T, Error>) -> Result<T, Error> {
        self.latch.keep(outcome)
    }

    /// Gate rows and scales, if a bank's Gate rows are resident. Drop them before the layer ends.
    pub fn resident_gates(&self, bank: u32) -> Option<Arc<Resident>> {
        let resident = self.residency.banks.gates_resident(bank);
        resident.then(|| self.residency.resident())
    }

    /// Whether the cold region may evict.
    pub fn evicts(&self) -> bool {
        self.residency.evicts()
    }

    /// As [`Residency::set_margins`](crate::store::residency::Residency::set_margins).
    pub fn set_margins(
        &mut self,
        cpu: Cpu,
        bank: u32,
        first: usize,
        margins: &[f32],
        consecutive: bool,
    ) {
        (self.residency).set_margins(cpu, bank, first, margins, consecutive);
    }
}
