//! Several continuations of one prompt at once: the prompt is computed once, and every pass
//! computes a token of each of them (Best-of-N, PowerInfer-2 §2.2 and §7.4).

use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use crate::counters::Counters;
use crate::forward::Span;
use crate::generate::Energy;
use crate::sampler::{Sampler, Sampling};
use crate::sequence::Sequence;
use crate::{Engine, Error, Logits, Request, Step, Stop};

/// One continuation.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Seed of its sampler.
    pub seed: u64,
    /// Its tokens, an end-of-text token included.
    pub tokens: Vec<u32>,
    /// Sum of the natural logarithms of the probabilities that the model gave its tokens, at
    /// temperature 1 and before any were left out.
    pub log_prob: f64,
    /// Hash over the logits of every token, as in [`crate::Generation::logits_hash`].
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
}

impl Sample {
    /// Mean log-probability of a token; the best continuation has the highest.
    pub fn score(&self) -> f64 {
        self.log_prob / self.tokens.len().max(1) as f64
    }
}

/// All continuations and their timings.
#[derive(Debug, Clone)]
pub struct Batch {
    /// In the order of their seeds.
    pub samples: Vec<Sample>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time to compute the prompt.
    pub prefill: Duration,
    /// Time from the start until every continuation has its first token.
    pub first_token: Duration,
    /// Time of each further pass, which gives a token to all that have not ended.
    pub latencies: Vec<Duration>,
    /// What was done for it.
    pub counters: Counters,
    /// What each further pass did, where [`Engine::keep_steps`] asked for it.
    pub steps: Vec<Step>,
    /// What the machine used for it, as in [`crate::Generation::energy`].
    pub energy: Option<Energy>,
}

impl Batch {
    /// The continuation with the highest [`Sample::score`], the first of equals.
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

/// A continuation that goes on.
struct Live {
    /// Its place in the result.
    index: usize,
    sequence: Sequence,
    sampler: Sampler,
    hash: Xxh3,
    sample: Sample,
}

impl Engine {
    /// Runs `prompt` (not empty) after what `sequence` already holds, and continues it
    /// `samples` times, with the seed of `request` and those that follow it. Each
    /// continuation is what [`Engine::generate`] gives with its seed, bit for bit. One that
    /// ends leaves the batch, and the plan follows.
    ///
    /// # Errors
    /// As [`Engine::generate`]; also when there are more samples than the options have room
    /// for.
    pub fn generate_batch(
        &mut self,
        mut sequence: Sequence,
        prompt: &[u32],
        request: &Request,
        samples: usize,
    ) -> Result<Batch, Error> {
        request.sampling.validate()?;
        self.check_prompt(&sequence, prompt)?;
        let (found, most) = (samples, self.most_sequences());
        if found == 0 || found > most {
            return Err(Error::Continuations { found, most });
        }
        let before = self.counters();
        let mut joules = [self.joules(), None, None];
        let start = Instant::now();
        self.set_batch(samples)?;
        let mut interrupted = !self.prefill(&mut sequence, prompt)?;
        let prefill = start.elapsed();

        let mut live = Vec::with_capacity(samples);
        for index in 1..samples {
            live.push(self.continuation(index, sequence.fork(), request));
        }
        live.insert(0, self.continuation(0, sequence, request));
        let mut latencies = Vec::with_capacity(request.max_tokens.min(live[0].sequence.room()));
        let (mut first_token, mut last) = (prefill, Instant::now());
        if request.max_tokens > 0 && !interrupted {
            for one in &mut live {
                one.take(self.logits())?;
            }
            first_token = start.elapsed();
            joules[1] = self.joules();
            last = Instant::now();
        }
        let mut done = Vec::with_capacity(samples);
        let (mut steps, mut counted) = (Vec::new(), self.counters());
        loop {
            interrupted |= self.interrupted();
            let mut i = 0;
            while i < live.len() {
                match live[i].ends(request, &self.config().eos, interrupted) {
                    Some(stop) => done.push(live.remove(i).finish(stop)),
                    None => i += 1,
                }
            }
            if live.is_empty() {
                break;
            }
            self.set_batch(live.len())?;
            self.step(&mut live)?;
            for (row, one) in live.iter_mut().enumerate() {
                one.take(self.row_logits(row))?;
            }
            latencies.push(last.elapsed());
            if self.keeps_steps() {
                let counters = self.counters();
                steps.push(Step {
                    counters: counters.since(counted),
                    logits_hash: 0,
                });
                counted = counters;
            }
            self.watch_energy();
            last = Instant::now();
        }
        joules[2] = self.joules();
        done.sort_by_key(|(index, _)| *index);
        Ok(Batch {
            samples: done.into_iter().map(|(_, sample)| sample).collect(),
            prompt_tokens: prompt.len(),
            prefill,
            first_token,
            latencies,
            counters: self.counters().since(before),
            steps,
            energy: Energy::between(joules),
        })
    }

    fn continuation(&self, index: usize, sequence: Sequence, request: &Request) -> Live {
        let seed = request.sampling.seed.wrapping_add(index as u64);
        let sampling = Sampling {
            seed,
            ..request.sampling
        };
        Live {
            index,
            sampler: Sampler::new(sampling, self.config().vocab as usize),
            hash: Xxh3::new(),
            sample: Sample {
                seed,
                tokens: Vec::with_capacity(request.max_tokens.min(sequence.room() + 1)),
                log_prob: 0.0,
                logits_hash: 0,
                stop: Stop::Caller,
            },
            sequence,
        }
    }

    /// Runs the last token of every continuation.
    fn step(&mut self, live: &mut [Live]) -> Result<(), Error> {
        let mut spans: Vec<Span<'_>> = live
            .iter_mut()
            .map(|one| {
                let tokens = &one.sample.tokens;
                Span {
                    sequence: &mut one.sequence,
                    tokens: &tokens[tokens.len().saturating_sub(1)..],
                }
            })
            .collect();
        // Taken from the buffer afterwards, when the sequences have their new tokens.
        self.forward_batch(&mut spans, Logits::Each(&mut |_, _| {}))
    }
}

impl Live {
    /// Chooses the next token from `logits`, those after the whole sequence.
    fn take(&mut self, logits: &[f32]) -> Result<(), Error> {
        if !logits.iter().all(|l| l.is_finite()) {
            return Err(Error::NotFinite {
                position: self.sequence.len() - 1,
            });
        }
        self.hash.update(bytemuck::cast_slice(logits));
        let token = self.sampler.sample(logits, self.sequence.tokens());
        self.sample.tokens.push(token);
        self.sample.log_prob += log_prob(logits, token);
        Ok(())
    }

    /// Whether it has its last token, and why, by the rules of [`Engine::generate`].
    fn ends(&self, request: &Request, eos: &[u32], interrupted: bool) -> Option<Stop> {
        let tokens = &self.sample.tokens;
        let at_eos = tokens.last().is_some_and(|token| eos.contains(token));
        if at_eos && !request.ignore_eos {
            Some(Stop::Eos)
        } else if interrupted {
            Some(Stop::Caller)
        } else if tokens.len() == request.max_tokens {
            Some(Stop::Length)
        } else {
            (self.sequence.room() == 0).then_some(Stop::Context)
        }
    }

    /// Its place in the result, and what goes there. Frees the keys and values.
    fn finish(mut self, stop: Stop) -> (usize, Sample) {
        self.sample.stop = stop;
        self.sample.logits_hash = self.hash.digest();
        (self.index, self.sample)
    }
}

/// Natural logarithm of the probability of `token`.
fn log_prob(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = (logits.iter())
        .map(|&l| f64::from(libm::expf(l - max)))
        .sum();
    let chosen = logits.get(token as usize).copied().unwrap_or(f32::MIN);
    f64::from(chosen - max) - libm::log(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_to_one() {
        let logits = [1.0, -3.0, 0.5, 80.0, 79.0];
        let sum: f64 = (0..5).map(|t| libm::exp(log_prob(&logits, t))).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert!(log_prob(&logits, 3) > log_prob(&logits, 4));
    }

    #[test]
    fn the_best_has_the_highest_mean() {
        let sample = |log_prob, n| Sample {
            seed: 0,
            tokens: vec![0; n],
            log_prob,
            logits_hash: 0,
            stop: Stop::Length,
        };
        let batch = Batch {
            samples: vec![sample(-3.0, 2), sample(-4.0, 4), sample(-1.0, 1)],
            prompt_tokens: 1,
            prefill: Duration::ZERO,
            first_token: Duration::ZERO,
            latencies: Vec::new(),
            counters: Counters::default(),
            steps: Vec::new(),
            energy: None,
        };
        assert_eq!((batch.best(), batch.tokens()), (1, 7));
    }
}
