//! The memory of a device, and divisions for long prompts, whose chunks use more of it.

use super::budget::Division;
use super::facts::{Planner, Tier};
use crate::memory::Needs;

/// Chunk by which devices are compared for prompts.
const LONG: usize = 256;

impl Planner {
    /// A division of the same kind for a long prompt, where it would have longer chunks.
    pub(super) fn long(&self, division: &Division) -> Option<Division> {
        let mut chunks = self.scratch.iter().map(|s| s.chunk);
        let long = chunks.rfind(|&chunk| chunk <= LONG);
        let long = long.filter(|&chunk| self.batch == 1 && chunk > division.chunk);
        self.with_chunk(division, long?)
    }

    /// A division of the same kind with another chunk.
    pub(super) fn with_chunk(&self, usual: &Division, chunk: usize) -> Option<Division> {
        let needs = Needs {
            process_peak: 0,
            ..self.needs_with(&usual.needs, chunk)
        };
        let budget = usual.memory.budget();
        let divided = self.divided(budget, needs, chunk, usual.batch).ok()?;
        let (before, after) = (&usual.memory, &divided.memory);
        let same = before.gate_banks == after.gate_banks
            && before.embedding == after.embedding
            && (before.slots > 0) == (after.slots > 0);
        let widths = self.widths(&divided, self.threads);
        same.then_some(Division { widths, ..divided })
    }

    /// Clusters of each of the two buffers that others pass through on their way through a device. In a memory of
    /// its own they take room from neurons, so that there are none where no row of a chunk would use them.
    pub(crate) fn stream_buffers(&self, division: &Division) -> usize {
        let streams = |d: &Division| d.widths.streamed(d.chunk.max(d.batch)) > 0;
        let used = |tier: &&Tier| {
            tier.unified || streams(division) || self.long(division).is_some_and(|d| streams(&d))
        };
        let tier = self.tier.as_ref().filter(used);
        tier.map_or(0, |tier| tier.at_once)
    }

    /// Bytes of a device's memory that neurons may be held in.
    pub(super) fn room_for_neurons(&self, tier: &Tier, division: &Division) -> u64 {
        let buffers = match tier.unified {
            true => 0,
            false => 2 * self.stream_buffers(division) as u64 * tier.cluster_len,
        };
        tier.memory.saturating_sub(buffers)
    }

    /// Bytes of a device's memory that a division leaves for matrices that the host has too. Where it is the
    /// machine's, they take none of it.
    pub(crate) fn device_spare(&self, division: &Division) -> u64 {
        match &self.tier {
            Some(tier) if !tier.unified => {
                let held = division.needs.device_clusters * tier.cluster_len;
                self.room_for_neurons(tier, division).saturating_sub(held)
            }
            _ => u64::MAX,
        }
    }
}
