//! [`Planner`]: the inputs of planning.

use emberflow_predictor::stats::routing::ExpertMisses;
use emberflow_storage::profile::ReadCost;

use super::firing::Firing;
use super::pass::{PredictorNeeds, Shape};
use super::rates::Rates;
use crate::ablation::Policy;
use crate::lane::LaneFacts;
use crate::memory::Needs;

/// Batch sizes with a reported hot cut.
pub(crate) const BATCHES: [usize; 4] = [1, 2, 4, 8];

/// Candidate chunk sizes, in prompt tokens.
pub(super) const CHUNKS: [usize; 6] = [16, 32, 64, 128, 256, 512];

/// Memory needed by a chunk size, without the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ChunkMemory {
    /// Chunk size in tokens.
    pub chunk: usize,
    /// Scratch bytes.
    pub bytes: u64,
    /// Bytes of the predictors: weights and scratch.
    pub predictor: u64,
}

/// All inputs of a plan except the budget.
#[derive(Debug, Clone)]
pub struct Planner {
    /// Byte sizes, with the scratch of the shortest chunk.
    pub(crate) needs: Needs,
    /// The same with projections and output head read for every pass, for budgets that are too small otherwise.
    pub(crate) streamed: Option<Needs>,
    /// Candidate chunks, ascending.
    pub(crate) scratch: Vec<ChunkMemory>,
    /// What of the model determines a pass's time.
    pub shape: Shape,
    /// How often neurons fire.
    pub firing: Firing,
    /// Miss rates of a cache of whole experts, if the container has them.
    pub(crate) expert_misses: Option<ExpertMisses>,
    pub(crate) rates: Rates,
    /// Storage costs at high queue depth, and at the depth of the stream buffers.
    pub(crate) storage: ReadCost,
    pub(crate) stream: ReadCost,
    /// Most compute threads; whether their number is fixed.
    pub(crate) threads: usize,
    pub(crate) threads_fixed: bool,
    /// Context length in positions.
    pub(crate) context: usize,
    /// Hot clusters of each bank, for batches of 1, 2, … sequences.
    pub(crate) hot_clusters: Vec<Vec<u32>>,
    /// Most sequences at once.
    pub(crate) batch: usize,
    /// Enabled mechanisms. Forecasts model only memory limits and prefetching.
    pub(crate) policy: Policy,
    /// Gate rows stay resident regardless of the forecast.
    pub(crate) gates_stay: bool,
    pub(crate) predictor: PredictorNeeds,
    /// Two-phase loading where Gate rows are not resident.
    pub(crate) gates_first: bool,
    /// The lane, if any.
    pub(crate) lane: Option<LaneFacts>,
    /// How often each bank is visited, for the lane; empty without statistics.
    pub(crate) visits: Vec<f32>,
    /// Core of the I/O thread, if one is preferable.
    pub(crate) io_core: Option<usize>,
}

impl Planner {
    /// A copy with other machine rates.
    pub(crate) fn with_rates(&self, rates: Rates) -> Self {
        Self {
            rates,
            ..self.clone()
        }
    }

    /// Byte sizes of everything, with the shortest chunk.
    pub fn needs(&self) -> &Needs {
        &self.needs
    }

    /// The longest candidate chunk.
    pub(crate) fn longest_chunk(&self) -> usize {
        self.scratch.last().map_or(1, |s| s.chunk)
    }

    /// `needs` with another chunk's scratch.
    pub(crate) fn needs_with(&self, needs: &Needs, chunk: usize) -> Needs {
        let found = self.scratch.iter().find(|s| s.chunk == chunk);
        let found = found.or(self.scratch.first());
        found.map_or(*needs, |s| Needs {
            scratch: s.bytes,
            predictor: s.predictor,
            ..*needs
        })
    }

    /// Hot clusters of each bank for a batch size.
    pub(crate) fn hot(&self, batch: usize) -> &[u32] {
        let largest = self.hot_clusters.last();
        let hot = self.hot_clusters.get(batch.saturating_sub(1)).or(largest);
        hot.map_or(&[], |h| h)
    }
}

/// Candidate chunk sizes for prompts of up to `prompt` tokens; only `chosen` unless it is 0.
pub(crate) fn chunks(chosen: usize, prompt: usize) -> Vec<usize> {
    if chosen > 0 {
        return vec![chosen];
    }
    let needed = |&&chunk: &&usize| chunk < prompt.next_power_of_two() * 2 || chunk == CHUNKS[0];
    CHUNKS.iter().filter(needed).copied().collect()
}
