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
    /// The sequence to continue; a new one if empty.
    pub sequence: Sequence,
    /// Tokens to prefill, at least one.
    pub prompt: Vec<u32>,
    /// What to generate.
    pub request: Request,
    /// Number of continuations, with consecutive seeds from the request's on. The prompt is
    /// computed once.
    pub samples: usize,
    /// Added to logits before a token is drawn.
    pub bias: Vec<Bias>,
    /// Constraint on each continuation, in its initial state.
    pub constraint: Option<Box<dyn Constraint>>,
}

/// An event of a request.
#[derive(Debug)]
pub enum Event {
    /// A token was generated; the last one if `stop` is set.
    Token {
        /// The request.
        id: RequestId,
        /// The token.
        token: u32,
        /// Why generation stops, if it does.
        stop: Option<Stop>,
        /// Log-probabilities, if requested.
        log_probs: Option<LogProbs>,
    },
    /// Log-probabilities of the next prompt tokens, if requested. The first token has none.
    Prompt {
        /// The request: the first continuation of its prompt.
        id: RequestId,
        /// In prompt order.
        log_probs: Vec<LogProbs>,
    },
    /// Mean of the prompt's last hidden states, if requested: the residual stream after the last
    /// layer and the final norm, averaged over all positions.
    Hidden {
        /// The request: the first continuation of its prompt.
        id: RequestId,
        /// `[d_model]`
        mean: Vec<f32>,
    },
    /// The request ended without a token.
    Ended {
        /// The request.
        id: RequestId,
        /// Why.
        stop: Stop,
    },
    /// The request failed; others are unaffected.
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
    /// The request.
    pub id: RequestId,
    /// The sequence, without the last token.
    pub sequence: Sequence,
    /// Generated tokens, including an end-of-text token.
    pub tokens: Vec<u32>,
    /// Sum of the natural log-probabilities of the tokens, at temperature 1 and before truncation
    /// (top-k, top-p); `None` unless the request asks for it.
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
        /// Rows of the pass.
        rows: usize,
        /// Whether this step ran all of its layers.
        whole: bool,
        /// Events of the pass.
        events: &'a mut Vec<Event>,
    },
}
