//! Gemma 3n: several residual streams (AltUp, arXiv 2301.13310) and a low-rank path parallel to
//! attention (LAuReL, arXiv 2411.07501). Formulas as in `modeling_gemma3n.py`.
//!
//! A layer reads and updates the first stream. Before it, *predict* mixes all streams with coefficients
//! routed from the first; after it, *correct* adds to each stream its share of the layer's update, and
//! to the further ones the layer's own input ([`LayerInputs`]). [`Pass::aux`] holds a row's further
//! streams, so that a pass can yield between two layers.

use emberflow_kernels::{Compute, Cpu, math};
use emberflow_models::config::{ModelConfig, Streams};
use emberflow_models::names::Role;
use emberflow_storage::container::Container;

use crate::error::Error;
use crate::forward::layer_inputs::{self, LayerInputs};
use crate::forward::pass::Pass;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::scratch::Scratch;

/// Lower bound of a stream's mean square before its magnitude is scaled to another one's
/// (transformers: `epsilon`).
const LEAST_SQUARE: f32 = 1e-5;

/// Weights outside the layers.
#[derive(Debug)]
struct StreamWeights {
    /// Projections from the embedding to each further stream, `[d_model × d_model]`.
    into: Vec<Matrix>,
    /// Projections from each further stream back, `[d_model × d_model]`.
    out: Vec<Matrix>,
}

/// Weights of a layer.
#[derive(Debug)]
struct LayerStreams {
    router_norm: Vec<f32>,
    /// `[streams × d_model]`.
    router: Matrix,
    /// `[streams² × streams]`.
    predict: Vec<f32>,
    /// `[streams × streams]`.
    correct: Vec<f32>,
    scale: Vec<f32>,
    left: Matrix,
    right: Matrix,
    laurel_norm: Vec<f32>,
}

impl StreamWeights {
    /// Reads and verifies the weights; `None` for a model with one stream.
    pub fn load(from: &Loader<'_>, c: &ModelConfig) -> Result<Option<Self>, Error> {
        let Some(streams) = c.form.streams else {
            return Ok(None);
        };
        let d = c.d_model as usize;
        let projections = |role| -> Result<Vec<Matrix>, Error> {
            let numbers = 0..streams.count - 1;
            numbers.map(|n| from.numbered(role, n, d, d)).collect()
        };
        Ok(Some(Self {
            into: projections(Role::StreamIn)?,
            out: projections(Role::StreamOut)?,
        }))
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let matrices = self.into.iter().chain(&self.out);
        matrices.map(Matrix::len).sum()
    }
}

impl LayerStreams {
    /// Reads and verifies the weights; `None` for a model with one stream.
    pub fn load(from: &Loader<'_>, c: &ModelConfig, layer: u32) -> Result<Option<Self>, Error> {
        let Some(streams) = c.form.streams else {
            return Ok(None);
        };
        let Streams { count, laurel, .. } = streams;
        let [d, n, rank] = [c.d_model, count, laurel].map(|n| n as usize);
        let matrix = |role, rows, cols| from.matrix(role, layer, rows, cols);
        let vector = |role| from.vector(role, layer, d);
        Ok(Some(Self {
            router_norm: vector(Role::StreamRouterNorm)?,
            router: matrix(Role::StreamRouter, n, d)?,
            predict: from.rows(Role::StreamPredict, layer, n * n, n)?,
            correct: from.rows(Role::StreamCorrect, layer, n, n)?,
            scale: vector(Role::StreamScale)?,
            left: matrix(Role::LaurelLeft, rank, d)?,
            right: matrix(Role::LaurelRight, d, rank)?,
            laurel_norm: vector(Role::LaurelNorm)?,
        }))
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let matrices = [&self.router, &self.left, &self.right];
        matrices.map(Matrix::len).iter().sum()
    }
}

/// Sizes of a model's streams.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    d: usize,
    count: usize,
    /// Elements of a row of [`Pass::aux`].
    aux_width: usize,
    eps: f32,
    scaled: bool,
}

impl Sizes {
    fn of(c: &ModelConfig) -> Option<Self> {
        let streams = c.form.streams?;
        Some(Self {
            d: c.d_model as usize,
            count: streams.count as usize,
            aux_width: aux_width(c),
            eps: c.rms_eps,
            scaled: streams.scaled,
        })
    }

    /// Elements of a row's further streams.
    fn others(self) -> usize {
        (self.count - 1) * self.d
    }
}

/// Elements per row of [`Pass::aux`].
pub(crate) fn aux_width(c: &ModelConfig) -> usize {
    c.form.further_streams(c.d_model) + layer_inputs::elements(c)
}

/// Elements per row of all streams.
pub(crate) fn width(c: &ModelConfig) -> usize {
    first(c) + c.form.further_streams(c.d_model)
}

/// Elements per row of [`Pass::x`] that are a stream. Hyper-connections have all streams in [`Pass::aux`].
fn first(c: &ModelConfig) -> usize {
    match c.form.hyper {
        Some(_) => 0,
        None => c.d_model as usize,
    }
}

/// Stores the streams of a pass's rows, `[rows × streams·d_model]`, in the pass.
pub(crate) fn put(c: &ModelConfig, pass: &mut Pass, rows: &[f32]) {
    let (d, aux_width) = (c.d_model as usize, aux_width(c));
    for (number, row) in rows.chunks_exact(width(c)).enumerate() {
        let (x, others) = row.split_at(first(c));
        pass.x[number * d..][..x.len()].copy_from_slice(x);
        pass.aux[number * aux_width..][..others.len()].copy_from_slice(others);
    }
}

/// Inverse of [`put`].
pub(crate) fn get(c: &ModelConfig, pass: &Pass, rows: &mut Vec<f32>) {
    let (d, aux_width) = (c.d_model as usize, aux_width(c));
    rows.clear();
    for number in 0..pass.rows {
        rows.extend_from_slice(&pass.x[number * d..][..first(c)]);
        rows.extend_from_slice(&pass.aux[number * aux_width..][..width(c) - first(c)]);
    }
}

/// The streams of a model: weights and buffers.
#[derive(Debug)]
pub(crate) struct ResidualStreams {
    weights: StreamWeights,
    layers: Vec<LayerStreams>,
    state: StreamState,
}

impl ResidualStreams {
    /// Reads and verifies the weights, for passes of up to `rows` rows; `None` for a model with one
    /// stream.
    pub fn load(
        container: &Container,
        c: &ModelConfig,
        rows: usize,
    ) -> Result<Option<Self>, Error> {
        let from = &Loader::of(container);
        let layers = (0..c.layers).map(|layer| LayerStreams::load(from, c, layer));
        let layers: Option<Vec<LayerStreams>> = layers.collect::<Result<_, Error>>()?;
        let weights = StreamWeights::load(from, c)?;
        let parts = (weights, layers, StreamState::new(c, rows));
        let (Some(weights), Some(layers), Some(state)) = parts else {
            return Ok(None);
        };
        Ok(Some(Self {
            weights,
            layers,
            state,
        }))
    }

    /// Bytes read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().map(LayerStreams::bytes_per_token);
        self.weights.bytes_per_token() + layers.sum::<u64>()
    }

    /// See [`StreamState::others`].
    pub fn others(&mut self, on: &Compute, pass: &mut Pass, s: &mut Scratch) {
        self.state.others(on, &self.weights, pass, s);
    }

    /// See [`StreamState::predict`].
    pub fn predict(&mut self, on: &Compute, layer: usize, pass: &mut Pass, s: &mut Scratch) {
        self.state.predict(on, &self.layers[layer], pass, s);
    }

    /// See [`StreamState::add_laurel`].
    pub fn add_laurel(&mut self, on: &Compute, layer: usize, pass: &mut Pass, s: &mut Scratch) {
        self.state.add_laurel(on, &self.layers[layer], pass, s);
    }

    /// See [`StreamState::correct`]; then adds the layer's gated input to the further streams.
    pub fn correct(
        &mut self,
        on: &Compute,
        layer: usize,
        inputs: &mut LayerInputs,
        pass: &mut Pass,
        s: &mut Scratch,
    ) {
        self.state.correct(on, &self.layers[layer], pass, s);
        inputs.gated(on, layer, pass, s);
        self.state.add_input(pass, s);
    }

    /// See [`StreamState::merge`].
    pub fn merge(&mut self, on: &Compute, pass: &mut Pass, s: &mut Scratch) {
        self.state.merge(on, &self.weights, pass, s);
    }
}

/// Buffers of the streams.
#[derive(Debug)]
pub(crate) struct StreamState {
    sizes: Sizes,
    /// The first stream's prediction, `[rows × d_model]`.
    predicted: Vec<f32>,
    /// A further stream, `[rows × d_model]`.
    wide: Vec<f32>,
    /// A narrow result, `[rows × width]`.
    narrow: Vec<f32>,
    /// Router output of a row, `[streams]`; its mixing coefficients, `[streams²]`.
    routes: Vec<f32>,
    coefficients: Vec<f32>,
}

/// Widths of [`StreamState`]'s buffers.
fn widths(c: &ModelConfig, sizes: Sizes) -> [usize; 3] {
    let laurel = c.form.streams.map_or(0, |s| s.laurel as usize);
    [sizes.d, sizes.d, laurel.max(sizes.count)]
}

impl StreamState {
    /// Buffers for passes of up to `rows` rows; `None` for a model with one stream.
    pub fn new(c: &ModelConfig, rows: usize) -> Option<Self> {
        let sizes = Sizes::of(c)?;
        let [predicted, wide, narrow] = widths(c, sizes).map(|width| vec![0.0; rows * width]);
        Some(Self {
            sizes,
            predicted,
            wide,
            narrow,
            routes: vec![0.0; sizes.count],
            coefficients: vec![0.0; sizes.count * sizes.count],
        })
    }

    /// Bytes allocated by [`StreamState::new`].
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> u64 {
        let Some(sizes) = Sizes::of(c) else { return 0 };
        let elements: usize = widths(c, sizes).iter().sum();
        4 * (rows * elements + sizes.count * (1 + sizes.count)) as u64
    }

    /// Computes the further streams from the embedding.
    fn others(&mut self, on: &Compute, w: &StreamWeights, pass: &mut Pass, s: &mut Scratch) {
        let z = self.sizes;
        let (rows, width) = (pass.rows, z.aux_width);
        let x = &pass.x[..rows * z.d];
        let input = Input::new(on.cpu, x, rows, &mut s.input);
        for (number, matrix) in w.into.iter().enumerate() {
            let out = &mut s.out[..rows * z.d];
            matrix.matmul(on, input, &mut s.rows, out);
            for ((row, y), x) in (pass.aux.chunks_exact_mut(width))
                .zip(out.chunks_exact_mut(z.d))
                .zip(x.chunks_exact(z.d))
            {
                match_magnitude(on.cpu, x, y);
                row[number * z.d..][..z.d].copy_from_slice(y);
            }
        }
    }

    /// Predict: mixes the streams into the layer's inputs.
    fn predict(&mut self, on: &Compute, w: &LayerStreams, pass: &mut Pass, s: &mut Scratch) {
        let z = self.sizes;
        self.route(on, w, &pass.x[..pass.rows * z.d], s);
        let width = z.aux_width;
        let rows = (pass.x.chunks_exact_mut(z.d)).zip(pass.aux.chunks_exact_mut(width));
        let routes = self.narrow.chunks_exact(z.count);
        let predicted = self.predicted.chunks_exact_mut(z.d);
        for (((x, row), routes), predicted) in rows.zip(routes).zip(predicted).take(pass.rows) {
            products(&w.predict, routes, &mut self.coefficients);
            mix(z, &self.coefficients, x, &mut row[..z.others()]);
            predicted.copy_from_slice(x);
        }
    }

    /// Adds the low-rank path (input: `normed`) to the first stream after attention.
    fn add_laurel(&mut self, on: &Compute, w: &LayerStreams, pass: &mut Pass, s: &mut Scratch) {
        let (z, rows) = (self.sizes, pass.rows);
        let rank = w.left.rows();
        let normed = &s.normed[..rows * z.d];
        let narrow = &mut self.narrow[..rows * rank];
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        w.left.matmul(on, input, &mut s.rows, narrow);
        let input = Input::new(on.cpu, narrow, rows, &mut s.input);
        let out = &mut s.out[..rows * z.d];
        w.right.matmul(on, input, &mut s.rows, out);
        for ((x, out), normed) in (pass.x.chunks_exact_mut(z.d))
            .zip(out.chunks_exact_mut(z.d))
            .zip(normed.chunks_exact(z.d))
        {
            on.cpu.rmsnorm_inplace(out, &w.laurel_norm, z.eps);
            for ((x, out), normed) in x.iter_mut().zip(out.iter()).zip(normed) {
                *x = (*x + (normed + out)) / std::f32::consts::SQRT_2;
            }
        }
    }

    /// Correct: adds each stream's share of a layer's update; stores the input of the gate of the
    /// layer's input in `s.normed`.
    fn correct(&mut self, on: &Compute, w: &LayerStreams, pass: &mut Pass, s: &mut Scratch) {
        let (z, rows) = (self.sizes, pass.rows);
        self.route(on, w, &pass.x[..rows * z.d], s);
        let width = z.aux_width;
        let streams = (pass.x.chunks_exact_mut(z.d)).zip(pass.aux.chunks_exact_mut(width));
        let routes = self.narrow.chunks_exact(z.count);
        let predicted = self.predicted.chunks_exact_mut(z.d);
        let first = s.normed.chunks_exact_mut(z.d);
        for ((((x, row), routes), predicted), first) in
            streams.zip(routes).zip(predicted).zip(first).take(rows)
        {
            products(&w.correct, routes, &mut self.routes);
            self.routes.iter_mut().for_each(|share| *share += 1.0);
            share_change(&self.routes, predicted, x, &mut row[..z.others()]);
            first.copy_from_slice(x);
            if z.scaled {
                first.iter_mut().zip(&w.scale).for_each(|(y, f)| *y *= f);
            }
        }
    }

    /// Adds the gated input of a layer, in `s.out`, to the further streams.
    fn add_input(&mut self, pass: &mut Pass, s: &Scratch) {
        let (z, rows) = (self.sizes, pass.rows);
        let aux = pass.aux.chunks_exact_mut(z.aux_width);
        for (out, row) in s.out.chunks_exact(z.d).zip(aux).take(rows) {
            for stream in row[..z.others()].chunks_exact_mut(z.d) {
                stream.iter_mut().zip(out).for_each(|(x, y)| *x += y);
            }
        }
    }

    /// Merges all streams into the first, after the last layer.
    fn merge(&mut self, on: &Compute, w: &StreamWeights, pass: &mut Pass, s: &mut Scratch) {
        let (z, rows) = (self.sizes, pass.rows);
        let width = z.aux_width;
        let sum = &mut self.predicted[..rows * z.d];
        sum.copy_from_slice(&pass.x[..rows * z.d]);
        for (number, matrix) in w.out.iter().enumerate() {
            let stream = &mut self.wide[..rows * z.d];
            for (to, row) in (stream.chunks_exact_mut(z.d)).zip(pass.aux.chunks_exact(width)) {
                to.copy_from_slice(&row[number * z.d..][..z.d]);
            }
            let input = Input::new(on.cpu, stream, rows, &mut s.input);
            let out = &mut s.out[..rows * z.d];
            matrix.matmul(on, input, &mut s.rows, out);
            for ((out, x), sum) in (out.chunks_exact_mut(z.d))
                .zip(pass.x.chunks_exact(z.d))
                .zip(sum.chunks_exact_mut(z.d))
            {
                match_magnitude(on.cpu, x, out);
                sum.iter_mut().zip(out.iter()).for_each(|(s, y)| *s += y);
            }
        }
        for (x, sum) in pass.x.iter_mut().zip(sum.iter()) {
            *x = sum / z.count as f32;
        }
    }

    /// Router outputs for the rows of `x`, `[rows × streams]`, in `self.narrow`.
    fn route(&mut self, on: &Compute, w: &LayerStreams, x: &[f32], s: &mut Scratch) {
        let (z, rows) = (self.sizes, x.len() / self.sizes.d);
        let normed = &mut s.normed[..x.len()];
        let norm = RouterNorm {
            weight: &w.router_norm,
            eps: z.eps,
            factor: 1.0 / z.d as f32,
        };
        norm.rows(on.cpu, x, normed);
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        let routes = &mut self.narrow[..rows * z.count];
        w.router.matmul(on, input, &mut s.rows, routes);
        for route in routes {
            *route = math::tanh(*route);
        }
    }
}

/// Norm before the router, and a factor after it.
struct RouterNorm<'a> {
    weight: &'a [f32],
    eps: f32,
    factor: f32,
}

impl RouterNorm<'_> {
    fn rows(&self, cpu: Cpu, x: &[f32], out: &mut [f32]) {
        let d = self.weight.len();
        for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
            cpu.rmsnorm(x, self.weight, self.eps, out);
            out.iter_mut().for_each(|value| *value *= self.factor);
        }
    }
}

/// `out[i] = row i of matrix · x`.
fn products(matrix: &[f32], x: &[f32], out: &mut [f32]) {
    for (row, out) in matrix.chunks_exact(x.len()).zip(out) {
        *out = row.iter().zip(x).fold(0.0, |sum, (a, b)| sum + a * b);
    }
}

/// `streams[i] += Σ_j coefficients[i][j] · streams[j]`, coefficients `[streams × streams]`.
fn mix(z: Sizes, coefficients: &[f32], x: &mut [f32], others: &mut [f32]) {
    const MOST: usize = 8;
    for at in 0..z.d {
        let mut before = [0.0f32; MOST];
        before[0] = x[at];
        for (i, value) in before[1..z.count].iter_mut().enumerate() {
            *value = others[i * z.d + at];
        }
        let before = &before[..z.count];
        for (i, row) in coefficients.chunks_exact(z.count).enumerate() {
            let sum = (before.iter().zip(row)).fold(0.0, |sum, (h, c)| sum + h * c);
            let value = before[i] + sum;
            match i {
                0 => x[at] = value,
                _ => others[(i - 1) * z.d + at] = value,
            }
        }
    }
}

/// Adds to each stream its share of `x − predicted`: `x` is the updated first stream, `predicted`
/// its value before the layer.
fn share_change(shares: &[f32], predicted: &mut [f32], x: &mut [f32], others: &mut [f32]) {
    let d = x.len();
    for (stream, share) in others.chunks_exact_mut(d).zip(&shares[1..]) {
        for ((stream, x), before) in stream.iter_mut().zip(x.iter()).zip(predicted.iter()) {
            *stream += (x - before) * share;
        }
    }
    for (x, before) in x.iter_mut().zip(predicted.iter()) {
        *x = before + (*x - before) * shares[0];
    }
}

/// Scales `y` to the root mean square of `x`.
fn match_magnitude(cpu: Cpu, x: &[f32], y: &mut [f32]) {
    let mean = |values: &[f32]| cpu.dot_f32(values, values) / values.len() as f32;
    let (target, found) = (mean(x).sqrt(), mean(y).max(LEAST_SQUARE).sqrt());
    y.iter_mut().for_each(|y| *y = *y * target / found);
}
