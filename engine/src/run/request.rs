//! Parameters of a request, and reasons for its end.

use crate::sampler::Sampling;

/// Parameters of a request.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Continue after an end-of-text token.
    pub ignore_eos: bool,
    /// Record the counters of each pass: about 150 bytes per token outside the budget.
    pub keep_steps: bool,
    /// Sum the log-probabilities of the tokens; costs an exponential per logit and token.
    pub keep_log_prob: bool,
    /// Report the log-probability of each token and of this many most likely tokens.
    pub log_probs: Option<usize>,
    /// With `log_probs`: also for the prompt's tokens except the first, which requires their
    /// logits.
    pub prompt_log_probs: bool,
    /// Report the mean of the prompt's last hidden states ([`super::Event::Hidden`]).
    pub mean_hidden: bool,
}

impl Request {
    /// Whether every position of the prompt must be computed, so that no prefix can be shared.
    pub(super) fn reads_prompt(&self) -> bool {
        self.prompt_log_probs || self.mean_hidden
    }
}

impl Default for Request {
    /// Up to 128 tokens, greedy.
    fn default() -> Self {
        Self {
            max_tokens: 128,
            sampling: Sampling::default(),
            ignore_eos: false,
            keep_steps: false,
            keep_log_prob: false,
            log_probs: None,
            prompt_log_probs: false,
            mean_hidden: false,
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// End-of-text token.
    Eos,
    /// The constraint allows no further token.
    Complete,
    /// `max_tokens` reached.
    Length,
    /// Context full.
    Context,
    /// Stopped by the caller.
    Caller,
}

/// Identifies a request of a [`crate::Stepper`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

impl RequestId {
    /// Id of the `index`-th continuation of an admission, whose first continuation has this id.
    pub fn sample(self, index: usize) -> Self {
        Self(self.0 + index as u64)
    }
}
