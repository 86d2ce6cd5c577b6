//! The forward pass of a decoder over a container, under a memory budget.
//!
//! ```text
//! token → embedding → [ norm → attention → + → norm → sparse FFN → + ] × layers → norm → head → sampler
//!                                                     │
//!                     resident gates → active set ∩ cache → reads → clusters → partial sums
//! ```
//!
//! [`Engine::open`] makes a plan ([`planner`], [`memory`]), loads what stays resident
//! and fills the cold region; [`Engine::forward`] runs a chunk of tokens;
//! [`Engine::generate`] adds the sampler and the clock; [`Report`] is what a run
//! says about itself.
//!
//! ```
#![doc = include_str!("../examples/generate.rs")]
//! ```
#![forbid(unsafe_code)]

mod attention;
mod batch;
pub mod bundle;
mod choice;
mod counters;
mod details;
mod embedding;
pub mod energy;
mod engine;
mod error;
mod explain;
mod ffn;
mod forward;
mod generate;
mod input;
mod judge;
mod kv_cache;
pub mod memory;
pub mod meta;
mod model;
mod options;
mod parts;
pub mod planner;
pub mod policy;
mod report;
mod rope;
pub mod sampler;
mod scratch;
mod sequence;
pub mod trace;
mod weights;

pub use batch::{Batch, Sample};
pub use counters::Counters;
pub use details::Details;
pub use engine::{Engine, MAX_BATCH};
pub use error::Error;
pub use ffn::{CLUSTER, FfnSeen, GATE_PIECES, MAX_CHUNK, regions};
pub use forward::{FfnObserver, Logits, Span};
pub use generate::{Energy, Generation, Request, Step, Stop};
pub use judge::Judge;
pub use kv_cache::KvCache;
pub use model::{Model, Text, demo_container};
pub use options::{Budget, Options, Phases, Sparsity};
pub use policy::Policy;
pub use report::Report;
pub use sampler::{Sampler, Sampling};
pub use sequence::Sequence;
