//! Sources of drafts other than the text itself.

use std::fmt::Debug;
use std::time::Duration;

use super::governor::{MODEL_RATE, Offer, Rates};
use crate::error::Error;

/// Hidden states of a pass: the residual stream after the final norm.
#[derive(Debug, Clone, Copy)]
pub struct HiddenRows<'a> {
    /// All tokens of the text up to the last row.
    pub text: &'a [u32],
    /// Hidden states of its last tokens, `[rows × d_model]`.
    pub rows: &'a [f32],
}

/// Guesses the next tokens of a text.
pub trait Draft: Debug {
    /// Whether it reads the model's hidden states.
    fn reads_hidden(&self) -> bool {
        false
    }

    /// Takes the hidden states of a pass over one text alone. Its last tokens may be drafts that are rejected.
    ///
    /// # Errors
    /// A failed read.
    fn passed(&mut self, _: HiddenRows<'_>) -> Result<(), Error> {
        Ok(())
    }

    /// Tokens of `text` that it has to compute before it can make drafts; `None` if it cannot follow the text.
    fn behind(&self, text: &[u32]) -> Option<usize>;

    /// Computes some of these tokens, as many as take less than about a second.
    ///
    /// # Errors
    /// A failed read.
    fn catch_up(&mut self, text: &[u32]) -> Result<(), Error>;

    /// Computes the tokens that it is behind, and appends up to `depth` tokens to `drafts` that may follow `text`. After the first,
    /// one that is right with a probability below `least` costs more than it saves.
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

    /// Counts a pass with `tried` drafts of which the first `taken` were right, or one without its `own` drafts.
    pub fn settle(&mut self, own: bool, taken: usize, tried: usize) {
        match own {
            true => self.rates.count(taken, tried),
            false => self.rates.fade(),
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

impl Source {
    /// Nothing is known of it yet.
    pub fn new(draft: Box<dyn Draft>) -> Self {
        Self {
            draft,
            learned: Learned::new(),
        }
    }
}
