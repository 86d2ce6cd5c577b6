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

use super::conv::{self, Convolution, by_tap};
use super::delta_net::{HeadRule, Units};
use super::mix::Recurrence;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::norm::softplus;
use crate::replay::Inputs;
use crate::scratch::{RowBuffers, Scratch};
use crate::state::{RecurrentPart, Span};

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Kda {
    shape: KdaShape,
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

buffers! { shape: KdaShape {
    /// Convolved queries, keys and values, row by row; later the mixed values.
    convolved: 3 * shape.values(),
    /// All queries, then all keys, then all values; later `y` in place of the queries, head by head in the rows of a
    /// sequence.
    projected: 3 * shape.values(),
    /// Decays, later the gates of the output.
    gates: shape.values(),
    /// Inputs of β.
    beta: shape.heads as usize,
    /// `DecayIn·x`.
    decay_inputs: narrow(shape),
    /// `GateIn·x`.
    gate_inputs: narrow(shape),
} }

/// Elements of a row between the two projections to decays, and to gates; 0 if there is one.
fn narrow(shape: KdaShape) -> usize {
    if shape.direct { 0 } else { shape.dim as usize }
}

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, shape: KdaShape) -> Needs {
    let [d, heads, dim] = [c.d_model, shape.heads, shape.dim].map(|n| n as usize);
    let values = shape.values();
    let mut matrices = vec![
        MatrixSpec::input(Role::Q, values, d),
        MatrixSpec::input(Role::K, values, d),
        MatrixSpec::input(Role::V, values, d),
        MatrixSpec::output(Role::O, d, values),
        MatrixSpec::input(Role::DeltaBeta, heads, d).on_cpu(),
    ];
    if shape.direct {
        let roles = [Role::DeltaDecays, Role::QGate];
        matrices.extend(roles.map(|role| MatrixSpec::input(role, values, d).on_cpu()));
    } else {
        let first = [Role::DeltaDecayIn, Role::DeltaGateIn];
        matrices.extend(first.map(|role| MatrixSpec::input(role, dim, d).on_cpu()));
        let last = [Role::DeltaDecay, Role::DeltaGate];
        matrices.extend(last.map(|role| MatrixSpec::between(role, values, dim).on_cpu()));
    }
    Needs {
        matrices,
        row_floats: widths(shape).iter().sum(),
        state_floats: 3 * conv_floats(shape) + values * dim,
        input_floats: 4 * values + heads,
        scores: None,
    }
}

/// Floats of the state of one of its three convolutions.
fn conv_floats(shape: KdaShape) -> usize {
    conv::state_floats(shape.values(), shape.taps as usize)
}

impl Kda {
    /// Loads the weights of layer `l`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        l: u32,
        shape: KdaShape,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        let [heads, dim, taps] = [shape.heads, shape.dim, shape.taps].map(|n| n as usize);
        let values = shape.values();
        let conv = |role| Ok::<_, Error>(by_tap(&from.rows(role, l, values, taps)?, taps));
        Ok(Self {
            shape,
            weights: [
                conv(Role::DeltaConvQ)?,
                conv(Role::DeltaConvK)?,
                conv(Role::DeltaConvV)?,
            ],
            rate: from.vector(Role::DeltaRate, l, heads)?,
            step: from.vector(Role::DeltaStep, l, values)?,
            norm: from.vector(Role::DeltaNorm, l, dim)?,
            unit: Units::new(dim),
            part,
        })
    }

    /// Queries, keys and values, inputs of β, decays, and inputs of gates unless these read `x`.
    fn project_all(
        &self,
        on: &Compute,
        matrices: &Matrices,
        d: usize,
        rows: usize,
        s: &mut Scratch,
    ) {
        let b = Buffers::split(self.shape, rows, &mut s.block);
        let (values, dim) = (self.shape.values(), self.norm.len());
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let (queries, others) = b.projected.split_at_mut(rows * values);
        let (keys, others) = others.split_at_mut(rows * values);
        let mut wide = [
            (&matrices[Role::Q], queries),
            (&matrices[Role::K], keys),
            (&matrices[Role::V], others),
        ];
        Matrix::matmul_all(on, &mut wide, input, &mut s.rows);
        let beta = (&matrices[Role::DeltaBeta], b.beta);
        if self.shape.direct {
            let mut both = [beta, (&matrices[Role::DeltaDecays], &mut *b.gates)];
            Matrix::matmul_all(on, &mut both, input, &mut s.rows);
        } else {
            let mut narrow = [beta, (&matrices[Role::DeltaDecayIn], &mut *b.decay_inputs)];
            Matrix::matmul_all(on, &mut narrow, input, &mut s.rows);
            matrices[Role::DeltaGateIn].matmul(on, input, &mut s.rows, b.gate_inputs);
            let input = Input::new(on.cpu, b.decay_inputs, rows, &mut s.input);
            matrices[Role::DeltaDecay].matmul(on, input, &mut s.rows, b.gates);
        }
        (on.workers).for_each_chunk_mut(b.gates, values, &|_, _, row| {
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
    /// `all`: replaces the queries of its rows by `y`, head by head.
    fn span(
        &self,
        on: &Compute,
        span: &mut Span<'_>,
        [first, all]: [usize; 2],
        b: &mut Buffers<'_>,
    ) {
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
            rows: &b.projected[(i * all + first) * values..][..n * values],
            stride: values,
        });
        let qkv = &mut b.convolved[3 * first * values..][..3 * n * values];
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
        let decays = &b.gates[first * values..][..n * values];
        let beta = &b.beta[first * heads..][..n * heads];
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
        let out = &mut b.projected[first * values..][..n * values];
        match marked {
            None => rule.run(before, after, 0..n, out, &token),
            Some((middle, to)) => {
                rule.run(before, to, 0..middle, out, &token);
                rule.run(to, after, middle..n, out, &token);
            }
        }
    }

    /// The mixed values `rmsnorm(y) ∘ σ(gate)`, head by head, in place of the convolved ones.
    fn norm_and_gate(
        &self,
        on: &Compute,
        matrices: &Matrices,
        c: &ModelConfig,
        spans: &[Span<'_>],
        s: &mut Scratch,
    ) {
        let (values, dim) = (self.shape.values(), self.norm.len());
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let b = Buffers::split(self.shape, rows, &mut s.block);
        let (role, hidden) = if self.shape.direct {
            (Role::QGate, &s.normed[..rows * c.d_model as usize])
        } else {
            (Role::DeltaGate, &*b.gate_inputs)
        };
        let input = Input::new(on.cpu, hidden, rows, &mut s.input);
        matrices[role].matmul(on, input, &mut s.rows, b.gates);
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let y = &b.projected[first * values..][..n * values];
            let gates = &b.gates[first * values..][..n * values];
            let out = &mut b.convolved[first * values..][..n * values];
            (on.workers).for_each_chunk_mut(out, values, &|_, row, out| {
                for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                    out.copy_from_slice(&y[(head * n + row) * dim..][..dim]);
                    on.cpu.rmsnorm_inplace(out, &self.norm, c.rms_eps);
                }
                scale_by_sigmoid(on.cpu, out, &gates[row * values..][..values]);
            });
            first += n;
        }
    }
}

impl Recurrence for Kda {
    fn project(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        rows: usize,
        s: &mut Scratch,
    ) {
        self.project_all(on, matrices, at.config.d_model as usize, rows, s);
    }

    fn inputs<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> Inputs<'a> {
        let b = Buffers::split(self.shape, rows, block);
        [b.projected, b.gates, b.beta].into()
    }

    fn recur(&self, on: &Compute, spans: &mut [Span<'_>], rows: usize, block: &mut RowBuffers) {
        let b = &mut Buffers::split(self.shape, rows, block);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.span(on, span, [first, rows], b);
            first += span.tokens.len();
        }
    }

    fn output(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &[Span<'_>],
        s: &mut Scratch,
    ) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        self.norm_and_gate(on, matrices, at.config, spans, s);
        let [mixed] = s.block.view(rows, [self.shape.values()]);
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        matrices[Role::O].matmul(on, input, &mut s.rows, &mut s.out);
    }
}
