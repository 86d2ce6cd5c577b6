//! What a run says about each of its tokens, and the speed of memory it is measured against.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::probe::Probe;
use crate::counters::Counters;
use crate::engine::Engine;
use crate::run::Step;

/// How long the speed of memory is measured.
const TIME: Duration = Duration::from_millis(300);

/// The tokens of a run one by one, the first one not counted; passes where texts are drawn
/// together. Keys are a contract: add, never rename.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Details {
    /// 10^9 bytes per second at which the compute threads read the weights of attention and of the
    /// hot region, measured after the run.
    pub memory_gb_per_s: f64,
    /// Bytes of weights outside the FFNs that every pass is computed from.
    pub dense_bytes: u64,
    /// Bytes of keys and values of one position of one text.
    pub kv_bytes_per_position: u64,
    /// Share of the clusters that are hot for as many texts.
    pub hot_cut: f64,
    /// Milliseconds.
    pub ms: Vec<f64>,
    /// Milliseconds in the FFNs, and of these, in which predictors named neurons.
    pub ffn_ms: Vec<f64>,
    /// See `ffn_ms`.
    pub predict_ms: Vec<f64>,
    /// Milliseconds that the computation waited for reads.
    pub wait_ms: Vec<f64>,
    /// Share of the needed neurons that was in memory, hot or cold.
    pub hit_rate: Vec<f64>,
    /// Share of all neurons that was needed.
    pub needed_share: Vec<f64>,
    /// Bytes of FFN weights that were computed with.
    pub ffn_bytes: Vec<u64>,
    /// Bytes that came from the device.
    pub bytes_read: Vec<u64>,
    /// Reads that the device was given, neighbours merged.
    pub reads: Vec<u64>,
    /// Hash over the logits up to this token; empty strings where texts are drawn together.
    pub logits_hash: Vec<String>,
}

impl Details {
    /// The passes `steps` of a generation of `texts` texts by `engine` and their times, and the speed
    /// of memory, which takes 0.3 s to measure.
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

/// More digits would say nothing.
fn rounded(value: f64) -> f64 {
    (value * 1e5).round() / 1e5
}
