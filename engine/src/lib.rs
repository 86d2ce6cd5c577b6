//! Forward pass of a decoder over a container, under a memory budget.
//!
//! ```text
//! token → embedding → [ norm → attention → + → norm → sparse FFN → + ] × layers → norm → head → sampler
//!                                                     │
//!                     resident gates → active set ∩ residency → reads → clusters → partial sums
//! ```
//!
//! [`Engine::open`] plans memory ([`planner`], [`memory`]), loads the fixed region and warms the
//! cold one. [`Engine::forward`] runs a chunk of tokens, a [`Stepper`] a batch of requests, and
//! [`Engine::generate`] a single one. [`Report`] holds the metrics of a run.
//!
//! ```
#![doc = include_str!("../examples/generate.rs")]
//! ```
#![forbid(unsafe_code)]

mod ablation;
mod activation;
pub mod bundle;
pub mod cluster;
pub mod constraint;
mod counters;
mod decoder;
pub mod device;
mod embedding;
pub mod energy;
mod engine;
mod error;
mod ffn;
mod input;
mod limits;
mod loader;
mod matrix;
pub mod memory;
pub mod meta;
mod mixer;
mod model;
mod norm;
mod observe;
mod open;
mod options;
mod pass;
pub mod planner;
mod prompts;
mod room;
mod rope;
mod router;
mod router_ahead;
mod run;
pub mod sampler;
mod scratch;
mod sparsity;
pub mod split;
mod state;
mod store;
mod streams;
#[cfg(test)]
mod testing;
mod thread_buffer;
pub mod trace;
mod weights;

pub use ablation::Ablation;
pub use activation::hidden as ffn_hidden;
pub use cluster::CLUSTER;
pub use constraint::Constraint;
pub use counters::Counters;
pub use decoder::{AttentionObserver, AttentionSeen, FfnObserver, StreamRows};
pub use engine::{Engine, Logits};
pub use error::Error;
pub use ffn::{Choice, FfnSeen, GATE_PIECES};
pub use limits::{MAX_BATCH, MAX_CHUNK};
pub use model::{Model, Text, demo_container};
pub use observe::{Computed, Details, DeviceReport, Judge, Probe, Report, SamplingReport};
pub use options::{Budget, Lab, Options, Phases, Sparsity};
pub use run::spans;
pub use run::{
    Admission, Batch, Energy, Event, Finished, Generation, LogProb, LogProbs, Progress, Request,
    RequestId, Sample, Step, Stepped, Stepper, Stop, log_probability,
};
pub use sampler::{Bias, Sampler, Sampling};
pub use state::{Sequence, Span};
pub use store::Foreseen;
pub use store::LayerResidency;
