//! Runs a decoder-only language model from a container under a memory budget. Weights that do not
//! fit in memory are read from flash while others are computed (PowerInfer-2; LLM in a flash).
//!
//! ```text
//! token → embedding → [ norm → mixer → + → norm → sparse FFN → + ] × layers → norm → head → sampler
//!                                                     │
//!                     resident gates → active set ∩ residency → reads → clusters → partial sums
//! ```
//!
//! # Example
//!
//! ```
#![doc = include_str!("../examples/generate.rs")]
//! ```
//!
//! # Terms
//!
//! | term | meaning |
//! |---|---|
//! | neuron | row i of Gate and of Up, and column i of Down, of one FFN |
//! | bundle | the stored vectors of a neuron, contiguous on flash |
//! | bank | all bundles of one FFN: of a layer, or of one expert of a layer |
//! | cluster | [`CLUSTER`] = 128 consecutive neurons of a bank: unit of hot memory, long reads, partial sums |
//! | active set | the neurons to compute for a pass |
//! | hot, cold region | resident whole clusters; a cache of single neurons |
//! | pass | one run of the layers over a batch of rows; a row is one token of one sequence |
//! | chunk | the rows of a prompt in one pass |
//! | unit, item | a bank with the rows of a pass that visit it; one cluster of a unit |
//! | budget, ledger | bytes that the process may hold; the entries that add up to it |
//!
//! # The path of a token
//!
//! 1. [`Model::load`] opens the container: metadata, tokenizer, chat template. [`Engine::open`] asks
//!    the [`planner`] to divide the budget ([`memory`]), loads the weights outside the FFNs and fills
//!    the hot and cold regions with the neurons that fire most often.
//! 2. A [`Request`] goes to the [`Stepper`], the only decode loop; [`Engine::generate`] and
//!    [`Engine::generate_batch`] use it. Each step runs one pass: one row for every sequence that
//!    decodes, and prompt rows up to the chunk ([`spans::Turns`]).
//! 3. The decoder copies embedding rows to the residual stream `x [rows × d_model]`. Each layer is a list
//!    of steps (`forward`) that add two terms to it: the output of its mixer and that of its FFN.
//! 4. The mixer (`mixer`: attention, latent attention, short convolution, DeltaNet, Kimi Delta Attention,
//!    Mamba-2) multiplies with resident matrices (`matrix.rs`) and reads and extends the sequence's state (`state`: pages of keys and values,
//!    recurrent blocks, snapshots).
//! 5. With experts, `router.rs` chooses the banks of each row and groups the rows by bank.
//! 6. `ffn` determines the active set of each unit: neurons with a nonzero gate, computed from
//!    resident Gate rows; neurons that a predictor selects; or all neurons.
//! 7. `store` looks the active neurons up. Hits are pinned, misses become reads: a whole cluster, or
//!    single neurons, whichever costs less (`store/rules.rs`). Prefetches for later layers follow.
//! 8. The CPU's threads compute clusters in the order in which they become complete (`ffn/run.rs`), a
//!    lane those that it holds (`lane`). The partial sums of clusters are added in a fixed order,
//!    regardless of their order of arrival (`ffn/reduce.rs`).
//! 9. After the last layer the final norm and the head give logits for the rows that need them, and
//!    the [`Sampler`] draws a token, restricted by the request's [`Constraint`]. The stepper reports
//!    an [`Event`] and continues at 2.
//!
//! # Where to look
//!
//! | to understand or change | open |
//! |---|---|
//! | the public interface | `engine.rs`, `model.rs`, `options.rs`, `error.rs` |
//! | requests, batches, preemption, best-of-N | `run/stepper.rs`, then `run/spans.rs`, `run/groups.rs` |
//! | sampling, logit filters, grammars | `sampler.rs`, `sampler/filters.rs`, `constraint.rs` |
//! | the forward pass | `forward/mod.rs`; the steps of a layer: `forward/layer.rs`, `forward/step.rs`; a family's own: `forward/specials.rs` |
//! | norms, rotary angles | `norm.rs`, `rope.rs` |
//! | attention, latent attention, short convolution, DeltaNet, Kimi Delta Attention, Mamba-2; a new token mixer | `mixer` |
//! | the KV cache, recurrent state, prefix sharing | `state` |
//! | resident weights and matrix products | `forward/weights.rs`, `matrix.rs`, `input.rs`, `scratch.rs` |
//! | experts | `router.rs`; guesses of the next layer's experts: `forward/router_ahead.rs` |
//! | active sets, order of sums, prefetch by predictors | `ffn` |
//! | the door for GPUs and NPUs, which the crate `emberflow-devices` implements | [`lane`] |
//! | hits, misses, eviction, prefetch | `store/mod.rs`, then `store/residency.rs`, `store/reads.rs` |
//! | whole cluster or single neurons | `store/rules.rs`, `store/costs.rs` |
//! | bytes of a bundle | [`bundle`]; offsets and alignment: `store/layout.rs` |
//! | division of a budget | `memory.rs` (bytes), `planner/search.rs` (candidates) |
//! | corrections by the first tokens of a run | `first_tokens.rs`, `prompts.rs` |
//! | expected speed | `planner/cost.rs`, `planner/reads.rs`; measured inputs: [`planner::rates`] |
//! | what a run reports | `observe/report.rs`; counters: `counters.rs`; traces: [`trace`] |
//! | metadata of a container | [`meta`] |
//! | baselines such as LLM in a flash, and the values that they are for the store | `ablation.rs` |
//!
//! A first reading in about an hour: this page, `engine.rs`, `run/stepper.rs`, `forward/mod.rs`,
//! `forward/layer.rs`, `ffn/layer.rs`, `store/neurons/layer.rs`, `store/rules.rs`, `planner/mod.rs`, `memory.rs`.
//!
//! # Rules
//!
//! - Logits depend on weights and tokens only: not on budget, threads, chunks, batch, preemption,
//!   residency or the order of reads. Nothing measured may decide which value is computed.
//! - Everything that the process holds is an entry of the ledger; buffers are allocated when the
//!   engine is opened or the plan changes, not per token.
//! - Bytes from flash are verified against their checksum before they are used.
//! - Parts do not refer to their owner: the four parts of the store do not refer to each other, and
//!   the planner knows sizes and times but no reads.
#![forbid(unsafe_code)]

mod ablation;
mod activation;
mod banks;
pub mod bundle;
pub mod cluster;
pub mod constraint;
mod counters;
mod drafts;
pub mod energy;
mod engine;
mod error;
mod ffn;
mod first_tokens;
mod forward;
mod input;
pub mod lane;
mod limits;
mod loader;
mod matrix;
pub mod memory;
pub mod meta;
mod mixer;
mod model;
mod narrow_sizes;
mod norm;
mod observe;
mod open;
mod options;
pub mod planner;
mod prompts;
mod replay;
mod room;
mod rope;
mod router;
mod run;
pub mod sampler;
mod scratch;
mod sparsity;
mod state;
mod store;
#[cfg(test)]
mod testing;
mod thread_buffer;
mod tiles;
pub mod trace;
mod unpacked;

pub use ablation::Ablation;
pub use activation::hidden as ffn_hidden;
pub use cluster::CLUSTER;
pub use constraint::Constraint;
pub use counters::Counters;
pub use drafts::{Draft, DraftCounts, DraftTotals, HiddenRows, MOST_DRAFTS, Speculation};
pub use engine::{Engine, Logits};
pub use error::Error;
pub use ffn::{Choice, FfnSeen, GATE_PIECES};
pub use forward::{AttentionObserver, AttentionSeen, FfnObserver, StreamRows};
pub use limits::{MAX_BATCH, MAX_CHUNK};
pub use model::{Model, Text, demo_container};
pub use observe::{Details, Importance, Judge, Probe, Report, SamplingReport};
pub use open::{compute, has_rows_with_one_scale};
pub use options::{Budget, LONGEST_PAUSE, Lab, Options, Phases, Sparsity};
pub use run::spans;
pub use run::{
    Admission, Batch, Continuation, Energy, Event, Finished, Generation, LogProb, LogProbs,
    PlannedHead, Progress, Repetition, Request, RequestId, Step, Stepped, Stepper, Stop, Tail,
    log_probability, most_likely, open_with_heads,
};
pub use sampler::{Bias, Sampler, Sampling};
pub use state::{Restored, Sequence, Span};
pub use store::Foreseen;
pub use store::LayerResidency;
pub use unpacked::{unpacked, unpacked_geometry};
