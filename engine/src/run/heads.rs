//! Drafts of a model's own head for multi-token prediction (MTP, DeepSeek-V3, arXiv 2412.19437 §2.2).
//!
//! The head is opened as a model of one layer, which shares the output head of the other. Position p of its sequence has the
//! hidden state of the model at p, after its final norm, and the token at p + 1, and predicts the token at p + 2; run again on
//! its own hidden state and its own token it predicts the next ones.
//!
//! Hidden states that a pass leaves are retained until drafts are wanted or the buffer is full, and then computed together.
//! What the head saw of a text begins where the model began to compute: a beginning that was shared or restored is missing, so
//! fewer drafts are right for a while.

use std::fmt;
use std::path::Path;

use emberflow_models::mtp_head_beside;
use emberflow_storage::{mem, trim_heap};

use super::log_probs::{log_probability, most_likely};
use crate::ablation::Ablation;
use crate::drafts::{Draft, HiddenRows, MOST_DRAFTS, equal};
use crate::engine::{Engine, Logits, Opening};
use crate::error::Error;
use crate::forward::Hooks;
use crate::memory::MemoryPlan;
use crate::model::{Model, Text};
use crate::open::Parts;
use crate::options::{Budget, Lab, Options};
use crate::planner::Planner;
use crate::state::{Sequence, Span};

/// Most hidden states that are computed together. While no drafts are made, they are computed this seldom, so that each expert
/// is read once for many of them.
const CHUNK: usize = 128;

/// Where an error is no reason to stop.
const UNUSED: &str = "the model's head for multi-token prediction is not used";

/// Bytes of a buffer that each of the head's threads may have, as long as those of the model.
const PER_THREAD: u64 = 1 << 20;

/// Shares of a head's FFN that may be in memory.
const SHARES: [f64; 3] = [1.0, 0.5, 0.25];

/// Assumed probability that a draft of a head is right, if those before it are: 0.49 (prose) to 0.91 (code) were published for
/// the first one.
const RATE: f64 = 0.7;

/// A head is used if this speedup is expected of it: its memory is the cache's otherwise.
const GAIN: f64 = 1.05;

/// Opens `model` with its head for multi-token prediction, if it has one that the options allow and the budget has room for.
/// Otherwise as [`Engine::open_watched`].
///
/// # Errors
/// As [`Engine::open_watched`].
pub fn open_with_heads<E: From<Error>>(
    model: Model,
    options: Options,
    planned: impl FnOnce(&MemoryPlan) -> Result<(), E>,
) -> Result<Engine, E> {
    let mut parts = Parts::of(model, options)?;
    let head = PlannedHead::beside(&mut parts)?;
    let opening = Opening::of(parts)?;
    planned(&opening.division.memory)?;
    let mut engine = opening.open(None)?;
    match head.map(|head| head.open(&engine)).transpose() {
        Ok(draft) => draft.into_iter().for_each(|draft| engine.set_draft(draft)),
        Err(error) => tracing::warn!(%error, "{UNUSED}"),
    }
    Ok(engine)
}

/// A head whose memory is planned and not yet allocated.
pub struct PlannedHead {
    parts: Parts,
    /// Bytes of the process before it was read.
    before: u64,
    budget: u64,
    bytes: u64,
}

impl PlannedHead {
    /// Plans memory for the first head in the unpacked checkpoint `path` of the model with this `text`; `None` if it has none that is
    /// implemented. Of the options those count that concern threads, context and storage.
    ///
    /// # Errors
    /// A head that cannot be read.
    pub fn of(path: &Path, text: &Text, options: &Options) -> Result<Option<Self>, Error> {
        trim_heap();
        let before = mem::rss().unwrap_or(0);
        let Some(model) = Model::mtp_head(path, text)? else {
            return Ok(None);
        };
        let options = Options {
            threads: options.threads,
            context: options.context,
            kv: options.kv,
            lock: options.lock,
            lab: Lab {
                chunk: CHUNK,
                ..options.lab.clone()
            },
            ..Options::default()
        };
        let mut head = Self {
            parts: Parts::of(model, options)?,
            before,
            budget: 0,
            bytes: 0,
        };
        head.hold(1.0)?;
        Ok(Some(head))
    }

    /// Plans to hold this share of its FFN; the rest is read when it is needed.
    fn hold(&mut self, share: f64) -> Result<(), Error> {
        let planner = &self.parts.planner;
        self.budget = match share {
            1.0 => planner.budget_without_tables(),
            _ => planner.budget_for_share(share),
        };
        let division = planner.divide(self.budget)?;
        let held = division.memory.held();
        let d = u64::from(self.parts.text.config().d_model);
        let waiting = (CHUNK * size_of::<f32>()) as u64 * d;
        let threads = PER_THREAD * self.parts.threads as u64;
        self.bytes = held.saturating_sub(self.before) + waiting + threads;
        Ok(())
    }

    /// Plans memory for the head of the model with these `parts`, within its budget; `None` if it has none, or if more speed is
    /// expected without.
    ///
    /// # Errors
    /// A head that the caller has named and that cannot be read, or is another model's.
    fn beside(parts: &mut Parts) -> Result<Option<Self>, Error> {
        let options = &parts.options;
        let full = matches!(options.lab.ablation, Ablation::Full);
        if !options.speculation.heads || !full {
            return Ok(None);
        }
        // Otherwise it is one source among others.
        let only = !(options.speculation.lookup || options.speculation.memory);
        let asked = only || options.head.is_some();
        if !asked && !Self::may_look(&parts.planner, options.budget) {
            return Ok(None);
        }
        let head = Self::find(parts).and_then(|head| match head {
            Some(head) => head.fitting(&parts.planner, options.budget, asked),
            None => Ok(None),
        });
        trim_heap();
        parts.planner.see_peak();
        match head {
            Ok(Some((head, planner))) => {
                parts.planner = planner;
                parts.planner.see_peak();
                return Ok(Some(head));
            }
            Ok(None) if asked => {
                tracing::warn!(
                    "no drafts of a head: the model has none that fits beside its output head"
                );
            }
            Ok(None) => {}
            Err(error) if parts.options.head.is_some() => return Err(error),
            Err(error) => tracing::warn!(%error, "{UNUSED}"),
        }
        Ok(None)
    }

    /// Whether the budget has room for a second reading of the model's header and texts.
    fn may_look(planner: &Planner, budget: Budget) -> bool {
        let (needs, budget) = (planner.needs(), planner.budget(budget));
        let streams = planner
            .divide(budget)
            .map_or(true, |of| of.needs.streamed > 0);
        !streams && needs.process.saturating_add(needs.process_peak) <= budget
    }

    /// The head in the file that the caller named, in the model's own or in one beside it by its name.
    fn find(parts: &Parts) -> Result<Option<Self>, Error> {
        let (container, options) = (&parts.layout.container, &parts.options);
        let of = |path: &Path| Self::of(path, &parts.text, options);
        if let Some(path) = &options.head {
            let head = of(path)?;
            return match head {
                Some(head) => Ok(Some(head)),
                None => Err(Error::NotItsHead { path: path.clone() }),
            };
        }
        if container.is_outside()
            && let Some(own) = of(container.path())?
        {
            return Ok(Some(own));
        }
        mtp_head_beside(container.path()).map_or(Ok(None), |path| of(&path))
    }

    /// The head with the share in memory that promises most speed within `budget`, and the model's planner; without a promise
    /// only if the caller `asked` for heads.
    fn fitting(
        mut self,
        planner: &Planner,
        budget: Budget,
        asked: bool,
    ) -> Result<Option<(Self, Planner)>, Error> {
        let alone = |planner: &Planner| {
            let division = planner.divide(planner.budget(budget)).ok()?;
            Some(planner.speed(&division, 1))
        };
        let plain = alone(planner).unwrap_or(0.0);
        let mut best: Option<(f64, f64, Planner)> = None;
        for share in SHARES {
            self.hold(share)?;
            let with = planner.reserving(self.bytes);
            let speed = self.speed(&with, budget);
            let better = |speed: &f64| best.as_ref().is_none_or(|best| *speed > best.0);
            if let Some(speed) = speed.filter(better) {
                best = Some((speed, share, with));
            }
        }
        let Some((speed, share, with)) = best.filter(|best| asked || best.0 > GAIN * plain) else {
            tracing::info!("the model's head for multi-token prediction promises no speed");
            return Ok(None);
        };
        tracing::info!(
            "the model's head for multi-token prediction promises {:.2} times the speed",
            speed / plain
        );
        self.hold(share)?;
        Ok(Some((self, with)))
    }

    /// Expected tokens per second of the model with drafts of the head, as many as are fastest, if [`RATE`] of them are right.
    fn speed(&self, model: &Planner, budget: Budget) -> Option<f64> {
        let division = model.divide(model.budget(budget)).ok()?;
        if division.needs.streamed > 0 {
            // Its drafts may read the output head.
            return None;
        }
        let own = &self.parts.planner;
        let draft = 1.0 / own.speed(&own.divide(self.budget).ok()?, 1);
        let (mut tokens, mut right, mut best) = (1.0, 1.0, 0.0_f64);
        for depth in 1..=MOST_DRAFTS {
            right *= RATE;
            tokens += right;
            let pass = (1 + depth) as f64 / model.speed(&division, 1 + depth);
            best = best.max(tokens / (pass + depth as f64 * draft));
        }
        Some(best)
    }

    /// Bytes that the head will take.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Loads the head's weights. Its output head is that of `engine`.
    ///
    /// # Errors
    /// A failed read; an engine whose output head is not in memory.
    pub fn open(self, engine: &Engine) -> Result<Box<dyn Draft>, Error> {
        let head = &engine.decoder.weights.head;
        if head.is_streamed() {
            return Err(Error::HeadOnDisk);
        }
        let head = head.shared();
        let d = engine.config().d_model as usize;
        let engine = Opening::within(self.parts, self.budget)?.open(Some(head))?;
        Ok(Box::new(HeadDrafts {
            sequence: engine.new_sequence()?,
            base: 0,
            waiting: Waiting {
                tokens: Vec::with_capacity(CHUNK),
                rows: Vec::with_capacity(CHUNK * d),
                d,
            },
            own: vec![0.0; d],
            engine,
        }))
    }
}

/// A head and what it knows of a text.
struct HeadDrafts {
    engine: Engine,
    /// Computed positions, from position `base` of the text on. Its tokens are those of the text from `base` + 1 on.
    sequence: Sequence,
    base: usize,
    /// The positions after them.
    waiting: Waiting,
    /// The head's own hidden state.
    own: Vec<f32>,
}

/// Hidden states that are not yet computed, of consecutive positions.
struct Waiting {
    /// The token at each position.
    tokens: Vec<u32>,
    /// `[tokens × d]`.
    rows: Vec<f32>,
    d: usize,
}

impl Waiting {
    fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.rows.truncate(len * self.d);
    }

    /// Removes the first ones.
    fn drop_first(&mut self, count: usize) {
        self.tokens.drain(..count);
        self.rows.drain(..count * self.d);
    }
}

/// What of a head's state belongs to a text.
struct Known {
    /// Computed positions.
    computed: usize,
    /// Waiting ones.
    waiting: usize,
}

impl HeadDrafts {
    /// What is known of `text`.
    fn known(&self, text: &[u32]) -> Known {
        let after = text.get(self.base + 1..).unwrap_or(&[]);
        let computed = equal(self.sequence.tokens(), after);
        if computed < self.sequence.len() {
            return Known {
                computed,
                waiting: 0,
            };
        }
        let rest = text.get(self.base + computed..).unwrap_or(&[]);
        Known {
            computed,
            waiting: equal(&self.waiting.tokens, rest),
        }
    }

    /// Forgets what does not belong to `text`; returns the first position that is not known.
    fn align(&mut self, text: &[u32]) -> usize {
        let Known { computed, waiting } = self.known(text);
        let computed = self.sequence.truncate(computed);
        self.waiting.truncate(waiting);
        self.base + computed + self.waiting.tokens.len()
    }

    /// Computes the first `count` waiting positions, whose next tokens `text` has, and the `wanted` logits.
    fn compute(&mut self, text: &[u32], count: usize, wanted: Logits<'_>) -> Result<(), Error> {
        let first = self.base + self.sequence.len() + 1;
        let tokens = &text[first..first + count];
        let hidden = &self.waiting.rows[..count * self.waiting.d];
        run(&mut self.engine, &mut self.sequence, tokens, hidden, wanted)?;
        self.waiting.drop_first(count);
        Ok(())
    }

    /// Computes all waiting positions, whose next tokens `text` has, if there is room.
    fn flush(&mut self, text: &[u32]) -> Result<(), Error> {
        match self.waiting.tokens.len() {
            0 => Ok(()),
            count if count > self.sequence.room() => Ok(()),
            count => self.compute(text, count, Logits::None),
        }
    }

    /// Whether a draft can be made: the hidden state of the last token but one is known.
    fn is_ready(&self, text: &[u32]) -> bool {
        let Known { computed, waiting } = self.known(text);
        let room = self.sequence.len() + self.sequence.room();
        waiting > 0
            && self.base + computed + waiting + 1 == text.len()
            && text.len() + MOST_DRAFTS < self.base + room
    }
}

/// Runs the head.
fn run(
    engine: &mut Engine,
    sequence: &mut Sequence,
    tokens: &[u32],
    hidden: &[f32],
    wanted: Logits<'_>,
) -> Result<(), Error> {
    let hooks = Hooks {
        hidden,
        ..Hooks::default()
    };
    engine.forward_spans(&mut [Span { sequence, tokens }], wanted, hooks)
}

impl fmt::Debug for HeadDrafts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.engine.config().name;
        f.debug_struct("HeadDrafts").field("name", name).finish()
    }
}

impl Draft for HeadDrafts {
    fn reads_hidden(&self) -> bool {
        true
    }

    fn passed(&mut self, HiddenRows { text, rows }: HiddenRows<'_>) -> Result<(), Error> {
        let d = self.waiting.d;
        let first = text.len() - rows.len() / d;
        let next = self.align(text);
        if first > next || first < self.base {
            // The model has computed other positions meanwhile.
            self.sequence.truncate(0);
            self.waiting.truncate(0);
            self.base = first;
        }
        // What lies at these positions is computed again, because drafts need its logits.
        let computed = self.sequence.truncate(first - self.base);
        self.waiting.truncate(first - self.base - computed);
        let fits = self.waiting.tokens.len() + rows.len() / d <= CHUNK;
        if !fits {
            // Before the rows of this pass, of which the last may be rejected.
            self.flush(text)?;
        }
        for (at, row) in (first..).zip(rows.chunks_exact(d)) {
            if self.waiting.tokens.len() == CHUNK {
                self.flush(text)?;
            }
            if self.waiting.tokens.len() < CHUNK {
                self.waiting.tokens.push(text[at]);
                self.waiting.rows.extend_from_slice(row);
            }
        }
        Ok(())
    }

    fn behind(&self, text: &[u32]) -> Option<usize> {
        // The last one is computed with the first draft.
        (self.is_ready(text)).then(|| self.known(text).waiting.saturating_sub(1))
    }

    fn catch_up(&mut self, text: &[u32]) -> Result<(), Error> {
        self.align(text);
        let count = self.waiting.tokens.len().saturating_sub(1);
        match count {
            0 => Ok(()),
            _ => self.compute(text, count, Logits::None),
        }
    }

    fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        least: f64,
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if depth == 0 || !self.is_ready(text) {
            return Ok(());
        }
        self.align(text);
        let mut rows = self.waiting.tokens.len();
        self.compute(text, rows, Logits::Last)?;
        let (len, mut sure) = (self.sequence.len(), 1.0);
        for place in 1..=depth {
            let logits = self.engine.logits();
            let token = most_likely(logits);
            sure *= log_probability(logits, token).exp();
            drafts.push(token);
            if sure < least || place == depth {
                break;
            }
            let Engine { decoder, pass, .. } = &mut self.engine;
            let own = decoder.hidden(pass, rows - 1..rows);
            self.own.copy_from_slice(own);
            rows = 1;
            let (engine, sequence) = (&mut self.engine, &mut self.sequence);
            run(engine, sequence, &[token], &self.own, Logits::Last)?;
        }
        self.sequence.truncate(len);
        Ok(())
    }
}
