//! Errors of the engine, with remedies.

use std::path::PathBuf;

use emberflow_models::config::Activation;

use crate::sampler::BadSampling;

/// An error of a device: it is not used any longer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device {device}: {what}")]
pub struct DeviceError {
    /// Its name.
    pub device: String,
    /// What failed.
    pub what: String,
}

/// Errors of opening a model and of generation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The container or its device.
    #[error(transparent)]
    Storage(#[from] emberflow_storage::Error),
    /// The model's configuration, tokenizer or chat template.
    #[error(transparent)]
    Model(#[from] emberflow_models::Error),
    /// The metadata section is invalid.
    #[error("{}: metadata: {reason}", path.display())]
    Metadata {
        /// The container.
        path: PathBuf,
        /// Cause and remedy.
        reason: String,
    },
    /// A tensor of the container is missing or has the wrong shape.
    #[error("{}: tensor {name} {reason}; pack the checkpoint again", path.display())]
    Tensor {
        /// The container.
        path: PathBuf,
        /// Container name of the tensor.
        name: String,
        /// Found and expected.
        reason: String,
    },
    /// Bundles do not fit the configuration.
    #[error("{}: neuron bundles: {reason}; pack the checkpoint again", path.display())]
    Bundles {
        /// The container.
        path: PathBuf,
        /// Found and expected.
        reason: String,
    },
    /// Neurons of a mixture of experts cannot be observed yet.
    #[error(
        "neurons of models with experts cannot be observed yet, so there are no predictors for them; \
         profile and trace count their routes"
    )]
    Experts,
    /// A device failed, or cannot compute this model.
    #[error("{source}; --device none does without it")]
    Device {
        /// What failed.
        #[from]
        source: DeviceError,
    },
    /// A device cannot be used with these options.
    #[error("a device computes neurons of {0}; --device none does without it")]
    DeviceUse(&'static str),
    /// The container's predictors are invalid.
    #[error("{}: predictors: {reason}", path.display())]
    Predictor {
        /// The container.
        path: PathBuf,
        /// Cause and remedy.
        reason: String,
    },
    /// The budget is below the smallest feasible one.
    #[error(
        "a budget of {} is too small for this model with {}; the smallest that works is {} \
         (--memory {}), and {} keeps everything in memory",
        mib(*budget), contexts(*context, *batch), mib(*smallest), suggestion(*smallest), mib(*full)
    )]
    BudgetTooSmall {
        /// Requested bytes.
        budget: u64,
        /// Positions of a text.
        context: usize,
        /// Texts at once.
        batch: usize,
        /// Smallest feasible budget in bytes.
        smallest: u64,
        /// Bytes that hold the whole model.
        full: u64,
    },
    /// An earlier error; residency may be inconsistent.
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
        /// Capacity of the KV cache in positions.
        capacity: usize,
        /// Required positions.
        needed: usize,
        /// Longest context of the model.
        limit: usize,
    },
    /// A prompt that goes on beyond the context, of which no more was read.
    #[error(
        "the prompt has at least {least} tokens and the context holds {capacity} (the model was made \
         for at most {limit}); shorten the prompt{}",
        if capacity < limit { " or raise --context" } else { "" }
    )]
    PromptTooLong {
        /// Tokens that it surely has.
        least: usize,
        /// Positions of the context.
        capacity: usize,
        /// Longest context of the model.
        limit: usize,
    },
    /// The KV pool cannot hold another sequence.
    #[error(
        "a sequence of {positions} positions does not fit beside the others: there is room for {free} \
         of {total} (end one of them, or plan for more sequences at once)"
    )]
    KvFull {
        /// Requested positions.
        positions: usize,
        /// Free positions.
        free: usize,
        /// Positions of all sequences together.
        total: usize,
    },
    /// A logit is not finite.
    #[error(
        "the model computed a logit that is not finite at position {position}: its weights are \
         damaged at the source, or too large for their format"
    )]
    NotFinite {
        /// Position in the sequence.
        position: usize,
    },
    /// A text cannot be held to its constraint any longer.
    #[error("the text cannot be held to its grammar: {why}")]
    Constraint {
        /// Why.
        why: String,
    },
    /// Too many compute threads.
    #[error("{found} threads, expected at most {most}")]
    Threads {
        /// Threads asked for.
        found: usize,
        /// Most threads.
        most: usize,
    },
    /// A context outside the model's range.
    #[error("a context of {found} tokens, expected 1 to {most} (what the model was made for)")]
    Context {
        /// Positions asked for.
        found: usize,
        /// Longest context of the model.
        most: u32,
    },
    /// A chunk that is too long.
    #[error("a chunk of {found} tokens, expected 1 to {most}")]
    Chunk {
        /// Tokens asked for.
        found: usize,
        /// Most tokens.
        most: usize,
    },
    /// No sequences, or too many.
    #[error("{found} sequences at once, expected 1 to {most}")]
    Sequences {
        /// Sequences asked for.
        found: usize,
        /// Most sequences.
        most: usize,
    },
    /// Unsupported format of keys and values.
    #[error("key/value format {found}, expected f16 or f32")]
    KvFormat {
        /// Name of the format asked for.
        found: &'static str,
    },
    /// `exact` for a model without exact zeros.
    #[error(
        "--sparsity exact needs an activation with exact zeros; this model uses {activation:?}: \
         use --sparsity dense"
    )]
    NotSparse {
        /// The model's activation.
        activation: Activation,
    },
    /// `predicted` for a container without predictors.
    #[error(
        "--sparsity predicted needs predictors, and this container has none: make one that has \
         with emberflow train-predictor, or use --sparsity auto"
    )]
    NoPredictors,
    /// What is not implemented for models with several residual streams and Gaussian top-k.
    #[error("{what} is not implemented for models of several residual streams (Gemma 3n)")]
    GateTop {
        /// What was asked for.
        what: &'static str,
    },
    /// A machine profile without measurements.
    #[error(
        "the profile of this machine has {thread_counts} thread counts; measure again with \
         `emberflow bench io`"
    )]
    NoRates {
        /// Measured thread counts.
        thread_counts: usize,
    },
    /// The process cannot read its own memory use.
    #[error(
        "cannot read this process's own memory from /proc/self/status: a memory budget cannot be \
         kept without it (is /proc mounted, and are there file descriptors left?)"
    )]
    NoMemoryFacts,
    /// No continuations, or more than planned.
    #[error("{found} continuations at once, expected 1 to {most}, for which memory was planned")]
    Continuations {
        /// Continuations asked for.
        found: usize,
        /// Most sequences by the options.
        most: usize,
    },
    /// A pass with an empty sequence, or with too many tokens.
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
    /// An invalid sampling parameter.
    #[error(transparent)]
    Sampling(#[from] BadSampling),
}

pub(crate) fn mib(bytes: u64) -> String {
    match bytes {
        0..0x1000 => format!("{bytes} bytes"),
        0x1000..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64),
    }
}

/// What memory is planned for.
fn contexts(context: usize, batch: usize) -> String {
    match batch {
        1 => format!("a context of {context} tokens"),
        _ => format!("contexts of {context} tokens for {batch} texts at once"),
    }
}

/// Variation of the process size between starts: up to half a MiB in 30 starts with the bundled
/// model.
const START_TO_START: u64 = 1 << 20;

/// A budget that also suffices at the next start if `bytes` do now, in whole MiB.
pub(crate) fn at_next_start(bytes: u64) -> u64 {
    let mib = bytes.saturating_add(START_TO_START).div_ceil(1 << 20);
    mib.saturating_mul(1 << 20)
}

fn suggestion(bytes: u64) -> String {
    format!("{}MiB", at_next_start(bytes) >> 20)
}
