//! What to generate, and why it ended.

use crate::sampler::Sampling;

/// What to generate.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How to choose them.
    pub sampling: Sampling,
    /// Go on after an end-of-text token.
    pub ignore_eos: bool,
    /// Keep what each pass did, some 150 bytes a token that are not part of the budget.
    pub keep_steps: bool,
}

impl Default for Request {
    /// Up to 128 tokens, the likeliest ones.
    fn default() -> Self {
        Self {
            max_tokens: 128,
            sampling: Sampling::default(),
            ignore_eos: false,
            keep_steps: false,
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model said so.
    Eos,
    /// `max_tokens` were generated.
    Length,
    /// The context is full.
    Context,
    /// The caller asked for it.
    Caller,
}

/// Names a request of a [`crate::Stepper`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

impl RequestId {
    /// The name of the `index`-th sample of a request whose first text has this name.
    pub fn sample(self, index: usize) -> Self {
        Self(self.0 + index as u64)
    }
}
