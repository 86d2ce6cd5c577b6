//! Drafts: guesses of a text's next tokens, which the model checks in one pass (speculative decoding, arXiv 2211.17192).
//!
//! ```text
//! text ─► sources ─► drafts ─► pass over the last token and the drafts ─► tokens are drawn row by row
//!            ▲                                                                 │ until one differs
//!            └────────── governor: rates, times ◄──────────────────────────────┘ the rows after it are undone
//! ```
//!
//! A pass reads what is missing once for all of its rows, so right drafts are nearly free where weights are read. A row's
//! bits do not depend on other rows, and tokens are drawn in the usual order, so the text is the same bit for bit.

mod governor;
mod lookup;
mod source;

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::Error;
pub use governor::MOST_DRAFTS;
pub(crate) use governor::MOST_ROWS;
use governor::{Choice, Governor, NGRAM_RATE, Offer, Rates};
use lookup::{MATCHES, Match};
pub use source::{Draft, HiddenRows};
use source::{Learned, Source};

/// Which drafts are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Speculation {
    /// Copies what followed an earlier occurrence of the last tokens (prompt lookup decoding).
    pub lookup: bool,
    /// Runs the model with only the FFN weights that are in memory.
    pub memory: bool,
    /// Asks the model's heads for multi-token prediction, if they are set.
    pub heads: bool,
    /// Asks another source, such as a small model, if one is set.
    pub model: bool,
    /// A fixed number of drafts per pass, at most [`MOST_DRAFTS`]; `None` lets the governor choose.
    pub depth: Option<usize>,
}

impl Speculation {
    /// No drafts.
    pub const OFF: Self = Self {
        lookup: false,
        memory: false,
        heads: false,
        model: false,
        depth: None,
    };

    /// All sources, chosen by the governor.
    pub const AUTO: Self = Self {
        lookup: true,
        memory: true,
        heads: true,
        model: true,
        depth: None,
    };

    /// Whether drafts may be used.
    pub fn is_on(self) -> bool {
        self.lookup || self.memory || self.heads || self.model
    }

    /// Most rows of logits that a text needs after a pass.
    pub(crate) fn logit_rows(self) -> usize {
        let most = self
            .depth
            .map_or(MOST_DRAFTS, |depth| depth.min(MOST_DRAFTS));
        if self.is_on() { 1 + most } else { 1 }
    }
}

/// Counts of drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// Drafts that were checked, and how many of them were accepted.
    pub proposed: u64,
    /// See `proposed`.
    pub taken: u64,
}

impl DraftCounts {
    fn add(&mut self, more: Self) {
        self.proposed += more.proposed;
        self.taken += more.taken;
    }

    fn since(self, before: Self) -> Self {
        Self {
            proposed: self.proposed - before.proposed,
            taken: self.taken - before.taken,
        }
    }
}

/// Counts of all drafts of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftTotals {
    /// From the text itself.
    pub lookup: DraftCounts,
    /// Of the model itself, from what is in memory.
    pub memory: DraftCounts,
    /// Of the model's heads for multi-token prediction.
    pub heads: DraftCounts,
    /// Of another source.
    pub model: DraftCounts,
    /// Passes of texts that decode alone, and their rows.
    pub passes: u64,
    /// See `passes`.
    pub rows: u64,
    /// Bytes that these passes read from storage.
    pub bytes: u64,
    /// Time to make drafts.
    pub time: Duration,
}

impl DraftTotals {
    /// Counts since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            lookup: self.lookup.since(before.lookup),
            memory: self.memory.since(before.memory),
            heads: self.heads.since(before.heads),
            model: self.model.since(before.model),
            passes: self.passes - before.passes,
            rows: self.rows - before.rows,
            bytes: self.bytes - before.bytes,
            time: self.time - before.time,
        }
    }
}

/// [`Draft::propose`] without its text argument.
pub(crate) type Propose<'a> = dyn FnMut(usize, f64, &mut Vec<u32>) -> Result<(), Error> + 'a;

/// Where drafts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Lookup,
    Memory,
    /// The source at this place of [`Drafts::sources`].
    Source(usize),
}

/// Places of [`Drafts::sources`].
const HEAD: usize = 0;
/// See [`HEAD`].
const OTHER: usize = 1;

/// Most sources to choose from: the text, the model from memory, its heads, a small model.
const MOST_OFFERS: usize = 4;

/// A source drafts only if it has at most this many tokens left to compute: those of one pass.
const NEAR: usize = MOST_DRAFTS + 1;

/// A request for drafts of one text.
pub(crate) struct Ask<'a> {
    /// All of its tokens.
    pub text: &'a [u32],
    /// Rows that its next pass computes even without drafts.
    pub pending: usize,
    /// Most drafts.
    pub most: usize,
    /// After a rejected draft the next pass must recompute the accepted rows (recurrent state).
    pub again: bool,
    /// Whether the model itself can make drafts.
    pub memory: bool,
    /// Tokens of the model.
    pub vocab: u32,
}

/// The sources of an engine and how well they do.
#[derive(Debug)]
pub(crate) struct Drafts {
    options: Speculation,
    governor: Option<Governor>,
    matches: [Rates; MATCHES],
    memory: Learned,
    /// The model's head, and another source.
    sources: [Option<Source>; 2],
    totals: DraftTotals,
    /// The last match, and the tokens that followed it.
    found: Option<Match>,
    guessed: Vec<u32>,
    /// The drafts of the next pass, and where they come from.
    drafts: Vec<u32>,
    from: Origin,
    /// Tokens that were drawn after the last pass.
    drawn: Vec<u32>,
    /// Rows and time of that pass.
    pass: (usize, Duration),
}

impl Drafts {
    /// No source is known yet.
    pub fn new(options: Speculation) -> Self {
        Self {
            options,
            governor: None,
            matches: std::array::from_fn(|_| Rates::new(NGRAM_RATE)),
            memory: Learned::new(),
            sources: [None, None],
            totals: DraftTotals::default(),
            found: None,
            guessed: Vec::with_capacity(MOST_DRAFTS),
            drafts: Vec::with_capacity(MOST_DRAFTS),
            from: Origin::Lookup,
            drawn: Vec::with_capacity(MOST_ROWS),
            pass: (0, Duration::ZERO),
        }
    }

    /// Forgets how long passes take and what the model knows from memory, which is divided differently.
    pub fn forget_times(&mut self) {
        self.governor = None;
        self.memory = Learned::new();
    }

    /// Uses a source if the options allow it: in place of the last head if it reads hidden states, otherwise of the last other
    /// one.
    pub fn set_source(&mut self, source: Box<dyn Draft>) {
        let (place, allowed) = match source.reads_hidden() {
            true => (HEAD, self.options.heads),
            false => (OTHER, self.options.model),
        };
        if allowed {
            self.sources[place] = Some(Source::new(source));
        }
    }

    /// Which drafts are used.
    pub fn options(&self) -> Speculation {
        self.options
    }

    /// Counts so far.
    pub fn totals(&self) -> DraftTotals {
        self.totals
    }

    /// Makes drafts for the next pass of a text that decodes alone. `forecast`: expected time of a pass by number of rows,
    /// in any unit. `itself`: as [`Draft::propose`], by the model itself.
    ///
    /// # Errors
    /// Those of a source.
    pub fn propose(
        &mut self,
        ask: &Ask<'_>,
        forecast: &dyn Fn(usize) -> f64,
        itself: &mut Propose<'_>,
    ) -> Result<(), Error> {
        self.clear();
        self.found = (self.options.lookup)
            .then(|| Match::find(ask.text))
            .flatten();
        if let Some(found) = self.found {
            found.follow(ask.text, MOST_DRAFTS, &mut self.guessed);
        }
        self.follow(ask.text);
        let Some((from, depth, least)) = self.choose(ask, forecast) else {
            return Ok(());
        };
        self.from = from;
        let start = Instant::now();
        match from {
            Origin::Memory => {
                itself(depth, least, &mut self.drafts)?;
                (self.memory).learn_time(start.elapsed(), self.drafts.len());
            }
            Origin::Source(place) => {
                let Some(Source { draft, learned }) = &mut self.sources[place] else {
                    return Ok(());
                };
                let far = draft.behind(ask.text).is_some_and(|behind| behind > NEAR);
                let made = match far {
                    true => draft.catch_up(ask.text),
                    false => Ok(()),
                };
                // Only what each draft costs.
                let begun = Instant::now();
                let made =
                    made.and_then(|()| draft.propose(ask.text, depth, least, &mut self.drafts));
                learned.learn_time(begun.elapsed(), self.drafts.len());
                if !kept(made) {
                    self.sources[place] = None;
                    self.drafts.clear();
                }
            }
            Origin::Lookup => self.drafts.extend_from_slice(&self.guessed[..depth]),
        }
        self.drafts.truncate(depth);
        let known = self.drafts.iter().take_while(|&&token| token < ask.vocab);
        self.drafts.truncate(known.count());
        self.totals.time += start.elapsed();
        Ok(())
    }

    /// Lets sources that have many tokens left to compute process some of them. They draft once they have caught up; heads, which
    /// see every pass, catch up when they are chosen.
    fn follow(&mut self, text: &[u32]) {
        self.ask_all(|draft| match draft.behind(text) {
            Some(behind) if behind > NEAR && !draft.reads_hidden() => draft.catch_up(text),
            _ => Ok(()),
        });
    }

    /// Whether a source reads hidden states.
    pub fn read_hidden(&self) -> bool {
        self.sources[HEAD].is_some()
    }

    /// Shows the hidden states of a pass over one text alone to the sources that read them.
    pub fn show(&mut self, rows: HiddenRows<'_>) {
        self.ask_all(|draft| draft.passed(rows));
    }

    /// Lets every source compute something, and drops those that fail; generation continues without them.
    fn ask_all(&mut self, mut ask: impl FnMut(&mut dyn Draft) -> Result<(), Error>) {
        for source in &mut self.sources {
            let start = Instant::now();
            let Some(of) = source else {
                continue;
            };
            if !kept(ask(&mut *of.draft)) {
                *source = None;
            }
            self.totals.time += start.elapsed();
        }
    }

    /// The drafts of the next pass.
    pub fn drafts(&self) -> &[u32] {
        &self.drafts
    }

    fn clear(&mut self) {
        self.found = None;
        self.pass = (0, Duration::ZERO);
        self.drafts.clear();
        self.guessed.clear();
        self.drawn.clear();
    }

    /// The source to use, the number of drafts, and the least probability of a further one.
    fn choose(
        &mut self,
        ask: &Ask<'_>,
        forecast: &dyn Fn(usize) -> f64,
    ) -> Option<(Origin, usize, f64)> {
        let governor = (self.governor).get_or_insert_with(|| Governor::new(forecast));
        let mut offers = arrayvec::ArrayVec::<Offer<'_>, MOST_OFFERS>::new();
        let mut sources = arrayvec::ArrayVec::<Origin, MOST_OFFERS>::new();
        if let Some(found) = self.found {
            offers.push(Offer {
                rates: &self.matches[found.class()],
                most: ask.most,
                seconds: 0.0,
            });
            sources.push(Origin::Lookup);
        }
        if self.options.memory && ask.memory {
            offers.push(self.memory.offer(ask.most));
            sources.push(Origin::Memory);
        }
        for (place, source) in self.sources.iter().enumerate() {
            let Some(source) = source else {
                continue;
            };
            let behind = source.draft.behind(ask.text);
            let ready = |behind| behind <= NEAR || source.draft.reads_hidden();
            if behind.is_some_and(ready) {
                offers.push(source.learned.offer(ask.most));
                sources.push(Origin::Source(place));
            }
        }
        if let Some(depth) = self.options.depth {
            let depth = depth.min(ask.most).min(MOST_DRAFTS);
            // A source of its own first: it knows more than the text does.
            return sources
                .last()
                .map(|&from| (from, depth, 0.0))
                .filter(|_| depth > 0);
        }
        let Choice {
            offer,
            depth,
            least,
        } = governor.choose(ask.pending, &offers, ask.again)?;
        Some((sources[offer], depth, least))
    }

    /// Records the time of the pass over `rows` rows, of which the drafts are the last, up to its first token; it read
    /// `bytes` from storage.
    pub fn passed(&mut self, rows: usize, bytes: u64, time: Duration) {
        self.totals.passes += 1;
        self.totals.bytes += bytes;
        self.totals.rows += rows as u64;
        self.pass = (rows, time);
    }

    /// Records a token that was drawn after the pass.
    pub fn drawn(&mut self, token: u32) {
        self.drawn.push(token);
    }

    /// Counts the drafts of the last pass, whose tokens are all drawn. Undoing the rejected ones took `undoing`.
    pub fn settle(&mut self, undoing: Duration) {
        let (rows, time) = std::mem::take(&mut self.pass);
        if let Some(governor) = self.governor.as_mut().filter(|_| rows > 0) {
            governor.passed(rows, self.drafts.len(), time + undoing);
        }
        let checked = &self.drafts[..];
        let taken = equal(checked, &self.drawn);
        let counts = DraftCounts {
            proposed: checked.len() as u64,
            taken: taken as u64,
        };
        let tried = self.drawn.len().min(checked.len());
        let from = Some(self.from).filter(|_| tried > 0);
        match self.from {
            Origin::Lookup => self.totals.lookup.add(counts),
            Origin::Memory => self.totals.memory.add(counts),
            Origin::Source(HEAD) => self.totals.heads.add(counts),
            Origin::Source(_) => self.totals.model.add(counts),
        }
        self.memory
            .settle(from == Some(Origin::Memory), taken, tried);
        for (place, source) in self.sources.iter_mut().enumerate() {
            if let Some(source) = source {
                let own = from == Some(Origin::Source(place));
                source.learned.settle(own, taken, tried);
            }
        }
        // Also what was not checked.
        if let Some(found) = self.found {
            let right = equal(&self.guessed, &self.drawn);
            let tried = self.drawn.len().min(self.guessed.len());
            self.matches[found.class()].count(right, tried.min(right + 1));
        }
        self.clear();
    }
}

/// Whether a source that ends so is used again.
fn kept(outcome: Result<(), Error>) -> bool {
    if let Err(error) = &outcome {
        tracing::warn!(%error, "a source of drafts is no longer used");
    }
    outcome.is_ok()
}

/// Number of equal tokens at the start.
pub(crate) fn equal(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
