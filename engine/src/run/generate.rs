//! Generation of one request, with timings.

use std::ops::ControlFlow;
use std::time::Duration;

use super::clock::{Clock, Energy, Step};
use super::events::{Admission, Event, Finished, Stepped};
use super::request::{Request, RequestId, Stop};
use super::stepper::{Stepper, check};
use crate::counters::Counters;
use crate::drafts::DraftTotals;
use crate::engine::Engine;
use crate::error::Error;
use crate::state::Sequence;

/// Progress of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Number of prompt tokens computed.
    Prompt(usize),
    /// The next token.
    Token(u32),
}

/// Result and timings of a generation.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, including an end-of-text token.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time to the first token (prefill).
    pub first_token: Duration,
    /// Latency of each further token. Tokens of one pass have equal shares of its time.
    pub latencies: Vec<Duration>,
    /// Drafts of its tokens.
    pub drafts: DraftTotals,
    /// Hash over the logits of every generated token, in order.
    pub logits_hash: u64,
    /// Why it ended.
    pub stop: Stop,
    /// Counters of the generation.
    pub counters: Counters,
    /// Counters of each further token, if [`Request::keep_steps`] is set.
    pub steps: Vec<Step>,
    /// Energy used; `None` without a meter (see [`crate::energy`]).
    pub energy: Option<Energy>,
    /// (Number of further tokens before the second half, counters of the second half of the
    /// requested tokens, when caches are warm). `None` if generation ended earlier.
    pub settled: Option<(usize, Counters)>,
    /// (Number of early further tokens, their counters), from which the machine's speed is
    /// estimated. `None` if generation ended earlier.
    pub early: Option<(usize, Counters)>,
}

impl Engine {
    /// Runs `prompt` (not empty) after the tokens of `sequence` and generates. `on` receives the
    /// prefill progress after each prompt pass but the last, then each token, and may stop the
    /// generation. The last generated token is not added to the sequence. With drafts and a
    /// recurrent state the sequence may lack the tokens of the last pass, too: continue after [`Sequence::tokens`].
    ///
    /// # Errors
    /// An invalid request, a prompt that does not fit, a failed read, or non-finite logits.
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
            bias: Vec::new(),
            constraint: None,
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
            drafts: times.drafts,
            logits_hash: finished.logits_hash,
            stop: finished.stop,
            counters: times.counters,
            steps: times.steps,
            energy: times.energy,
            settled: times.settled,
            early: times.early,
        })
    }

    /// As [`Engine::generate`]; `on_text` receives the text in pieces of whole characters.
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
        // Generation has ended, so a stop has no effect.
        if let Some(rest) = stream.finish() {
            let _ = on_text(&rest);
        }
        Ok(generation)
    }
}

/// Steps until the only request has ended.
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
        let Stepped::Passed { rows, events, .. } = stepper.step()? else {
            unreachable!("the only text has rows to compute and is never preempted");
        };
        done += rows;
        let event = events.pop();
        let (goes_on, stop) = match event {
            None | Some(Event::Prompt { .. } | Event::Hidden { .. }) => {
                clock.look();
                (on(Progress::Prompt(done.min(prompt))), None)
            }
            Some(Event::Failed { error, .. }) => return Err(error),
            Some(Event::Ended { stop, .. }) => (ControlFlow::Continue(()), Some(stop)),
            Some(Event::Token { token, stop, .. }) => {
                tokens += 1;
                clock.token(stepper.engine(), rows, || stepper.logits_hash(id));
                if tokens == request.max_tokens / 2 {
                    clock.half(stepper.engine());
                }
                match stop {
                    // The end-of-text token is not reported.
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
