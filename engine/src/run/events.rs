//! What goes into a stepper and what comes out.

use super::request::{Request, RequestId, Stop};
use crate::error::Error;
use crate::sequence::Sequence;

/// A request that is to begin.
#[derive(Debug)]
pub struct Admission {
    /// What the text goes on after; an empty one for a text of its own.
    pub sequence: Sequence,
    /// Tokens to compute first, at least one.
    pub prompt: Vec<u32>,
    /// What to generate.
    pub request: Request,
    /// Texts to draw from this prompt, with the seed of the request and those that follow it: the
    /// prompt is computed once.
    pub samples: usize,
}

/// Something that happened to a request.
#[derive(Debug)]
pub enum Event {
    /// It has one more token, its last one if it stops.
    Token {
        /// The text.
        id: RequestId,
        /// The token.
        token: u32,
        /// Why there will be no other.
        stop: Option<Stop>,
    },
    /// It ended without a token.
    Ended {
        /// The text.
        id: RequestId,
        /// Why.
        stop: Stop,
    },
    /// It failed, and only it.
    Failed {
        /// The text.
        id: RequestId,
        /// Why.
        error: Error,
    },
}

/// A text that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Its name.
    pub id: RequestId,
    /// Its sequence, which the last token is not yet part of.
    pub sequence: Sequence,
    /// Generated tokens, an end-of-text token included.
    pub tokens: Vec<u32>,
    /// Sum of the natural logarithms of the probabilities that the model gave its tokens, at
    /// temperature 1 and before any were left out.
    pub log_prob: f64,
    /// Hash over the logits of every generated token, in order.
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
}

/// What a step did.
#[derive(Debug)]
pub enum Stepped<'a> {
    /// Nobody wants anything.
    Idle,
    /// The pass stopped between two layers, as was asked for; the next step goes on with it.
    Yielded,
    /// A pass was run.
    Passed {
        /// Its rows.
        rows: usize,
        /// What came of it.
        events: &'a mut Vec<Event>,
    },
}
