//! Per-layer inputs (Gemma 3n, Gemma 4): a small vector for each layer and token.
//!
//! A token's vectors are computed from its row of a table on flash and from its embedding:
//!
//! ```text
//! input = (norm(P·x₀ / √d_model) + table[token]·√width) / √2
//! ```
//!
//! A layer ends by adding `norm(proj·(act(gate·x) ∘ input))` to the residual stream: Gemma 4 to the one
//! that it changes, Gemma 3n to the further ones of AltUp. The vectors are stored in [`Pass::aux`] after
//! the further streams, so that a pass can yield between two layers.

use emberflow_kernels::{Compute, Cpu};
use emberflow_models::config::{Activation, ModelConfig};
use emberflow_models::names::Role;

use crate::activation::activate;
use crate::error::Error;
use crate::forward::embedding::Embedding;
use crate::forward::pass::Pass;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use crate::store::{Layout, NeuronStore};

/// Weights of a layer.
#[derive(Debug)]
struct InputGate {
    /// `[width × d_model]`.
    gate: Matrix,
    /// `[d_model × width]`.
    proj: Matrix,
    norm: Vec<f32>,
}

/// The inputs of all layers: weights and buffers.
pub(crate) struct LayerInputs {
    /// The table, one row per token.
    table: Embedding,
    /// Projection from the embedding to the inputs, `[layers·width × d_model]`.
    proj: Matrix,
    /// Norm of each layer's input.
    norm: Vec<f32>,
    layers: Vec<InputGate>,
    /// Elements of a layer's input, and of a row of the residual stream.
    width: usize,
    d: usize,
    /// Offset of the inputs in a row of [`Pass::aux`], and rows of the table.
    before: usize,
    vocab: u32,
    eps: f32,
    activation: Activation,
    /// The inputs of all layers, `[rows × layers·width]`.
    all: Vec<f32>,
    /// The gated inputs of a layer, `[rows × width]`.
    gated: Vec<f32>,
}

/// Elements of a row's inputs; 0 without any.
pub(crate) fn elements(c: &ModelConfig) -> usize {
    let width = c.form.inputs_by_layer().map_or(0, |inputs| inputs.width);
    c.layers as usize * width as usize
}

/// The rows of `tokens` in a table of `vocab` rows; tokens beyond it use row 0.
fn rows_of(
    vocab: u32,
    tokens: impl Iterator<Item = u32> + Clone,
) -> impl Iterator<Item = u32> + Clone {
    tokens.map(move |token| if token < vocab { token } else { 0 })
}

impl LayerInputs {
    /// Loads and verifies the weights, for passes of up to `rows` rows; `None` for a model without
    /// per-layer inputs.
    pub fn load(layout: &Layout, c: &ModelConfig, rows: usize) -> Result<Option<Self>, Error> {
        let table = Embedding::open(layout, c, Role::LayerInputs, false)?;
        let (Some(inputs), Some(table)) = (c.form.inputs_by_layer(), table) else {
            return Ok(None);
        };
        let container = &layout.container;
        let from = Loader::of(container);
        let [d, width] = [c.d_model, inputs.width].map(|n| n as usize);
        let layer = |layer| -> Result<InputGate, Error> {
            Ok(InputGate {
                gate: from.matrix(Role::InputGate, layer, width, d)?,
                proj: from.matrix(Role::InputProj, layer, d, width)?,
                norm: from.vector(Role::InputNorm, layer, d)?,
            })
        };
        Ok(Some(Self {
            table,
            proj: from.matrix(Role::LayerInputsProj, 0, elements(c), d)?,
            norm: from.vector(Role::LayerInputsNorm, 0, width)?,
            layers: (0..c.layers).map(layer).collect::<Result<_, _>>()?,
            width,
            d,
            before: c.form.further_streams(c.d_model),
            vocab: inputs.vocab,
            eps: c.rms_eps,
            activation: c.ffn_kind.activation,
            all: vec![0.0; rows * elements(c)],
            gated: vec![0.0; rows * width],
        }))
    }

    /// Bytes of the buffers of [`LayerInputs::load`].
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> u64 {
        let width = c.form.inputs_by_layer().map_or(0, |inputs| inputs.width);
        4 * (rows * (elements(c) + width as usize)) as u64
    }

    /// Bytes of weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().map(|l| l.gate.len() + l.proj.len());
        self.proj.len() + layers.sum::<u64>()
    }

    /// The table, which may be resident.
    pub fn table_mut(&mut self) -> &mut Embedding {
        &mut self.table
    }

    /// Starts reading the table rows of `tokens`.
    pub fn ask(
        &mut self,
        store: &mut NeuronStore,
        tokens: impl Iterator<Item = u32> + Clone,
    ) -> Result<(), Error> {
        self.table.ask(store, rows_of(self.vocab, tokens))
    }

    /// Reads the table rows of `tokens`.
    pub fn read(
        &mut self,
        cpu: Cpu,
        store: &mut NeuronStore,
        tokens: impl Iterator<Item = u32> + Clone,
    ) -> Result<(), Error> {
        let rows = rows_of(self.vocab, tokens);
        self.table.rows(cpu, store, rows, &mut self.all)
    }

    /// Computes the inputs of a pass from its embedding and the table's rows.
    pub fn begin(&mut self, on: &Compute, pass: &mut Pass, s: &mut Scratch) {
        let (rows, each) = (pass.rows, self.layers.len() * self.width);
        let stride = self.before + each;
        let factor = (self.width as f32).sqrt();
        let aux = pass.aux.chunks_exact_mut(stride);
        for (row, table) in aux.zip(self.all.chunks_exact(each)).take(rows) {
            for (to, from) in row[self.before..].iter_mut().zip(table) {
                *to = from * factor;
            }
        }
        let input = Input::new(on.cpu, &pass.x[..rows * self.d], rows, &mut s.input);
        let all = &mut self.all[..rows * each];
        self.proj.matmul(on, input, &mut s.rows, all);
        let shrink = 1.0 / (self.d as f32).sqrt();
        all.iter_mut().for_each(|value| *value *= shrink);
        let aux = pass.aux.chunks_exact_mut(stride);
        for (row, all) in aux.zip(all.chunks_exact_mut(each)) {
            for part in all.chunks_exact_mut(self.width) {
                on.cpu.rmsnorm_inplace(part, &self.norm, self.eps);
            }
            for (to, from) in row[self.before..].iter_mut().zip(all.iter()) {
                *to = (*to + from) * std::f32::consts::FRAC_1_SQRT_2;
            }
        }
    }

    /// The term that layer `number` adds for the rows of `s.normed`, in `s.out`, both
    /// `[rows × d_model]`.
    pub fn gated(&mut self, on: &Compute, number: usize, pass: &Pass, s: &mut Scratch) {
        let (rows, w) = (pass.rows, &self.layers[number]);
        let input = Input::new(on.cpu, &s.normed[..rows * self.d], rows, &mut s.input);
        let gated = &mut self.gated[..rows * self.width];
        w.gate.matmul(on, input, &mut s.rows, gated);
        activate(self.activation, on.cpu, gated);
        let stride = self.before + self.layers.len() * self.width;
        let at = self.before + number * self.width;
        let aux = pass.aux.chunks_exact(stride);
        for (gated, row) in gated.chunks_exact_mut(self.width).zip(aux) {
            let inputs = &row[at..at + self.width];
            gated.iter_mut().zip(inputs).for_each(|(g, i)| *g *= i);
        }
        let input = Input::new(on.cpu, gated, rows, &mut s.input);
        let out = &mut s.out[..rows * self.d];
        w.proj.matmul(on, input, &mut s.rows, out);
        for out in out.chunks_exact_mut(self.d) {
            on.cpu.rmsnorm_inplace(out, &w.norm, self.eps);
        }
    }

    /// Adds [`LayerInputs::gated`] of the residual stream to the residual stream.
    pub fn add(&mut self, on: &Compute, number: usize, pass: &mut Pass, s: &mut Scratch) {
        let len = pass.rows * self.d;
        s.normed[..len].copy_from_slice(&pass.x[..len]);
        self.gated(on, number, pass, s);
        for (x, y) in pass.x[..len].iter_mut().zip(&s.out) {
            *x += y;
        }
    }
}
