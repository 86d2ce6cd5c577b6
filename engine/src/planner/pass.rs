//! What a forecast is made of, and what it says.

use emberflow_kernels::DType;
use emberflow_storage::profile::ReadCost;
use serde::Serialize;

use super::firing::Firing;
use super::rates::{Rates, ThreadRates};

/// What a predictor of firing neurons takes and gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PredictorNeeds {
    /// Bytes of its weights, all layers; 0 without one. Each token reads them once.
    pub bytes: u64,
    /// Neurons that it names for each that fires.
    pub named: f64,
}

/// What of a model decides how long a pass takes.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub d: usize,
    /// Rows of the head.
    pub vocab: usize,
    /// Neurons of a layer.
    pub neurons: usize,
    /// Format of the neurons.
    pub ffn: DType,
    /// Format of the attention matrices.
    pub attention: DType,
    /// Format of the head.
    pub head: DType,
    /// Rows of a layer's attention matrices, and their bytes.
    pub attention_rows: f64,
    /// See `attention_rows`.
    pub attention_bytes: f64,
    /// Bytes of keys and values of one position in one layer.
    pub kv_bytes: f64,
    /// Bytes of a Gate row, and of Up and Down.
    pub gate_len: f64,
    /// See `gate_len`.
    pub rest_len: f64,
    /// Bytes that are read for a Gate part alone, for Up and Down alone, and for a cluster.
    pub gate_read: u64,
    /// See `gate_read`.
    pub rest_read: u64,
    /// See `gate_read`.
    pub cluster_read: u64,
    /// Bytes from one neuron to the next.
    pub stride: u64,
    /// Every neuron is computed, firing or not.
    pub dense: bool,
}

/// The resource that limits a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Limit {
    /// Reading weights from memory.
    #[serde(rename = "memory bandwidth")]
    Memory,
    /// Arithmetic and bookkeeping.
    #[serde(rename = "compute")]
    Compute,
    /// Reads of single neurons.
    #[serde(rename = "random reads")]
    RandomReads,
    /// Reads of whole clusters.
    #[serde(rename = "sequential reads")]
    SequentialReads,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory bandwidth",
            Self::Compute => "compute",
            Self::RandomReads => "random reads",
            Self::SequentialReads => "sequential reads",
        })
    }
}

/// What a pass is expected to take.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Forecast {
    /// Tokens of the pass.
    pub tokens: usize,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// What limits it.
    pub limit: Limit,
    /// Milliseconds of the pass.
    pub ms: f64,
    /// Milliseconds in which something is computed.
    pub compute_ms: f64,
    /// Milliseconds in which the device reads.
    pub io_ms: f64,
    /// Milliseconds in which the computation waits for reads.
    pub wait_ms: f64,
    /// Bytes read from the device.
    pub bytes_read: f64,
    /// Reads asked for.
    pub reads: f64,
    /// Share of the needed neurons outside the hot region that are found in the cold one.
    pub cold_hit_rate: f64,
}

/// Everything a forecast depends on.
pub struct Pass<'a> {
    /// The model.
    pub shape: &'a Shape,
    /// Which neurons fire.
    pub firing: &'a Firing,
    /// The machine.
    pub machine: &'a Rates,
    /// The machine with the threads that compute, and with one.
    pub rates: &'a ThreadRates,
    /// See `rates`.
    pub alone: &'a ThreadRates,
    /// The device with many reads under way.
    pub device: &'a ReadCost,
    /// The device with few.
    pub stream: &'a ReadCost,
    /// What names the neurons.
    pub predictor: PredictorNeeds,
    /// Clusters that can be under way at once.
    pub stream_buffers: u32,
    /// Gate parts are read first where gates are not resident.
    pub two_phases: bool,
    /// What a predictor's guess names is read a layer ahead.
    pub foresees: bool,
}
