//! The forward pass: embedding, layers, head.
//!
//! A [`Pass`] can yield between two layers and resume without recomputation. Apart from the state
//! of the sequences, its only state is the residual stream.

mod narrow;

use std::ops::Range;
use std::time::{Duration, Instant};

use emberflow_kernels::Compute;
use emberflow_models::config::{ModelConfig, Parallel};

use crate::embedding::Embedding;
use crate::error::Error;
use crate::ffn::{BankWork, Bias, Ffn, FfnSeen, LayerInput, NextLayer, Rows};
use crate::hyper::{Hyper, Reader};
use crate::input::Input;
use crate::layer_inputs::LayerInputs;
use crate::mixer::{LayerPass, Mixed};
use crate::ngrams::NGramLayer;
use crate::norm::{add_output, add_rows, rows_or_copy, scale_logits};
use crate::pass::Pass;
use crate::rope::Ropes;
use crate::router_ahead::{RouterAhead, likely_banks};
use crate::scratch::Scratch;
use crate::state::Span;
use crate::streams::{self, ResidualStreams};
use crate::trace;
use crate::weights::Weights;

/// Called for every FFN, before its output is added to the residual stream.
pub type FfnObserver<'a> = dyn FnMut(&FfnSeen<'_>) + 'a;

/// Inputs and outputs of a layer's mixer, for an observer of [`crate::Engine::forward_residual`].
pub struct AttentionSeen<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// Tokens of the chunk.
    pub tokens: usize,
    /// Input of the first projections: the residual stream after the norm, `[tokens × d_model]`.
    pub x: &'a [f32],
    /// Input of the last projection: the mixed values, `[tokens × width]`.
    pub mixed: &'a [f32],
    /// Keys and values as stored, `[tokens × kv_heads·head_dim]` each; empty if the layer has none.
    pub stored: [&'a [f32]; 2],
}

/// Rows that enter the layers as residual streams, for [`crate::Engine::forward_residual`].
pub struct StreamRows<'a> {
    /// Their tokens; used only by layers with inputs per token.
    pub tokens: &'a [u32],
    /// Residual streams, `[rows × streams·d_model]`; if empty, the tokens' embeddings are used.
    pub x: &'a mut Vec<f32>,
    /// What the first layer stores instead of its own keys and values, `[rows × kv_heads·head_dim]`
    /// each.
    pub stored: Option<[&'a [f32]; 2]>,
}

/// Called for every attention, before its output is added to the residual stream.
pub type AttentionObserver<'a> = dyn FnMut(&AttentionSeen<'_>) + 'a;

/// Callbacks of a pass.
#[derive(Default)]
pub(crate) struct Hooks<'a, 'b> {
    pub observer: Option<&'a mut FfnObserver<'b>>,
    pub attention: Option<&'a mut AttentionObserver<'b>>,
    /// The pass begins and ends between two layers.
    pub between: Option<Between<'a>>,
    /// Polled between layers: whether to yield.
    pub yields: Option<&'a dyn Fn() -> bool>,
}

/// See [`StreamRows`].
#[derive(Clone, Copy)]
pub(crate) struct Between<'a> {
    pub x: &'a [f32],
    pub stored: Option<[&'a [f32]; 2]>,
}

/// The model and its buffers: all state of a forward pass except the sequences.
pub(crate) struct Decoder {
    pub on: Compute,
    pub config: ModelConfig,
    pub weights: Weights,
    /// `None` if tied to the head.
    pub embedding: Option<Embedding>,
    /// Per-layer inputs and further residual streams.
    pub layer_inputs: Option<LayerInputs>,
    pub streams: Option<ResidualStreams>,
    /// Hyper-connections between residual streams.
    pub hyper: Option<Hyper>,
    /// N-gram embedding rows.
    pub ngrams: Option<NGramLayer>,
    pub ffn: Ffn,
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
    /// Row `row` of the last computed logits, `[vocab]`.
    pub fn logits(&self, row: usize) -> &[f32] {
        let vocab = self.config.vocab as usize;
        &self.scratch.logits[row * vocab..(row + 1) * vocab]
    }

    /// Bytes of resident weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let streams = self.streams.as_ref();
        let inputs = self.layer_inputs.as_ref();
        self.weights.bytes_per_token()
            + streams.map_or(0, ResidualStreams::bytes_per_token)
            + inputs.map_or(0, LayerInputs::bytes_per_token)
            + self.hyper.as_ref().map_or(0, Hyper::bytes_per_token)
            + self.ngrams.as_ref().map_or(0, NGramLayer::bytes_per_token)
    }

    /// Most rows of logits per call.
    pub fn most_logits(&self) -> usize {
        self.scratch.logits.len() / self.config.vocab as usize
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
        if fresh {
            self.ffn.store.step_border()?;
        }
        let rows = spans.iter().map(|span| span.tokens.len());
        self.ffn.begin_pass(rows, fresh);
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
                self.begin(pass, spans, hooks.between)?;
                pass.layers = Some(0);
                0
            }
        };
        for layer in first..self.weights.layers.len() {
            (self.scratch.input).set_pruned(self.weights.layers[layer].pruned);
            let ran = self.layer(layer, pass, spans, &mut hooks);
            self.scratch.input.set_pruned(false);
            ran?;
            pass.layers = Some(layer + 1);
            let more = layer + 1 < self.weights.layers.len();
            if more && hooks.yields.is_some_and(|yields| yields()) {
                return Ok(false);
            }
        }
        if let (Some(streams), None) = (&mut self.streams, hooks.between) {
            streams.merge(&self.on, pass, &mut self.scratch);
        }
        for span in spans {
            span.sequence.advance(span.tokens);
        }
        Ok(true)
    }

    /// Computes the input of the first layer.
    fn begin(
        &mut self,
        pass: &mut Pass,
        spans: &[Span<'_>],
        between: Option<Between<'_>>,
    ) -> Result<(), Error> {
        self.ask(spans)?;
        let given = between.map_or(&[][..], |rows| rows.x);
        if given.is_empty() || self.layer_inputs.is_some() {
            self.embed(pass, spans)?;
            self.begin_inputs(pass, spans)?;
        }
        if let (Some(streams), true) = (&mut self.streams, given.is_empty()) {
            streams.others(&self.on, pass, &mut self.scratch);
        }
        if let (Some(hyper), true) = (&self.hyper, given.is_empty()) {
            hyper.begin(pass);
        }
        if !given.is_empty() {
            streams::put(&self.config, pass, given);
        }
        Ok(())
    }

    /// Starts reading the table rows that layers need.
    fn ask(&mut self, spans: &[Span<'_>]) -> Result<(), Error> {
        let store = &mut self.ffn.store;
        if let Some(inputs) = &mut self.layer_inputs {
            inputs.ask(store, spans.iter().flat_map(|span| span.tokens).copied())?;
        }
        let ngrams = self.ngrams.as_mut();
        ngrams.map_or(Ok(()), |ngrams| ngrams.ask(store, spans))
    }

    /// Computes the per-layer inputs of all layers.
    fn begin_inputs(&mut self, pass: &mut Pass, spans: &[Span<'_>]) -> Result<(), Error> {
        let Some(inputs) = &mut self.layer_inputs else {
            return Ok(());
        };
        let tokens = spans.iter().flat_map(|span| span.tokens).copied();
        inputs.read(self.on.cpu, &mut self.ffn.store, tokens)?;
        inputs.begin(&self.on, pass, &mut self.scratch);
        Ok(())
    }

    /// Looks up the embedding rows into the residual stream.
    fn embed(&mut self, pass: &mut Pass, spans: &[Span<'_>]) -> Result<(), Error> {
        let d = self.config.d_model as usize;
        let store = &mut self.ffn.store;
        store.tracer.section(&trace::EMBEDDING, [0; 2]);
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

    /// One layer: adds attention, then the FFN, to the residual stream.
    fn layer(
        &mut self,
        number: usize,
        pass: &mut Pass,
        spans: &mut [Span<'_>],
        hooks: &mut Hooks<'_, '_>,
    ) -> Result<(), Error> {
        let mut last = Instant::now();
        self.route_early(number, pass)?;
        if let Some(streams) = &mut self.streams {
            streams.predict(&self.on, number, pass, &mut self.scratch);
        }
        if let Some(ngrams) = self.ngrams.as_mut().filter(|of| of.is_at(number)) {
            let store = &mut self.ffn.store;
            ngrams.add(&self.on, store, spans, pass, &mut self.scratch)?;
        }
        if let Some(hyper) = &mut self.hyper {
            hyper.mix(&self.on, Reader::Mixer(number), pass, &mut self.scratch);
        }
        self.mix(number, pass, spans, hooks);
        lap(&mut self.times.attention, &mut last);
        if self.config.has_ffn(number as u32) {
            self.feed(number, pass, hooks)?;
        }
        self.add(number, pass);
        self.end_layer(number, pass);
        lap(&mut self.times.ffn, &mut last);
        Ok(())
    }

    /// The steps after a layer's FFN: further streams, the per-layer input, a factor.
    fn end_layer(&mut self, number: usize, pass: &mut Pass) {
        let s = &mut self.scratch;
        match (&mut self.streams, &mut self.layer_inputs) {
            (Some(streams), Some(inputs)) => streams.correct(&self.on, number, inputs, pass, s),
            (None, Some(inputs)) => inputs.add(&self.on, number, pass, s),
            (_, None) => {}
        }
        let scale = self.weights.layers[number].scale;
        if scale != 1.0 {
            let len = pass.rows * self.config.d_model as usize;
            pass.x[..len].iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Starts reading the experts that the tokens' ids select, or those of a single token that an early router chooses, which
    /// reads the layer's input.
    fn route_early(&mut self, number: usize, pass: &Pass) -> Result<(), Error> {
        let (on, c, s) = (&self.on, &self.config, &mut self.scratch);
        let (n, layer) = (pass.rows, &self.weights.layers[number]);
        let place = c.ffn_place(number as u32);
        let store = &mut self.ffn.store;
        let (Some(router), Some(mixture)) = (&layer.router, c.mixture_of(number as u32)) else {
            return Ok(());
        };
        if !s.routes.choose_by_token(on, router, n) {
            if !mixture.early_router {
                return Ok(());
            }
            store.tracer.section(&trace::ROUTER, [number as u64, 0]);
            let x = &pass.x[..n * c.d_model as usize];
            let input = Input::new(on.cpu, x, n, &mut s.input);
            s.routes.choose(on, router, mixture, input, &mut s.rows);
            if n > 1 {
                return Ok(());
            }
        }
        let first = store.layout.banks_of(place).start;
        let units = s.routes.visited().map(|expert| first + expert);
        store.read_chosen(place, units)
    }

    /// Runs the layer's mixer and computes the FFN's input. If both read the layer's input, the
    /// mixer's output is held until the FFN has read it.
    fn mix(
        &mut self,
        number: usize,
        pass: &mut Pass,
        spans: &mut [Span<'_>],
        hooks: &mut Hooks<'_, '_>,
    ) {
        let (on, c, s) = (&self.on, &self.config, &mut self.scratch);
        let (n, layer) = (pass.rows, &self.weights.layers[number]);
        let (tracer, width) = (&self.ffn.store.tracer, n * c.d_model as usize);
        tracer.section(&trace::ATTENTION, [number as u64, 0]);
        rows_or_copy(
            layer.attn_norm.as_ref(),
            on.cpu,
            &pass.x[..width],
            &mut s.normed,
        );
        if layer.mixer.is_none() {
            return;
        }
        let at = LayerPass {
            config: c,
            number,
            rope: self.rope.of(number),
            given: hooks.between.filter(|_| number == 0).and_then(|b| b.stored),
        };
        layer.mixer.run(on, at, spans, s);
        if let Some(observer) = &mut hooks.attention {
            let Mixed { mixed, stored } = layer.mixer.seen(n, s);
            observer(&AttentionSeen {
                layer: number,
                tokens: n,
                x: &s.normed[..width],
                mixed,
                stored,
            });
        }
        if c.form.parallel == Parallel::No {
            let post = layer.attn_post_norm.as_ref();
            let (out, scale) = (&mut s.out[..width], c.form.residual_scale);
            match &mut self.hyper {
                Some(hyper) => {
                    hyper.add(on, out, pass);
                    hyper.mix(on, Reader::Ffn(number), pass, s);
                }
                None => add_output(on.cpu, post, scale, out, &mut pass.x),
            }
            if let Some(streams) = &mut self.streams {
                streams.add_laurel(on, number, pass, s);
            }
            let before = layer.ffn_norm.as_ref();
            rows_or_copy(before, on.cpu, &pass.x[..width], &mut s.normed);
        } else {
            if let Some(norm) = &layer.ffn_norm {
                norm.rows(on.cpu, &pass.x[..width], &mut s.normed);
            }
            std::mem::swap(&mut s.out, &mut s.parallel);
        }
    }

    /// Computes a layer's FFN, into `scratch.out`.
    fn feed(&mut self, number: usize, pass: &Pass, hooks: &mut Hooks<'_, '_>) -> Result<(), Error> {
        let layer = &self.weights.layers[number];
        match (&layer.parallel_dense, &layer.narrow) {
            (Some(_), _) => self.run_parallel_dense(number, pass, hooks),
            (None, Some(_)) => self.run_narrow(number, pass, hooks),
            (None, None) => self.run_ffn(number, pass, hooks),
        }
    }

    /// Experts in parallel with a dense FFN, each with its own norms, into `scratch.out`. The router
    /// reads the residual stream.
    fn run_parallel_dense(
        &mut self,
        number: usize,
        pass: &Pass,
        hooks: &mut Hooks<'_, '_>,
    ) -> Result<(), Error> {
        let (on, c, ffn, s) = (&self.on, &self.config, &mut self.ffn, &mut self.scratch);
        let (n, d, layers) = (pass.rows, c.d_model as usize, &self.weights.layers);
        let (layer, residual) = (&layers[number], &pass.x[..n * d]);
        let (Some(norms), Some(router), Some(mixture)) =
            (&layer.parallel_dense, &layer.router, &c.mixture)
        else {
            return Ok(());
        };
        let place = c.ffn_place(number as u32);
        let bank = ffn.store.layout.banks_of(place).start;
        (ffn.store.tracer).section(&trace::ROUTER, [number as u64, 0]);
        let dense_out = &mut s.parallel[..n * d];
        rows_or_copy(router.norm.as_ref(), on.cpu, residual, dense_out);
        let input = Input::new(on.cpu, dense_out, n, &mut s.input);
        s.routes.choose(on, router, mixture, input, &mut s.rows);
        if n == 1 {
            let units = s.routes.visited().map(|expert| bank + expert);
            ffn.store.read_chosen(place, units)?;
        }
        let units = s.routes.units(bank, n, None);
        let Some((dense, experts)) = units.split_last() else {
            return Ok(());
        };
        // `normed` has the norm before the FFN.
        let input = Input::new(on.cpu, &s.normed[..n * d], n, &mut s.input);
        let at = LayerInput {
            then: experts,
            ..LayerInput::alone(place, std::slice::from_ref(dense), input, residual)
        };
        ffn.layer(on, &at, dense_out)?;
        let observed = if hooks.observer.is_some() { n * d } else { 0 };
        let dense_input = s.normed[..observed].to_vec();
        norms.dense_post.rows_inplace(on.cpu, dense_out);
        norms.experts.rows(on.cpu, residual, &mut s.normed);
        let row = (n == 1).then(|| (s.routes.first_token(), &pass.x[..d]));
        let ahead = likely_banks(&mut self.ahead, &ffn.store, on, c, layers, number, row);
        let input = Input::new(on.cpu, &s.normed[..n * d], n, &mut s.input);
        let at = LayerInput {
            ahead,
            ..LayerInput::alone(place, experts, input, residual)
        };
        ffn.layer(on, &at, &mut s.out)?;
        let out = &mut s.out[..n * d];
        norms.experts_post.rows_inplace(on.cpu, out);
        add_rows(out, dense_out, n * d);
        if let Some(observer) = &mut hooks.observer {
            observer(&ffn.seen(FfnSeen {
                layer: place,
                tokens: n,
                residual,
                x: &s.normed[..n * d],
                dense: &dense_input,
                choices: s.routes.choices(n),
                gates: &[],
                hidden: &[],
            }));
        }
        Ok(())
    }

    /// The FFN of a layer for the rows of `scratch.normed`, into `scratch.out`.
    fn run_ffn(
        &mut self,
        number: usize,
        pass: &Pass,
        hooks: &mut Hooks<'_, '_>,
    ) -> Result<(), Error> {
        let (on, c, ffn, s) = (&self.on, &self.config, &mut self.ffn, &mut self.scratch);
        let (n, d, layers) = (pass.rows, c.d_model as usize, &self.weights.layers);
        let (width, layer) = (n * d, &layers[number]);
        let place = c.ffn_place(number as u32);
        let mut later = number + 1..layers.len();
        let next = later.find(|&layer| c.has_ffn(layer as u32));
        let next = next.map(|next| &layers[next]);
        let bank = ffn.store.layout.banks_of(place).start;
        let input = Input::new(on.cpu, &s.normed[..width], n, &mut s.input);
        let biases = layer.ffn_bias.as_ref();
        let dense = [BankWork {
            bank,
            rows: Rows::All(n),
            weights: None,
            scales: None,
            bias: Bias::of(biases, 0),
            hidden: None,
        }];
        let experts = match (&layer.router, &c.mixture) {
            (Some(router), Some(mixture)) => {
                if !mixture.early_router {
                    (ffn.store.tracer).section(&trace::ROUTER, [number as u64, 0]);
                    s.routes.choose(on, router, mixture, input, &mut s.rows);
                }
                Some(s.routes.units(bank, n, biases))
            }
            _ => None,
        };
        let row = (n == 1).then(|| (s.routes.first_token(), &pass.x[..d]));
        let ahead = likely_banks(&mut self.ahead, &ffn.store, on, c, layers, number, row);
        let units = experts.as_deref().unwrap_or(&dense);
        let at = LayerInput {
            next: next.map(|next| NextLayer {
                norm: next.before_ffn(),
                bias: Bias::of(next.ffn_bias.as_ref(), 0).gate,
            }),
            ahead,
            ..LayerInput::alone(place, units, input, &pass.x[..width])
        };
        ffn.layer(on, &at, &mut s.out)?;
        if let Some(observer) = &mut hooks.observer {
            let choices = experts.map_or(&[][..], |_| s.routes.choices(n));
            observer(&ffn.seen(FfnSeen {
                layer: place,
                tokens: n,
                residual: &pass.x[..width],
                x: &s.normed[..width],
                dense: &[],
                choices,
                gates: &[],
                hidden: &[],
            }));
        }
        Ok(())
    }

    /// Adds a layer's FFN output to the residual stream, after the mixer's output if that was held.
    fn add(&mut self, number: usize, pass: &mut Pass) {
        let (c, cpu, s) = (&self.config, self.on.cpu, &mut self.scratch);
        let (width, scale) = (pass.rows * c.d_model as usize, c.form.residual_scale);
        if c.form.parallel != Parallel::No && c.has_mixer(number as u32) {
            add_output(cpu, None, scale, &mut s.parallel[..width], &mut pass.x);
        }
        if c.has_ffn(number as u32) {
            let post = self.weights.layers[number].ffn_post_norm.as_ref();
            match &self.hyper {
                Some(hyper) => hyper.add(&self.on, &s.out[..width], pass),
                None => add_output(cpu, post, scale, &mut s.out[..width], &mut pass.x),
            }
        }
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
        let together = match &mut self.hyper {
            Some(hyper) => hyper.mix_rows(&self.on, Reader::Head, rows.clone(), pass, s),
            None => 0,
        };
        let norm = self.weights.final_norm.as_ref();
        for (at, (row, normed)) in rows.zip(s.normed.chunks_exact_mut(d)).enumerate() {
            let row = if at < together { at } else { row };
            rows_or_copy(norm, cpu, &pass.x[row * d..][..d], normed);
        }
    }

    /// Computes the logits of `rows` of a finished pass, at most [`Decoder::most_logits`], with one
    /// read of the head's weights. [`Decoder::logits`] returns them in this order.
    pub fn head(&mut self, pass: &mut Pass, rows: impl ExactSizeIterator<Item = usize> + Clone) {
        let start = Instant::now();
        let tracer = &self.ffn.store.tracer;
        tracer.section(&trace::HEAD, [0; 2]);
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
    }
}

/// Adds the time since `last` to `sum` and restarts.
fn lap(sum: &mut Duration, last: &mut Instant) {
    let now = Instant::now();
    *sum += now - *last;
    *last = now;
}
