//! Input and output of a stepper.

use super::log_probs::LogProbs;
use super::request::{Request, RequestId, Stop};
use crate::constraint::Constraint;
use crate::error::Error;
use crate::sampler::Bias;
use crate::state::Sequence;

/// A request to admit.
#[derive(Debug)]
pub struct Admission {
    /// The sequence to continue; empty for a new one.
    pub sequence: Sequence,
    /// Tokens to prefill, at least one.
    pub prompt: Vec<u32>,
    /// What to generate.
    pub request: Request,
    /// Continuations of this prompt, with consecutive seeds from the request's. The prompt is
    /// computed once.
    pub samples: usize,
    /// What is added to logits before a token is drawn.
    pub bias: Vec<Bias>,
    /// What each continuation is held to, in its initial state.
    pub constraint: Option<Box<dyn Constraint>>,
}

/// Something that happened to a request.
#[derive(Debug)]
pub enum Event {
    /// It generated a token, its last one if `stop` is set.
    Token {
        /// The request.
        id: RequestId,
        /// The token.
        token: u32,
        /// Why it stops, if it does.
        stop: Option<Stop>,
        /// How likely it was, if the request asks.
        log_probs: Option<LogProbs>,
    },
    /// How likely the next tokens of its prompt were, if the request asks; the first one has none.
    Prompt {
        /// The request: the first continuation of its prompt.
        id: RequestId,
        /// In the order of the prompt.
        log_probs: Vec<LogProbs>,
    },
    /// The mean of its prompt's last hidden states, if the request asks: of the residual stream behind
    /// the last layer and the final norm, over all positions of the prompt.
    Hidden {
        /// The request: the first continuation of its prompt.
        id: RequestId,
        /// `[d_model]`
        mean: Vec<f32>,
    },
    /// It ended without a token.
    Ended {
        /// The request.
        id: RequestId,
        /// Why.
        stop: Stop,
    },
    /// It failed; others are unaffected.
    Failed {
        /// The request.
        id: RequestId,
        /// Why.
        error: Error,
    },
}

/// A finished request.
#[derive(Debug)]
pub struct Finished {
    /// Its id.
    pub id: RequestId,
    /// Its sequence, without the last token.
    pub sequence: Sequence,
    /// Generated tokens, including an end-of-text token.
    pub tokens: Vec<u32>,
    /// Sum of the natural log-probabilities of its tokens, at temperature 1 and before truncation
    /// (top-k, top-p); `None` unless the request keeps it.
    pub log_prob: Option<f64>,
    /// Hash over the logits of every generated token, in order.
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
}

/// Outcome of a step.
#[derive(Debug)]
pub enum Stepped<'a> {
    /// No request can run.
    Idle,
    /// The pass yielded between two layers; the next step resumes it.
    Yielded,
    /// A pass completed.
    Passed {
        /// Its rows.
        rows: usize,
        /// Its events.
        events: &'a mut Vec<Event>,
    },
}
