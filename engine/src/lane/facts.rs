//! A lane as data for the planner, and the planner's forecast of the CPU as data for a lane.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::widths::Widths;

/// What the planner knows of a lane.
#[derive(Debug, Clone)]
pub struct LaneFacts {
    /// Names of its devices, each of which has a track in a trace.
    pub names: Vec<String>,
    /// Its memory is the machine's, so its clusters count in the budget.
    pub unified: bool,
    /// Bytes for clusters; in separate memory including stream buffers, if any.
    pub memory: u64,
    /// The user chose `memory`.
    pub asked: bool,
    /// Clusters that it holds whatever the budget and the times: 0 if the planner chooses.
    pub fixed: u64,
    /// Bytes of a cluster.
    pub cluster_len: u64,
    /// Its sums have the CPU's bits, so times may decide who computes a neuron. Otherwise it is a separate numerics class.
    pub same_bits: bool,
    /// Clusters per stream buffer, of which it has two; 0 if it streams none.
    pub at_once: usize,
    /// Seconds of all compute threads for a cluster whose neurons all fire.
    pub cpu_cluster: f64,
    /// Its times.
    pub times: Arc<dyn LaneTimes>,
}

impl LaneFacts {
    /// Whether its part of the clusters that it holds may follow its times: the CPU can read them in place and computes the
    /// same bits.
    pub fn follows(&self) -> bool {
        self.unified && self.same_bits
    }
}

/// A lane's part of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LanePart {
    /// The hottest neurons of the layer, if it computes some neurons for all rows.
    pub neurons: usize,
    /// Its time in nanoseconds.
    pub ns: f64,
    /// Rows of the pass, if it computes all neurons for some rows.
    pub rows: usize,
    /// Nanoseconds in which the threads copy neurons that it does not hold, or wait for neurons that only it holds.
    pub copying: f64,
}

/// The CPU's forecast for one division of the memory.
pub trait CpuTimes {
    /// Number of layers with an FFN.
    fn layers(&self) -> usize;

    /// Neurons of a layer.
    fn neurons(&self) -> usize;

    /// Rows at the end of a pass that the CPU has to compute: they determine what stays in the cache.
    fn last_rows(&self) -> usize;

    /// Bytes of a cluster in a lane's memory.
    fn cluster_len(&self) -> u64;

    /// Nanoseconds of a layer in memory beside a lane's part: until the active set is known, and in all.
    fn layer_ns(&self, layer: usize, rows: usize, part: LanePart) -> [f64; 2];
}

/// A division of the memory that a lane explains.
pub struct LaneOutlook<'a> {
    /// The CPU's forecast.
    pub cpu: &'a dyn CpuTimes,
    /// What the lane computes, by the rows of a pass.
    pub widths: &'a Widths,
    /// Clusters that it holds.
    pub held: u64,
    /// How often each bank is visited; empty without statistics.
    pub visits: &'a [f32],
    /// Rows of a pass: one, all texts, a prompt chunk.
    pub rows: &'a [usize],
    /// Rows of a prompt chunk.
    pub chunk: usize,
}

/// What a plan says of one of a lane's devices.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct LanePlan {
    /// Its values.
    pub values: serde_json::Value,
    /// The same as text.
    #[serde(skip)]
    pub text: String,
}

/// Times of a lane.
pub trait LaneTimes: Send + Sync + fmt::Debug {
    /// Number of `hot` clusters in `layers` layers with which it ends when the CPU does, which takes `cpu` seconds for a cluster.
    /// 0 if it saves no time.
    fn balanced(&self, hot: u64, cpu: f64, layers: usize) -> u64;

    /// Its work by the rows of a pass, if it holds `held` clusters.
    fn widths(&self, cpu: &dyn CpuTimes, held: u64) -> Widths;

    /// Its mean part of a layer in a pass of `rows` rows.
    fn part(&self, cpu: &dyn CpuTimes, widths: &Widths, held: u64, rows: usize) -> LanePart;

    /// What a plan says of its devices.
    fn explain(&self, of: &LaneOutlook<'_>) -> Vec<LanePlan>;
}
