//! The engine thread: receives jobs, runs passes, sends text.
//!
//! One [`Stepper`] runs all requests; `schedule.rs` decides which.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use emberflow_engine::{
    Admission, Engine, Error, Event, Finished, LogProbs, RequestId, Stepped, Stepper, Stop, Tail,
};
use emberflow_models::tokenizer::{StreamDecoder, Tokenizer};
use tokio::sync::mpsc::UnboundedSender;

use super::idle::{Beginning, Begun, IdleSequences, Places};
pub use super::job::{Job, Work};
use super::lines::Lines;
use super::metrics::Totals;
use super::out::PromptProgress;
pub use super::out::{End, Out};
pub use super::schedule::Scheduling;
use super::schedule::{Running, Schedule, Waiting};
use super::shared::Shared;
use super::slot_order::{SlotAction, SlotOrder};
use super::snapshot::{MemoryPart, Slot, Snapshot};
use super::stops::Stops;
use crate::Failure;
use crate::states::{Restoring, StateFolder};

/// Time without requests after which state is saved: a conversation's next request often follows at once.
const PAUSE: Duration = Duration::from_millis(500);

/// What a client is told about a prompt that is being read.
struct PromptReading {
    told: PromptProgress,
    start: Instant,
}

/// Saved state that is being read.
struct StateReading {
    state: Restoring,
    of: Reader,
}

/// What state is read for.
enum Reader {
    /// A request that begins with it.
    Job(Box<Job>),
    /// A slot; with the bytes of the files.
    Slot(SlotOrder, u64),
}

/// A running text.
struct Live<'t> {
    id: RequestId,
    /// Number of the place of its sequence, also when it is idle.
    slot: usize,
    index: usize,
    stream: StreamDecoder<'t>,
    stops: Stops,
    lines: Lines,
    /// Log-probabilities of tokens whose text was not sent yet.
    log_probs: Vec<LogProbs>,
    ends: Arc<[u32]>,
    tokens: usize,
    tail: Tail,
    prompt: usize,
    /// Until the prompt is read, if the client wants to know.
    reading: Option<PromptReading>,
    proactive: bool,
    arrived: Instant,
    /// Time of the first token.
    first: Option<Instant>,
    aside: bool,
    /// Prefill only: no text is generated.
    read_only: bool,
    out: UnboundedSender<Out>,
}

impl Live<'_> {
    /// Sends text. A closed channel is noticed before the next pass.
    fn send(&mut self, text: String) {
        let _ = self.out.send(Out::Text {
            index: self.index,
            text,
            log_probs: std::mem::take(&mut self.log_probs),
            tokens: self.tokens,
        });
    }
}

/// A pass in which all texts decoded.
struct Decoded {
    texts: usize,
    tokens: usize,
    time: Duration,
}

/// All jobs, and the stepper that runs them.
struct Worker<'e, 't> {
    stepper: Stepper<'e>,
    tokenizer: &'t Tokenizer,
    waiting: VecDeque<Job>,
    /// Actions on slots that have not ended.
    orders: VecDeque<SlotOrder>,
    /// One after the other, in pieces between passes.
    reading: VecDeque<StateReading>,
    /// How long state may be read before the next pass, besides one piece: as long as the last pass took.
    reading_time: Duration,
    live: Vec<Live<'t>>,
    idle: IdleSequences,
    totals: Totals,
    schedule: Schedule,
    /// The last pass in which all texts decoded.
    decoded: Option<Decoded>,
    /// Origin of the scheduler's times.
    start: Instant,
}

/// Runs jobs until all senders are dropped, and saves the state of finished ones in `states`. Calls `started` once it
/// accepts jobs.
///
/// # Errors
/// A failed read, after which the engine must be reopened.
pub fn work(
    engine: &mut Engine,
    jobs: &Receiver<Work>,
    shared: &Shared,
    scheduling: Scheduling,
    states: Option<StateFolder>,
    started: impl FnOnce(),
) -> Result<(), Failure> {
    let tokenizer = engine.text().tokenizer().clone();
    let most = engine.most_sequences();
    let stepper = Stepper::new(engine);
    shared.set_ready(stepper.yield_flag());
    started();
    let mut worker = Worker {
        stepper,
        tokenizer: &tokenizer,
        waiting: VecDeque::new(),
        orders: VecDeque::new(),
        reading: VecDeque::new(),
        reading_time: Duration::ZERO,
        live: Vec::new(),
        idle: IdleSequences::new(states),
        totals: Totals::default(),
        schedule: Schedule::new(scheduling, most),
        decoded: None,
        start: Instant::now(),
    };
    loop {
        if worker.rests() {
            worker.report(shared);
            match worker.next_work(jobs, shared) {
                Some(work) => worker.receive(work),
                None => return Ok(()),
            }
        }
        jobs.try_iter().for_each(|work| worker.receive(work));
        worker.cancel_abandoned();
        if shared.must_end() {
            worker.end_all("the server is shutting down");
        }
        worker.run_order();
        worker.admit_waiting();
        worker.read_states();
        worker.preempt_and_resume();
        worker.step()?;
        worker.report(shared);
    }
}

impl<'t> Worker<'_, 't> {
    /// Whether there is nothing to do.
    fn rests(&self) -> bool {
        let Self {
            live,
            waiting,
            orders,
            reading,
            ..
        } = self;
        live.is_empty() && waiting.is_empty() && orders.is_empty() && reading.is_empty()
    }

    fn receive(&mut self, work: Work) {
        match work {
            Work::Texts(job) => self.waiting.push_back(*job),
            Work::Slot(order) => self.orders.push_back(order),
        }
    }

    /// Waits for work. Until some comes, the state of idle sequences is saved; after the last one, what is left of it, as
    /// long as a server may take to end.
    fn next_work(&mut self, jobs: &Receiver<Work>, shared: &Shared) -> Option<Work> {
        let mut pause = PAUSE;
        while self.idle.unsaved() {
            match jobs.recv_timeout(pause) {
                Ok(work) => return Some(work),
                Err(RecvTimeoutError::Disconnected) if shared.must_end() => return None,
                Err(_) => self.idle.save_next(),
            }
            pause = Duration::ZERO;
        }
        jobs.recv().ok()
    }

    /// Cancels texts whose client has gone.
    fn cancel_abandoned(&mut self) {
        self.waiting.retain(|job| !job.out.is_closed());
        self.orders.retain(|order| !order.is_abandoned());
        (self.reading).retain(|reading| match &reading.of {
            Reader::Job(job) => !job.out.is_closed(),
            Reader::Slot(..) => true,
        });
        let gone = self.live.iter().filter(|live| live.out.is_closed());
        let gone: Vec<_> = gone.map(|live| live.id).collect();
        for id in gone {
            self.totals.cancelled += 1;
            self.cancel(id);
        }
    }

    fn end_all(&mut self, why: &str) {
        self.orders.clear();
        let reading = self
            .reading
            .drain(..)
            .filter_map(|reading| match reading.of {
                Reader::Job(job) => Some(*job),
                Reader::Slot(..) => None,
            });
        for job in self.waiting.drain(..).chain(reading) {
            let _ = job.out.send(Out::Failed(why.to_owned()));
        }
        let all: Vec<_> = self.live.iter().map(|live| live.id).collect();
        for id in all {
            self.fail(id, Out::Failed(why.to_owned()));
        }
    }

    fn fail(&mut self, id: RequestId, why: Out) {
        if let Some(live) = self.live.iter().find(|live| live.id == id) {
            // Fails if the receiver has gone.
            let _ = live.out.send(why);
        }
        self.cancel(id);
    }

    fn cancel(&mut self, id: RequestId) {
        let live = self.remove(id);
        if let Some(finished) = self.stepper.cancel(id) {
            self.keep(live.as_ref(), finished);
        }
    }

    /// Keeps the sequence of a finished request for reuse.
    fn keep(&mut self, live: Option<&Live<'_>>, finished: Finished) {
        if let Some(live) = live.filter(|live| !live.read_only) {
            self.idle.add(finished.sequence, live.slot);
        }
    }

    fn remove(&mut self, id: RequestId) -> Option<Live<'t>> {
        let at = self.live.iter().position(|live| live.id == id)?;
        Some(self.live.remove(at))
    }

    /// Time for the scheduler.
    fn time_of(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.start)
    }

    /// Running texts as seen by the scheduler.
    fn running(&self) -> Vec<Running> {
        let seen = |live: &Live<'_>| Running {
            proactive: live.proactive,
            arrived: self.time_of(live.arrived),
            prompt: live.prompt,
            tokens: live.tokens,
        };
        self.live.iter().map(seen).collect()
    }

    /// Texts for which state is being read, as seen by the scheduler.
    fn reserved(&self, reading: &StateReading) -> impl Iterator<Item = Running> + use<> {
        let (text, count) = match &reading.of {
            Reader::Job(job) => {
                let text = Running {
                    proactive: job.proactive,
                    arrived: self.time_of(job.arrived),
                    prompt: job.prompt.len(),
                    tokens: 0,
                };
                (text, job.samples)
            }
            Reader::Slot(..) => {
                let text = Running {
                    proactive: true,
                    arrived: self.time_of(Instant::now()),
                    prompt: 0,
                    tokens: 0,
                };
                (text, 1)
            }
        };
        std::iter::repeat_n(text, count)
    }

    /// How many idle sequences there may be beside the running ones and `texts` more.
    fn room(&self, texts: usize) -> usize {
        let reserved: usize = (self.reading.iter())
            .map(|reading| self.reserved(reading).count())
            .sum();
        let most = self.stepper.engine().most_sequences();
        most.saturating_sub(self.live.len() + reserved + texts)
    }

    /// Does a part of the next action on a slot that is not in use.
    fn run_order(&mut self) {
        let runs = |order: &SlotOrder| self.live.iter().any(|live| live.slot == order.slot);
        // A request whose state is being read may get any slot.
        let waits = |order: &SlotOrder| {
            matches!(order.action, SlotAction::Restore(_)) && !self.reading.is_empty()
        };
        let next = (self.orders.iter()).position(|order| !runs(order) && !waits(order));
        let Some(mut order) = next.and_then(|at| self.orders.remove(at)) else {
            return;
        };
        order.begin();
        let slot = order.slot;
        match &order.action {
            SlotAction::Erase => {
                let tokens = self.idle.erase(slot);
                order.end(Ok((tokens, 0)));
            }
            SlotAction::Save(name) => match self.idle.save(slot, name, &mut order.sequence) {
                Ok(None) => self.orders.push_front(order),
                Ok(Some(saved)) => order.end(Ok((saved.found.len, saved.bytes))),
                Err(why) => order.end(Err(why)),
            },
            SlotAction::Restore(name) => {
                match self.idle.begin_restore(slot, name, self.stepper.engine()) {
                    Ok((state, bytes)) => self.reading.push_back(StateReading {
                        state,
                        of: Reader::Slot(order, bytes),
                    }),
                    Err(why) => order.end(Err(why)),
                }
            }
        }
    }

    /// Reads saved state for as long as other texts may wait, at least a piece.
    fn read_states(&mut self) {
        let start = Instant::now();
        while let Some(reading) = self.reading.front_mut() {
            if !self.idle.restore_next(&mut reading.state)
                && let Some(StateReading { state, of }) = self.reading.pop_front()
            {
                match of {
                    Reader::Job(job) => {
                        let places = Places {
                            room: self.room(job.samples),
                            free: self.free_slot(),
                        };
                        let begun = (self.idle).restored(
                            job.reusable(),
                            places,
                            state,
                            self.stepper.engine(),
                        );
                        self.begin(*job, begun);
                    }
                    Reader::Slot(order, bytes) => {
                        let restored = self.idle.add_restored(state, order.slot);
                        order.end(restored.map(|tokens| (tokens, bytes)));
                    }
                }
            }
            if start.elapsed() >= self.reading_time {
                return;
            }
        }
    }

    /// The lowest slot that is not in use.
    fn free_slot(&self) -> usize {
        let reads = |slot: usize| {
            let of = self.reading.iter().map(|reading| &reading.of);
            of.filter_map(|of| match of {
                Reader::Job(_) => None,
                Reader::Slot(order, _) => Some(order.slot),
            })
            .any(|reads| reads == slot)
        };
        let runs = |slot: usize| self.live.iter().any(|live| live.slot == slot);
        let free = |slot: &usize| !runs(*slot) && !self.idle.has(*slot) && !reads(*slot);
        (0..).find(free).unwrap_or_default()
    }

    /// Starts waiting jobs for which there is room.
    fn admit_waiting(&mut self) {
        loop {
            let now = self.time_of(Instant::now());
            let waiting = self.waiting.iter().map(|job| Waiting {
                proactive: job.proactive,
                texts: job.samples,
                prompt: job.prompt.len(),
                arrived: self.time_of(job.arrived),
            });
            let waiting: Vec<_> = waiting.collect();
            let mut running = self.running();
            running.extend(
                self.reading
                    .iter()
                    .flat_map(|reading| self.reserved(reading)),
            );
            let next = self.schedule.next(now, waiting.into_iter(), &running);
            let Some(job) = next.and_then(|at| self.waiting.remove(at)) else {
                return;
            };
            self.admit(job);
        }
    }

    /// Starts a job, now or when its saved state is read.
    fn admit(&mut self, job: Job) {
        let room = self.room(job.samples);
        let reusable = job.reusable();
        let shared = match reusable.is_empty() {
            true => 0,
            false => self.stepper.shared(&job.prompt),
        };
        let free = self.free_slot();
        let engine = self.stepper.engine();
        let taken = self
            .idle
            .take(reusable, shared, Places { room, free }, engine);
        match taken {
            Ok(Begun::OnDisk(state)) => self.reading.push_back(StateReading {
                state,
                of: Reader::Job(Box::new(job)),
            }),
            Ok(Begun::InMemory(beginning)) => self.begin(job, Ok(beginning)),
            Err(e) => self.begin(job, Err(e)),
        }
    }

    /// Starts a job with the state of its beginning.
    fn begin(&mut self, job: Job, begun: Result<Beginning, Error>) {
        let Beginning {
            sequence,
            restored,
            mut slot,
        } = match begun {
            Ok(begun) => begun,
            Err(e) => {
                let _ = job.out.send(Out::Failed(e.to_string()));
                return;
            }
        };
        let known = sequence.len();
        let admitted = self.stepper.admit(Admission {
            sequence,
            prompt: job.prompt[known..].to_vec(),
            request: job.request,
            samples: job.samples,
            bias: job.bias,
            constraint: job.constraint,
        });
        let first = match admitted {
            Ok(first) => first,
            Err(e) => {
                let _ = job.out.send(Out::Failed(e.to_string()));
                return;
            }
        };
        // With what it shares with a running text.
        let known = self.stepper.sequence_len(first).unwrap_or(known);
        self.totals.requests += 1;
        let class = self.totals.class(job.proactive);
        class.queue.add(job.arrived.elapsed());
        self.totals.prompt_tokens += (job.prompt.len() - known) as u64;
        self.totals.cached_tokens += known as u64;
        self.totals.restored_tokens += restored as u64;
        if job.begins {
            let _ = job.out.send(Out::Started {
                index: job.first,
                cached: known,
                slot: slot.unwrap_or_else(|| self.free_slot()),
            });
        }
        let total = job.prompt.len();
        let told = PromptProgress {
            total,
            cache: known,
            processed: known,
            time_ms: 0,
        };
        if job.progress {
            let _ = job.out.send(Out::Progress {
                index: job.first,
                progress: told,
            });
        }
        for index in 0..job.samples {
            let slot = slot.take().unwrap_or_else(|| self.free_slot());
            self.live.push(Live {
                id: first.sample(index),
                slot,
                index: job.first + index,
                stream: (self.tokenizer.stream_after_prompt()).showing(job.signs.clone()),
                stops: (Stops::new(job.stops.clone()).and_quietly(&job.quiet_stops))
                    .keeping(job.keeps_stop),
                lines: Lines::new(job.lines),
                ends: job.ends.clone(),
                log_probs: Vec::new(),
                tokens: 0,
                tail: Tail::default(),
                prompt: total,
                reading: (job.progress && index == 0).then(|| PromptReading {
                    told,
                    start: Instant::now(),
                }),
                proactive: job.proactive,
                arrived: job.arrived,
                first: None,
                aside: false,
                read_only: job.request.mean_hidden,
                out: job.out.clone(),
            });
        }
    }

    /// Preempts and resumes texts as the scheduler decides.
    fn preempt_and_resume(&mut self) {
        let now = self.time_of(Instant::now());
        let aside = self.schedule.aside(now, &self.running());
        for (at, aside) in aside.into_iter().enumerate() {
            self.set_aside(at, aside);
        }
    }

    fn set_aside(&mut self, at: usize, aside: bool) {
        let live = &mut self.live[at];
        if live.aside == aside {
            return;
        }
        live.aside = aside;
        if aside {
            self.totals.preemptions += 1;
            self.stepper.preempt(live.id);
        } else {
            self.stepper.resume(live.id)
        }
    }

    /// Counts a step for the schedule. A pass is recorded when its last token is drawn: with drafts it has several, one at
    /// each step.
    fn count_pass(&mut self, rows: usize, whole: bool, tokens: usize, time: Duration) {
        if rows == 0 {
            if let Some(pass) = &mut self.decoded {
                pass.tokens += tokens;
                pass.time += time;
            }
            return;
        }
        let now = self.time_of(Instant::now());
        if let Some(pass) = self.decoded.take() {
            (self.schedule).decoded(now, pass.texts, pass.tokens, pass.time);
        }
        let mut running = self.live.iter().filter(|live| !live.aside);
        let texts = running.clone().count();
        let decodes = whole && running.all(|live| live.tokens > 0);
        self.decoded = decodes.then_some(Decoded {
            texts,
            tokens,
            time,
        });
    }

    /// Runs a pass and sends its results.
    fn step(&mut self) -> Result<(), Failure> {
        let start = Instant::now();
        let stepped = self.stepper.step()?;
        let time = start.elapsed();
        self.totals.pass += time;
        // What begins to be read has not waited yet.
        self.reading_time = match self.reading.is_empty() {
            true => Duration::ZERO,
            false => time,
        };
        let (events, rows, whole) = match stepped {
            Stepped::Passed {
                events,
                rows,
                whole,
            } => (std::mem::take(events), rows, whole),
            Stepped::Idle | Stepped::Yielded => return Ok(()),
        };
        self.totals.passes_while_reading += u64::from(rows > 0 && !self.reading.is_empty());
        let is_token = |event: &&Event| matches!(event, Event::Token { .. });
        let tokens = events.iter().filter(is_token).count();
        self.count_pass(rows, whole, tokens, time);
        self.tell_progress();
        for event in events {
            match event {
                Event::Token {
                    id,
                    token,
                    stop,
                    log_probs,
                } => self.token(id, token, stop, log_probs),
                Event::Prompt { id, log_probs } => {
                    self.tell(id, |index| Out::Prompt { index, log_probs });
                }
                Event::Hidden { id, mean } => self.tell(id, |_| Out::Hidden(mean)),
                Event::Ended { id, stop } => {
                    let eos = stop == Stop::Eos;
                    self.end(id, if eos { End::Eos } else { End::Length });
                }
                Event::Failed { id, error } => self.fail(
                    id,
                    match error {
                        Error::Constraint { .. } => Out::Refused(error.to_string()),
                        _ => Out::Failed(error.to_string()),
                    },
                ),
            }
        }
        Ok(())
    }

    /// Tells clients that want to know how much of their prompt the last pass has read.
    fn tell_progress(&mut self) {
        for live in &mut self.live {
            let Some(PromptReading { told, start }) = &mut live.reading else {
                continue;
            };
            let len = self.stepper.sequence_len(live.id).unwrap_or_default();
            let processed = len.min(told.total);
            if processed > told.processed {
                told.processed = processed;
                told.time_ms = start.elapsed().as_millis() as u64;
                let _ = live.out.send(Out::Progress {
                    index: live.index,
                    progress: *told,
                });
            }
            if processed == told.total {
                live.reading = None;
            }
        }
    }

    /// Sends output that is not a token.
    fn tell(&self, id: RequestId, what: impl FnOnce(usize) -> Out) {
        if let Some(live) = self.live.iter().find(|live| live.id == id) {
            let _ = live.out.send(what(live.index));
        }
    }

    /// Sends the text of a token.
    fn token(
        &mut self,
        id: RequestId,
        token: u32,
        stop: Option<Stop>,
        log_probs: Option<LogProbs>,
    ) {
        let Some(live) = self.live.iter_mut().find(|live| live.id == id) else {
            return;
        };
        live.tokens += 1;
        live.tail.push(token);
        self.totals.predicted_tokens += 1;
        if live.first.is_none() {
            live.first = Some(Instant::now());
            let class = self.totals.class(live.proactive);
            class.first.add(live.arrived.elapsed());
        }
        // A token that ends the text is not part of it, but it is counted and has log-probabilities.
        let mut stopped = stop == Some(Stop::Eos) || live.ends.contains(&token);
        live.log_probs.extend(log_probs);
        let passed = (!stopped).then(|| live.stops.push_token(&mut live.stream, token));
        let mut cut = false;
        if let Some(mut passed) = passed {
            cut = live.lines.push(&mut passed.text, Instant::now());
            stopped = passed.stopped && !cut;
            if !passed.text.is_empty() {
                live.send(passed.text);
            }
        }
        let word = live.stops.found().filter(|_| !cut);
        if stopped || cut || stop.is_some() {
            let by_itself = stopped || stop == Some(Stop::Complete) && !cut;
            let end = if by_itself { End::Eos } else { End::Length };
            self.end(id, word.map_or(end, End::Word));
        }
    }

    /// Ends a text.
    fn end(&mut self, id: RequestId, end: End) {
        let mut live = self.remove(id);
        if let Some(live) = &mut live {
            let class = self.totals.class(live.proactive);
            class.ended += 1;
            if let (Some(first), true) = (live.first, live.tokens > 1) {
                class.token.add(first.elapsed() / (live.tokens - 1) as u32);
            }
            // Text held back as a possible stop string.
            let mut rest = live.stops.finish();
            if live.lines.ended() {
                rest.clear();
            } else if !end.stopped() {
                let fresh = self.tokenizer.stream_after_prompt();
                let stream = std::mem::replace(&mut live.stream, fresh);
                rest.push_str(&stream.finish().unwrap_or_default());
            }
            if !rest.is_empty() || !live.log_probs.is_empty() {
                live.send(rest);
            }
            let repetition = live.tail.repetition();
            self.totals.looping += u64::from(repetition.is_some());
            let _ = live.out.send(Out::Done {
                index: live.index,
                end,
                tokens: live.tokens,
                repetition,
            });
        }
        if let Some(finished) = self.stepper.take(id).or_else(|| self.stepper.cancel(id)) {
            self.keep(live.as_ref(), finished);
        }
    }

    fn report(&mut self, shared: &Shared) {
        self.totals.processing = self.live.len();
        self.totals.waiting = self.waiting.len() + self.reading.len();
        self.totals.counters = self.stepper.engine().counters();
        for proactive in [false, true] {
            let running = self.live.iter().filter(|l| l.proactive == proactive);
            let waiting = self.waiting.iter().filter(|j| j.proactive == proactive);
            let class = self.totals.class(proactive);
            (class.running, class.waiting) = (running.count(), waiting.count());
        }
        shared.set(self.totals);
        if shared.take_snapshot_request() || self.live.is_empty() {
            shared.set_snapshot(self.snapshot());
        }
    }

    fn snapshot(&self) -> Snapshot {
        let engine = self.stepper.engine();
        let entries = engine.memory().ledger.entries().iter();
        let slot = |live: &Live<'_>| Slot {
            id: live.slot,
            proactive: live.proactive,
            prompt: live.prompt,
            tokens: live.tokens,
            aside: live.aside,
        };
        Snapshot {
            slots: self.live.iter().map(slot).collect(),
            idle: self.idle.slots().collect(),
            layers: engine.resident_by_layer(),
            memory: entries
                .map(|&(name, bytes)| MemoryPart { name, bytes })
                .collect(),
            budget: engine.memory().budget(),
        }
    }
}
