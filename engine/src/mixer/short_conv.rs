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
use super::mix::Recurrence;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::replay::Inputs;
use crate::scratch::{RowBuffers, Scratch};
use crate::state::Span;

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct ShortConv {
    d: usize,
    /// The convolution, `[taps × d_model]`.
    weights: Vec<f32>,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

buffers! { d: usize {
    /// The mixed values.
    mixed: d,
    /// `b`, `c` and `x`, later `b ∘ x` in place of `x`.
    projected: 3 * d,
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig, taps: usize) -> Needs {
    let d = c.d_model as usize;
    Needs {
        matrices: vec![
            // rows of `b`, of `c`, of `x`
            MatrixSpec::input(Role::ConvIn, 3 * d, d),
            MatrixSpec::output(Role::ConvOut, d, d),
        ],
        row_floats: widths(d).iter().sum(),
        state_floats: state_floats(d, taps),
        input_floats: 3 * d,
        scores: None,
    }
}

impl ShortConv {
    /// Loads the weights of layer `layer`, whose state is `part` of a sequence's recurrent state.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        layer: u32,
        taps: usize,
        part: Range<usize>,
    ) -> Result<Self, Error> {
        let d = c.d_model as usize;
        Ok(Self {
            d,
            weights: by_tap(&from.rows(Role::Conv, layer, d, taps)?, taps),
            part,
        })
    }
}

impl Recurrence for ShortConv {
    fn project(
        &self,
        on: &Compute,
        matrices: &Matrices,
        _at: LayerPass<'_>,
        rows: usize,
        s: &mut Scratch,
    ) {
        let d = self.d;
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let Buffers { projected, .. } = Buffers::split(d, rows, &mut s.block);
        matrices[Role::ConvIn].matmul(on, input, &mut s.rows, projected);
        // x ← b ∘ x
        (on.workers).for_each_chunk_mut(projected, 3 * d, &|_, _, row| {
            let (bc, x) = row.split_at_mut(2 * d);
            x.iter_mut().zip(bc).for_each(|(x, b)| *x *= *b);
        });
    }

    fn inputs<'a>(&self, rows: usize, block: &'a mut RowBuffers) -> Inputs<'a> {
        let Buffers { projected, .. } = Buffers::split(self.d, rows, block);
        [projected].into_iter().collect()
    }

    fn recur(&self, on: &Compute, spans: &mut [Span<'_>], rows: usize, block: &mut RowBuffers) {
        let d = self.d;
        let Buffers { mixed, projected } = Buffers::split(d, rows, block);
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let state = span.sequence.recurrent(self.part.clone());
            let projected = &projected[first * 3 * d..][..n * 3 * d];
            let conv = Convolution {
                channels: d,
                weights: &self.weights,
                every: 1,
                bias: None,
                before: state.before,
                rows: &projected[2 * d..],
                stride: 3 * d,
            };
            let out = &mut mixed[first * d..][..n * d];
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
    }

    fn output(
        &self,
        on: &Compute,
        matrices: &Matrices,
        _at: LayerPass<'_>,
        spans: &[Span<'_>],
        s: &mut Scratch,
    ) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        let [mixed] = s.block.view(rows, [self.d]);
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        matrices[Role::ConvOut].matmul(on, input, &mut s.rows, &mut s.out);
    }
}
