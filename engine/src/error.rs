//! What can go wrong in the engine, and what to do about it.

use std::path::PathBuf;

use emberflow_models::config::Activation;

use crate::sampler::BadSampling;

/// Errors of opening a model and of generating.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The container or its device.
    #[error(transparent)]
    Storage(#[from] emberflow_storage::Error),
    /// The model's configuration, tokenizer or chat template.
    #[error(transparent)]
    Model(#[from] emberflow_models::Error),
    /// The metadata section does not make sense.
    #[error("{}: metadata: {reason}", path.display())]
    Metadata {
        /// The container.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A tensor of the container is missing or has the wrong shape.
    #[error("{}: tensor {name} {reason}; pack the checkpoint again", path.display())]
    Tensor {
        /// The container.
        path: PathBuf,
        /// Container name of the tensor.
        name: String,
        /// What was found and what was expected.
        reason: String,
    },
    /// Bundles do not fit the configuration.
    #[error("{}: neuron bundles: {reason}; pack the checkpoint again", path.display())]
    Bundles {
        /// The container.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The container's predictors do not make sense.
    #[error("{}: predictors: {reason}", path.display())]
    Predictor {
        /// The container.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The budget cannot hold what must be resident.
    #[error(
        "a budget of {} is too small for this model; the smallest that works is {} (--memory {}), \
         and {} keeps everything in memory",
        mib(*budget), mib(*smallest), suggestion(*smallest), mib(*full)
    )]
    BudgetTooSmall {
        /// Bytes asked for.
        budget: u64,
        /// Bytes that would do.
        smallest: u64,
        /// Bytes that hold the whole model.
        full: u64,
    },
    /// An earlier error; what is in memory may be incomplete.
    #[error("this engine stopped at an earlier error and must be opened again: {first}")]
    Failed {
        /// The first error.
        first: String,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// More tokens than the sequence has room for.
    #[error(
        "{needed} tokens are needed and the context holds {capacity} (the model was made for at \
         most {limit}); shorten the prompt{}", if capacity < limit { " or raise --context" } else { "" }
    )]
    ContextFull {
        /// Positions the KV cache holds.
        capacity: usize,
        /// Positions asked for.
        needed: usize,
        /// Longest context of the model.
        limit: usize,
    },
    /// No keys and values for another sequence.
    #[error(
        "a sequence of {positions} positions does not fit beside the others: there is room for {free} \
         of {total} (end one of them, or plan for more sequences at once)"
    )]
    KvFull {
        /// Positions asked for.
        positions: usize,
        /// Positions that are free.
        free: usize,
        /// Positions of all sequences together.
        total: usize,
    },
    /// The logits are not numbers.
    #[error(
        "the model computed a logit that is not finite at position {position}: its weights are \
         damaged at the source, or too large for their format"
    )]
    NotFinite {
        /// Position in the sequence.
        position: usize,
    },
    /// More compute threads than there may be.
    #[error("{found} threads, expected at most {most}")]
    Threads {
        /// Threads asked for.
        found: usize,
        /// Most threads.
        most: usize,
    },
    /// A context that the model has no positions for.
    #[error("a context of {found} tokens, expected 1 to {most} (what the model was made for)")]
    Context {
        /// Positions asked for.
        found: usize,
        /// Longest context of the model.
        most: u32,
    },
    /// A longer chunk than the FFN takes.
    #[error("a chunk of {found} tokens, expected 1 to {most}")]
    Chunk {
        /// Tokens asked for.
        found: usize,
        /// Most tokens.
        most: usize,
    },
    /// No sequences, or more than there may be at once.
    #[error("{found} sequences at once, expected 1 to {most}")]
    Sequences {
        /// Sequences asked for.
        found: usize,
        /// Most sequences.
        most: usize,
    },
    /// A format that keys and values are not stored in.
    #[error("key/value format {found}, expected f16 or f32")]
    KvFormat {
        /// Name of the format asked for.
        found: &'static str,
    },
    /// `exact` for a model whose neurons all count.
    #[error(
        "--sparsity exact needs an activation with exact zeros; this model uses {activation:?}: \
         use --sparsity dense"
    )]
    NotSparse {
        /// The model's.
        activation: Activation,
    },
    /// `predicted` for a container without predictors.
    #[error(
        "--sparsity predicted needs predictors, and this container has none: make one that has \
         with emberflow train-predictor, or use --sparsity auto"
    )]
    NoPredictors,
    /// A profile of the machine that says nothing.
    #[error(
        "the profile of this machine has {thread_counts} thread counts; measure again with \
         `emberflow bench device`"
    )]
    NoRates {
        /// Thread counts that were measured.
        thread_counts: usize,
    },
    /// The system does not say what the process holds.
    #[error(
        "cannot read this process's own memory from /proc/self/status: a memory budget cannot be \
         kept without it (is /proc mounted, and are there file descriptors left?)"
    )]
    NoMemoryFacts,
    /// No continuations, or more than were planned for.
    #[error("{found} continuations at once, expected 1 to {most}, for which memory was planned")]
    Continuations {
        /// Continuations asked for.
        found: usize,
        /// Most sequences by the options.
        most: usize,
    },
    /// A pass in which a sequence has no tokens, or all together have too many.
    #[error(
        "a pass with {lens:?} tokens of its sequences, expected at least one of each and 1 to \
         {most} in all"
    )]
    Pass {
        /// Tokens of each sequence.
        lens: Vec<usize>,
        /// Most tokens of a pass.
        most: usize,
    },
    /// Nothing to continue.
    #[error("the prompt is empty; give at least one token of text")]
    EmptyPrompt,
    /// A setting of the sampler that has no meaning.
    #[error(transparent)]
    Sampling(#[from] BadSampling),
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// What the program itself takes differs from start to start: by up to half a MiB in 30 starts with
/// the bundled model.
const START_TO_START: u64 = 1 << 20;

/// A budget that still does at the next start, where `bytes` do at this one: rounded up to whole MiB,
/// as it can be typed.
pub(crate) fn at_next_start(bytes: u64) -> u64 {
    let mib = bytes.saturating_add(START_TO_START).div_ceil(1 << 20);
    mib.saturating_mul(1 << 20)
}

fn suggestion(bytes: u64) -> String {
    format!("{}MiB", at_next_start(bytes) >> 20)
}
