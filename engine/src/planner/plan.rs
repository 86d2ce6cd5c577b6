//! What a plan says.

use serde::Serialize;

use super::pass::{Forecast, PredictorNeeds};
use crate::memory::MemoryPlan;

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
