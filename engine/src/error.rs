//! Errors of the engine, with remedies in the text.

use std::path::PathBuf;

use emberflow_models::config::Activation;

use crate::sampler::BadSampling;

/// Errors of opening a model and of generation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A storage error: of the container or its device.
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
    /// Bundles do not match the configuration.
    #[error("{}: neuron bundles: {reason}; pack the checkpoint again", path.display())]
    Bundles {
        /// The container.
        path: PathBuf,
        /// Found and expected.
        reason: String,
    },
    /// Neurons of a mixture of experts cannot be observed.
    #[error(
        "neurons of models with experts cannot be observed yet, so there are no predictors for them; \
         profile and trace count their routes"
    )]
    Experts,
    /// A lane cannot compute this model, or failed; see [`crate::lane`].
    #[error(transparent)]
    Lane(Box<dyn std::error::Error + Send + Sync>),
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
         (--memory {}), and {} holds everything in memory{}",
        mib(*budget), contexts(*context, *batch), mib(*smallest), suggestion(*smallest), suggestion(*full),
        packed(*whole_ffn)
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
        /// Bytes of FFN matrices that a packed model would read from flash.
        whole_ffn: u64,
    },
    /// A file with no head for multi-token prediction of the model.
    #[error(
        "{path}: it has no head for multi-token prediction of this model: its size, its tokens or its family differ",
        path = path.display()
    )]
    NotItsHead {
        /// The file.
        path: PathBuf,
    },
    /// A head for multi-token prediction, and an output head that is read for every pass.
    #[error(
        "drafts of a head need the model's output head in memory: give more memory, or choose other drafts"
    )]
    HeadOnDisk,
    /// Work was requested after an error; residency may be inconsistent.
    #[error("the engine stopped after an error and must be opened again: {first}")]
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
    /// More tokens than the sequence can hold.
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
    /// A prompt longer than the context; it was not read to its end.
    #[error(
        "the prompt has at least {least} tokens and the context holds {capacity} (the model was made \
         for at most {limit}); shorten the prompt{}",
        if capacity < limit { " or raise --context" } else { "" }
    )]
    PromptTooLong {
        /// Tokens read so far: a lower bound.
        least: usize,
        /// Positions of the context.
        capacity: usize,
        /// Longest context of the model.
        limit: usize,
    },
    /// The KV pool cannot hold another sequence.
    #[error(
        "a sequence of {positions} positions does not fit: {free} of {total} positions are free \
         (end another sequence, or plan for more of them)"
    )]
    KvFull {
        /// Requested positions.
        positions: usize,
        /// Free positions.
        free: usize,
        /// Positions of all sequences together.
        total: usize,
    },
    /// A logit is NaN or infinite.
    #[error(
        "the logits at position {position} are not finite: the source's weights are damaged, or too \
         large for their format"
    )]
    NotFinite {
        /// Position in the sequence.
        position: usize,
    },
    /// A key or value is too large for f16.
    #[error(
        "keys or values at position {position} are beyond 65504, the largest number of --kv f16: use \
         --kv f32"
    )]
    KvRange {
        /// Position in the sequence.
        position: usize,
    },
    /// The text's constraint failed.
    #[error("the grammar of this text failed: {why}")]
    Constraint {
        /// Why.
        why: String,
    },
    /// Too many compute threads.
    #[error("{found} threads, expected at most {most}")]
    Threads {
        /// Requested threads.
        found: usize,
        /// Most threads.
        most: usize,
    },
    /// A context outside the model's range.
    #[error("a context of {found} tokens, expected 1 to {most} (the model's limit)")]
    Context {
        /// Requested positions.
        found: usize,
        /// Longest context of the model.
        most: u32,
    },
    /// A chunk that is too long.
    #[error("a chunk of {found} tokens, expected 1 to {most}")]
    Chunk {
        /// Requested tokens.
        found: usize,
        /// Most tokens.
        most: usize,
    },
    /// Zero sequences, or too many.
    #[error("{found} sequences at once, expected 1 to {most}")]
    Sequences {
        /// Requested sequences.
        found: usize,
        /// Most sequences.
        most: usize,
    },
    /// Unsupported format of keys and values.
    #[error("key/value format {found}, expected f16 or f32")]
    KvFormat {
        /// Name of the requested format.
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
        "--sparsity predicted needs predictors, and this container has none: add some with \
         emberflow train-predictor, or use --sparsity auto"
    )]
    NoPredictors,
    /// A feature that models with several residual streams and Gaussian top-k lack.
    #[error("{what} is not implemented for models with several residual streams (Gemma 3n)")]
    GateTop {
        /// The requested feature.
        what: &'static str,
    },
    /// A feature that needs neurons in bundles.
    #[error(
        "{}: {what} needs neurons in bundles: emberflow pack CHECKPOINT -o model.ember --quant q4k (or q8)",
        path.display()
    )]
    Unpacked {
        /// The model's file.
        path: PathBuf,
        /// The requested feature.
        what: &'static str,
    },
    /// A machine profile without measurements.
    #[error(
        "the machine profile has {thread_counts} thread counts; measure again with \
         `emberflow bench io`"
    )]
    NoRates {
        /// Measured thread counts.
        thread_counts: usize,
    },
    /// The process cannot read its own memory use.
    #[error(
        "cannot read the memory size of this process from /proc/self/status, without which no budget \
         can be enforced (is /proc mounted, and are there file descriptors left?)"
    )]
    NoMemoryFacts,
    /// Zero continuations, or more than planned.
    #[error(
        "{found} continuations at once, expected 1 to {most} (memory was planned for that many)"
    )]
    Continuations {
        /// Requested continuations.
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
    /// An empty prompt.
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

/// The contexts for which memory is planned, as text.
fn contexts(context: usize, batch: usize) -> String {
    match batch {
        1 => format!("a context of {context} tokens"),
        _ => format!("contexts of {context} tokens for {batch} texts at once"),
    }
}

/// Variation of the process size between starts in bytes: up to half a MiB in 30 starts with the
/// bundled model.
const START_TO_START: u64 = 1 << 20;

/// A budget in whole MiB that also suffices at the next start if `bytes` do now.
pub(crate) fn at_next_start(bytes: u64) -> u64 {
    let mib = bytes.saturating_add(START_TO_START).div_ceil(1 << 20);
    mib.saturating_mul(1 << 20)
}

/// What to do about FFN matrices that are resident only because the model is not packed.
fn packed(whole_ffn: u64) -> String {
    match whole_ffn {
        0 => String::new(),
        bytes => format!(
            "; {} of its FFN lie in the file in a form that cannot be read in parts: `emberflow pack` makes a model whose \
             FFN is read from flash",
            mib(bytes)
        ),
    }
}

fn suggestion(bytes: u64) -> String {
    format!("{}MiB", at_next_start(bytes) >> 20)
}
