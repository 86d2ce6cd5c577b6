//! Mamba-1 with norms (Jamba): a state-space model whose channels each have a state and a step of their own.
//!
//! ```text
//! [u, z] = In · x        v = silu(conv(u) + bias)        [δ, B, C] = norms(Mix · v)
//! Δ = softplus(Steps · δ + step)        S ← exp(rates ∘ Δ) ∘ S + Δ·v·B        y = C·S + skip·v        per channel
//! out = Out · (y ∘ silu(z))
//! ```
//!
//! The state is the convolution's, then `S` of each channel, `[channels × state_dim]`. Channels are independent; the
//! tokens of a channel are processed in order, so no bit depends on chunks.

use std::ops::Range;

use emberflow_kernels::{Compute, math};
use emberflow_models::config::{Mamba1Shape, ModelConfig};
use emberflow_models::names::Role;

use super::LayerPass;
use super::conv::{self, Convolution, by_tap};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::norm::softplus;
use crate::scratch::Scratch;
use crate::state::{RecurrentPart, Span};

/// Channels of a unit of work.
const BLOCK: usize = 64;

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Mamba1 {
    shape: Mamba1Shape,
    /// Projection to the channels of the convolution and the gates of the output, `[2·channels × d_model]`.
    pub input: Matrix,
    /// Projection of the channels to the input of the steps, `B` and `C`, `[rank + 2·state_dim × channels]`.
    pub mix: Matrix,
    /// Projection to the channels' steps, `[channels × rank]`.
    pub steps: Matrix,
    /// Output projection, `[d_model × channels]`.
    pub output: Matrix,
    /// The convolution, `[taps × channels]`.
    weights: Vec<f32>,
    /// By channel: the bias of the convolution, that of the step, and the factor of the input in the output.
    bias: Vec<f32>,
    step: Vec<f32>,
    skip: Vec<f32>,
    /// Factors of the decays, below 0, `[channels × state_dim]`.
    rates: Vec<f32>,
    /// RMSNorms of the input of the steps, of `B` and of `C`.
    norms: [Vec<f32>; 3],
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

/// Floats of a layer's state.
pub(super) fn state_floats(shape: Mamba1Shape) -> usize {
    conv_floats(shape) + shape.channels as usize * shape.state_dim as usize
}

fn conv_floats(shape: Mamba1Shape) -> usize {
    conv::state_floats(shape.channels as usize, shape.taps as usize)
}

impl Mamba1 {
    /// Loads the weights of layer `l`, whose state begins at float `at` of a sequence's block.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        l: u32,
        shape: Mamba1Shape,
        at: usize,
    ) -> Result<Self, Error> {
        let [d, channels, taps, state, rank] = [
            c.d_model,
            shape.channels,
            shape.taps,
            shape.state_dim,
            shape.rank,
        ]
        .map(|n| n as usize);
        Ok(Self {
            shape,
            input: from.matrix(Role::MambaIn, l, 2 * channels, d)?,
            mix: from.matrix(Role::MambaMix, l, shape.mixed(), channels)?,
            steps: from.matrix(Role::MambaSteps, l, channels, rank)?,
            output: from.matrix(Role::MambaOut, l, d, channels)?,
            weights: by_tap(&from.rows(Role::MambaConv, l, channels, taps)?, taps),
            bias: from.vector(Role::MambaConvBias, l, channels)?,
            step: from.vector(Role::MambaStep, l, channels)?,
            skip: from.vector(Role::MambaSkip, l, channels)?,
            rates: from.rows(Role::MambaRates, l, channels, state)?,
            norms: [
                from.vector(Role::MambaStepNorm, l, rank)?,
                from.vector(Role::MambaWriteNorm, l, state)?,
                from.vector(Role::MambaReadNorm, l, state)?,
            ],
            part: at..at + state_floats(shape),
        })
    }

    /// See [`super::Mixer::run`].
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let (d, channels) = (self.output.rows(), self.shape.channels as usize);
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        self.input.matmul(on, input, &mut s.rows, &mut s.q);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.convolve(on, span, first, s);
            first += span.tokens.len();
        }
        let convolved = &s.attended[..rows * channels];
        let input = Input::new(on.cpu, convolved, rows, &mut s.input);
        self.mix.matmul(on, input, &mut s.rows, &mut s.k);
        self.normalize(on, at.config.rms_eps, rows, s);
        let rank = self.shape.rank as usize;
        let input = Input::new(on.cpu, &s.v[..rows * rank], rows, &mut s.input);
        self.steps.matmul(on, input, &mut s.rows, &mut s.gate);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.span(on, span, [first, rows], s);
            first += span.tokens.len();
        }
        let mixed = &s.attended[..rows * channels];
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        self.output.matmul(on, input, &mut s.rows, &mut s.out);
    }

    /// The convolution of one sequence's rows, the first of which is row `first` of the pass, into `s.attended`.
    fn convolve(&self, on: &Compute, span: &mut Span<'_>, first: usize, s: &mut Scratch) {
        let (channels, n) = (self.shape.channels as usize, span.tokens.len());
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.conv_part());
        let conv = Convolution {
            channels,
            weights: &self.weights,
            every: 1,
            bias: Some(&self.bias),
            before,
            rows: &s.q[first * 2 * channels..][..n * 2 * channels],
            stride: 2 * channels,
        };
        let out = &mut s.attended[first * channels..][..n * channels];
        (on.workers).for_each_chunk_mut(out, channels, &|_, row, out| {
            conv.row(row, out);
            on.cpu.silu(out);
        });
        conv.state(n, after);
        if let Some((rows, to)) = marked {
            conv.state(rows, to);
        }
    }

    /// The part of the recurrent state with the convolution's.
    fn conv_part(&self) -> Range<usize> {
        self.part.start..self.part.start + conv_floats(self.shape)
    }

    /// Normalises the products of `s.k`; the input of the steps goes to `s.v`.
    fn normalize(&self, on: &Compute, eps: f32, rows: usize, s: &mut Scratch) {
        let (mixed, rank) = (self.shape.mixed(), self.shape.rank as usize);
        let products = s.k[..rows * mixed].chunks_exact_mut(mixed);
        for (products, steps) in products.zip(s.v.chunks_exact_mut(rank)) {
            let mut end = 0;
            for norm in &self.norms {
                let part = &mut products[end..end + norm.len()];
                on.cpu.rmsnorm_inplace(part, norm, eps);
                end += norm.len();
            }
            steps.copy_from_slice(&products[..rank]);
        }
    }

    /// The recurrence over the rows of one sequence, the first of `rows` of which is row `first` of the pass: replaces
    /// the channels of its rows in `s.attended` by the gated outputs.
    fn span(&self, on: &Compute, span: &mut Span<'_>, [first, rows]: [usize; 2], s: &mut Scratch) {
        let (channels, n) = (self.shape.channels as usize, span.tokens.len());
        let mixed = self.shape.mixed();
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.conv_part().end..self.part.end);
        let (projected, out) = s.q.split_at_mut(rows * 2 * channels);
        let out = &mut out[..n * channels];
        let scan = ChannelScan {
            mamba: self,
            convolved: &s.attended[first * channels..][..n * channels],
            mixed: &s.k[first * mixed..][..n * mixed],
            steps: &s.gate[first * channels..][..n * channels],
        };
        match marked {
            None => scan.run(on, before, after, 0..n, out),
            Some((middle, to)) => {
                scan.run(on, before, to, 0..middle, out);
                scan.run(on, to, after, middle..n, out);
            }
        }
        let gates = &projected[first * 2 * channels..];
        let gated = &mut s.attended[first * channels..][..n * channels];
        (on.workers).for_each_chunk_mut(gated, channels, &|_, row, gated| {
            gated.copy_from_slice(&gates[row * 2 * channels + channels..][..channels]);
            on.cpu.silu(gated);
            for (block, gated) in gated.chunks_mut(BLOCK).enumerate() {
                let y = &out[block * BLOCK * n + row * gated.len()..];
                gated.iter_mut().zip(y).for_each(|(z, y)| *z *= *y);
            }
        });
    }
}

/// The inputs of the recurrence for one sequence's rows.
struct ChannelScan<'a> {
    mamba: &'a Mamba1,
    /// `v`, `[rows × channels]`.
    convolved: &'a [f32],
    /// The input of the steps, `B` and `C`, `[rows × (rank + 2·state_dim)]`.
    mixed: &'a [f32],
    /// Projected steps, `[rows × channels]`.
    steps: &'a [f32],
}

impl ChannelScan<'_> {
    /// Runs all channels over the rows `rows`, from the state `before` to `after`; stores `y` block by block, each
    /// `[rows × channels of the block]`.
    fn run(
        &self,
        on: &Compute,
        before: &[f32],
        after: &mut [f32],
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let state = self.mamba.shape.state_dim as usize;
        let block_len = out.len() / self.mamba.shape.channels as usize * BLOCK;
        let sizes = [BLOCK * state, block_len];
        (on.workers).for_each_chunk_pair_mut([after, out], sizes, |block, after, out| {
            after.copy_from_slice(&before[block * BLOCK * state..][..after.len()]);
            let width = after.len() / state;
            for row in rows.clone() {
                let out = &mut out[row * width..][..width];
                for (i, (state, y)) in after.chunks_exact_mut(state).zip(out).enumerate() {
                    *y = self.channel(row, block * BLOCK + i, state);
                }
            }
        });
    }

    /// Row `row` of a channel: takes it up in the channel's state and returns `y`.
    fn channel(&self, row: usize, channel: usize, state: &mut [f32]) -> f32 {
        let (mamba, shape) = (self.mamba, self.mamba.shape);
        let [channels, rank] = [shape.channels, shape.rank].map(|n| n as usize);
        let (write, read) = self.mixed[row * shape.mixed() + rank..].split_at(state.len());
        let [v, step] = [self.convolved, self.steps].map(|all| all[row * channels + channel]);
        let step = softplus(step + mamba.step[channel]);
        let taken = step * v;
        let rates = &mamba.rates[channel * state.len()..];
        let mut sum = 0.0;
        for (((s, rate), write), read) in state.iter_mut().zip(rates).zip(write).zip(read) {
            *s = math::exp(rate * step) * *s + taken * write;
            sum += *s * read;
        }
        sum + mamba.skip[channel] * v
    }
}
