//! N-gram embeddings (Qwen3.8-Flash-Next: per-layer embedding). Formulas as in
//! `modeling_qwen4_exp.py`. Before its mixer, one layer adds to each of its streams:
//!
//! ```text
//! e = table rows of the hashes of the last 2, 3, … tokens       k = norm(Key · e)       v = Value · e
//! s = k·norm(stream) / √d_model       g = σ(sign(s)·√max(|s|, 1e-6))       y = g·v
//! stream ← stream + y + silu(conv(norm(y)))
//! ```
//!
//! The table stays on flash; a token reads one row for each head (see [`NGrams`]), requested when a pass
//! begins and read while earlier layers are computed. The convolution is dilated; its
//! state follows those of the mixers in a sequence's block, and the tokens before a pass are those of the
//! sequence. So no bit depends on chunks.

use std::ops::Range;

use emberflow_kernels::Compute;
use emberflow_models::config::{ModelConfig, NGrams};
use emberflow_models::names::Role;

use crate::error::Error;
use crate::forward::embedding::Embedding;
use crate::forward::pass::Pass;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::mixer::{Convolution, by_tap, ngram_floats, recurrent_floats};
use crate::norm::sigmoid;
use crate::scratch::Scratch;
use crate::state::{RecurrentPart, Span};
use crate::store::{Layout, NeuronStore};
use crate::thread_buffer::renew;

/// The n-gram rows of a model, the layer that reads them, and its buffers.
pub(crate) struct NGramLayer {
    of: NGrams,
    table: Embedding,
    d: usize,
    /// Elements of a row's streams.
    width: usize,
    eps: f32,
    /// `[streams·d_model × embedding]`, `[d_model × embedding]`.
    key: Matrix,
    value: Matrix,
    /// Norms of keys, of streams and of the convolution's input; `[streams·d_model]` each.
    key_norm: Vec<f32>,
    query_norm: Vec<f32>,
    conv_norm: Vec<f32>,
    /// `[taps × streams·d_model]`.
    conv: Vec<f32>,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
    buffers: NGramBuffers,
}

/// Buffers, row after row.
#[derive(Debug, Default)]
struct NGramBuffers {
    /// The rows of the table, `[rows × embedding]`.
    rows: Vec<f32>,
    /// `v`, `[rows × d_model]`.
    values: Vec<f32>,
    /// Keys, then the convolution's input, `[rows × streams·d_model]`.
    keys: Vec<f32>,
    /// Normed streams, then `y`.
    gated: Vec<f32>,
    /// The convolution.
    mixed: Vec<f32>,
}

/// Widths of [`NGramBuffers`]'s rows.
fn widths(c: &ModelConfig, of: &NGrams) -> [usize; 5] {
    let width = c.form.further_streams(c.d_model);
    [of.embedding(), c.d_model as usize, width, width, width]
}

impl NGramLayer {
    /// Loads and verifies the weights, for passes of up to `rows` rows; `None` for a model without
    /// n-gram rows.
    pub fn load(layout: &Layout, c: &ModelConfig, rows: usize) -> Result<Option<Self>, Error> {
        let (Some(of), Some(table)) = (
            c.form.ngrams.clone(),
            Embedding::open(layout, c, Role::NGramTable, false)?,
        ) else {
            return Ok(None);
        };
        let container = &layout.container;
        let (from, layer, embedding) = (Loader::of(container), of.layer, of.embedding());
        let [d, width] = [c.d_model as usize, c.form.further_streams(c.d_model)];
        let at = recurrent_floats(c, c.layers);
        let norm = |role| from.vector(role, layer, width);
        let taps = of.taps as usize;
        let mut loaded = Self {
            table,
            d,
            width,
            eps: c.rms_eps,
            key: from.matrix(Role::NGramKey, layer, width, embedding)?,
            value: from.matrix(Role::NGramValue, layer, d, embedding)?,
            key_norm: norm(Role::NGramKeyNorm)?,
            query_norm: norm(Role::NGramQueryNorm)?,
            conv_norm: norm(Role::NGramConvNorm)?,
            conv: by_tap(&from.rows(Role::NGramConv, layer, width, taps)?, taps),
            part: at..at + ngram_floats(c),
            buffers: NGramBuffers::default(),
            of,
        };
        loaded.set_rows(c, rows);
        Ok(Some(loaded))
    }

    /// Resizes the buffers for another number of rows.
    pub fn set_rows(&mut self, c: &ModelConfig, rows: usize) {
        let b = &mut self.buffers;
        let all = [
            &mut b.rows,
            &mut b.values,
            &mut b.keys,
            &mut b.gated,
            &mut b.mixed,
        ];
        for (buffer, width) in all.into_iter().zip(widths(c, &self.of)) {
            renew(buffer, rows * width);
        }
    }

    /// Bytes of the buffers for passes of up to `rows` rows.
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> u64 {
        let widths = c.form.ngrams.as_ref().map(|of| widths(c, of));
        let floats: usize = widths.iter().flatten().sum();
        4 * (rows * floats) as u64
    }

    /// Bytes of weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        self.key.len() + self.value.len()
    }

    /// The table, which may be resident.
    pub fn table_mut(&mut self) -> &mut Embedding {
        &mut self.table
    }

    /// Adds the n-gram terms to the streams of a pass, and reads the rows for them.
    pub fn add(
        &mut self,
        on: &Compute,
        store: &mut NeuronStore,
        spans: &mut [Span<'_>],
        pass: &mut Pass,
        s: &mut Scratch,
    ) -> Result<(), Error> {
        self.read(on, store, spans)?;
        let (rows, b) = (pass.rows, &mut self.buffers);
        let input = &b.rows[..rows * self.of.embedding()];
        let input = Input::new(on.cpu, input, rows, &mut s.input);
        let mut both = [
            (&self.key, &mut b.keys[..]),
            (&self.value, &mut b.values[..]),
        ];
        Matrix::matmul_all(on, &mut both, input, &mut s.rows);
        self.gate(on, pass);
        let mut first = 0;
        for span in spans {
            self.convolve(on, span, first);
            first += span.tokens.len();
        }
        let (width, b) = (self.width, &self.buffers);
        let streams = &mut pass.aux[..rows * width];
        on.workers.for_each_chunk_mut(streams, width, &|_, row, x| {
            let [y, z] = [&b.gated, &b.mixed].map(|all| &all[row * width..][..width]);
            for ((x, y), z) in x.iter_mut().zip(y).zip(z) {
                *x += y + z;
            }
        });
        Ok(())
    }

    /// Starts reading the table rows of a pass, which follow from its tokens.
    pub fn ask(&mut self, store: &mut NeuronStore, spans: &[Span<'_>]) -> Result<(), Error> {
        self.table.ask(store, wanted(&self.of, spans))
    }

    /// Reads the table rows for the tokens of a pass.
    fn read(
        &mut self,
        on: &Compute,
        store: &mut NeuronStore,
        spans: &[Span<'_>],
    ) -> Result<(), Error> {
        let wanted = wanted(&self.of, spans);
        self.table
            .rows(on.cpu, store, wanted, &mut self.buffers.rows)
    }

    /// Stores `y` in `gated` and its norm in `keys`.
    fn gate(&mut self, on: &Compute, pass: &Pass) {
        let (d, eps, width) = (self.d, self.eps, self.width);
        let count = width / d;
        let (b, streams, root) = (&mut self.buffers, &pass.aux, (d as f32).sqrt());
        let [keys, gated] = [&mut b.keys, &mut b.gated].map(|all| &mut all[..pass.rows * width]);
        let values = &b.values;
        let [key_norm, query_norm, conv_norm] = [&self.key_norm, &self.query_norm, &self.conv_norm];
        (on.workers).for_each_chunk_pair_mut([keys, gated], [d; 2], |at, key, y| {
            let of = at % count * d..at % count * d + d;
            on.cpu.rmsnorm_inplace(key, &key_norm[of.clone()], eps);
            on.cpu
                .rmsnorm(&streams[at * d..][..d], &query_norm[of.clone()], eps, y);
            let gate = gate_of(on.cpu.dot_f32(key, y) / root);
            let value = &values[at / count * d..][..d];
            y.iter_mut().zip(value).for_each(|(y, v)| *y = gate * v);
            on.cpu.rmsnorm(y, &conv_norm[of], eps, key);
        });
    }

    /// Convolves the rows of one sequence, the first of which is row `first` of the pass.
    fn convolve(&mut self, on: &Compute, span: &mut Span<'_>, first: usize) {
        let (width, n) = (self.width, span.tokens.len());
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.part.clone());
        let conv = Convolution {
            channels: width,
            weights: &self.conv,
            every: self.of.longest(),
            bias: None,
            before,
            rows: &self.buffers.keys[first * width..][..n * width],
            stride: width,
        };
        let out = &mut self.buffers.mixed[first * width..][..n * width];
        on.workers.for_each_chunk_mut(out, width, &|_, row, out| {
            conv.row(row, out);
            on.cpu.silu(out);
        });
        conv.state(n, after);
        if let Some((rows, to)) = marked {
            conv.state(rows, to);
        }
    }
}

/// Row indices in the table for the tokens of a pass, all heads of a token together.
fn wanted<'a>(of: &'a NGrams, spans: &'a [Span<'_>]) -> impl Iterator<Item = u32> + Clone + 'a {
    spans.iter().flat_map(move |span| {
        let tokens =
            (0..span.tokens.len()).flat_map(move |at| (0..of.heads.len()).map(move |h| (at, h)));
        tokens.map(move |(at, head)| {
            let before = span.tokens[..at].iter().rev();
            let before = before.chain(span.sequence.tokens().iter().rev());
            of.row(head, span.tokens[at], before.copied())
        })
    })
}

/// `σ(sign(s)·√max(|s|, 1e-6))`.
fn gate_of(score: f32) -> f32 {
    let root = score.abs().max(1e-6).sqrt();
    let signed = match score {
        0.0 => 0.0,
        score => root.copysign(score),
    };
    sigmoid(signed)
}
