//! [`Planner`]: all that plans are made from.

use emberflow_storage::profile::ReadCost;

use super::firing::Firing;
use super::pass::{PredictorNeeds, Shape};
use super::rates::Rates;
use crate::ablation::Ablation;
use crate::error::at_next_start;
use crate::memory::Needs;

/// Batches whose hot cut is told.
pub(crate) const BATCHES: [usize; 4] = [1, 2, 4, 8];

/// Chunks of prompt tokens to choose from.
pub(super) const CHUNKS: [usize; 6] = [16, 32, 64, 128, 256, 512];

/// What a chunk of some length takes beside the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Scratched {
    /// Tokens.
    pub chunk: usize,
    /// Working memory, bytes.
    pub bytes: u64,
    /// Weights and working memory of predictors, bytes.
    pub predictor: u64,
}

/// All that a plan depends on, except the budget.
#[derive(Debug, Clone)]
pub struct Planner {
    /// Sizes, with the scratch memory of the shortest chunk.
    pub(crate) needs: Needs,
    /// Chunks to choose from, ascending.
    pub(crate) scratch: Vec<Scratched>,
    pub(crate) shape: Shape,
    pub(crate) firing: Firing,
    pub(crate) rates: Rates,
    /// The device with many reads under way, and with as many as there are stream buffers.
    pub(crate) device: ReadCost,
    pub(crate) stream: ReadCost,
    /// Most threads that compute, and whether that many are wanted for certain.
    pub(crate) threads: usize,
    pub(crate) threads_fixed: bool,
    /// Positions there will be.
    pub(crate) context: usize,
    /// Hot clusters at the start of each bank, for batches of 1, 2, … sequences.
    pub(crate) hot_clusters: Vec<Vec<u32>>,
    /// Most sequences at once.
    pub(crate) batch: usize,
    /// Which mechanisms are at work; forecasts are for all of them.
    pub(crate) ablation: Ablation,
    pub(crate) predictor: PredictorNeeds,
    /// Whether Gate parts that are not resident are read before Up and Down.
    pub(crate) gates_first: bool,
    /// The core for the I/O thread, where one is better than others.
    pub(crate) io_core: Option<usize>,
}

impl Planner {
    /// The same for another machine.
    pub(crate) fn with_rates(&self, rates: Rates) -> Self {
        Self {
            rates,
            ..self.clone()
        }
    }

    /// Sizes of everything that is held, with the shortest chunk.
    pub fn needs(&self) -> &Needs {
        &self.needs
    }

    /// The smallest budget that works.
    pub fn smallest_budget(&self) -> u64 {
        self.needs.smallest_budget()
    }

    /// The smallest budget that works at the next start, too, in whole MiB: programs differ a little
    /// in size from start to start.
    pub fn smallest_to_name(&self) -> u64 {
        at_next_start(self.smallest_budget())
    }

    /// The budget that holds the whole model, with the longest chunk.
    pub fn full_budget(&self) -> u64 {
        self.needs_with(self.longest_chunk()).full_budget()
    }

    /// The longest chunk there is to choose.
    pub(crate) fn longest_chunk(&self) -> usize {
        self.scratch.last().map_or(1, |s| s.chunk)
    }

    /// The same with the scratch memory of a chunk.
    pub(crate) fn needs_with(&self, chunk: usize) -> Needs {
        let found = self.scratch.iter().find(|s| s.chunk == chunk);
        let found = found.or(self.scratch.first());
        found.map_or(self.needs, |s| Needs {
            scratch: s.bytes,
            predictor: s.predictor,
            ..self.needs
        })
    }

    /// Hot clusters at the start of each layer for batches of some size.
    pub(crate) fn hot(&self, batch: usize) -> &[u32] {
        let largest = self.hot_clusters.last();
        let hot = self.hot_clusters.get(batch.saturating_sub(1)).or(largest);
        hot.map_or(&[], |h| h)
    }
}

/// Chunks to choose from for prompts of up to `prompt` tokens: `chosen` alone where it is not 0.
pub(crate) fn chunks(chosen: usize, prompt: usize) -> Vec<usize> {
    if chosen > 0 {
        return vec![chosen];
    }
    let needed = |&&chunk: &&usize| chunk < prompt.next_power_of_two() * 2 || chunk == CHUNKS[0];
    CHUNKS.iter().filter(needed).copied().collect()
}
