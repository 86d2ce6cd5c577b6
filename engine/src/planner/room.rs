//! A lane's memory, and divisions for long prompts, whose longer chunks use more of it.

use super::budget::Division;
use super::facts::Planner;
use crate::lane::LaneFacts;
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

    /// Clusters in each of the two stream buffers of a lane. In separate memory the buffers
    /// displace neurons, so there are none if no row of a chunk would use them.
    pub(crate) fn stream_buffers(&self, division: &Division) -> usize {
        let streams = |d: &Division| d.widths.streamed(d.chunk.max(d.batch)) > 0;
        let used = |lane: &&LaneFacts| {
            lane.unified || streams(division) || self.long(division).is_some_and(|d| streams(&d))
        };
        let lane = self.lane.as_ref().filter(used);
        lane.map_or(0, |lane| lane.at_once)
    }

    /// Bytes of a lane's memory available to neurons.
    pub(super) fn room_for_neurons(&self, lane: &LaneFacts, division: &Division) -> u64 {
        let buffers = if lane.unified {
            0
        } else {
            2 * self.stream_buffers(division) as u64 * lane.cluster_len
        };
        lane.memory.saturating_sub(buffers)
    }

    /// Bytes of a lane's memory left for copies of matrices that the host holds too. Unlimited in
    /// unified memory, where a lane reads the host's matrices.
    pub(crate) fn lane_spare(&self, division: &Division) -> u64 {
        match &self.lane {
            Some(lane) if !lane.unified => {
                let held = division.needs.lane_clusters * lane.cluster_len;
                self.room_for_neurons(lane, division).saturating_sub(held)
            }
            _ => u64::MAX,
        }
    }
}
