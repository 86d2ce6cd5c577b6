//! Memory for a long prompt: its chunks may be longer than decoding has memory for.
//!
//! ```text
//! decoding  │ weights │ cache ················ │ buffers │
//! a prompt  │ weights │ cache ·········│ buffers ······· │
//! ```
//!
//! A pass reads each missing cluster once, so a longer chunk reads less per token, and a GPU is faster
//! with more rows. Both divisions stay within the budget: memory is freed before it is allocated.

use emberflow_storage::trim_heap;

use crate::engine::Engine;
use crate::error::Error;
use crate::ffn::FfnRoom;
use crate::forward::pass::Pass;
use crate::forward::scratch_room::{ScratchRoom, product_room};
use crate::forward::streams;
use crate::planner::{Candidates, Division, FORECAST_MARGIN};
use crate::room::{LongChunk, thread_floats};
use crate::rope::Ropes;
use crate::thread_buffer;

impl Engine {
    /// Changes the budget between two passes. A smaller budget frees memory before this returns; a
    /// larger one fills on demand, except with projections if the engine was opened without room for them. Results do not
    /// depend on it.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`], with nothing changed; or a failed read.
    pub fn set_budget(&mut self, bytes: u64) -> Result<(), Error> {
        self.first_tokens.restart();
        let batch = self.division.batch;
        let division =
            (self.planner()).divide_again(self.settled(), bytes, batch, Candidates::All)?;
        apply(self, division)
    }

    /// Longest chunk of a prompt so far, or that of the plan.
    pub fn prompt_chunk(&self) -> usize {
        self.longest.map_or(self.chunk(), |longest| longest.rows)
    }

    /// Rows of it that a lane computes with all neurons.
    pub(crate) fn rows_streamed(&self) -> usize {
        let usual = || self.decoder.ffn.rows_beside(self.chunk());
        self.longest.map_or_else(usual, |longest| longest.streamed)
    }

    /// Divides the memory for a prompt with `tokens` tokens left, if that is faster, until
    /// [`Engine::end_prompt`]. No pass may be in progress.
    ///
    /// # Errors
    /// Those of [`Engine::set_budget`].
    pub(crate) fn begin_prompt(&mut self, tokens: usize) -> Result<(), Error> {
        let fixed = self.config().form.inputs_by_layer().is_some() || self.options.lab.observe;
        if fixed
            || self.options.lab.count_fired
            || self.short_prompts
            || self.usual.is_some()
            // It would be divided for the times of a lane that is lost.
            || self.decoder.ffn.lane.as_ref().is_some_and(|lane| lane.has_failed())
            || tokens <= self.chunk()
        {
            return Ok(());
        }
        let Some(division) = self.planner().for_prompt(&self.division, tokens) else {
            return Ok(());
        };
        tracing::info!(tokens, chunk = division.chunk, "memory for a prompt");
        self.decoder.set_plan(&division.memory)?;
        let usual = std::mem::replace(&mut self.division, division);
        self.usual = Some(Box::new(usual));
        if !self.set_rows(false)? {
            tracing::warn!("prompts use shorter chunks");
            self.short_prompts = true;
            self.end_prompt()?;
        }
        Ok(())
    }

    /// Divides the memory for decoding again.
    ///
    /// # Errors
    /// As [`Engine::begin_prompt`].
    pub(crate) fn end_prompt(&mut self) -> Result<(), Error> {
        let Some(usual) = self.usual.take() else {
            return Ok(());
        };
        let (budget, batch) = (self.division.memory.budget(), self.division.batch);
        self.division =
            (self.planner()).divide_again(&usual, budget, batch, Candidates::Current)?;
        self.set_rows(true)?;
        // Freed heap memory would count in addition to the cache.
        trim_heap();
        self.decoder.set_plan(&self.division.memory)
    }

    /// Buffers for the division's chunk. False if the lane has no memory for them, unless it `must`; all others are allocated.
    fn set_rows(&mut self, must: bool) -> Result<bool, Error> {
        self.options.lab.chunk = self.division.chunk;
        let rows = self.most_rows();
        let ffn = FfnRoom {
            rows,
            ..self.rooms.ffn
        };
        let context = self.options.context;
        let Self { decoder, pass, .. } = self;
        let c = &decoder.config;
        thread_buffer::set_len(thread_floats(c, rows));
        *pass = Pass::default();
        *pass = Pass::new(rows, c.d_model as usize, streams::aux_width(c));
        decoder.rope = Ropes::new(c, rows, context);
        let tiles = decoder.tiles.is_some();
        ScratchRoom::of(&self.options, rows, tiles).resize(c, &mut decoder.scratch);
        decoder.specials.set_rows(c, rows);
        decoder.ffn.set_room(c, &ffn);
        let logit_rows = self.options.logit_rows();
        let products = product_room(c, rows, logit_rows, self.rooms.gates);
        let room = ffn.of_lane(decoder.config.bundle_width() as usize);
        let fits = match &mut decoder.ffn.lane {
            Some(lane) => lane.set_room(&room, &products, &self.division.widths, must)?,
            None => true,
        };
        let longest = LongChunk {
            rows: self.chunk(),
            streamed: self.decoder.ffn.rows_beside(self.chunk()),
        };
        let before = self.longest.map_or(0, |longest| longest.rows);
        if fits && longest.rows > before {
            self.longest = Some(longest);
        }
        Ok(fits)
    }
}

/// Divides the memory differently, with this budget or another.
///
/// # Errors
/// A failed read.
fn apply(engine: &mut Engine, division: Division) -> Result<(), Error> {
    engine.end_prompt()?;
    let (hold, decoder) = (division.memory.tables, &mut engine.decoder);
    // Free first, then allocate.
    decoder.hold_tables(|number, table| hold[number] && table.is_held())?;
    decoder.set_plan(&division.memory)?;
    decoder.hold_tables(|number, _| hold[number])?;
    engine.division = division;
    engine.drafts.forget_times();
    Ok(())
}

/// Counts a decoded token of a single text. Divides the memory again once the run's first tokens have
/// corrected the plan's assumptions (see [`crate::first_tokens`]).
///
/// # Errors
/// A failed read.
pub(crate) fn token_decoded(engine: &mut Engine) -> Result<(), Error> {
    let lane = engine.decoder.ffn.lane.is_some();
    if lane || !engine.first_tokens.corrects(&engine.planner) {
        return Ok(());
    }
    let now = engine.counters();
    let Some(seen) = engine.first_tokens.count(now) else {
        return Ok(());
    };
    let firing = engine.planner.corrected_firing(engine.settled(), &seen);
    tracing::info!(
        fire = firing.share(),
        misses = firing.miss_times,
        "neurons of the first tokens"
    );
    engine.planner.firing = firing;
    let (planner, settled) = (&engine.planner, engine.settled());
    match planner.divide_again(settled, engine.memory().budget(), 1, Candidates::All) {
        // Moving the regions costs reads.
        Ok(new) if planner.speed(&new, 1) > FORECAST_MARGIN * planner.speed(settled, 1) => {
            apply(engine, new)
        }
        Ok(_) => Ok(()),
        Err(e) => {
            tracing::warn!(error = %e, "memory stays divided as it is");
            Ok(())
        }
    }
}
