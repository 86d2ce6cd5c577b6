//! One request of a stepper: its sequence, sampler and tokens.

use std::sync::Arc;

use emberflow_models::TextRules;
use xxhash_rust::xxh3::Xxh3;

use super::events::Finished;
use super::log_probs::log_probability;
use super::request::{Request, RequestId, Stop};
use super::spans::Wants;
use crate::constraint::Constraint;
use crate::error::Error;
use crate::forward::Decoder;
use crate::sampler::{Bias, Sampler, Sampling};
use crate::state::{Sequence, Span};

/// A live request.
pub(super) struct LiveText {
    pub id: RequestId,
    pub sequence: Sequence,
    /// The whole prompt; number of its tokens in the sequence (`done`).
    pub prompt: Vec<u32>,
    pub done: usize,
    /// Positions before the first generated token.
    before: usize,
    /// The rows of its next pass, while it decodes: tokens that were drawn but not computed, then drafts of the
    /// tokens after them.
    rows: Vec<u32>,
    drafts: usize,
    pub request: Request,
    sampler: Sampler,
    /// Constraint on its tokens.
    pub constraint: Option<Box<dyn Constraint>>,
    hash: Xxh3,
    pub tokens: Vec<u32>,
    log_prob: f64,
    /// Sum of the prompt's last hidden states so far, if their mean is requested. Positions are
    /// added in order, so no bit depends on prompt chunks.
    pub hidden: Vec<f64>,
    /// The request whose prefill this one waits for.
    pub waits_for: Option<RequestId>,
    /// Preempted.
    pub preempted: bool,
}

impl LiveText {
    /// Request `id`, which continues `prompt` with the `index`-th seed.
    pub fn new(
        id: RequestId,
        sequence: Sequence,
        prompt: Vec<u32>,
        request: Request,
        index: u64,
        vocab: usize,
        bias: &[Bias],
    ) -> Self {
        let sampling = Sampling {
            seed: request.sampling.seed.wrapping_add(index),
            ..request.sampling
        };
        let room = sequence.room() + 1 - prompt.len().min(sequence.room());
        Self {
            id,
            before: sequence.len() + prompt.len(),
            sequence,
            prompt,
            done: 0,
            rows: Vec::new(),
            drafts: 0,
            sampler: Sampler::new(sampling, vocab).with_bias(bias.to_vec()),
            constraint: None,
            hash: Xxh3::new(),
            tokens: Vec::with_capacity(request.max_tokens.min(room)),
            log_prob: 0.0,
            hidden: Vec::new(),
            waits_for: None,
            preempted: false,
            request,
        }
    }

    /// For a prompt of which some tokens are in the sequence already: it begins after `positions` positions.
    pub fn after(mut self, positions: usize) -> Self {
        self.before = positions + self.prompt.len();
        self
    }

    /// Applies the checkpoint's text rules.
    pub fn under(mut self, rules: &Arc<TextRules>) -> Self {
        self.sampler = self.sampler.with_rules(rules.clone());
        self
    }

    /// Rows it could use in the next pass.
    pub fn wants(&self) -> Wants {
        match self.prompt.len() - self.done {
            _ if self.preempted || self.waits_for.is_some() => Wants::Nothing,
            0 => Wants::Decode,
            rest => Wants::Prompt(rest),
        }
    }

    /// All tokens: of the sequence before the prompt, of the prompt and the generated ones. The last one is not computed.
    pub fn all_tokens(&self, into: &mut Vec<u32>) {
        into.clear();
        into.extend_from_slice(&self.sequence.tokens()[..self.sequence.len().min(self.before)]);
        into.extend_from_slice(&self.tokens);
    }

    /// Tokens that were drawn but not computed; only after the prompt.
    pub fn pending(&self) -> usize {
        self.before + self.tokens.len() - self.sequence.len()
    }

    /// Most drafts that could be of use in its next pass, which has up to `rows` rows.
    pub fn most_drafts(&self, rows: usize) -> usize {
        let pending = self.pending();
        let left = self.request.max_tokens - self.tokens.len();
        let room = self.sequence.room().saturating_sub(pending);
        rows.saturating_sub(pending)
            .min(left.saturating_sub(1))
            .min(room)
    }

    /// Sets the rows of its next pass, up to `most`: what is pending, then `drafts`. Returns their number.
    pub fn set_rows(&mut self, drafts: &[u32], most: usize) -> usize {
        let computed = self.sequence.len() - self.before;
        let pending = &self.tokens[computed..];
        let pending = &pending[..pending.len().min(most)];
        self.rows.clear();
        self.rows.extend_from_slice(pending);
        self.rows.extend_from_slice(drafts);
        self.rows.truncate(most);
        self.drafts = self.rows.len() - pending.len();
        self.rows.len()
    }

    /// Its span of a pass: the next `count` tokens.
    pub fn span(&mut self, count: usize) -> Span<'_> {
        let tokens = match self.prompt.len() - self.done {
            0 => &self.rows[..count],
            _ => &self.prompt[self.done..self.done + count],
        };
        Span {
            sequence: &mut self.sequence,
            tokens,
        }
    }

    /// Records `count` computed rows. Returns of how many of them, the last ones, it may need the logits.
    pub fn advance(&mut self, count: usize) -> usize {
        if self.done == self.prompt.len() {
            let whole = self.sequence.len() - self.drafts >= self.before + self.tokens.len();
            return if whole { 1 + self.drafts } else { 0 };
        }
        self.done = self.prompt.len().min(self.done + count);
        usize::from(self.done == self.prompt.len() && self.request.max_tokens > 0)
    }

    /// Rejects keys and values beyond their format, except those of drafts.
    pub fn check_range(&self) -> Result<(), Error> {
        let len = self.sequence.len().saturating_sub(self.drafts);
        self.sequence.check_range_to(len)
    }

    /// Whether the token that was drawn last is the draft at this place, so that the row after it counts.
    pub fn is_drafted(&self, place: usize) -> bool {
        let drafts = &self.rows[self.rows.len() - self.drafts..];
        drafts.get(place) == self.tokens.last()
    }

    /// Removes the rows of rejected drafts from its state.
    pub fn settle(&mut self, decoder: &mut Decoder) {
        if self.drafts > 0 {
            let len = self.before + self.tokens.len() - 1;
            decoder.undo(&mut self.sequence, &self.rows, len);
            self.drafts = 0;
        }
    }

    /// Samples the next token from `logits` of the last position.
    pub fn take(&mut self, logits: &[f32]) -> Result<u32, Error> {
        let len = self.before + self.tokens.len();
        self.sequence.check_range_to(len)?;
        if !logits.iter().all(|l| l.is_finite()) {
            return Err(Error::NotFinite { position: len - 1 });
        }
        self.hash.update(bytemuck::cast_slice(logits));
        let history = &self.sequence.tokens()[..len];
        let token = match &mut self.constraint {
            None => self.sampler.sample(logits, history),
            Some(constraint) => {
                let held = |why| Error::Constraint { why };
                constraint.prepare().map_err(held)?;
                let sampler = &mut self.sampler;
                let token = sampler.sample_under(logits, history, Some(&**constraint));
                constraint.accept(token).map_err(held)?;
                token
            }
        };
        self.tokens.push(token);
        if self.request.keep_log_prob {
            self.log_prob += log_probability(logits, token);
        }
        Ok(token)
    }

    /// Why the text ends, if it does.
    pub fn ends(&self, eos: &[u32]) -> Option<Stop> {
        if self.done < self.prompt.len() {
            return None;
        }
        let at_eos = self.tokens.last().is_some_and(|token| eos.contains(token));
        if at_eos && !self.request.ignore_eos {
            Some(Stop::Eos)
        } else if !self.tokens.is_empty()
            && self.constraint.as_ref().is_some_and(|c| c.is_complete())
        {
            Some(Stop::Complete)
        } else if self.tokens.len() >= self.request.max_tokens {
            Some(Stop::Length)
        } else {
            let capacity = self.sequence.len() + self.sequence.room();
            (capacity < self.before + self.tokens.len()).then_some(Stop::Context)
        }
    }

    /// Hash over the logits of all tokens so far.
    pub fn logits_hash(&self) -> u64 {
        self.hash.digest()
    }

    pub fn finish(self, stop: Stop) -> Finished {
        Finished {
            id: self.id,
            logits_hash: self.hash.digest(),
            sequence: self.sequence,
            tokens: self.tokens,
            log_prob: self.request.keep_log_prob.then_some(self.log_prob),
            stop,
        }
    }
}
