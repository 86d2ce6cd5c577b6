//! Prompt in, tokens out, with the clock running.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use crate::counters::Counters;
use crate::sampler::{Sampler, Sampling};
use crate::sequence::Sequence;
use crate::{Engine, Error, Logits};

/// What to generate.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How to choose them.
    pub sampling: Sampling,
    /// Go on after an end-of-text token.
    pub ignore_eos: bool,
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
    /// The caller's callback asked for it.
    Caller,
}

/// What the pass that gave one token did.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Its counters.
    pub counters: Counters,
    /// Hash over the logits of every token up to this one, so that runs of different lengths
    /// can be compared; 0 where sequences run together.
    pub logits_hash: u64,
}

/// The outcome and its timings.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, an end-of-text token included.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time to compute the prompt.
    pub prefill: Duration,
    /// Time from the start to the first generated token.
    pub first_token: Duration,
    /// Time of each further token.
    pub latencies: Vec<Duration>,
    /// Hash over the logits of every generated token, in order.
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
    /// What was done for it.
    pub counters: Counters,
    /// What was done for each further token, where [`Engine::keep_steps`] asked for it.
    pub steps: Vec<Step>,
    /// What the machine used for it; `None` where nothing tells (see [`crate::energy`]).
    pub energy: Option<Energy>,
    /// What of that was done for the second half of the tokens that were asked for, when caches
    /// hold what this text needs, and the number of further tokens before. `None` when the
    /// generation ended earlier.
    pub settled: Option<(usize, Counters)>,
}

/// Joules that the machine used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Energy {
    /// From the start to the first generated token.
    pub prefill_joules: f64,
    /// From then to the last one.
    pub decode_joules: f64,
}

impl Energy {
    /// From readings at the start, at the first token and at the end.
    pub(crate) fn between([start, first, end]: [Option<f64>; 3]) -> Option<Self> {
        Some(Self {
            prefill_joules: first? - start?,
            decode_joules: end? - first?,
        })
    }
}

impl Default for Request {
    /// Up to 128 tokens, the likeliest ones.
    fn default() -> Self {
        Self {
            max_tokens: 128,
            sampling: Sampling::default(),
            ignore_eos: false,
        }
    }
}

impl Engine {
    /// Runs `prompt` (not empty) after what `sequence` already holds and
    /// generates. `on_token` sees each token as it is chosen and may stop the
    /// generation. The last generated token is not yet part of the sequence.
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        request: &Request,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        request.sampling.validate()?;
        self.check_prompt(sequence, prompt)?;
        let before = self.counters();
        let mut joules = [self.joules(), None, None];
        let start = Instant::now();
        let mut sampler = Sampler::new(request.sampling, self.config().vocab as usize);
        let mut hash = Xxh3::new();
        let most = request.max_tokens.min(sequence.room() - prompt.len() + 1);
        let mut latencies = Vec::with_capacity(most);
        let mut tokens = Vec::with_capacity(most);
        let mut steps = Vec::new();
        let mut done = before;

        let interrupted = !self.prefill(sequence, prompt)?;
        let prefill = start.elapsed();
        let mut first_token = prefill;
        let mut half = None;
        let mut last = Instant::now();
        let stop = loop {
            if interrupted {
                break Stop::Caller;
            }
            if tokens.len() == request.max_tokens {
                break Stop::Length;
            }
            if !self.logits().iter().all(|l| l.is_finite()) {
                return Err(Error::NotFinite {
                    position: sequence.len() - 1,
                });
            }
            hash.update(bytemuck::cast_slice(self.logits()));
            let token = sampler.sample(self.logits(), sequence.tokens());
            tokens.push(token);
            if tokens.len() == 1 {
                first_token = start.elapsed();
                joules[1] = self.joules();
            } else {
                latencies.push(last.elapsed());
            }
            if self.keeps_steps() {
                let counters = self.counters();
                if tokens.len() > 1 {
                    steps.push(Step {
                        counters: counters.since(done),
                        logits_hash: hash.digest(),
                    });
                }
                done = counters;
            }
            if tokens.len() == request.max_tokens / 2 {
                half = Some((latencies.len(), self.counters()));
            }
            last = Instant::now();
            if self.config().eos.contains(&token) && !request.ignore_eos {
                break Stop::Eos;
            }
            if on_token(token).is_break() || self.interrupted() {
                break Stop::Caller;
            }
            if tokens.len() == request.max_tokens {
                break Stop::Length;
            }
            if sequence.room() == 0 {
                break Stop::Context;
            }
            self.forward(sequence, &[token], Logits::Last)?;
            self.watch_energy();
        };
        joules[2] = self.joules();
        let counters = self.counters();
        Ok(Generation {
            settled: half.map(|(before, counted)| (before, counters.since(counted))),
            tokens,
            prompt_tokens: prompt.len(),
            prefill,
            first_token,
            latencies,
            logits_hash: hash.digest(),
            stop,
            counters: counters.since(before),
            steps,
            energy: Energy::between(joules),
        })
    }

    /// As [`Engine::generate`]; `on_text` gets the text as it grows, in whole characters.
    pub fn generate_text(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        request: &Request,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        let tokenizer = self.text().tokenizer().clone();
        let mut stream = tokenizer.stream_after_prompt();
        let mut on_token = |token| match stream.push(token) {
            Some(piece) => on_text(&piece),
            None => ControlFlow::Continue(()),
        };
        let generation = self.generate(sequence, prompt, request, &mut on_token)?;
        // nothing is left to stop
        if let Some(rest) = stream.finish() {
            let _ = on_text(&rest);
        }
        Ok(generation)
    }

    pub(crate) fn check_prompt(&self, sequence: &Sequence, prompt: &[u32]) -> Result<(), Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        self.check_room(sequence, prompt.len())
    }

    /// Runs a prompt, chunk by chunk. False when it was interrupted.
    pub(crate) fn prefill(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
    ) -> Result<bool, Error> {
        for chunk in prompt.chunks(self.chunk()) {
            self.forward(sequence, chunk, Logits::Last)?;
            self.watch_energy();
            if self.interrupted() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
