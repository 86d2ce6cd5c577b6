//! A source of drafts other than the text itself.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use super::governor::{Offer, Rates};
use crate::error::Error;

/// Guesses the next tokens of a text.
pub trait Draft: Debug + Send {
    /// Its name in reports.
    fn name(&self) -> &'static str;

    /// Appends up to `depth` tokens to `drafts` that may follow `text`.
    ///
    /// # Errors
    /// A failed read.
    fn propose(&mut self, text: &[u32], depth: usize, drafts: &mut Vec<u32>) -> Result<(), Error>;
}

/// Share of the last drafts in the mean time of one.
const NEW: f64 = 0.25;

/// A source, its rates and its time.
#[derive(Debug)]
pub(super) struct Source {
    draft: Box<dyn Draft>,
    rates: Rates,
    /// Mean seconds of a draft; 0 if unknown.
    seconds: f64,
}

impl Source {
    pub fn new(draft: Box<dyn Draft>) -> Self {
        Self {
            draft,
            rates: Rates::default(),
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

    /// See [`Draft::propose`].
    pub fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let start = Instant::now();
        self.draft.propose(text, depth, drafts)?;
        let made = drafts.len().max(1);
        self.learn(start.elapsed(), made);
        Ok(())
    }

    fn learn(&mut self, time: Duration, made: usize) {
        let each = time.as_secs_f64() / made as f64;
        self.seconds = match self.seconds {
            0.0 => each,
            before => before + NEW * (each - before),
        };
    }

    /// Counts drafts: the first `taken` of `tried` were right.
    pub fn count(&mut self, taken: usize, tried: usize) {
        self.rates.count(taken, tried);
    }
}
