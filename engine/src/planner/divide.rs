//! A budget divided. Arithmetic on a few hundred numbers: it takes microseconds, so it runs whenever
//! a sequence joins or leaves and whenever the budget changes.

use super::facts::{Planner, Scratched};
use crate::error::Error;
use crate::memory::{MemoryPlan, Needs};
use crate::store::MANY;
use crate::store::regions::{CLUSTER, prefixes};

/// A longer chunk may cost this share of the memory for neurons: it makes prompts much faster, and
/// every token after them a little slower.
const CHUNK_SHARE: f64 = 1.0 / 32.0;

/// Whole clusters that can be under way from flash at once: enough for the device to be busy while one
/// is computed.
const STREAM: u32 = 4;

/// The same where long chunks of a prompt stream whole layers: a few for each thread to work on, and as
/// many under way.
const STREAM_MANY: u32 = 12;

/// Stream buffers for chunks of up to `chunk` tokens.
pub(crate) fn stream_buffers(chunk: usize) -> u32 {
    if chunk >= MANY { STREAM_MANY } else { STREAM }
}

/// What is settled before anything runs.
#[derive(Debug, Clone)]
pub struct Division {
    /// How the memory is divided.
    pub memory: MemoryPlan,
    /// What it was divided by.
    pub needs: Needs,
    /// Prompt tokens computed at once.
    pub chunk: usize,
    /// Clusters that can be on their way from flash as a whole at once.
    pub stream_buffers: u32,
    /// Sequences that it is made for.
    pub batch: usize,
}

impl Planner {
    /// Divides `budget` for the options' number of sequences.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`], which names the smallest that works.
    pub fn divide(&self, budget: u64) -> Result<Division, Error> {
        let (chunk, needs) = self.chunk(budget)?;
        self.divided(budget, needs, chunk, self.batch)
    }

    /// The same for another budget or number of sequences of an engine that is open: the chunk is
    /// settled, and a peak of the past does not bind the future.
    ///
    /// # Errors
    /// As [`Planner::divide`].
    pub fn divide_again(
        &self,
        settled: &Division,
        budget: u64,
        batch: usize,
    ) -> Result<Division, Error> {
        let hot = self.hot(batch).iter().map(|&n| u64::from(n));
        let needs = Needs {
            process_peak: 0,
            hot_clusters: hot.sum(),
            ..settled.needs
        };
        self.divided(budget, needs, settled.chunk, batch)
    }

    fn divided(
        &self,
        budget: u64,
        needs: Needs,
        chunk: usize,
        batch: usize,
    ) -> Result<Division, Error> {
        Ok(Division {
            memory: needs.plan(budget)?.limited_to(self.ablation, &needs),
            needs,
            chunk,
            stream_buffers: stream_buffers(chunk),
            batch,
        })
    }

    /// The longest chunk that the budget can well afford, and the sizes with it.
    fn chunk(&self, budget: u64) -> Result<(usize, Needs), Error> {
        let least = self.needs.plan(budget)?;
        let cache: u64 = ["gates", "hot", "cold"]
            .iter()
            .map(|what| least.ledger.held(what))
            .sum();
        let spare = budget.saturating_sub(self.needs.full_budget());
        // Where everything fits, everything stays.
        let most = match spare {
            0 => (cache as f64 * CHUNK_SHARE) as u64,
            spare => spare,
        };
        let mut best = None;
        let held = |needs: &Needs| needs.scratch + needs.predictor;
        for &Scratched { chunk, .. } in &self.scratch {
            let needs = self.needs_with(chunk);
            let fits = held(&needs).saturating_sub(held(&self.needs)) <= most;
            let same = |plan: &MemoryPlan| plan.residency == least.residency;
            if fits && needs.plan(budget).is_ok_and(|p| same(&p)) {
                best = Some((chunk, needs));
            }
        }
        let first = self.scratch.first().map_or(1, |s| s.chunk);
        Ok(best.unwrap_or((first, self.needs)))
    }

    /// Whether every token looks at every neuron.
    pub(super) fn scans(&self, division: &Division) -> bool {
        let resident = division.memory.gates_resident();
        self.shape.dense || !resident && !division.needs.predicts
    }

    /// First neuron of each layer outside the hot region.
    pub(super) fn first_cold(&self, division: &Division) -> Vec<usize> {
        let hot = self.hot(division.batch);
        let all = vec![self.shape.neurons.div_ceil(CLUSTER) as u32; hot.len()];
        let wanted = if self.scans(division) { &all } else { hot };
        let prefix = prefixes(division.memory.hot_clusters, wanted, &all);
        let neuron = |&c: &u32| (c as usize * CLUSTER).min(self.shape.neurons);
        prefix.iter().map(neuron).collect()
    }
}
