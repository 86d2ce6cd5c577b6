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

use super::conv::{self, Convolution, by_tap};
use super::mix::Mix;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::norm::softplus;
use crate::scratch::Scratch;
use crate::state::{RecurrentPart, Span};

/// Channels of a unit of work.
const BLOCK: usize = 64;

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Mamba1 {
    shape: Mamba1Shape,
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

buffers! { shape: Mamba1Shape {
    /// The convolved channels, later the mixed values.
    convolved: shape.channels as usize,
    /// The channels of the convolution and the gates of the output.
    projected: 2 * shape.channels as usize,
    /// The input of the steps, `B` and `C`.
    mixed: shape.mixed(),
    /// The input of the steps alone.
    narrow: shape.rank as usize,
    /// The projected steps.
    steps: shape.channels as usize,
    /// Outputs of the channels.
    outputs: shape.channels as usize,
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, shape: Mamba1Shape) -> Needs {
    let [d, channels, rank, state] =
        [c.d_model, shape.channels, shape.rank, shape.state_dim].map(|n| n as usize);
    Needs {
        matrices: vec![
            // channels of the convolution, gates of the output
            MatrixSpec::input(Role::MambaIn, 2 * channels, d),
            // input of the steps, `B`, `C`
            MatrixSpec::between(Role::MambaMix, shape.mixed(), channels).on_cpu(),
            MatrixSpec::between(Role::MambaSteps, channels, rank).on_cpu(),
            MatrixSpec::output(Role::MambaOut, d, channels),
        ],
        row_floats: widths(shape).iter().sum(),
        state_floats: conv_floats(shape) + channels * state,
        input_floats: 0,
        scores: None,
    }
}

fn conv_floats(shape: Mamba1Shape) -> usize {
    conv::state_floats(shape.channels as usize, shape.taps as usize)
}

impl Mamba1 {
    /// Loads the weights of layer `l`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        l: u32,
        shape: Mamba1Shape,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        let [channels, taps, state, rank] =
            [shape.channels, shape.taps, shape.state_dim, shape.rank].map(|n| n as usize);
        Ok(Self {
            shape,
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
            part,
        })
    }

    /// The convolution of one sequence's rows, the first of which is row `first` of the pass.
    fn convolve(&self, on: &Compute, span: &mut Span<'_>, first: usize, b: &mut Buffers<'_>) {
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
            rows: &b.projected[first * 2 * channels..][..n * 2 * channels],
            stride: 2 * channels,
        };
        let out = &mut b.convolved[first * channels..][..n * channels];
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

    /// Normalises the input of the steps, `B` and `C`, and copies the first.
    fn normalize(&self, on: &Compute, eps: f32, b: &mut Buffers<'_>) {
        let (mixed, rank) = (self.shape.mixed(), self.shape.rank as usize);
        let products = b.mixed.chunks_exact_mut(mixed);
        for (products, steps) in products.zip(b.narrow.chunks_exact_mut(rank)) {
            let mut end = 0;
            for norm in &self.norms {
                let part = &mut products[end..end + norm.len()];
                on.cpu.rmsnorm_inplace(part, norm, eps);
                end += norm.len();
            }
            steps.copy_from_slice(&products[..rank]);
        }
    }

    /// The recurrence over the rows of one sequence, the first of which is row `first` of the pass: replaces the
    /// convolved channels of its rows by the gated outputs.
    fn span(&self, on: &Compute, span: &mut Span<'_>, first: usize, b: &mut Buffers<'_>) {
        let (channels, n) = (self.shape.channels as usize, span.tokens.len());
        let mixed = self.shape.mixed();
        let RecurrentPart {
            before,
            after,
            marked,
        } = span.sequence.recurrent(self.conv_part().end..self.part.end);
        let out = &mut b.outputs[..n * channels];
        let scan = ChannelScan {
            mamba: self,
            convolved: &b.convolved[first * channels..][..n * channels],
            mixed: &b.mixed[first * mixed..][..n * mixed],
            steps: &b.steps[first * channels..][..n * channels],
        };
        match marked {
            None => scan.run(on, before, after, 0..n, out),
            Some((middle, to)) => {
                scan.run(on, before, to, 0..middle, out);
                scan.run(on, to, after, middle..n, out);
            }
        }
        let gates = &b.projected[first * 2 * channels..];
        let gated = &mut b.convolved[first * channels..][..n * channels];
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

impl Mix for Mamba1 {
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let b = &mut Buffers::split(self.shape, rows, &mut s.block);
        let normed = &s.normed[..rows * at.config.d_model as usize];
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        matrices[Role::MambaIn].matmul(on, input, &mut s.rows, b.projected);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.convolve(on, span, first, b);
            first += span.tokens.len();
        }
        let input = Input::new(on.cpu, b.convolved, rows, &mut s.input);
        matrices[Role::MambaMix].matmul(on, input, &mut s.rows, b.mixed);
        self.normalize(on, at.config.rms_eps, b);
        let input = Input::new(on.cpu, b.narrow, rows, &mut s.input);
        matrices[Role::MambaSteps].matmul(on, input, &mut s.rows, b.steps);
        let mut first = 0;
        for span in spans.iter_mut() {
            self.span(on, span, first, b);
            first += span.tokens.len();
        }
        let input = Input::new(on.cpu, b.convolved, rows, &mut s.input);
        matrices[Role::MambaOut].matmul(on, input, &mut s.rows, &mut s.out);
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
