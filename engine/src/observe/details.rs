//! Metrics per token of a run, and the memory bandwidth to compare them with.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::probe::Probe;
use crate::counters::Counters;
use crate::engine::Engine;
use crate::run::Step;

/// Duration of the bandwidth measurement.
const TIME: Duration = Duration::from_millis(300);

/// Metrics of each token after the first, or of each pass in a batch. Keys are a contract: add,
/// never rename.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Details {
    /// Bandwidth in GB/s at which the compute threads read attention weights and the hot region,
    /// measured after the run.
    pub memory_gb_per_s: f64,
    /// Bytes of weights outside the FFNs that every pass reads.
    pub dense_bytes: u64,
    /// Bytes of keys and values per position and sequence.
    pub kv_bytes_per_position: u64,
    /// Share of the clusters that are hot at this batch size.
    pub hot_cut: f64,
    /// Latency in milliseconds.
    pub ms: Vec<f64>,
    /// Milliseconds in the FFNs; the part spent in predictors (`predict_ms`).
    pub ffn_ms: Vec<f64>,
    /// See `ffn_ms`.
    pub predict_ms: Vec<f64>,
    /// Milliseconds stalled on reads.
    pub wait_ms: Vec<f64>,
    /// Share of the needed neurons that were resident, hot or cold.
    pub hit_rate: Vec<f64>,
    /// Share of all neurons that were needed.
    pub needed_share: Vec<f64>,
    /// Bytes of FFN weights used.
    pub ffn_bytes: Vec<u64>,
    /// Bytes read from the device.
    pub bytes_read: Vec<u64>,
    /// Read commands after merging.
    pub reads: Vec<u64>,
    /// Hash over the logits up to this token; empty strings in batches.
    pub logits_hash: Vec<String>,
}

impl Details {
    /// Metrics of the passes `steps` of a generation with `texts` sequences. Measures the memory
    /// bandwidth, which takes 0.3 s.
    pub fn new(engine: &mut Engine, texts: usize, steps: &[Step], latencies: &[Duration]) -> Self {
        let mut probe = Probe::new(engine);
        let memory_gb_per_s = probe.read_bandwidth(TIME) / 1e9;
        let dense_bytes = probe.dense_bytes();
        let neurons = engine.needs().neurons.max(1);
        let counters = || steps.iter().map(|s| s.counters);
        let needed = |c: &Counters| c.hot_hits + c.hits + c.misses;
        let hash = |s: &Step| match s.logits_hash {
            0 => String::new(),
            hash => format!("{hash:016x}"),
        };
        Self {
            memory_gb_per_s: rounded(memory_gb_per_s),
            dense_bytes,
            kv_bytes_per_position: engine.position_bytes(),
            hot_cut: rounded(engine.hot_cut(texts)),
            ms: (latencies.iter())
                .map(|l| rounded(l.as_secs_f64() * 1e3))
                .collect(),
            ffn_ms: counters().map(|c| rounded(c.ffn_ns as f64 / 1e6)).collect(),
            predict_ms: counters()
                .map(|c| rounded(c.predict_ns as f64 / 1e6))
                .collect(),
            wait_ms: counters()
                .map(|c| rounded(c.wait_ns as f64 / 1e6))
                .collect(),
            hit_rate: counters()
                .map(|c| rounded(1.0 - c.misses as f64 / needed(&c).max(1) as f64))
                .collect(),
            needed_share: counters()
                .map(|c| rounded(needed(&c) as f64 / neurons as f64))
                .collect(),
            ffn_bytes: counters().map(|c| c.ffn_bytes).collect(),
            bytes_read: counters().map(|c| c.bytes_read).collect(),
            reads: counters().map(|c| c.commands).collect(),
            logits_hash: steps.iter().map(hash).collect(),
        }
    }
}

/// Rounded to five decimals.
fn rounded(value: f64) -> f64 {
    (value * 1e5).round() / 1e5
}
