//! Sources of drafts other than the text itself.

use std::fmt::Debug;
use std::time::Duration;

use super::governor::{MODEL_RATE, Offer, Rates};
use crate::error::Error;

/// Guesses the next tokens of a text.
pub trait Draft: Debug {
    /// Tokens of `text` that it has to compute before it can make drafts; `None` if it cannot follow the text.
    fn behind(&self, text: &[u32]) -> Option<usize>;

    /// Computes some of these tokens, as many as take less than about a second.
    ///
    /// # Errors
    /// A failed read.
    fn catch_up(&mut self, text: &[u32]) -> Result<(), Error>;

    /// Computes the tokens that it is behind, and appends up to `depth` tokens to `drafts` that may follow `text`. After the first, one that is right with a probability
    /// below `least` costs more than it saves.
    ///
    /// # Errors
    /// A failed read.
    fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        least: f64,
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error>;
}

/// Share of the last drafts in the mean time of one.
const NEW: f64 = 0.25;

/// What is known of a source.
#[derive(Debug)]
pub(super) struct Learned {
    pub rates: Rates,
    /// Mean seconds of a draft; 0 if unknown.
    seconds: f64,
}

impl Learned {
    /// Nothing is known yet.
    pub fn new() -> Self {
        Self {
            rates: Rates::new(MODEL_RATE),
            seconds: 0.0,
        }
    }

    /// Up to `most` drafts.
    pub fn offer(&self, most: usize) -> Offer<'_> {
        Offer {
            rates: &self.rates,
            most,
            seconds: self.seconds,
        }
    }

    /// Records the time of `made` drafts.
    pub fn learn_time(&mut self, time: Duration, made: usize) {
        if made == 0 {
            return;
        }
        let each = time.as_secs_f64() / made as f64;
        self.seconds = match self.seconds {
            0.0 => each,
            before => before + NEW * (each - before),
        };
    }
}

/// A source that the caller has set.
#[derive(Debug)]
pub(super) struct Source {
    pub draft: Box<dyn Draft>,
    pub learned: Learned,
}
