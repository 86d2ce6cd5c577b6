//! Continuous batching: many requests, pass by pass.
//!
//! ```text
//! admit ─► requests ─► rows (spans.rs) ─► pass, layer by layer ─► logits ─► tokens ─► events
//!                            ▲                     │ asked to yield
//!                            └─ resume ◄── preempt ┘ rows parked with their activations
//! ```
//!
//! A request's output depends neither on other requests, nor on arrival times, chunks or
//! preemption.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::events::{Admission, Event, Finished, Stepped};
use super::groups::{self, Groups};
use super::held::HeldDrafts;
use super::log_probs::LogProbs;
use super::pace::{Pace, PassTime};
use super::parked::{Parked, RequestRows, StoppedRows};
use super::prompt::prompt_events;
use super::request::{Request, RequestId, Stop};
use super::spans::{FREE_ROWS, PassSize, Turns, Wants};
use super::text::LiveText;
use crate::counters::Counters;
use crate::drafts::{Ask, HiddenRows, MOST_ROWS};
use crate::engine::{Engine, check_tokens};
use crate::error::Error;
use crate::forward::Hooks;
use crate::forward::streams;
use crate::lane::LanePass;
use crate::prompts::token_decoded;
use crate::state::{Sequence, Span};

/// Admits requests and runs them in batches, one pass at a time.
pub struct Stepper<'e> {
    engine: &'e mut Engine,
    /// In order of arrival.
    texts: Vec<LiveText>,
    /// Rows of the unfinished pass by request. The engine holds its activations.
    running: Vec<RequestRows>,
    parked: Parked,
    finished: Vec<Finished>,
    events: Vec<Event>,
    /// Set from any thread to make the pass yield between two layers.
    yields: Arc<AtomicBool>,
    next: u64,
    groups: Groups,
    turns: Turns<RequestId>,
    pace: Pace,
    /// The last request for whose prompt a memory division was considered.
    considered: Option<RequestId>,
    /// The text for whose pass drafts were considered: it decodes alone.
    drafting: Option<RequestId>,
    /// Drafts of the last pass whose rows may yield tokens.
    checked: Option<Checked>,
    /// All tokens of the text for which drafts are made.
    known: Vec<u32>,
}

/// Rows of a pass from which a text's next tokens are drawn, one at each step.
#[derive(Debug, Clone, Copy)]
struct Checked {
    id: RequestId,
    /// The row of the next token among the pass's, and of its logits.
    place: usize,
    logits: usize,
    /// Number of its rows.
    count: usize,
}

impl<'e> Stepper<'e> {
    /// A stepper without requests.
    pub fn new(engine: &'e mut Engine) -> Self {
        Self {
            engine,
            texts: Vec::new(),
            running: Vec::new(),
            parked: Parked::default(),
            finished: Vec::new(),
            events: Vec::new(),
            yields: Arc::new(AtomicBool::new(false)),
            next: 0,
            groups: Groups::new(),
            turns: Turns::new(),
            pace: Pace::default(),
            considered: None,
            drafting: None,
            checked: None,
            known: Vec::new(),
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        self.engine
    }

    /// Number of requests that have not ended.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether all requests have ended.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// A flag that any thread may set to make the running step yield before the next layer. The
    /// step clears it.
    pub fn yield_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.yields)
    }

    /// Admits a request, which runs from the next step on. Returns the id of its first continuation
    /// ([`RequestId::sample`] gives the others). Keys and values of a prefix that another request
    /// already has are shared instead of recomputed, also those after the given sequence.
    ///
    /// # Errors
    /// An invalid request, or not enough memory for it; the stepper is then unchanged.
    pub fn admit(&mut self, admission: Admission) -> Result<RequestId, Error> {
        let Admission {
            mut sequence,
            prompt,
            request,
            samples,
            bias,
            constraint,
        } = admission;
        check(self.engine, &sequence, &prompt, &request)?;
        let most = self.engine.most_sequences();
        if samples == 0 || self.texts.len() + samples > most {
            return Err(Error::Continuations {
                found: self.texts.len() + samples,
                most,
            });
        }
        let vocab = self.engine.config().vocab as usize;
        let rules = self.engine.text().rules().clone();
        let before = sequence.len();
        // A repeated or continued prompt recomputes the last token of this prompt.
        sequence.mark(sequence.len() + prompt.len() - 1);
        let mut forks = Vec::with_capacity(samples - 1);
        for _ in 1..samples {
            forks.push(sequence.fork_at(0)?);
        }
        let first = RequestId(self.next);
        self.next += samples as u64;
        let mut skipped = 0;
        if !request.reads_prompt()
            && let Some((other, len)) = self.longest_prefix(&[sequence.tokens(), &prompt].concat())
            && len > before
        {
            sequence.adopt(&self.texts[other].sequence, len);
            skipped = len - before;
        }
        let mut text = LiveText::new(first, sequence, prompt.clone(), request, 0, vocab, &bias)
            .after(before)
            .under(&rules);
        text.done = skipped;
        if request.mean_hidden {
            text.hidden = vec![0.0; self.engine.config().d_model as usize];
        }
        text.constraint = constraint.as_ref().map(|c| c.fork());
        self.texts.push(text);
        for (index, sequence) in (1..).zip(forks) {
            let id = first.sample(index);
            let mut text = LiveText::new(
                id,
                sequence,
                prompt.clone(),
                request,
                index as u64,
                vocab,
                &bias,
            )
            .after(before)
            .under(&rules);
            text.waits_for = Some(first);
            text.constraint = constraint.as_ref().map(|c| c.fork());
            self.texts.push(text);
        }
        self.groups.admitted();
        self.set_batch()?;
        Ok(first)
    }

    /// The longest prefix of `tokens`, except the last one, that a request to be admitted would share with another.
    pub fn shared(&self, tokens: &[u32]) -> usize {
        self.longest_prefix(tokens).map_or(0, |(_, len)| len)
    }

    /// The request whose sequence can share the longest prefix with `tokens`, and its length. The
    /// last token is always recomputed.
    fn longest_prefix(&self, tokens: &[u32]) -> Option<(usize, usize)> {
        let most = &tokens[..tokens.len().saturating_sub(1)];
        let common = |text: &LiveText| {
            let pairs = text.sequence.tokens().iter().zip(most);
            text.sequence
                .reach(pairs.take_while(|(a, b)| a == b).count())
        };
        let prefixes = self.texts.iter().map(common).enumerate();
        prefixes
            .max_by_key(|&(_, len)| len)
            .filter(|&(_, len)| len > 0)
    }

    /// Runs one pass, or resumes the one that yielded.
    ///
    /// # Errors
    /// A failed read, after which the engine must be reopened. Failures of a single request are
    /// events.
    pub fn step(&mut self) -> Result<Stepped<'_>, Error> {
        self.events.clear();
        if let Some(checked) = self.checked.take() {
            self.draw([checked])?;
            return Ok(Stepped::Passed {
                rows: 0,
                whole: true,
                events: &mut self.events,
            });
        }
        let overtaken = self.overtake();
        if self.running.is_empty() && (overtaken || !self.unpark()) {
            self.suit_memory()?;
            if !self.choose()? {
                return Ok(Stepped::Idle);
            }
        }
        let rows = self.running.iter().map(|part| part.rows).sum();
        let whole = self.engine.pass.layers.is_none();
        let decodes = self.begin_lane(rows);
        let (start, before) = (Instant::now(), self.engine.counters());
        if !self.run()? {
            return Ok(Stepped::Yielded);
        }
        if whole {
            let time = start.elapsed();
            let counted = self.engine.counters().since(before);
            if let Some(lane) = &mut self.engine.decoder.ffn.lane {
                lane.end_pass(LanePass { rows, decodes }, time);
            }
            if !decodes {
                self.pace.passed(PassTime {
                    rows,
                    time,
                    waited: Duration::from_nanos(counted.wait_ns),
                    read: Duration::from_nanos(counted.busy_ns),
                });
            }
            self.count_pass(rows, time, counted)?;
        }
        let takers = self.end_pass()?;
        if whole && self.drafting.is_some() {
            let read = self.engine.counters().since(before).bytes_read;
            self.engine.drafts.passed(rows, read, start.elapsed());
        }
        self.show_hidden();
        self.draw(takers)?;
        Ok(Stepped::Passed {
            rows,
            whole,
            events: &mut self.events,
        })
    }

    /// Shows the hidden states of a pass over one text alone to the sources of drafts that read them.
    fn show_hidden(&mut self) {
        let Engine {
            drafts,
            decoder,
            pass,
            ..
        } = &mut *self.engine;
        let [text] = self.texts.as_slice() else {
            return;
        };
        if !drafts.read_hidden() || text.request.max_tokens == 0 {
            return;
        }
        let rows = decoder.hidden(pass, 0..pass.rows);
        let text = text.sequence.tokens();
        drafts.show(HiddenRows { text, rows });
    }

    /// Tells the lane what pass begins. Returns whether all its rows decode.
    fn begin_lane(&mut self, rows: usize) -> bool {
        let runs = |text: &&LiveText| self.running.iter().any(|part| part.id == text.id);
        let decodes = (self.texts.iter().filter(runs)).all(|text| text.wants() == Wants::Decode);
        if let Some(lane) = &mut self.engine.decoder.ffn.lane {
            lane.begin_pass(Some(LanePass { rows, decodes }));
        }
        decodes
    }

    /// Counts an uninterrupted pass for the current group, if all its rows decode.
    fn count_pass(&mut self, rows: usize, time: Duration, counted: Counters) -> Result<(), Error> {
        if !self.parked.is_empty() {
            return Ok(());
        }
        let decoding = self.texts.iter().filter(|t| t.wants() == Wants::Decode);
        if decoding.clone().filter(|t| self.groups.has(t.id)).count() != rows {
            return Ok(());
        }
        let store = &self.engine.decoder.ffn.store;
        // Streamed neurons are read once per pass for any number of requests.
        let streamed = store.streamed();
        let needed = counted.hot_hits + counted.hits + counted.misses;
        let pass = groups::PassCost {
            tokens: rows,
            needed: needed.saturating_sub(streamed),
            missed: counted.misses.saturating_sub(streamed),
            neurons: store.layout.total() - streamed,
            slots: store.capacity(),
            time,
            wait: Duration::from_nanos(counted.wait_ns),
        };
        self.groups.passed(pass, decoding.count());
        self.set_batch()
    }

    /// Plans memory for the requests that run together.
    fn set_batch(&mut self) -> Result<(), Error> {
        let together = self.texts.len().min(self.groups.group_size());
        self.engine.set_batch(together)
    }

    /// Divides the memory for the prompt of a single request, and for decode afterwards.
    fn suit_memory(&mut self) -> Result<(), Error> {
        if !self.parked.is_empty() {
            return Ok(());
        }
        if !matches!(self.texts.as_slice(), [text] if text.wants() == Wants::Decode) {
            self.engine.first_tokens.restart();
        }
        match self.texts.as_slice() {
            [text] => match text.wants() {
                Wants::Prompt(_) if self.considered == Some(text.id) => Ok(()),
                Wants::Prompt(tokens) => {
                    self.considered = Some(text.id);
                    self.engine.begin_prompt(tokens)
                }
                Wants::Decode => {
                    self.end_prompt()?;
                    token_decoded(self.engine)
                }
                Wants::Nothing | Wants::Underway => self.end_prompt(),
            },
            _ => self.end_prompt(),
        }
    }

    /// Schedules the next pass. Returns false if no request can run.
    ///
    /// # Errors
    /// A failed read of a source of drafts.
    fn choose(&mut self) -> Result<bool, Error> {
        let decoding = self.texts.iter().filter(|t| t.wants() == Wants::Decode);
        self.groups.choose(decoding.map(|text| text.id));
        let wants = |text: &LiveText| match text.wants() {
            Wants::Prompt(_) if self.parked.has(text.id) => Wants::Underway,
            Wants::Decode if !self.groups.has(text.id) || self.parked.has(text.id) => {
                Wants::Nothing
            }
            wants => wants,
        };
        let wants = self.texts.iter().map(|text| (text.id, wants(text)));
        let wants: Vec<_> = wants.collect();
        let rows = self.turns.divide(&wants, self.pass_size());
        self.draft()?;
        let given: usize = rows.iter().sum();
        let mut left = self.engine.most_rows().saturating_sub(given);
        for (text, rows) in self.texts.iter_mut().zip(rows) {
            let rows = match text.wants() {
                _ if rows == 0 => continue,
                Wants::Decode => {
                    let drafts = match self.drafting == Some(text.id) {
                        true => self.engine.drafts.drafts(),
                        false => &[],
                    };
                    let own = text.set_rows(drafts, rows + left);
                    left -= own - rows;
                    own
                }
                _ => rows,
            };
            self.running.push(RequestRows { id: text.id, rows });
        }
        let total = self.running.iter().map(|part| part.rows).sum();
        self.engine.pass.begin(total);
        Ok(total > 0)
    }

    /// Makes drafts for a text that decodes alone.
    fn draft(&mut self) -> Result<(), Error> {
        self.drafting = None;
        let Engine {
            drafts,
            decoder,
            pass,
            planner,
            first_tokens,
            division,
            options,
            ..
        } = &mut *self.engine;
        let [text] = self.texts.as_mut_slice() else {
            return Ok(());
        };
        // Passes of one row correct the plan first.
        let corrects = first_tokens.corrects(planner) && decoder.ffn.lane.is_none();
        if corrects
            || !drafts.options().is_on()
            || text.wants() != Wants::Decode
            || !self.parked.is_empty()
        {
            return Ok(());
        }
        text.all_tokens(&mut self.known);
        let most = match decoder.replays() {
            true => decoder.scratch.replay.most(),
            false => MOST_ROWS,
        };
        let ask = Ask {
            text: &self.known,
            pending: text.pending(),
            most: text.most_drafts(options.lab.chunk.max(options.batch).min(most)),
            again: !text.sequence.goes_back() && !decoder.replays(),
            memory: decoder.leaves_out(),
            vocab: decoder.config.vocab,
        };
        let forecast = |rows: usize| rows as f64 / planner.speed(division, rows);
        let mut itself = |depth, least, drafts: &mut Vec<u32>| {
            let pending = text.set_rows(&[], usize::MAX);
            let held = HeldDrafts {
                decoder,
                pass,
                depth,
                least,
            };
            held.append(text.span(pending), drafts)
        };
        drafts.propose(&ask, &forecast, &mut itself)?;
        self.drafting = Some(text.id);
        Ok(())
    }

    /// Rows of a pass, fewer while texts decode. Where passes read weights or a device computes them, short ones save little
    /// time.
    fn pass_size(&self) -> PassSize {
        let (most, ffn) = (self.engine.most_rows(), &self.engine.decoder.ffn);
        let in_memory = ffn.store.capacity() >= ffn.store.layout.total();
        let free = match in_memory && ffn.lane.is_none() {
            true => FREE_ROWS.min(most / 8),
            false => most,
        };
        let decoding = self.texts.iter().filter(|t| t.wants() == Wants::Decode);
        let rows = match decoding.count() {
            0 => most,
            texts => {
                let rows = self.pace.rows(self.engine.options().lab.pause);
                most.min(rows.max(texts + FREE_ROWS))
            }
        };
        PassSize {
            rows,
            free: free.min(rows),
        }
    }

    /// Parks the pass in progress if a much shorter prompt waits for it. Returns whether that prompt goes first.
    fn overtake(&mut self) -> bool {
        let size = self.pass_size();
        let rows_of = |text: &LiveText| {
            let parts = self.parked.parts().chain(self.running.iter().copied());
            parts
                .filter(|part| part.id == text.id)
                .map(|part| part.rows)
                .sum::<usize>()
        };
        let wanted = self.texts.iter().filter(|text| !text.preempted);
        let underway: usize = wanted.clone().map(rows_of).sum();
        let goes_first = |text: &LiveText| match text.wants() {
            Wants::Prompt(rest) => rows_of(text) == 0 && self.turns.overtakes(rest, underway, size),
            _ => false,
        };
        let unfinished: usize = self.texts.iter().map(rows_of).sum();
        if unfinished > self.room_to_park() || !wanted.clone().any(goes_first) {
            return false;
        }
        while let Some(part) = self.running.first() {
            self.park(part.id);
        }
        true
    }

    /// Resumes parked rows that stopped at the same layer as the first one. Returns false if there
    /// are none.
    fn unpark(&mut self) -> bool {
        let wanted = |id| self.texts.iter().any(|t| t.id == id && !t.preempted);
        let Some(layers) = self.parked.layers(wanted) else {
            return false;
        };
        let pass = &mut self.engine.pass;
        pass.begin(0);
        pass.layers = Some(layers);
        // In request order, as `run` visits them.
        for text in self.texts.iter().filter(|text| !text.preempted) {
            let part = self.parked.resume(text.id, layers, pass);
            self.running.extend(part);
        }
        true
    }

    /// Runs the pass. Returns false if it yields.
    fn run(&mut self) -> Result<bool, Error> {
        let mut parts = self.running.iter().peekable();
        let mut spans: Vec<Span<'_>> = Vec::with_capacity(self.running.len());
        for text in &mut self.texts {
            if let Some(part) = parts.next_if(|part| part.id == text.id) {
                spans.push(text.span(part.rows));
            }
        }
        let yields = || self.yields.swap(false, Ordering::Relaxed);
        let hooks = Hooks {
            yields: Some(&yields),
            ..Hooks::default()
        };
        let Engine { decoder, pass, .. } = &mut *self.engine;
        decoder.run(pass, &mut spans, hooks)
    }

    /// Ends a pass: computes the logits of every request with a complete prompt. Returns the rows of tokens to draw.
    ///
    /// # Errors
    /// A failed read of the output head.
    fn end_pass(&mut self) -> Result<Vec<Checked>, Error> {
        let (mut rows, mut takers, mut end) = (Vec::new(), Vec::new(), 0);
        let mut parts = std::mem::take(&mut self.running);
        for part in parts.drain(..) {
            end += part.rows;
            let Some(at) = self.texts.iter().position(|text| text.id == part.id) else {
                continue;
            };
            let computed = end - part.rows..end;
            let told = prompt_events(self.engine, &mut self.texts[at], computed)?;
            self.events.extend(told.into_iter().flatten());
            let count = self.texts[at].advance(part.rows);
            let checked = |at: usize| Checked {
                id: self.texts[at].id,
                place: 0,
                logits: rows.len(),
                count,
            };
            takers.extend(self.followers(at).map(|follower| Checked {
                count: 1,
                ..checked(follower)
            }));
            if count > 0 {
                takers.push(checked(at));
            }
            rows.extend(end - count..end);
        }
        self.running = parts;
        for follower in 0..self.texts.len() {
            self.catch_up(follower);
        }
        if !rows.is_empty() {
            let Engine { decoder, pass, .. } = &mut *self.engine;
            decoder.head(pass, rows.iter().copied())?;
        }
        takers.sort_unstable_by_key(|taker| taker.id);
        Ok(takers)
    }

    /// Draws the next token of each of these requests.
    fn draw(&mut self, takers: impl IntoIterator<Item = Checked>) -> Result<(), Error> {
        let out_of_range = |text: &LiveText| Some((text.id, text.check_range().err()?));
        let mut failed: Vec<_> = self.texts.iter().filter_map(out_of_range).collect();
        for taker in takers {
            let Some(text) = self.texts.iter_mut().find(|text| text.id == taker.id) else {
                continue;
            };
            let has_failed = failed.iter().any(|(id, _)| *id == text.id);
            if text.request.max_tokens == 0 || has_failed {
                continue;
            }
            let Engine {
                decoder, drafts, ..
            } = &mut *self.engine;
            let logits = decoder.logits(taker.logits);
            let token = match text.take(logits) {
                Ok(token) => token,
                Err(error) => {
                    failed.push((text.id, error));
                    continue;
                }
            };
            let stop = text.ends(&decoder.config.eos);
            self.events.push(Event::Token {
                id: text.id,
                token,
                stop,
                log_probs: (text.request.log_probs).map(|top| LogProbs::of(logits, token, top)),
            });
            let next = Checked {
                place: taker.place + 1,
                logits: taker.logits + 1,
                ..taker
            };
            let goes_on =
                stop.is_none() && next.place < taker.count && text.is_drafted(taker.place);
            self.checked = goes_on.then_some(next).or(self.checked.take());
            if self.drafting == Some(text.id) {
                drafts.drawn(token);
            }
            if !goes_on {
                self.settle(taker.id);
            }
        }
        for (id, error) in failed {
            self.cancel(id);
            self.finished.retain(|f| f.id != id);
            self.events.push(Event::Failed { id, error });
        }
        self.end_texts()
    }

    /// Forgets the drafts of a request whose tokens are not drawn.
    fn settle(&mut self, id: RequestId) {
        self.checked = self.checked.take().filter(|checked| checked.id != id);
        let start = Instant::now();
        if let Some(text) = self.texts.iter_mut().find(|text| text.id == id) {
            text.settle(&mut self.engine.decoder);
        }
        if self.drafting.take_if(|drafting| *drafting == id).is_some() {
            self.engine.drafts.settle(start.elapsed());
        }
    }

    /// Requests waiting for the prompt of request `at`, if that prompt is complete.
    fn followers(&self, at: usize) -> impl Iterator<Item = usize> {
        let leader = &self.texts[at];
        let complete = leader.done == leader.prompt.len();
        let waits = move |text: &LiveText| complete && text.waits_for == Some(leader.id);
        (self.texts.iter().enumerate())
            .filter(move |(_, text)| waits(text))
            .map(|(follower, _)| follower)
    }

    /// Shares the completed prompt that request `at` waited for.
    fn catch_up(&mut self, at: usize) {
        let Some(leader) = self.texts[at].waits_for else {
            return;
        };
        let Some(leader) = self.texts.iter().position(|text| text.id == leader) else {
            return;
        };
        if self.texts[leader].done < self.texts[leader].prompt.len() {
            return;
        }
        let Ok([leader, text]) = self.texts.get_disjoint_mut([leader, at]) else {
            return;
        };
        let len = leader.sequence.len();
        text.sequence.adopt(&leader.sequence, len);
        (text.done, text.waits_for) = (text.prompt.len(), None);
    }

    /// Removes finished requests.
    fn end_texts(&mut self) -> Result<(), Error> {
        let eos = &self.engine.decoder.config.eos;
        let mut index = 0;
        while index < self.texts.len() {
            let text = &self.texts[index];
            match text.ends(eos).filter(|_| text.waits_for.is_none()) {
                None => index += 1,
                Some(stop) => {
                    let text = self.texts.remove(index);
                    if text.tokens.is_empty() {
                        self.events.push(Event::Ended { id: text.id, stop });
                    }
                    self.finished.push(text.finish(stop));
                }
            }
        }
        self.set_batch()?;
        self.rest()
    }

    /// Divides the memory for decode when no request is left.
    fn rest(&mut self) -> Result<(), Error> {
        let idle = self.texts.is_empty() && self.parked.is_empty() && self.running.is_empty();
        if idle { self.end_prompt() } else { Ok(()) }
    }

    fn end_prompt(&mut self) -> Result<(), Error> {
        self.considered = None;
        self.engine.end_prompt()
    }

    /// Preempts a request until [`Stepper::resume`]. Its rows of a yielded pass keep their
    /// activations if the engine was opened with
    /// [`Options::preemption`](crate::Options::preemption) and a buffer is free; otherwise they are
    /// recomputed.
    pub fn preempt(&mut self, id: RequestId) {
        if self.checked.is_some_and(|checked| checked.id == id) {
            self.settle(id);
        }
        let Some(text) = self.texts.iter_mut().find(|text| text.id == id) else {
            return;
        };
        text.preempted = true;
        self.park(id);
    }

    /// Rows for which there are buffers to keep their activations in.
    fn room_to_park(&self) -> usize {
        match self.engine.options().preemption {
            true => self.engine.most_rows(),
            false => 0,
        }
    }

    /// Removes a request's rows from the yielded pass, and keeps them if there is room.
    fn park(&mut self, id: RequestId) {
        let d = self.engine.config().d_model as usize;
        let room = self.room_to_park().saturating_sub(self.parked.rows());
        if let Some((part, x, aux)) = self.leave_pass(id)
            && let Some(layers) = self.engine.pass.layers.filter(|_| part.rows <= room)
        {
            debug_assert_eq!(x.len(), part.rows * d);
            self.parked.add(StoppedRows {
                part,
                layers,
                x,
                aux,
            });
        }
    }

    /// Removes a request's rows from the yielded pass.
    fn leave_pass(&mut self, id: RequestId) -> Option<(RequestRows, Vec<f32>, Vec<f32>)> {
        let index = self.running.iter().position(|part| part.id == id)?;
        let before: usize = self.running[..index].iter().map(|part| part.rows).sum();
        let part = self.running.remove(index);
        let d = self.engine.config().d_model as usize;
        let width = streams::aux_width(self.engine.config());
        let pass = &mut self.engine.pass;
        let pass_rows = pass.rows;
        let take = |values: &mut Vec<f32>, width: usize| {
            let rows = before * width..(before + part.rows) * width;
            let part = values[rows.clone()].to_vec();
            values.copy_within(rows.end..pass_rows * width, rows.start);
            part
        };
        let x = take(&mut pass.x, d);
        let aux = take(&mut pass.aux, width);
        pass.rows -= part.rows;
        Some((part, x, aux))
    }

    /// Resumes a preempted request.
    pub fn resume(&mut self, id: RequestId) {
        if let Some(text) = self.texts.iter_mut().find(|text| text.id == id) {
            text.preempted = false;
        }
    }

    /// Cancels a request. `None` if its id is unknown or its result was taken.
    pub fn cancel(&mut self, id: RequestId) -> Option<Finished> {
        if let Some(at) = self.finished.iter().position(|f| f.id == id) {
            let mut finished = self.finished.remove(at);
            finished.stop = Stop::Caller;
            return Some(finished);
        }
        let index = self.texts.iter().position(|text| text.id == id)?;
        if self.checked.is_some_and(|checked| checked.id == id) {
            self.settle(id);
        }
        self.leave_pass(id);
        self.parked.discard(id);
        let text = self.texts.remove(index);
        self.hand_over(&text);
        // Cannot fail: a plan for the same number of sequences succeeded before.
        let _ = self.set_batch();
        // The next pass reports a failed read.
        let _ = self.rest();
        Some(text.finish(Stop::Caller))
    }

    /// Makes the first request that waits for this prompt compute the rest of it.
    fn hand_over(&mut self, text: &LiveText) {
        let mut heir = None;
        for other in self.texts.iter_mut() {
            if other.waits_for == Some(text.id) {
                other.waits_for = heir;
                if heir.is_none() {
                    heir = Some(other.id);
                    other.sequence.adopt(&text.sequence, text.sequence.len());
                    other.done = text.done;
                }
            }
        }
    }

    /// Takes a finished request.
    pub fn take(&mut self, id: RequestId) -> Option<Finished> {
        let index = self.finished.iter().position(|f| f.id == id)?;
        Some(self.finished.remove(index))
    }

    /// Number of tokens in a request's sequence; `None` if its id is unknown or its result was taken.
    pub fn sequence_len(&self, id: RequestId) -> Option<usize> {
        let live = self.texts.iter().find(|text| text.id == id);
        let ended = self.finished.iter().find(|f| f.id == id);
        let sequence = live.map(|text| &text.sequence);
        Some(sequence.or(ended.map(|f| &f.sequence))?.len())
    }

    /// Hash over the logits of all tokens of a request so far; 0 if unknown.
    pub fn logits_hash(&self, id: RequestId) -> u64 {
        let live = self.texts.iter().find(|text| text.id == id);
        let ended = self.finished.iter().find(|f| f.id == id);
        live.map(LiveText::logits_hash)
            .or(ended.map(|f| f.logits_hash))
            .unwrap_or(0)
    }
}

/// Validates a request.
pub(super) fn check(
    engine: &Engine,
    sequence: &Sequence,
    prompt: &[u32],
    request: &Request,
) -> Result<(), Error> {
    request.sampling.validate()?;
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    check_tokens(prompt, engine.config())?;
    sequence.check_room(prompt.len(), engine.config())
}
