//! The planner's output.

use serde::Serialize;

use super::pass::{Forecast, PredictorNeeds};
use crate::lane::LanePlan;
use crate::memory::MemoryPlan;

/// Hot clusters for a batch size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HotCut {
    /// Batch size.
    pub batch: usize,
    /// Hot clusters of all layers; those that fit the budget (`resident`).
    pub clusters: u64,
    /// See `clusters`.
    pub resident: u64,
    /// Hot share of all clusters.
    pub share: f64,
}

/// The plan for one model, machine and budget.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Division of the memory.
    #[serde(serialize_with = "ledger")]
    pub memory: MemoryPlan,
    /// Share of the FFN weights that is resident.
    pub ffn_resident_share: f64,
    /// Whether all Gate rows are resident; the share that is (`gates_resident_share`).
    pub gates_resident: bool,
    /// See `gates_resident`.
    pub gates_resident_share: f64,
    /// Reads per missing neuron: 1, or 2 with two-phase loading.
    pub reads_per_bundle: u32,
    /// By batch size.
    pub hot_cut: Vec<HotCut>,
    /// Bytes of a neuron read.
    pub random_read_bytes: u64,
    /// Bytes of a cluster read.
    pub sequential_read_bytes: u64,
    /// Bytes of projections and the output head that are read for every pass; 0 if they are resident.
    pub streamed_bytes: u64,
    /// Whole clusters in flight at once.
    pub stream_buffers: u32,
    /// Most clusters of later layers that are prefetched.
    pub prefetch_clusters: u32,
    /// Compute threads.
    pub compute_threads: usize,
    /// Core of the I/O thread; `null` if the scheduler chooses.
    pub io_core: Option<usize>,
    /// Prompt tokens per pass.
    pub chunk: usize,
    /// The predictor; 0 bytes without one.
    pub predictor: PredictorNeeds,
    /// Expected share of the visited experts' clusters that is resident; `null` without experts.
    pub expert_hit_rate: Option<f64>,
    /// What a lane says of its devices and their share; none without a lane.
    pub devices: Vec<LanePlan>,
    /// Decode in the middle of the context.
    pub decode: Forecast,
    /// Passes of one text that check drafts of its next tokens. None if nothing is read: their time is then that of
    /// products of a few tokens, which were not measured.
    pub drafts: Vec<DraftPass>,
    /// Prefill.
    pub prefill: Forecast,
    /// Which inputs of the forecast were measured.
    pub basis: Basis,
}

/// A pass that checks drafts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DraftPass {
    /// Number of drafts.
    pub drafts: usize,
    /// Time of the pass, as a multiple of that of a pass without drafts.
    pub times_as_long: f64,
    /// Tokens per second, as a multiple of those without drafts, if three of four drafts are right and making them takes no
    /// time.
    pub gain: f64,
}

impl DraftPass {
    /// Of a pass of `times_as_long` times the time.
    pub fn new(drafts: usize, times_as_long: f64) -> Self {
        // The j-th draft is taken if it and those before it are right.
        let tokens: f64 = (0..=drafts).map(|place| 0.75f64.powi(place as i32)).sum();
        Self {
            drafts,
            times_as_long,
            gain: tokens / times_as_long,
        }
    }
}

/// Which inputs of a forecast were measured; the others are assumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Basis {
    /// Whether the machine was measured.
    pub machine_measured: bool,
    /// Why the measurement of the machine may not be that of the idle machine, if there is a reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_doubt: Option<String>,
    /// Whether the storage device was measured.
    pub device_measured: bool,
    /// Whether the device was under load when measured, so that the numbers may be wrong.
    pub device_doubtful: bool,
    /// Source of the device's numbers, as text.
    pub device: String,
    /// Whether the container has the statistics that the forecast uses: of neurons, or of experts
    /// if whole experts are read.
    pub statistics: bool,
    /// Whether the forecast assumes, without statistics, how often an expert's neurons fire.
    pub neurons_assumed: bool,
}

impl Basis {
    /// Whether all inputs were measured.
    pub fn all_measured(&self) -> bool {
        let measured = self.machine_measured && self.device_measured;
        let doubtful = self.machine_doubt.is_some() || self.device_doubtful;
        measured && !doubtful && self.statistics && !self.neurons_assumed
    }

    /// The most important assumption behind `forecast`, with the command that measures it. `None`
    /// if the forecast is reliable; without reads it depends on neither storage nor cache
    /// statistics.
    pub fn doubt(&self, forecast: &Forecast) -> Option<&'static str> {
        let reads = forecast.reads > 0.0;
        match () {
            () if !self.machine_measured => {
                Some("this machine was not measured; `emberflow plan` does it once")
            }
            () if self.machine_doubt.is_some() => {
                Some("this machine was measured under load; `emberflow plan` measures it again")
            }
            () if reads && !self.device_measured => {
                Some("the disk was not measured; `emberflow plan MODEL` does it once")
            }
            () if reads && self.device_doubtful => {
                Some("the disk was measured under load; `emberflow bench io` measures it again")
            }
            () if !self.statistics => {
                Some("the model has no activation statistics; pack it with --stats")
            }
            () if reads && self.neurons_assumed => {
                Some("the firing rate of experts' neurons is assumed, without statistics")
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
