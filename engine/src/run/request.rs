//! A request's parameters, and why it ended.

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
    /// Keep the counters of each pass: about 150 bytes per token outside the budget.
    pub keep_steps: bool,
    /// Sum the log-probabilities of the tokens: an exponential for every logit of every token.
    pub keep_log_prob: bool,
    /// Say how likely each token was, with so many of the likeliest ones.
    pub log_probs: Option<usize>,
    /// With `log_probs`: also for the tokens of the prompt but the first, which costs their logits.
    pub prompt_log_probs: bool,
    /// Tell the mean of the prompt's last hidden states ([`super::Event::Hidden`]).
    pub mean_hidden: bool,
}

impl Request {
    /// Whether every position of the prompt counts, so that none may come from another sequence.
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
    /// Its constraint allows nothing more.
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
    /// Id of the `index`-th continuation of an admission whose first one has this id.
    pub fn sample(self, index: usize) -> Self {
        Self(self.0 + index as u64)
    }
}
