//! Benchmarks, one per claim, built from the parts of `emberflow bench`.
//!
//! `kernels`, `cache`, `predictor`, `timeline`, `serve` and `split` measure in this process.
//! `ablation`, `latency`, `prefill` and `batch` start a new process for every point.

pub mod ablation;
pub mod batch;
pub mod cache;
pub mod graph_memory;
pub mod kernels;
pub mod latency;
mod paper;
pub mod predictor;
pub mod prefill;
pub mod serve;
pub mod split;
pub mod timeline;
