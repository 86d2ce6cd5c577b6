//! Kimi Delta Attention (Kimi Linear, Ling 3): a gated DeltaNet whose state decays element by element of its keys.
//!
//! ```text
//! [q, k, v] = silu(conv(Q·x, K·x, V·x))    q ← q / (|q|·√dim)    k ← k / |k|                      per head
//! α = exp(rate · softplus(Decay·(DecayIn·x) + step))             one for each element of a key
//! β = σ(Beta·x)                                                  per head
//! S ← diag(α)·S        S ← S + k ⊗ β·(v − kᵀ·S)        y = qᵀ·S
//! out = O · (rmsnorm(y) ∘ σ(Gate·(GateIn·x)))
//! ```
//!
//! In Ling 3 decays and gates have one projection each, `Decay·x` and `Gate·x`, and a decay is at least
//! `exp(bound)`: `α = exp(bound · σ(−rate · (Decay·x + step)))`.
//!
//! The state is the convolution's, then `S` of each head, `[dim × dim]`. Heads are independent; the tokens
//! of a head are processed in order, so no bit depends on chunks.

use std::ops::Range;

use emberflow_kernels::{Compute, Decay, DeltaToken, math, scale_by_sigmoid};
use emberflow_models::config::{KdaShape, ModelConfig};
use emberflow_models::names::Role;

use super::LayerPass;
use super::conv::{self, Convolution, by_tap};
use super::delta_net::{HeadRule, Units};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::norm::softplus;
use crate::scratch::Scratch;
use crate::state::{RecurrentPart, Span};

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Kda {
    shape: KdaShape,
    /// Projections to queries, keys and values, `[values × d_model]` each.
    pub input: [Matrix; 3],
    /// Projection to β, `[heads × d_model]`.
    beta: Matrix,
    /// Projection to the decays.
    pub decay: Steps,
    /// Projection to the gates of the output.
    pub gate: Steps,
    /// Output projection, `[d_model × values]`.
    pub output: Matrix,
    /// The convolutions of queries, keys and values, `[taps × values]` each.
    weights: [Vec<f32>; 3],
    /// Factor of the decays of a head, below 0.
    rate: Vec<f32>,
    /// Bias of the projection to the decays, by element.
    step: Vec<f32>,
    /// RMSNorm over each head's output.
    norm: Vec<f32>,
    unit: Units,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

/// A low-rank or full projection of the input to all value elements.
#[derive(Debug)]
pub(crate) struct Steps {
    /// First step of a low-rank projection, `[dim × d_model]`; `None` for a full one.
    pub first: Option<Matrix>,
    /// `[values × dim]`, or `[values × d_model]` for a full one.
    pub last: Matrix,
}

/// Floats of a layer's state.
pub(super) fn state_floats(shape: KdaShape) -> usize {
    3 * conv_floats(shape) + shape.values() * shape.dim as usize
}

/// Floats of the state of one of its three convolutions.
fn conv_floats(shape: KdaShape) -> usize {
    conv::state_floats(shape.values(), shape.taps as usize)
}

impl Kda {
    /// Loads the weights of layer `l`, whose state begins at float `at` of a sequence's block.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: KdaShape,
        at: usize,
    ) -> Result<Self, Error> {
        let [d, heads, dim, taps] =
            [c.d_model, shape.heads, shape.dim, shape.taps].map(|n| n as usize);
        let values = shape.values();
        let input = |role| from.matrix(role, l, values, d);
        let conv = |role| Ok::<_, Error>(by_tap(&from.rows(role, l, values, taps)?, taps));
        let steps = |by_way: [Role; 2], direct| {
            let (first, last) = match (shape.direct, by_way) {
                (true, _) => (None, from.matrix(direct, l, values, d)?),
                (false, [first, last]) => {
                    let first = from.matrix(first, l, dim, d)?;
                    (Some(first), from.matrix(last, l, values, dim)?)
                }
            };
            Ok::<_, Error>(Steps { first, last })
        };
        Ok(Self {
            shape,
            input: [input(Role::Q)?, input(Role::K)?, input(Role::V)?],
            beta: from.matrix(Role::DeltaBeta, l, heads, d)?,
            decay: steps([Role::DeltaDecayIn, Role::DeltaDecay], Role::DeltaDecays)?,
            gate: steps([Role::DeltaGateIn, Role::DeltaGate], Role::QGate)?,
            output: from.matrix(Role::O, l, d, values)?,
            weights: [
                conv(Role::DeltaConvQ)?,
                conv(Role::DeltaConvK)?,
                conv(Role::DeltaConvV)?,
            ],
            rate: from.vector(Role::DeltaRate, l, heads)?,
            step: from.vector(Role::DeltaStep, l, values)?,
            norm: from.vector(Role::DeltaNorm, l, dim)?,
            unit: Units::new(dim),
            part: at..at + state_floats(shape),
        })
    }

    /// See [`super::Mixer::run`].
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        self.project(on, rows, s);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.span(on, span, [first, rows], s);
            first += span.tokens.len();
        }
        self.norm_and_gate(on, at.config.rms_eps, spans, s);
        let mixed = &s.attended[..rows * self.shape.values()];
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        self.output.matmul(on, input, &mut s.rows, &mut s.out);
    }

    /// `s.q`: all queries, then all keys, then all values. `s.k`: inputs of β. `s.gate`: decays. The
    /// second `rows · dim` floats of `s.v`: inputs of gates, unless these read `x`.
    fn project(&self, on: &Compute, rows: usize, s: &mut Scratch) {
        let (d, values, dim) = (self.output.rows(), self.shape.values(), self.norm.len());
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let (queries, others) = s.q.split_at_mut(rows * values);
        let (keys, others) = others.split_at_mut(rows * values);
        let [q, k, v] = &self.input;
        let mut wide = [(q, queries), (k, keys), (v, others)];
        Matrix::matmul_all(on, &mut wide, input, &mut s.rows);
        match (&self.decay.first, &self.gate.first) {
            (Some(decay), Some(gate)) => {
                let (decays, gates) = s.v.split_at_mut(rows * dim);
                let mut narrow = [(&self.beta, &mut s.k[..]), (decay, &mut decays[..])];
                Matrix::matmul_all(on, &mut narrow, input, &mut s.rows);
                gate.matmul(on, input, &mut s.rows, gates);
                let input = Input::new(on.cpu, decays, rows, &mut s.input);
                (self.decay.last).matmul(on, input, &mut s.rows, &mut s.gate);
            }
            _ => {
                let mut both = [
                    (&self.beta, &mut s.k[..]),
                    (&self.decay.last, &mut s.gate[..]),
                ];
                Matrix::matmul_all(on, &mut both, input, &mut s.rows);
            }
        }
        let decays = &mut s.gate[..rows * values];
        (on.workers).for_each_chunk_mut(decays, values, &|_, _, row| {
            let heads = row.chunks_exact_mut(dim).zip(self.step.chunks_exact(dim));
            for ((head, steps), rate) in heads.zip(&self.rate) {
                for (x, step) in head.iter_mut().zip(steps) {
                    *x = self.decay_of(*x + step, *rate);
                }
            }
        });
    }

    /// The decay for a projection's result and `step`.
    fn decay_of(&self, x: f32, rate: f32) -> f32 {
        math::exp(match self.shape.bound {
            None => rate * softplus(x),
            Some(bound) => bound / (1.0 + math::exp(rate * x)),
        })
    }

    /// The recurrence over the rows of one sequence, the first of which is row `first` of the pass of
    /// `all`: replaces the queries of its rows in `s.q` by `y`, head by head.
    fn span(&self, on: &Compute, span: &mut Span<'_>, [first, all]: [usize; 2], s: &mut Scratch) {
        let (shape, n, values) = (self.shape, span.tokens.len(), self.shape.values());
        let conv_floats = conv_floats(shape);
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.part.clone());
        let (conv_before, before) = before.split_at(3 * conv_floats);
        let (conv_after, after) = after.split_at_mut(3 * conv_floats);
        let convs = [0, 1, 2].map(|i| Convolution {
            channels: values,
            weights: &self.weights[i],
            every: 1,
            bias: None,
            before: &conv_before[i * conv_floats..][..conv_floats],
            rows: &s.q[(i * all + first) * values..][..n * values],
            stride: values,
        });
        let qkv = &mut s.attended[3 * first * values..][..3 * n * values];
        (on.workers).for_each_chunk_mut(qkv, 3 * values, &|_, row, out| {
            for (conv, out) in convs.iter().zip(out.chunks_exact_mut(values)) {
                conv.row(row, out);
            }
            on.cpu.silu(out);
            self.unit.normalize(on.cpu, &mut out[..2 * values]);
        });
        let keep = |rows: usize, to: &mut [f32]| {
            for (conv, to) in convs.iter().zip(to.chunks_exact_mut(conv_floats)) {
                conv.state(rows, to);
            }
        };
        keep(n, conv_after);
        let marked = marked.map(|(rows, to)| {
            let (conv_to, to) = to.split_at_mut(3 * conv_floats);
            keep(rows, conv_to);
            (rows, to)
        });
        let (heads, dim) = (shape.heads as usize, shape.dim as usize);
        let decays = &s.gate[first * values..][..n * values];
        let beta = &s.k[first * heads..][..n * heads];
        let token = |row: usize, head: usize| {
            let offset = row * values + head * dim;
            let [query, key, value] =
                [0, 1, 2].map(|i| &qkv[(3 * row + i) * values + head * dim..][..dim]);
            DeltaToken {
                query,
                key,
                value,
                decay: Decay::ByRow(&decays[offset..][..dim]),
                beta: 1.0 / (1.0 + math::exp(-beta[row * heads + head])),
            }
        };
        let rule = HeadRule {
            on,
            heads,
            key_dim: dim,
            value_dim: dim,
        };
        let out = &mut s.q[first * values..][..n * values];
        match marked {
            None => rule.run(before, after, 0..n, out, &token),
            Some((middle, to)) => {
                rule.run(before, to, 0..middle, out, &token);
                rule.run(to, after, middle..n, out, &token);
            }
        }
    }

    /// `s.attended[row] = rmsnorm(y) ∘ σ(gate)`, head by head.
    fn norm_and_gate(&self, on: &Compute, eps: f32, spans: &[Span<'_>], s: &mut Scratch) {
        let (values, dim) = (self.shape.values(), self.norm.len());
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let hidden = match self.gate.first {
            Some(_) => &s.v[rows * dim..][..rows * dim],
            None => &s.normed[..rows * self.output.rows()],
        };
        let input = Input::new(on.cpu, hidden, rows, &mut s.input);
        (self.gate.last).matmul(on, input, &mut s.rows, &mut s.gate);
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let y = &s.q[first * values..][..n * values];
            let gates = &s.gate[first * values..][..n * values];
            let out = &mut s.attended[first * values..][..n * values];
            (on.workers).for_each_chunk_mut(out, values, &|_, row, out| {
                for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                    out.copy_from_slice(&y[(head * n + row) * dim..][..dim]);
                    on.cpu.rmsnorm_inplace(out, &self.norm, eps);
                }
                scale_by_sigmoid(on.cpu, out, &gates[row * values..][..values]);
            });
            first += n;
        }
    }
}
