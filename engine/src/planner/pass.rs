//! Inputs and result of a forecast.

use emberflow_kernels::DType;
use emberflow_storage::profile::ReadCost;
use serde::Serialize;

use super::firing::Firing;
use super::rates::{Rates, ThreadRates};
use crate::lane::LanePart;
use crate::tiles::TileReads;

/// Costs and precision of a predictor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PredictorNeeds {
    /// Bytes of its weights over all layers, read once per token; 0 without a predictor.
    pub bytes: u64,
    /// Products of 4 bits with 8 that scoring takes for a token, over all layers.
    pub products: f64,
    /// `1 / precision`: predicted neurons per firing neuron.
    pub named: f64,
}

/// The model properties that determine a pass's time.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub d: usize,
    /// Rows of the head.
    pub vocab: usize,
    /// Neurons per layer that a token visits: with experts, those of the chosen experts.
    pub neurons: usize,
    /// Their share of all; 1 without experts.
    pub visited: f64,
    /// Banks of a layer that a token visits.
    pub chosen: usize,
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
    /// Bytes of keys and values per position and layer.
    pub kv_bytes: f64,
    /// Bytes of a Gate row, and of Up and Down.
    pub gate_len: f64,
    /// See `gate_len`.
    pub rest_len: f64,
    /// Read sizes: Gate part, Up and Down, whole cluster.
    pub gate_read: u64,
    /// See `gate_read`.
    pub rest_read: u64,
    /// See `gate_read`.
    pub cluster_read: u64,
    /// Stride of bundles in bytes.
    pub stride: u64,
    /// Compute every neuron, firing or not.
    pub dense: bool,
    /// FFNs that lie in tiles, whose rows are among those of attention.
    pub tiles: TileReads,
}

/// The bottleneck of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Limit {
    /// Reading weights from RAM.
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

/// Forecast of a pass.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Forecast {
    /// Tokens of the pass.
    pub tokens: usize,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// The bottleneck.
    pub limit: Limit,
    /// Time of the pass in milliseconds.
    pub ms: f64,
    /// Computation time in milliseconds.
    pub compute_ms: f64,
    /// Device busy time in milliseconds.
    pub io_ms: f64,
    /// Stall time on reads in milliseconds.
    pub wait_ms: f64,
    /// Bytes read from the device.
    pub bytes_read: f64,
    /// Number of reads.
    pub reads: f64,
    /// Hit rate of the cold region.
    pub cold_hit_rate: f64,
}

/// Inputs of a forecast.
#[derive(Clone, Copy)]
pub struct CostModel<'a> {
    /// The model.
    pub shape: &'a Shape,
    /// Activation frequencies.
    pub firing: &'a Firing,
    /// The machine's rates.
    pub machine: &'a Rates,
    /// Rates with the compute threads.
    pub rates: &'a ThreadRates,
    /// Storage at high queue depth.
    pub storage: &'a ReadCost,
    /// Storage at low queue depth.
    pub stream: &'a ReadCost,
    /// The predictor.
    pub predictor: PredictorNeeds,
    /// Whole clusters in flight at once.
    pub stream_buffers: u32,
    /// Two-phase loading where Gate rows are not resident.
    pub two_phases: bool,
    /// Prefetching one layer ahead.
    pub foresees: bool,
    /// A lane's part, beside the threads.
    pub beside: LanePart,
}
