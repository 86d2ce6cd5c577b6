//! Mamba-2 (Granite 4 H): a state-space model with heads.
//!
//! ```text
//! [z, u, dt] = In · x        [v, B, C] = silu(conv(u) + bias)
//! Δ = softplus(dt + step)        S ← exp(rate · Δ)·S + B ⊗ Δ·v        y = Cᵀ·S + skip·v        per head
//! out = Out · rmsnorm(y ∘ silu(z))
//! ```
//!
//! The heads of a group share `B` and `C`, and the norm is per group; Falcon-H1 may have none. The state is the convolution's,
//! then `S` of each head, `[state_dim × head_dim]`. Heads are independent; the tokens of a head are
//! processed in order, so no bit depends on chunks.

use std::ops::Range;

use emberflow_kernels::{Compute, ScanToken, math, selective_scan};
use emberflow_models::config::{MambaShape, ModelConfig};
use emberflow_models::names::Role;

use super::conv::{self, Convolution, by_tap};
use super::mix::Recurrence;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::norm::softplus;
use crate::replay::Inputs;
use crate::scratch::{RowBuffers, Scratch};
use crate::state::{RecurrentPart, Span};

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Mamba {
    shape: MambaShape,
    /// The convolution, `[taps × channels]`.
    weights: Vec<f32>,
    /// Its bias, by channel.
    bias: Vec<f32>,
    /// By head: the factor of the decay, below 0; the bias of its step; the factor of its input in its
    /// output (`skip`).
    rate: Vec<f32>,
    step: Vec<f32>,
    skip: Vec<f32>,
    /// Weights of the RMSNorms over the groups, `values` in all; empty without norms.
    norm: Vec<f32>,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

buffers! { shape: MambaShape {
    /// `v`, `B` and `C`, later the mixed values.
    convolved: shape.channels(),
    /// `z`, `u` and `dt`.
    projected: shape.inputs(),
    /// `y`, head by head in the rows of a sequence.
    outputs: shape.values(),
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, shape: MambaShape) -> Needs {
    let d = c.d_model as usize;
    Needs {
        matrices: vec![
            // gates of the output, channels of the convolution, steps of the heads
            MatrixSpec::input(Role::MambaIn, shape.inputs(), d),
            MatrixSpec::output(Role::MambaOut, d, shape.values()),
        ],
        row_floats: widths(shape).iter().sum(),
        state_floats: conv_floats(shape) + shape.values() * shape.state_dim as usize,
        input_floats: shape.inputs(),
        scores: None,
    }
}

fn conv_floats(shape: MambaShape) -> usize {
    conv::state_floats(shape.channels(), shape.taps as usize)
}

impl Mamba {
    /// Loads the weights of layer `l`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        l: u32,
        shape: MambaShape,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        let [heads, taps] = [shape.heads, shape.taps].map(|n| n as usize);
        let (channels, values) = (shape.channels(), shape.values());
        Ok(Self {
            shape,
            weights: by_tap(&from.rows(Role::MambaConv, l, channels, taps)?, taps),
            bias: from.vector(Role::MambaConvBias, l, channels)?,
            rate: from.vector(Role::MambaRate, l, heads)?,
            step: from.vector(Role::MambaStep, l, heads)?,
            skip: from.vector(Role::MambaSkip, l, heads)?,
            norm: if shape.unnormed {
                Vec::new()
            } else {
                from.vector(Role::MambaNorm, l, values)?
            },
            part,
        })
    }

    /// The recurrence over the rows of one sequence, the first of which is row `first` of the pass: stores `y` of its
    /// rows, head by head.
    fn span(&self, on: &Compute, span: &mut Span<'_>, first: usize, b: &mut Buffers<'_>) {
        let (shape, n) = (self.shape, span.tokens.len());
        let (inputs, channels, values) = (shape.inputs(), shape.channels(), shape.values());
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.part.clone());
        let (conv_before, before) = before.split_at(conv_floats(shape));
        let (conv_after, after) = after.split_at_mut(conv_floats(shape));
        let projected = &b.projected[first * inputs..][..n * inputs];
        let conv = Convolution {
            channels,
            weights: &self.weights,
            every: 1,
            bias: Some(&self.bias),
            before: conv_before,
            rows: &projected[values..],
            stride: inputs,
        };
        let convolved = &mut b.convolved[first * channels..][..n * channels];
        (on.workers).for_each_chunk_mut(convolved, channels, &|_, row, out| {
            conv.row(row, out);
            on.cpu.silu(out);
        });
        conv.state(n, conv_after);
        let marked = marked.map(|(rows, to)| {
            let (conv_to, to) = to.split_at_mut(conv_floats(shape));
            conv.state(rows, conv_to);
            (rows, to)
        });
        let scan = Scan {
            mamba: self,
            convolved,
            projected,
        };
        let out = &mut b.outputs[first * values..][..n * values];
        match marked {
            None => scan.run(on, before, after, 0..n, out),
            Some((middle, to)) => {
                scan.run(on, before, to, 0..middle, out);
                scan.run(on, to, after, middle..n, out);
            }
        }
    }

    /// The mixed values `rmsnorm(y ∘ silu(z))`, group by group, in place of the convolved channels.
    fn gate_and_norm(&self, on: &Compute, eps: f32, spans: &[Span<'_>], b: &mut Buffers<'_>) {
        let (inputs, values) = (self.shape.inputs(), self.shape.values());
        let dim = self.shape.head_dim as usize;
        let group = values / self.shape.groups as usize;
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let y = &b.outputs[first * values..][..n * values];
            let projected = &b.projected[first * inputs..][..n * inputs];
            let out = &mut b.convolved[first * values..][..n * values];
            (on.workers).for_each_chunk_mut(out, values, &|_, row, out| {
                out.copy_from_slice(&projected[row * inputs..][..values]);
                on.cpu.silu(out);
                for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                    let y = &y[(head * n + row) * dim..][..dim];
                    out.iter_mut().zip(y).for_each(|(z, y)| *z *= *y);
                }
                for (out, norm) in out.chunks_exact_mut(group).zip(self.norm.chunks(group)) {
                    on.cpu.rmsnorm_inplace(out, norm, eps);
                }
            });
            first += n;
        }
    }
}

impl Recurrence for Mamba {
    fn project(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        rows: usize,
        s: &mut Scratch,
    ) {
        let normed = &s.normed[..rows * at.config.d_model as usize];
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        let b = Buffers::split(self.shape, rows, &mut s.block);
        matrices[Role::MambaIn].matmul(on, input, &mut s.rows, b.projected);
    }

    fn inputs<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> Inputs<'a> {
        let b = Buffers::split(self.shape, rows, block);
        [b.projected].into_iter().collect()
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
        self.gate_and_norm(on, at.config.rms_eps, spans, b);
        let mixed = &b.convolved[..rows * self.shape.values()];
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        matrices[Role::MambaOut].matmul(on, input, &mut s.rows, &mut s.out);
    }
}

/// The inputs of the recurrence for one sequence's rows.
struct Scan<'a> {
    mamba: &'a Mamba,
    /// `v`, `B` and `C`, `[rows × channels]`.
    convolved: &'a [f32],
    /// `z`, `u` and `dt`, `[rows × inputs]`.
    projected: &'a [f32],
}

impl Scan<'_> {
    /// Runs all heads over the rows `rows`, from the state `before` to `after`.
    fn run(
        &self,
        on: &Compute,
        before: &[f32],
        after: &mut [f32],
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let shape = self.mamba.shape;
        let dim = shape.head_dim as usize;
        let state = dim * shape.state_dim as usize;
        let head_len = out.len() / shape.heads as usize;
        (on.workers).for_each_chunk_pair_mut(
            [after, out],
            [state, head_len],
            |head, after, out| {
                let mut initial = Some(&before[head * state..][..state]);
                for row in rows.clone() {
                    let token = self.token(row, head);
                    let out = &mut out[row * dim..][..dim];
                    selective_scan(on.cpu, initial.take(), after, token, out);
                }
            },
        );
    }

    /// Row `row` of head `head`.
    fn token(&self, row: usize, head: usize) -> ScanToken<'_> {
        let (mamba, shape) = (self.mamba, self.mamba.shape);
        let [dim, state] = [shape.head_dim, shape.state_dim].map(|n| n as usize);
        let (values, shared) = (shape.values(), shape.groups as usize * state);
        let group = shape.group_of(head as u32) as usize;
        let convolved = &self.convolved[row * shape.channels()..];
        let [write, read] =
            [0, shared].map(|at| &convolved[values + at + group * state..][..state]);
        let dt = self.projected[row * shape.inputs()..][values + shape.channels() + head];
        let step = softplus(dt + mamba.step[head]);
        ScanToken {
            input: &convolved[head * dim..][..dim],
            write,
            read,
            decay: math::exp(mamba.rate[head] * step),
            step,
            skip: mamba.skip[head],
        }
    }
}
