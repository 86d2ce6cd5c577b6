//! The plan: what a model, a machine and a budget make of each other.
//!
//! Statistics of the model × profile of the machine × budget give the division of the memory, the
//! ways to read, thread counts, the chunk of a prompt, and how fast that will be (PowerInfer-2 §5).
//! [`Planner::plan`] is a pure function of what [`Planner`] holds. The arithmetic of bytes is
//! [`crate::memory`]'s, expected times are [`cost`]'s.

pub mod cold;
pub mod cores;
pub mod cost;
mod drift;
pub mod firing;
mod inputs;
pub mod measure;
pub mod rates;
mod reads;

use emberflow_storage::profile::{Origin, ReadCost};
use serde::Serialize;

use crate::Error;
use crate::error::at_next_start;
use crate::ffn::regions::prefixes;
use crate::ffn::{Banks, CLUSTER};
use crate::memory::{MemoryPlan, Needs, Residency};
use crate::policy::Policy;
use cost::{Forecast, Pass, Shape};
pub(crate) use drift::Again;
use firing::Firing;
use rates::Rates;

/// Batches whose hot cut is told.
pub(crate) const BATCHES: [usize; 4] = [1, 2, 4, 8];

/// Chunks of prompt tokens to choose from.
const CHUNKS: [usize; 6] = [16, 32, 64, 128, 256, 512];

/// A longer chunk may cost this share of the memory for neurons: it makes prompts much faster, and
/// every token after them a little slower.
const CHUNK_SHARE: f64 = 1.0 / 32.0;

/// Fewer threads than cores have to promise this much more speed.
const WORTH: f64 = 1.2;

/// What a predictor of firing neurons takes and gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PredictorNeeds {
    /// Bytes of its weights, all layers; 0 without one. Each token reads them once.
    pub bytes: u64,
    /// Neurons that it names for each that fires.
    pub named: f64,
}

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
    pub(crate) policy: Policy,
    pub(crate) predictor: PredictorNeeds,
    /// Whether Gate parts that are not resident are read before Up and Down.
    pub(crate) gates_first: bool,
    /// The core for the I/O thread, where one is better than others.
    pub(crate) io_core: Option<usize>,
}

/// Clusters that are hot for a batch of some size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HotCut {
    /// Tokens of the batch.
    pub batch: usize,
    /// Hot clusters of all layers, and those the budget holds.
    pub clusters: u64,
    /// See `clusters`.
    pub resident: u64,
    /// Share of all clusters that is hot.
    pub share: f64,
}

/// One model on one machine under one budget.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// How the memory is divided.
    #[serde(serialize_with = "ledger")]
    pub memory: MemoryPlan,
    /// Share of the FFN's weights in memory.
    pub ffn_resident_share: f64,
    /// Whether Gate rows stay in memory.
    pub gates_resident: bool,
    /// Reads per neuron that is not resident: 1, or 2 with its Gate part first.
    pub reads_per_bundle: u32,
    /// By size of the batch.
    pub hot_cut: Vec<HotCut>,
    /// Bytes of a read of one neuron.
    pub random_read_bytes: u64,
    /// Bytes of a read of a cluster.
    pub sequential_read_bytes: u64,
    /// Clusters that can be under way at once.
    pub stream_buffers: u32,
    /// Clusters of the next layer that are read ahead, beside attention.
    pub prefetch_clusters: u32,
    /// Threads that compute.
    pub compute_threads: usize,
    /// Core of the I/O thread; `null` where the system chooses.
    pub io_core: Option<usize>,
    /// Prompt tokens computed at once.
    pub chunk: usize,
    /// The predictor; no bytes without one.
    pub predictor: PredictorNeeds,
    /// Decoding in the middle of the context.
    pub decode: Forecast,
    /// Prompts.
    pub prefill: Forecast,
    /// What the forecast rests on.
    pub basis: Basis,
}

/// What a forecast rests on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Basis {
    /// Whether the machine was measured.
    pub machine_measured: bool,
    /// Whether the storage device was measured.
    pub device_measured: bool,
    /// Where the device's numbers come from, in words.
    pub device: String,
    /// Whether the model has activation statistics.
    pub statistics: bool,
}

impl Basis {
    /// Whether nothing was assumed.
    pub fn all_measured(&self) -> bool {
        self.machine_measured && self.device_measured && self.statistics
    }

    /// What had to be assumed for `forecast` and would change it much, with the command that
    /// measures it. `None` for a forecast to rely on: without reads it needs no device and no
    /// statistics of the cache.
    pub fn doubt(&self, forecast: &Forecast) -> Option<&'static str> {
        let reads = forecast.reads > 0.0;
        match () {
            () if !self.machine_measured => {
                Some("this machine was not measured, `emberflow plan` does it once")
            }
            () if reads && !self.device_measured => {
                Some("the disk was not measured, `emberflow bench io MODEL --save` does it")
            }
            () if !self.statistics => {
                Some("the model has no activation statistics, pack it with --stats")
            }
            () => None,
        }
    }
}

fn ledger<S: serde::Serializer>(plan: &MemoryPlan, s: S) -> Result<S::Ok, S::Error> {
    let budget = [("budget_bytes", plan.budget())];
    let entries = plan.ledger.entries().iter().copied();
    s.collect_map(budget.into_iter().chain(entries))
}

impl Planner {
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

    /// Plans for `budget`.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`], which names the smallest that works.
    pub fn plan(&self, budget: u64) -> Result<Plan, Error> {
        let (chunk, needs) = self.chunk(budget)?;
        self.plan_with(budget, &needs, chunk, self.batch)
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

    /// Plans for `budget` with a chunk that is settled and the sizes that go with it.
    pub(crate) fn plan_with(
        &self,
        budget: u64,
        needs: &Needs,
        chunk: usize,
        batch: usize,
    ) -> Result<Plan, Error> {
        let memory = needs.plan(budget)?.limited_to(self.policy, needs);
        let gates_resident = memory.residency == Residency::GatesResident;
        let scan = self.shape.dense || !gates_resident && !needs.predicts;
        let first = self.first_cold(&memory, scan, self.hot(batch));
        let slots = if scan { 0 } else { memory.slots };
        let named = (self.predictor.bytes > 0).then_some(self.predictor.named);
        let absent = self.firing.absent(slots, &first, named)?;
        let stream_buffers = Banks::stream_for(chunk);
        let forecast = |threads: usize, tokens| {
            let pass = Pass {
                shape: &self.shape,
                firing: &self.firing,
                machine: &self.rates,
                rates: self.rates.with_threads(threads)?,
                alone: self.rates.with_threads(1)?,
                device: &self.device,
                stream: &self.stream,
                predictor: self.predictor,
                stream_buffers,
                two_phases: needs.two_phases && memory.slots > 0,
                foresees: self.policy.foresees() && !self.gates_first,
            };
            let before = if tokens > 1 { 0 } else { self.context / 2 };
            Some((
                pass.forecast(&memory, &first, &absent, tokens, before),
                threads,
            ))
        };
        let counts = (self.rates.threads.iter())
            .map(|t| t.threads as usize)
            .filter(|&n| n < self.threads && !self.threads_fixed);
        let mut decode = forecast(self.threads, 1);
        for fewer in counts {
            let Some(other) = forecast(fewer, 1) else {
                continue;
            };
            if decode.is_none_or(|d| other.0.tokens_per_s > WORTH * d.0.tokens_per_s) {
                decode = Some(other);
            }
        }
        let (decode, compute_threads) = decode.ok_or_else(|| no_rates(&self.rates))?;
        let (prefill, _) =
            forecast(compute_threads, chunk.max(2)).ok_or_else(|| no_rates(&self.rates))?;
        let clusters = needs.clusters.max(1);
        let cut = |batch: usize| {
            let hot: u64 = self.hot(batch).iter().map(|&n| u64::from(n)).sum();
            let hot = if scan { clusters } else { hot };
            HotCut {
                batch,
                clusters: hot,
                resident: hot.min(memory.hot_clusters),
                share: hot as f64 / clusters as f64,
            }
        };
        let (random, reads_per_bundle) = match () {
            () if gates_resident => (self.shape.rest_read, 1),
            () if !self.gates_first => (self.shape.stride, 1),
            () => (self.shape.gate_read, if memory.slots == 0 { 1 } else { 2 }),
        };
        let prefetch = scan && !needs.two_phases && memory.hot_clusters < needs.clusters;
        Ok(Plan {
            ffn_resident_share: memory.ffn_resident_share(needs),
            gates_resident,
            reads_per_bundle,
            hot_cut: BATCHES.map(cut).to_vec(),
            random_read_bytes: random,
            sequential_read_bytes: self.shape.cluster_read,
            stream_buffers,
            prefetch_clusters: if prefetch { stream_buffers } else { 0 },
            compute_threads,
            io_core: self.io_core,
            chunk,
            predictor: self.predictor,
            decode,
            prefill,
            basis: Basis {
                machine_measured: self.rates.measured,
                device_measured: !matches!(self.device.origin(), Origin::Assumed(_)),
                device: self.device.origin().to_string(),
                statistics: self.firing.measured,
            },
            memory,
        })
    }

    /// Hot clusters at the start of each layer for batches of some size.
    pub(crate) fn hot(&self, batch: usize) -> &[u32] {
        let largest = self.hot_clusters.last();
        let hot = self.hot_clusters.get(batch.saturating_sub(1)).or(largest);
        hot.map_or(&[], |h| h)
    }

    /// First neuron of each layer outside the hot region.
    fn first_cold(&self, memory: &MemoryPlan, scan: bool, wanted: &[u32]) -> Vec<usize> {
        let clusters = self.shape.neurons.div_ceil(CLUSTER) as u32;
        let all = vec![clusters; wanted.len()];
        let wanted = if scan { &all } else { wanted };
        let prefix = prefixes(memory.hot_clusters, wanted, clusters);
        let neuron = |&c: &u32| (c as usize * CLUSTER).min(self.shape.neurons);
        prefix.iter().map(neuron).collect()
    }
}

fn no_rates(rates: &Rates) -> Error {
    Error::NoRates {
        thread_counts: rates.threads.len(),
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

#[cfg(test)]
mod tests;
