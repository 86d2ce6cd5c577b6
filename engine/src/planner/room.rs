//! Device memory, and divisions for long prompts, whose longer chunks use more of it.

use super::budget::Division;
use super::facts::{DeviceTier, Planner};
use crate::memory::Needs;

/// Chunk size for comparing divisions on prompts.
const LONG: usize = 256;

impl Planner {
    /// A division of the same kind for a long prompt, if a longer chunk is possible.
    pub(super) fn long(&self, division: &Division) -> Option<Division> {
        let mut chunks = self.scratch.iter().map(|s| s.chunk);
        let long = chunks.rfind(|&chunk| chunk <= LONG);
        let long = long.filter(|&chunk| self.batch == 1 && chunk > division.chunk);
        self.with_chunk(division, long?)
    }

    /// A division of the same budget with another chunk and the same tables in memory. A long chunk may take the memory
    /// of Gate rows: nearly all neurons fire for one of its rows.
    pub(super) fn with_chunk(&self, usual: &Division, chunk: usize) -> Option<Division> {
        let needs = Needs {
            process_peak: 0,
            ..self.needs_with(&usual.needs, chunk)
        };
        let budget = usual.memory.budget();
        let divided = self.divided(budget, needs, chunk, usual.batch).ok()?;
        let (before, after) = (&usual.memory, &divided.memory);
        let same = before.tables == after.tables
            && (!self.gates_stay || before.gate_banks == after.gate_banks);
        let widths = self.widths(&divided, self.threads);
        same.then_some(Division { widths, ..divided })
    }

    /// Clusters in each of the two stream buffers of a device. In separate memory the buffers
    /// displace neurons, so there are none if no row of a chunk would use them.
    pub(crate) fn stream_buffers(&self, division: &Division) -> usize {
        let streams = |d: &Division| d.widths.streamed(d.chunk.max(d.batch)) > 0;
        let used = |tier: &&DeviceTier| {
            tier.unified || streams(division) || self.long(division).is_some_and(|d| streams(&d))
        };
        let tier = self.tier.as_ref().filter(used);
        tier.map_or(0, |tier| tier.at_once)
    }

    /// Bytes of device memory available to neurons.
    pub(super) fn room_for_neurons(&self, tier: &DeviceTier, division: &Division) -> u64 {
        let buffers = if tier.unified {
            0
        } else {
            2 * self.stream_buffers(division) as u64 * tier.cluster_len
        };
        tier.memory.saturating_sub(buffers)
    }

    /// Bytes of device memory left for copies of matrices that the host holds too. Unlimited in
    /// unified memory, where a device reads the host's matrices.
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
