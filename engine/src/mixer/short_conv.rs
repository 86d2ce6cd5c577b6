//! Short convolution (LFM2): a gated causal convolution of each channel over a few tokens.
//!
//! ```text
//! [b, c, x] = In · input        y = c ∘ conv(b ∘ x)        out = Out · y
//! ```

use std::ops::Range;

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;

use super::conv::{Convolution, by_tap, state_floats};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use crate::state::Span;

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct ShortConv {
    /// Input projection, `[3·d_model × d_model]`: rows of `b`, of `c`, of `x`.
    pub input: Matrix,
    /// Output projection, `[d_model × d_model]`.
    pub output: Matrix,
    /// The convolution, `[taps × d_model]`.
    weights: Vec<f32>,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

impl ShortConv {
    /// Loads the weights of layer `layer`, whose state begins at float `at` of a sequence's block.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        layer: u32,
        taps: usize,
        at: usize,
    ) -> Result<Self, Error> {
        let d = c.d_model as usize;
        Ok(Self {
            input: from.matrix(Role::ConvIn, layer, 3 * d, d)?,
            output: from.matrix(Role::ConvOut, layer, d, d)?,
            weights: by_tap(&from.rows(Role::Conv, layer, d, taps)?, taps),
            part: at..at + state_floats(d, taps),
        })
    }

    /// See [`super::Mixer::run`].
    pub fn run(&self, on: &Compute, spans: &mut [Span<'_>], s: &mut Scratch) {
        let d = self.output.rows();
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        self.input.matmul(on, input, &mut s.rows, &mut s.q);
        // x ← b ∘ x
        (on.workers).for_each_chunk_mut(&mut s.q[..rows * 3 * d], 3 * d, &|_, _, row| {
            let (bc, x) = row.split_at_mut(2 * d);
            x.iter_mut().zip(bc).for_each(|(x, b)| *x *= *b);
        });
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let state = span.sequence.recurrent(self.part.clone());
            let projected = &s.q[first * 3 * d..][..n * 3 * d];
            let conv = Convolution {
                channels: d,
                weights: &self.weights,
                every: 1,
                bias: None,
                before: state.before,
                rows: &projected[2 * d..],
                stride: 3 * d,
            };
            let out = &mut s.attended[first * d..][..n * d];
            on.workers.for_each_chunk_mut(out, d, &|_, row, out| {
                conv.row(row, out);
                let c = &projected[(3 * row + 1) * d..][..d];
                out.iter_mut().zip(c).for_each(|(y, c)| *y *= c);
            });
            conv.state(n, state.after);
            if let Some((rows, to)) = state.marked {
                conv.state(rows, to);
            }
            first += n;
        }
        let input = Input::new(on.cpu, &s.attended[..rows * d], rows, &mut s.input);
        self.output.matmul(on, input, &mut s.rows, &mut s.out);
    }
}
