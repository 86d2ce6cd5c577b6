//! The forward pass: embedding, layers, head.
//!
//! A layer is a list of steps, built once from the configuration (`layer.rs`). A step has its weights and one
//! file; what only some families have is a step that the other lists lack, or an argument of one.
//!
//! A [`Pass`] can yield between two layers and resume without recomputation. Apart from the state
//! of the sequences, its only state is the residual stream.

mod add;
mod at;
pub(crate) mod embedding;
mod feed;
mod hooks;
pub(crate) mod hyper;
mod layer;
pub(crate) mod layer_inputs;
mod layer_weights;
mod mix;
pub(crate) mod mtp;
mod narrow_experts;
pub(crate) mod ngrams;
pub(crate) mod pass;
mod route;
pub(crate) mod router_ahead;
pub(crate) mod scratch_room;
pub(crate) mod specials;
mod step;
pub(crate) mod streamed;
pub(crate) mod streams;
pub(crate) mod weights;

use std::ops::Range;
use std::time::{Duration, Instant};

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;

use crate::error::Error;
use crate::ffn::Ffn;
use crate::input::Input;
use crate::memory::MemoryPlan;
use crate::norm::{add_rows, rows_or_copy, scale_logits};
use crate::rope::Ropes;
use crate::scratch::Scratch;
use crate::state::{Sequence, Span};
use crate::tiles::TileStore;
use crate::trace;
use at::At;
use embedding::{Embedding, hold_tables};
pub use hooks::{AttentionObserver, AttentionSeen, FfnObserver, StreamRows};
pub(crate) use hooks::{Between, Hooks};
use pass::Pass;
use router_ahead::RouterAhead;
use specials::Specials;
use weights::Weights;

/// The model and its buffers: all state of a forward pass except the sequences.
pub(crate) struct Decoder {
    pub on: Compute,
    pub tracer: Tracer,
    pub config: ModelConfig,
    pub weights: Weights,
    /// `None` if tied to a head in memory.
    pub embedding: Option<Embedding>,
    pub specials: Specials,
    pub ffn: Ffn,
    /// The tiles, if FFNs lie in tiles.
    pub tiles: Option<TileStore>,
    /// Guesses the next layer's experts; `None` without experts.
    pub ahead: Option<RouterAhead>,
    pub rope: Ropes,
    pub scratch: Scratch,
    pub times: Times,
}

/// Time of all passes by part.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    pub attention: Duration,
    pub ffn: Duration,
    pub head: Duration,
}

impl Decoder {
    /// Whether a pass that computes only what is in memory differs from a whole one and reads nothing, and only the CPU
    /// computes.
    pub fn leaves_out(&self) -> bool {
        if self.weights.stream.is_some() {
            return false;
        }
        let store = &self.ffn.store;
        let tiles = (self.tiles.as_ref()).is_some_and(|tiles| !tiles.holds_all());
        let neurons = store.capacity() < store.layout.total();
        (tiles || neurons) && self.ffn.lane.is_none()
    }

    /// Row `row` of the last computed logits, `[vocab]`.
    pub fn logits(&self, row: usize) -> &[f32] {
        let vocab = self.config.vocab as usize;
        &self.scratch.logits[row * vocab..(row + 1) * vocab]
    }

    /// Bytes of resident weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        self.weights.bytes_per_token() + self.specials.bytes_per_token()
    }

    /// Most rows of logits per call.
    pub fn most_logits(&self) -> usize {
        self.scratch.logits.len() / self.config.vocab as usize
    }

    /// Loads the tables for which `hold` is true and frees the others.
    pub fn hold_tables(&mut self, hold: impl Fn(usize, &Embedding) -> bool) -> Result<(), Error> {
        let [inputs, ngrams] = self.specials.tables_mut();
        let mut tables = [self.embedding.as_mut(), inputs, ngrams];
        hold_tables(&mut tables, &self.ffn.store.layout.container, hold)
    }

    /// Divides the memory for weights as `plan` says, between two passes.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        if let Some(tiles) = &mut self.tiles {
            tiles.settle(&mut self.ffn.store)?;
            tiles.set_slots(plan.tile_slots);
        }
        self.ffn.set_plan(plan)
    }

    /// Runs a pass over `spans`, whose tokens are valid and fit their sequences, through all layers
    /// and advances the sequences. False if it yields; the same call resumes it. A row's result
    /// depends only on its own sequence.
    pub fn run(
        &mut self,
        pass: &mut Pass,
        spans: &mut [Span<'_>],
        mut hooks: Hooks<'_, '_>,
    ) -> Result<bool, Error> {
        let fresh = pass.layers.is_none();
        // A pass that was interrupted has not all inputs of its recurrences.
        self.scratch.replay.begin(match spans {
            [span] if fresh => span.tokens.len(),
            _ => 0,
        });
        if fresh {
            if !hooks.held_only {
                self.ffn.store.step_border()?;
            }
            if let Some(tiles) = self.tiles.as_mut().filter(|_| !hooks.held_only) {
                tiles.begin_pass();
            }
        }
        let rows = spans.iter().map(|span| span.tokens.len());
        match hooks.held_only {
            true => self.ffn.begin_drafts(rows),
            false => self.ffn.begin_pass(rows, fresh),
        }
        let positions = spans.iter().flat_map(|span| {
            let first = span.sequence.len();
            first..first + span.tokens.len()
        });
        (positions.enumerate()).for_each(|(row, position)| self.rope.fill(row, position));
        let tokens = spans.iter().flat_map(|span| span.tokens).copied();
        self.scratch.routes.set_tokens(tokens);
        for span in spans.iter_mut() {
            // Also when a pass resumes: other sequences may share the pages by then.
            span.sequence.prepare(span.tokens.len());
        }
        let first = match pass.layers {
            Some(layers) => layers,
            None => {
                self.begin(pass, spans, &hooks)?;
                pass.layers = Some(0);
                0
            }
        };
        for layer in first..self.weights.layers.len() {
            self.layer(layer, pass, spans, &mut hooks)?;
            pass.layers = Some(layer + 1);
            let more = layer + 1 < self.weights.layers.len();
            if more && hooks.yields.is_some_and(|yields| yields()) {
                return Ok(false);
            }
        }
        if let (Some(streams), None) = (&mut self.specials.streams, hooks.between) {
            streams.merge(&self.on, pass, &mut self.scratch);
        }
        self.check_stream()?;
        for span in spans {
            span.sequence.advance(span.tokens);
        }
        Ok(true)
    }

    /// Fails if a matrix that is read for every pass was not read, or its file has changed.
    fn check_stream(&self) -> Result<(), Error> {
        let Some(stream) = &self.weights.stream else {
            return Ok(());
        };
        stream.check()?;
        let mut files = stream.files().iter();
        files.try_for_each(|&offset| self.ffn.store.check_file(offset))
    }

    /// Whether [`Decoder::undo`] leaves the first rows of a pass, although the state is recurrent.
    pub fn replays(&self) -> bool {
        self.scratch.replay.is_possible()
    }

    /// Undoes the last rows of the last pass, which was over `tokens` of `sequence` alone, from position `len` on. A recurrent
    /// state is then that before the pass, or after the other rows if they can be replayed.
    pub fn undo(&mut self, sequence: &mut Sequence, tokens: &[u32], len: usize) {
        let rows = tokens.len();
        let count = (len + rows).saturating_sub(sequence.len());
        let replays = (1..rows).contains(&count) && self.scratch.replay.rows() == rows;
        if sequence.goes_back() || !replays {
            sequence.undo(rows, len);
            return;
        }
        sequence.begin_replay(rows, count);
        let tokens = &tokens[..count];
        for (number, layer) in self.weights.layers.iter().enumerate() {
            if let Some(mixer) = layer.mixer() {
                let span = Span { sequence, tokens };
                mixer.replay(&self.on, number, span, &mut self.scratch);
            }
        }
        sequence.end_replay(rows, count);
    }

    /// Computes the input of the first layer.
    fn begin(
        &mut self,
        pass: &mut Pass,
        spans: &[Span<'_>],
        hooks: &Hooks<'_, '_>,
    ) -> Result<(), Error> {
        self.specials.ask(&mut self.ffn.store, spans)?;
        let given = hooks.between.map_or(&[][..], |rows| rows.x);
        if given.is_empty() || self.specials.layer_inputs.is_some() {
            self.embed(pass, spans)?;
            let (store, s) = (&mut self.ffn.store, &mut self.scratch);
            (self.specials).begin_inputs(&self.on, store, spans, pass, s)?;
            if let Some(mtp) = &mut self.specials.mtp {
                mtp.join(&self.on, hooks.hidden, pass, s);
            }
        }
        if given.is_empty() {
            (self.specials).begin_streams(&self.on, pass, &mut self.scratch);
        } else {
            streams::put(&self.config, pass, given);
        }
        Ok(())
    }

    /// Looks up the embedding rows into the residual stream.
    fn embed(&mut self, pass: &mut Pass, spans: &[Span<'_>]) -> Result<(), Error> {
        let d = self.config.d_model as usize;
        let store = &mut self.ffn.store;
        self.tracer.section(&trace::EMBEDDING, [0; 2]);
        let tokens = spans.iter().flat_map(|span| span.tokens).copied();
        match &mut self.embedding {
            Some(embedding) => embedding.rows(self.on.cpu, store, tokens, &mut pass.x)?,
            None => {
                for (token, x) in tokens.zip(pass.x.chunks_exact_mut(d)) {
                    let row = self.weights.head.row(token as usize);
                    self.on.cpu.dequantize(row, x);
                }
            }
        }
        let scale = self.config.form.embedding_scale;
        let rows = &mut pass.x[..pass.rows * d];
        if scale != 1.0 {
            rows.iter_mut().for_each(|x| *x *= scale);
        }
        if let Some(table) = &self.weights.positions {
            let before = self.config.form.learned_positions.unwrap_or(0) as usize;
            let positions = spans.iter().flat_map(|span| {
                let first = before + span.sequence.len();
                first..first + span.tokens.len()
            });
            let vector = &mut self.scratch.out[..d];
            for (position, x) in positions.zip(rows.chunks_exact_mut(d)) {
                self.on.cpu.dequantize(table.row(position), vector);
                add_rows(x, vector, d);
            }
        }
        Ok(())
    }

    /// One layer: the steps of its list.
    fn layer(
        &mut self,
        number: usize,
        pass: &mut Pass,
        spans: &mut [Span<'_>],
        hooks: &mut Hooks<'_, '_>,
    ) -> Result<(), Error> {
        let mut last = Instant::now();
        let layer = &self.weights.layers[number];
        let mut at = At {
            on: &self.on.pruning(layer.pruned),
            config: &self.config,
            tracer: &self.tracer,
            layer: number,
            pass,
            spans,
            scratch: &mut self.scratch,
            specials: &mut self.specials,
            ffn: &mut self.ffn,
            tiles: &mut self.tiles,
            ahead: &mut self.ahead,
            rope: &self.rope,
            hooks,
            dense: Vec::new(),
        };
        layer.mix(&mut at)?;
        lap(&mut self.times.attention, &mut last);
        layer.feed(&mut at)?;
        lap(&mut self.times.ffn, &mut last);
        Ok(())
    }

    /// The last hidden states of `rows` of a finished pass, the input of the head,
    /// `[rows × d_model]`.
    pub fn hidden(&mut self, pass: &mut Pass, rows: Range<usize>) -> &[f32] {
        let len = rows.len() * self.config.d_model as usize;
        self.finish(pass, rows);
        &self.scratch.normed[..len]
    }

    /// Normalises the `rows` of a finished pass; further streams are mixed for these rows only.
    fn finish(&mut self, pass: &mut Pass, rows: impl Iterator<Item = usize> + Clone) {
        let (cpu, s, d) = (self.on.cpu, &mut self.scratch, self.config.d_model as usize);
        let together = (self.specials).mix_for_head(&self.on, rows.clone(), pass, s);
        let norm = self.weights.final_norm.as_ref();
        for (at, (row, normed)) in rows.zip(s.normed.chunks_exact_mut(d)).enumerate() {
            let row = if at < together { at } else { row };
            rows_or_copy(norm, cpu, &pass.x[row * d..][..d], normed);
        }
    }

    /// Computes the logits of `rows` of a finished pass, at most [`Decoder::most_logits`], with one
    /// read of the head's weights. [`Decoder::logits`] returns them in this order.
    ///
    /// # Errors
    /// A failed read, if the head is read for every pass.
    pub fn head(
        &mut self,
        pass: &mut Pass,
        rows: impl ExactSizeIterator<Item = usize> + Clone,
    ) -> Result<(), Error> {
        let start = Instant::now();
        self.tracer.section(&trace::HEAD, [0; 2]);
        let count = rows.len();
        self.finish(pass, rows);
        let (c, on, s) = (&self.config, &self.on, &mut self.scratch);
        let d = c.d_model as usize;
        let input = Input::new(on.cpu, &s.normed[..count * d], count, &mut s.input);
        let logits = &mut s.logits[..count * c.vocab as usize];
        self.weights.head.matmul(on, input, &mut s.rows, logits);
        if let Some(bias) = &self.weights.head_bias {
            let rows = logits.chunks_exact_mut(bias.len());
            rows.for_each(|row| add_rows(row, bias, bias.len()));
        }
        scale_logits(on, logits, c.form.logit_scale, c.form.logit_cap);
        self.times.head += start.elapsed();
        self.check_stream()
    }
}

/// Adds the time since `last` to `sum` and restarts.
fn lap(sum: &mut Duration, last: &mut Instant) {
    let now = Instant::now();
    *sum += now - *last;
    *last = now;
}
