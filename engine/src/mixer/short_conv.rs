//! Short convolution (LFM2): gates around a causal convolution of each channel over a few tokens.
//!
//! ```text
//! [b, c, x] = In · input          y[t] = c[t] ∘ Σⱼ w[j] ∘ (b ∘ x)[t − taps + 1 + j]          out = Out · y
//! ```
//!
//! Its state is `b ∘ x` of the last `taps − 1` tokens, the oldest first; zeros before the first token.

use std::ops::Range;

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;

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

/// Floats of a layer's state.
pub(super) fn state_floats(d: usize, taps: usize) -> usize {
    (taps - 1) * d
}

impl ShortConv {
    /// Reads the weights of layer `layer`, whose state begins at float `at` of a sequence's block.
    pub fn load(
        from: &Loader<'_>,
        c: &ModelConfig,
        layer: u32,
        taps: usize,
        at: usize,
    ) -> Result<Self, Error> {
        let d = c.d_model as usize;
        let by_channel = from.rows(Role::Conv, layer, d, taps)?;
        let by_tap = (0..taps).flat_map(|j| by_channel.iter().skip(j).step_by(taps).copied());
        Ok(Self {
            input: from.matrix(Role::ConvIn, layer, 3 * d, d)?,
            output: from.matrix(Role::ConvOut, layer, d, d)?,
            weights: by_tap.collect(),
            part: at..at + state_floats(d, taps),
        })
    }

    /// See [`super::Mixer::run`].
    pub fn run(&self, on: &Compute, spans: &mut [Span<'_>], s: &mut Scratch) {
        let d = self.output.rows();
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        self.input.matmul(on, input, &mut s.rows, &mut s.q);
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let state = span.sequence.recurrent(self.part.clone());
            let conv = Convolution {
                d,
                weights: &self.weights,
                before: state.before,
                projected: &s.q[first * 3 * d..][..n * 3 * d],
            };
            let out = &mut s.attended[first * d..][..n * d];
            on.workers
                .for_each_chunk_mut(out, d, &|_, row, out| conv.row(row, out));
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

/// The convolution of one sequence's rows.
#[derive(Clone, Copy)]
struct Convolution<'a> {
    d: usize,
    /// `[taps × d]`.
    weights: &'a [f32],
    /// State before the first row, `[(taps − 1) × d]`.
    before: &'a [f32],
    /// `b`, `c` and `x` of each row, `[rows × 3·d]`.
    projected: &'a [f32],
}

impl Convolution<'_> {
    /// `b ∘ x` of the token `back` tokens before row `row`, as two factors.
    fn gated(&self, row: usize, back: usize) -> Gated<'_> {
        let d = self.d;
        match row.checked_sub(back) {
            Some(row) => {
                let [b, x] = [0, 2].map(|part| &self.projected[(3 * row + part) * d..][..d]);
                Gated::Product(b, x)
            }
            None => {
                // the newest of the state is one token before row 0
                let age = back - row;
                Gated::Value(&self.before[self.before.len() - age * d..][..d])
            }
        }
    }

    /// `y` of row `row`: taps in order, the oldest token first.
    fn row(&self, row: usize, out: &mut [f32]) {
        let d = self.d;
        let taps = self.weights.len() / d;
        out.fill(0.0);
        for (tap, w) in self.weights.chunks_exact(d).enumerate() {
            match self.gated(row, taps - 1 - tap) {
                Gated::Value(v) => {
                    for ((y, w), v) in out.iter_mut().zip(w).zip(v) {
                        *y += w * v;
                    }
                }
                Gated::Product(b, x) => {
                    for (((y, w), b), x) in out.iter_mut().zip(w).zip(b).zip(x) {
                        *y += w * (b * x);
                    }
                }
            }
        }
        let c = &self.projected[(3 * row + 1) * d..][..d];
        for (y, c) in out.iter_mut().zip(c) {
            *y *= c;
        }
    }

    /// The state behind the first `rows` rows, at least one.
    fn state(&self, rows: usize, to: &mut [f32]) {
        let kept = to.len() / self.d;
        for (at, to) in to.chunks_exact_mut(self.d).enumerate() {
            match self.gated(rows - 1, kept - 1 - at) {
                Gated::Value(v) => to.copy_from_slice(v),
                Gated::Product(b, x) => {
                    for ((to, b), x) in to.iter_mut().zip(b).zip(x) {
                        *to = b * x;
                    }
                }
            }
        }
    }
}

/// `b ∘ x` of a token: kept by the state, or still to be multiplied.
enum Gated<'a> {
    Value(&'a [f32]),
    Product(&'a [f32], &'a [f32]),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::floats;

    /// The formula, one element at a time over the whole text.
    fn textbook(d: usize, taps: usize, weights: &[f32], projected: &[f32]) -> Vec<f32> {
        let rows = projected.len() / (3 * d);
        let at = |t: usize, part: usize, i: usize| projected[(3 * t + part) * d + i];
        let element = |t: usize, i: usize| {
            let mut sum = 0.0;
            for j in 0..taps {
                if let Some(t) = (t + j + 1).checked_sub(taps) {
                    sum += weights[j * d + i] * (at(t, 0, i) * at(t, 2, i));
                }
            }
            sum * at(t, 1, i)
        };
        (0..rows)
            .flat_map(|t| (0..d).map(move |i| (t, i)))
            .map(|(t, i)| element(t, i))
            .collect()
    }

    #[test]
    fn chunks_change_no_bit_and_the_formula_holds() {
        for (d, taps, rows) in [(1, 2, 5), (5, 3, 17), (40, 4, 9), (8, 3, 2), (3, 7, 11)] {
            let weights = floats(1, taps * d);
            let projected = floats(2, 3 * rows * d);
            let expected = textbook(d, taps, &weights, &projected);
            for chunks in [&[rows][..], &[1], &[2, 1, 3], &[4]] {
                let mut state = vec![0.0; state_floats(d, taps)];
                let (mut found, mut first) = (Vec::new(), 0);
                for &chunk in chunks.iter().cycle() {
                    let n = chunk.min(rows - first);
                    if n == 0 {
                        break;
                    }
                    let conv = Convolution {
                        d,
                        weights: &weights,
                        before: &state,
                        projected: &projected[3 * first * d..][..3 * n * d],
                    };
                    let mut out = vec![f32::NAN; n * d];
                    for (row, out) in out.chunks_exact_mut(d).enumerate() {
                        conv.row(row, out);
                    }
                    let mut after = vec![f32::NAN; state.len()];
                    conv.state(n, &mut after);
                    found.extend(out);
                    state = after;
                    first += n;
                }
                let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{d} {taps} {chunks:?}");
            }
        }
    }
}
