//! What a store says of itself.

use super::NeuronStore;
use crate::counters::{Counters, nanoseconds};
use crate::store::prefetch::foresight::Foreseen;
use crate::store::residency::LayerResidency;

impl NeuronStore {
    /// Totals since the store was opened.
    pub fn counters(&self) -> Counters {
        let io = self.reads.stats();
        Counters {
            evictions: self.residency.evictions(),
            reads: io.reads,
            commands: io.commands,
            bytes_read: io.bytes + io.gap_bytes,
            wait_ns: nanoseconds(self.reads.waited()),
            busy_ns: io.busy_ns,
            ..self.counters
        }
    }

    /// Resident neurons by layer. Looks up every neuron: milliseconds for a large model.
    pub fn by_layer(&self) -> Vec<LayerResidency> {
        self.residency.by_layer(|bank| self.outside.holds(bank))
    }

    /// Largest number of neurons that can be resident at once.
    pub fn capacity(&self) -> u64 {
        match self.mapped {
            Some(_) => self.layout.total(),
            None => self.residency.capacity(),
        }
    }

    /// Number of neurons in banks that stream while others have resident Gate rows.
    pub fn streamed(&self) -> u64 {
        self.residency.banks.streamed()
    }

    /// Number of hot clusters wanted per bank.
    pub fn hot_wanted(&self) -> Vec<u32> {
        self.residency.wanted()
    }

    /// The bytes of the resident hot clusters.
    pub fn hot_bytes(&mut self) -> Vec<&[u8]> {
        self.residency.hot_bytes()
    }

    /// Counts of expert prefetches; `None` without experts.
    pub fn foreseen(&self) -> Option<Foreseen> {
        self.prefetch.foreseen()
    }

    /// Name of the I/O engine.
    pub fn io_name(&self) -> &'static str {
        self.reads.engine()
    }
}
