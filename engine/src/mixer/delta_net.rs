//! Gated DeltaNet (Qwen3-Next, Qwen3.5): attention with a state of fixed size.
//!
//! ```text
//! [q, k, v] = silu(conv(In · x))        q ← q / (|q|·√key_dim)        k ← k / |k|        per key head
//! α = exp(rate · softplus(Decay·x + step))        β = σ(Beta·x), or twice that           per value head
//! S ← α·S        S ← S + k ⊗ β·(v − kᵀ·S)        y = qᵀ·S
//! out = Out · (rmsnorm(y) ∘ silu(Gate · x)), or σ in place of silu (Qwen3.8-Flash-Next)
//! ```
//!
//! The state is the convolution's, then `S` of each value head, `[key_dim × value_dim]`. Heads are
//! independent; the tokens of a head are processed in order, so no bit depends on chunks.

use std::ops::Range;

use emberflow_kernels::{Compute, Cpu, Decay, DeltaToken, delta_rule, math, scale_by_sigmoid};
use emberflow_models::config::{DeltaNetShape, ModelConfig};
use emberflow_models::names::Role;

use super::conv::{self, Convolution, by_tap};
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
pub(crate) struct DeltaNet {
    shape: DeltaNetShape,
    /// The convolution, `[taps × channels]`.
    weights: Vec<f32>,
    /// By value head: the factor of the decay, below 0, and the bias of its projection.
    rate: Vec<f32>,
    step: Vec<f32>,
    /// Limit of β.
    most_beta: f32,
    /// RMSNorm over each head's output.
    norm: Vec<f32>,
    unit: Units,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

buffers! { shape: DeltaNetShape {
    /// Convolved queries, keys and values, later the mixed values.
    convolved: shape.channels(),
    /// Queries, keys and values; later `y`, head by head in the rows of a sequence.
    projected: shape.channels(),
    /// Gates of the output.
    gates: shape.values(),
    /// Inputs of β.
    beta: shape.value_heads as usize,
    /// Inputs of the decay.
    decay: shape.value_heads as usize,
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, shape: DeltaNetShape) -> Needs {
    let [d, heads, key_dim] = [c.d_model, shape.value_heads, shape.key_dim].map(|n| n as usize);
    Needs {
        matrices: vec![
            // queries, keys and values
            MatrixSpec::input(Role::DeltaIn, shape.channels(), d),
            MatrixSpec::input(Role::DeltaGate, shape.values(), d),
            MatrixSpec::input(Role::DeltaBeta, heads, d).on_cpu(),
            MatrixSpec::input(Role::DeltaDecay, heads, d).on_cpu(),
            MatrixSpec::output(Role::DeltaOut, d, shape.values()),
        ],
        row_floats: widths(shape).iter().sum(),
        state_floats: conv_floats(shape) + shape.values() * key_dim,
        input_floats: shape.channels() + 2 * heads,
        scores: None,
    }
}

fn conv_floats(shape: DeltaNetShape) -> usize {
    conv::state_floats(shape.channels(), shape.taps as usize)
}

impl DeltaNet {
    /// Loads the weights of layer `l`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        l: u32,
        shape: DeltaNetShape,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        let [heads, taps, dim] = [shape.value_heads, shape.taps, shape.key_dim].map(|n| n as usize);
        let channels = shape.channels();
        Ok(Self {
            shape,
            weights: by_tap(&from.rows(Role::DeltaConv, l, channels, taps)?, taps),
            rate: from.vector(Role::DeltaRate, l, heads)?,
            step: from.vector(Role::DeltaStep, l, heads)?,
            most_beta: if shape.signed { 2.0 } else { 1.0 },
            norm: from.vector(Role::DeltaNorm, l, shape.value_dim as usize)?,
            unit: Units::new(dim),
            part,
        })
    }

    /// The recurrence over the rows of one sequence, the first of which is row `first` of the pass: replaces the projected
    /// queries, keys and values of its rows by `y`, head by head.
    fn span(&self, on: &Compute, span: &mut Span<'_>, first: usize, b: &mut Buffers<'_>) {
        let (shape, n) = (self.shape, span.tokens.len());
        let (channels, heads) = (shape.channels(), shape.value_heads as usize);
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.part.clone());
        let (conv_before, before) = before.split_at(conv_floats(shape));
        let (conv_after, after) = after.split_at_mut(conv_floats(shape));
        let conv = Convolution {
            channels,
            weights: &self.weights,
            every: 1,
            bias: None,
            before: conv_before,
            rows: &b.projected[first * channels..][..n * channels],
            stride: channels,
        };
        let qkv = &mut b.convolved[first * channels..][..n * channels];
        (on.workers).for_each_chunk_mut(qkv, channels, &|_, row, out| {
            conv.row(row, out);
            on.cpu.silu(out);
            self.unit.normalize(on.cpu, &mut out[..2 * shape.keys()]);
        });
        conv.state(n, conv_after);
        let marked = marked.map(|(rows, to)| {
            let (conv_to, to) = to.split_at_mut(conv_floats(shape));
            conv.state(rows, conv_to);
            (rows, to)
        });
        let inputs = Rows {
            net: self,
            qkv,
            beta: &b.beta[first * heads..][..n * heads],
            decay: &b.decay[first * heads..][..n * heads],
        };
        let out = &mut b.projected[first * channels..][..n * shape.values()];
        let rule = HeadRule {
            on,
            heads,
            key_dim: shape.key_dim as usize,
            value_dim: shape.value_dim as usize,
        };
        let token = |row, head| inputs.token(row, head);
        match marked {
            None => rule.run(before, after, 0..n, out, &token),
            Some((middle, to)) => {
                rule.run(before, to, 0..middle, out, &token);
                rule.run(to, after, middle..n, out, &token);
            }
        }
    }

    /// The mixed values `rmsnorm(y) ∘ act(gate)`, head by head, in place of the convolved ones.
    fn norm_and_gate(&self, on: &Compute, eps: f32, spans: &[Span<'_>], b: &mut Buffers<'_>) {
        let (values, channels) = (self.shape.values(), self.shape.channels());
        let dim = self.shape.value_dim as usize;
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let y = &b.projected[first * channels..][..n * values];
            let gates = &mut b.gates[first * values..][..n * values];
            let out = &mut b.convolved[first * values..][..n * values];
            (on.workers).for_each_chunk_pair_mut([out, gates], [values; 2], |row, out, gates| {
                if !self.shape.sigmoid_gate {
                    on.cpu.silu(gates);
                }
                for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                    out.copy_from_slice(&y[(head * n + row) * dim..][..dim]);
                    on.cpu.rmsnorm_inplace(out, &self.norm, eps);
                }
                if self.shape.sigmoid_gate {
                    scale_by_sigmoid(on.cpu, out, gates)
                } else {
                    out.iter_mut().zip(gates).for_each(|(y, g)| *y *= *g)
                }
            });
            first += n;
        }
    }
}

impl Recurrence for DeltaNet {
    fn project(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        rows: usize,
        s: &mut Scratch,
    ) {
        let b = Buffers::split(self.shape, rows, &mut s.block);
        let normed = &s.normed[..rows * at.config.d_model as usize];
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        // separate, because a device stores matrices of one format together
        let mut wide = [
            (&matrices[Role::DeltaIn], &mut *b.projected),
            (&matrices[Role::DeltaGate], &mut *b.gates),
        ];
        Matrix::matmul_all(on, &mut wide, input, &mut s.rows);
        let mut narrow = [
            (&matrices[Role::DeltaBeta], &mut *b.beta),
            (&matrices[Role::DeltaDecay], &mut *b.decay),
        ];
        Matrix::matmul_all(on, &mut narrow, input, &mut s.rows);
    }

    fn inputs<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> Inputs<'a> {
        let b = Buffers::split(self.shape, rows, block);
        [b.projected, b.beta, b.decay].into()
    }

    fn recur(&self, on: &Compute, spans: &mut [Span<'_>], rows: usize, block: &mut RowBuffers) {
        let b = &mut Buffers::split(self.shape, rows, block);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.span(on, span, first, b);
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
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let b = &mut Buffers::split(self.shape, rows, &mut s.block);
        let eps = self.shape.norm_eps.unwrap_or(at.config.rms_eps);
        self.norm_and_gate(on, eps, spans, b);
        let mixed = &b.convolved[..rows * self.shape.values()];
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        matrices[Role::DeltaOut].matmul(on, input, &mut s.rows, &mut s.out);
    }
}

/// The inputs of the recurrence for one sequence's rows.
struct Rows<'a> {
    net: &'a DeltaNet,
    /// Queries, keys and values, `[rows × channels]`.
    qkv: &'a [f32],
    /// Projections, `[rows × value_heads]` each.
    beta: &'a [f32],
    decay: &'a [f32],
}

impl Rows<'_> {
    /// Row `row` of value head `head`.
    fn token(&self, row: usize, head: usize) -> DeltaToken<'_> {
        let shape = self.net.shape;
        let [key_dim, dim, heads] =
            [shape.key_dim, shape.value_dim, shape.value_heads].map(|n| n as usize);
        let (keys, key_head) = (shape.keys(), shape.key_head(head as u32) as usize);
        let qkv = &self.qkv[row * shape.channels()..];
        let [decay, beta] = [self.decay, self.beta].map(|all| all[row * heads + head]);
        let step = softplus(decay + self.net.step[head]);
        DeltaToken {
            query: &qkv[key_head * key_dim..][..key_dim],
            key: &qkv[keys + key_head * key_dim..][..key_dim],
            value: &qkv[2 * keys + head * dim..][..dim],
            decay: Decay::One(math::exp(self.net.rate[head] * step)),
            beta: self.net.most_beta / (1.0 + math::exp(-beta)),
        }
    }
}

/// The delta rule over the rows of a sequence, head by head.
#[derive(Clone, Copy)]
pub(super) struct HeadRule<'a> {
    pub on: &'a Compute,
    pub heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl HeadRule<'_> {
    /// Runs all heads over the rows `rows`, from the state `before` to `after`; `token` gives a row of a
    /// head. Stores the outputs in `out`, head by head.
    pub fn run<'t>(
        self,
        before: &[f32],
        after: &mut [f32],
        rows: Range<usize>,
        out: &mut [f32],
        token: &(dyn Fn(usize, usize) -> DeltaToken<'t> + Sync),
    ) {
        let (on, dim) = (self.on, self.value_dim);
        let state = dim * self.key_dim;
        let head_len = out.len() / self.heads;
        (on.workers).for_each_chunk_pair_mut(
            [after, out],
            [state, head_len],
            |head, after, out| {
                let mut initial = Some(&before[head * state..][..state]);
                for row in rows.clone() {
                    let out = &mut out[row * dim..][..dim];
                    delta_rule(on.cpu, initial.take(), after, token(row, head), out);
                }
            },
        );
    }
}

/// RMSNorm weights that divide a query by its length and `√key_dim`, and a key by its length.
#[derive(Debug)]
pub(super) struct Units([Vec<f32>; 2]);

impl Units {
    /// Weights for queries and keys of `dim` elements.
    pub fn new(dim: usize) -> Self {
        let root = 1.0 / libm::sqrtf(dim as f32);
        Self([vec![root * root; dim], vec![root; dim]])
    }

    /// Normalises the queries of all heads, and the keys after them.
    pub fn normalize(&self, cpu: Cpu, both: &mut [f32]) {
        for (part, unit) in both.chunks_exact_mut(both.len() / 2).zip(&self.0) {
            for head in part.chunks_exact_mut(unit.len()) {
                // `l2norm` adds 1e-6 to the sum of the squares, RMSNorm to their mean
                cpu.rmsnorm_inplace(head, unit, 1e-6 / unit.len() as f32);
            }
        }
    }
}
