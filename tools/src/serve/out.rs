//! What the engine thread sends for a job.

use emberflow_engine::{LogProbs, Repetition};
use serde::Serialize;

/// Output of a job. Each text has an index and ends with `Done`, unless the job fails.
#[derive(Debug)]
pub enum Out {
    /// The job has started.
    Started {
        /// Index of its first text.
        index: usize,
        /// Prompt tokens reused from the KV cache.
        cached: usize,
        /// The slot of its first text.
        slot: usize,
    },
    /// More of a prompt was read; only if requested.
    Progress {
        /// Index of the prompt's first text.
        index: usize,
        /// How much.
        progress: PromptProgress,
    },
    /// More text.
    Text {
        /// Index of the text.
        index: usize,
        /// Whole characters; empty only if there are log-probabilities.
        text: String,
        /// Log-probabilities of its tokens, if requested.
        log_probs: Vec<LogProbs>,
        /// Tokens of the text so far.
        tokens: usize,
    },
    /// Log-probabilities of the prompt's next tokens, from the second one on.
    Prompt {
        /// Index of the prompt's first text.
        index: usize,
        /// One per token.
        log_probs: Vec<LogProbs>,
    },
    /// The mean of the prompt's last hidden states, `[d_model]`.
    Hidden(Vec<f32>),
    /// A text has ended.
    Done {
        /// Index of the text.
        index: usize,
        /// Why.
        end: End,
        /// Number of tokens.
        tokens: usize,
        /// The loop in which it ends. No loop ends a text: what a client asked for may repeat itself.
        repetition: Option<Repetition>,
    },
    /// The job failed.
    Failed(String),
    /// The request cannot be served.
    Refused(String),
}

/// How much of a prompt is read: llama.cpp's `prompt_progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PromptProgress {
    /// Its tokens.
    pub total: usize,
    /// Those of them that were reused.
    pub cache: usize,
    /// Tokens read so far, with those that were reused.
    pub processed: usize,
    /// Milliseconds since the prompt began.
    pub time_ms: u64,
}

/// Why a text ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// End-of-text token, or a complete grammar.
    Eos,
    /// This stop string.
    Word(String),
    /// Length limit.
    Length,
}

impl End {
    /// Whether it ended before its length limit.
    pub fn stopped(&self) -> bool {
        *self != Self::Length
    }
}
