//! Prompt in, tokens out, with the clock running.

use std::ops::ControlFlow;
use std::time::Duration;

use super::clock::{Clock, Energy, Step};
use super::events::{Admission, Event, Finished, Stepped};
use super::request::{Request, RequestId, Stop};
use super::stepper::{Stepper, check};
use crate::counters::Counters;
use crate::engine::Engine;
use crate::error::Error;
use crate::sequence::Sequence;

/// How far a generation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// So many tokens of the prompt are computed.
    Prompt(usize),
    /// The next token.
    Token(u32),
}

/// The outcome and its timings.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, an end-of-text token included.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time from the start to the first generated token: that of the prompt.
    pub first_token: Duration,
    /// Time of each further token.
    pub latencies: Vec<Duration>,
    /// Hash over the logits of every generated token, in order.
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
    /// What was done for it.
    pub counters: Counters,
    /// What was done for each further token, where [`Request::keep_steps`] asked for it.
    pub steps: Vec<Step>,
    /// What the machine used for it; `None` where nothing tells (see [`crate::energy`]).
    pub energy: Option<Energy>,
    /// What of that was done for the second half of the tokens that were asked for, when caches hold
    /// what this text needs, and the number of further tokens before. `None` when the generation
    /// ended earlier.
    pub settled: Option<(usize, Counters)>,
}

impl Engine {
    /// Runs `prompt` (not empty) after what `sequence` already holds and generates. `on` sees how far
    /// the prompt is after each of its passes but the last, then each token as it is chosen, and may
    /// stop the generation. The last generated token is not yet part of the sequence.
    ///
    /// # Errors
    /// A request that makes no sense, a prompt that does not fit, a failed read, or logits that are
    /// no numbers.
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        request: &Request,
        on: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        check(self, sequence, prompt, request)?;
        let most = request.max_tokens.min(sequence.room() + 1);
        let mut clock = Clock::start(self, most, request.keep_steps);
        let lent = std::mem::replace(sequence, self.sequence(0)?);
        let mut stepper = Stepper::new(self);
        let id = stepper.admit(Admission {
            sequence: lent,
            prompt: prompt.to_vec(),
            request: *request,
            samples: 1,
        })?;
        let ended = follow(&mut stepper, id, prompt.len(), request, &mut clock, on);
        let finished = match ended {
            Ok(finished) => finished,
            Err(e) => {
                if let Some(finished) = stepper.cancel(id) {
                    *sequence = finished.sequence;
                }
                return Err(e);
            }
        };
        let times = clock.stop(stepper.engine());
        *sequence = finished.sequence;
        Ok(Generation {
            tokens: finished.tokens,
            prompt_tokens: prompt.len(),
            first_token: times.first_token,
            latencies: times.latencies,
            logits_hash: finished.logits_hash,
            stop: finished.stop,
            counters: times.counters,
            steps: times.steps,
            energy: times.energy,
            settled: times.settled,
        })
    }

    /// As [`Engine::generate`]; `on_text` gets the text as it grows, in whole characters.
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn generate_text(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        request: &Request,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        let tokenizer = self.text().tokenizer().clone();
        let mut stream = tokenizer.stream_after_prompt();
        let mut on = |progress| match progress {
            Progress::Prompt(_) => ControlFlow::Continue(()),
            Progress::Token(token) => match stream.push(token) {
                Some(piece) => on_text(&piece),
                None => ControlFlow::Continue(()),
            },
        };
        let generation = self.generate(sequence, prompt, request, &mut on)?;
        // Nothing is left to stop.
        if let Some(rest) = stream.finish() {
            let _ = on_text(&rest);
        }
        Ok(generation)
    }
}

/// Steps until the only text has ended.
fn follow(
    stepper: &mut Stepper<'_>,
    id: RequestId,
    prompt: usize,
    request: &Request,
    clock: &mut Clock,
    on: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Finished, Error> {
    let (mut done, mut tokens) = (0, 0);
    loop {
        let Stepped::Passed { rows, events } = stepper.step()? else {
            unreachable!("the only text wants something, and nobody makes it yield");
        };
        done += rows;
        let event = events.pop();
        let (goes_on, stop) = match event {
            None => {
                clock.look();
                (on(Progress::Prompt(done.min(prompt))), None)
            }
            Some(Event::Failed { error, .. }) => return Err(error),
            Some(Event::Ended { stop, .. }) => (ControlFlow::Continue(()), Some(stop)),
            Some(Event::Token { token, stop, .. }) => {
                tokens += 1;
                clock.token(stepper.engine(), || stepper.logits_hash(id));
                if tokens == request.max_tokens / 2 {
                    clock.half(stepper.engine());
                }
                match stop {
                    // The end of the text is no part of it.
                    Some(Stop::Eos) => (ControlFlow::Continue(()), stop),
                    _ => (on(Progress::Token(token)), stop),
                }
            }
        };
        let finished = match (goes_on, stop) {
            (ControlFlow::Break(()), _) => stepper.cancel(id),
            (_, Some(_)) => stepper.take(id),
            (_, None) => continue,
        };
        if let Some(finished) = finished {
            return Ok(finished);
        }
    }
}
