//! Best-of-N: several continuations of one prompt. The prompt is computed once; each later pass
//! computes one token of every continuation (PowerInfer-2 §2.2 and §7.4).

use std::ops::ControlFlow;
use std::time::Duration;

use super::clock::{Clock, Energy, Step};
use super::events::{Admission, Event, Finished, Stepped};
use super::request::{Request, Stop};
use super::stepper::Stepper;
use crate::counters::Counters;
use crate::engine::Engine;
use crate::error::Error;
use crate::state::Sequence;

/// One continuation.
#[derive(Debug, Clone)]
pub struct Continuation {
    /// Seed of the sampler.
    pub seed: u64,
    /// Generated tokens, including an end-of-text token.
    pub tokens: Vec<u32>,
    /// Sum of the natural log-probabilities of the tokens, at temperature 1 and before truncation
    /// (top-k, top-p).
    pub log_prob: f64,
    /// Hash over the logits of every token, as in [`crate::Generation::logits_hash`].
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
}

impl Continuation {
    /// Mean log-probability per token; the best continuation has the highest.
    pub fn score(&self) -> f64 {
        self.log_prob / self.tokens.len().max(1) as f64
    }
}

/// All continuations and their timings.
#[derive(Debug, Clone)]
pub struct Batch {
    /// In the order of seeds.
    pub samples: Vec<Continuation>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time until every continuation has its first token.
    pub first_token: Duration,
    /// Time of each further pass, one token per live continuation.
    pub latencies: Vec<Duration>,
    /// Counters of the batch.
    pub counters: Counters,
    /// Counters of each further pass, if [`Request::keep_steps`] is set.
    pub steps: Vec<Step>,
    /// Energy used, as in [`crate::Generation::energy`].
    pub energy: Option<Energy>,
}

impl Batch {
    /// The continuation with the highest [`Continuation::score`], the first of equals.
    pub fn best(&self) -> usize {
        let mut best = 0;
        for (i, sample) in self.samples.iter().enumerate() {
            if sample.score() > self.samples[best].score() {
                best = i;
            }
        }
        best
    }

    /// Tokens of all continuations.
    pub fn tokens(&self) -> usize {
        self.samples.iter().map(|s| s.tokens.len()).sum()
    }
}

impl Engine {
    /// Runs `prompt` (not empty) after the tokens of `sequence` and continues it `samples` times,
    /// with consecutive seeds starting at that of `request`. Each continuation equals, bit for bit,
    /// [`Engine::generate`] with its seed. `on_pass` runs after each pass and may stop the batch.
    /// Continuations leave the batch when they end, and the memory plan follows.
    ///
    /// # Errors
    /// As [`Engine::generate`]; also more samples than the options allow sequences.
    pub fn generate_batch(
        &mut self,
        sequence: Sequence,
        prompt: &[u32],
        request: &Request,
        samples: usize,
        on_pass: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Batch, Error> {
        let most = request.max_tokens.min(sequence.room() + 1);
        let mut clock = Clock::start(self, most, request.keep_steps);
        let mut stepper = Stepper::new(self);
        let first = stepper.admit(Admission {
            sequence,
            prompt: prompt.to_vec(),
            request: Request {
                keep_log_prob: true,
                ..*request
            },
            samples,
            bias: Vec::new(),
            constraint: None,
        })?;
        let ids: Vec<_> = (0..samples).map(|index| first.sample(index)).collect();
        while let Stepped::Passed { rows, events, .. } = stepper.step()? {
            let mut tokens = false;
            for event in events.drain(..) {
                match event {
                    Event::Token { .. } => tokens = true,
                    Event::Ended { .. } | Event::Prompt { .. } | Event::Hidden { .. } => {}
                    Event::Failed { error, .. } => return Err(error),
                }
            }
            if tokens {
                clock.token(stepper.engine(), rows, || 0)
            } else {
                clock.look()
            }
            if on_pass().is_break() {
                break;
            }
        }
        let finished: Vec<Finished> = ids
            .iter()
            .filter_map(|&id| stepper.take(id).or_else(|| stepper.cancel(id)))
            .collect();
        let times = clock.stop(stepper.engine());
        let sample = |(index, one): (u64, Finished)| Continuation {
            seed: request.sampling.seed.wrapping_add(index),
            tokens: one.tokens,
            log_prob: one.log_prob.unwrap_or_default(),
            logits_hash: one.logits_hash,
            stop: one.stop,
        };
        Ok(Batch {
            samples: (0..).zip(finished).map(sample).collect(),
            prompt_tokens: prompt.len(),
            first_token: times.first_token,
            latencies: times.latencies,
            counters: times.counters,
            steps: times.steps,
            energy: times.energy,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_has_the_highest_mean() {
        let sample = |log_prob, n| Continuation {
            seed: 0,
            tokens: vec![0; n],
            log_prob,
            logits_hash: 0,
            stop: Stop::Length,
        };
        let batch = Batch {
            samples: vec![sample(-3.0, 2), sample(-4.0, 4), sample(-1.0, 1)],
            prompt_tokens: 1,
            first_token: Duration::ZERO,
            latencies: Vec::new(),
            counters: Counters::default(),
            steps: Vec::new(),
            energy: None,
        };
        assert_eq!((batch.best(), batch.tokens()), (1, 7));
    }
}
