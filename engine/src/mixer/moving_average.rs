//! Gated moving average: each channel keeps a share of its average and takes the rest from the token.
//!
//! ```text
//! g = sigmoid(Gate · x)        s ← g ∘ s + (1 − g) ∘ (In · x)        out = Out · s
//! ```
//!
//! The state is `s` of the last token. Tokens are processed in order, so no bit depends on chunks.

use std::ops::Range;

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;

use super::mix::Mix;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
use crate::input::Input;
use crate::matrix::Matrix;
use crate::norm::sigmoid;
use crate::scratch::Scratch;
use crate::state::Span;

/// One layer.
#[derive(Debug)]
pub(crate) struct MovingAverage {
    d: usize,
    /// Its part of a sequence's recurrent state.
    part: Range<usize>,
}

buffers! { d: usize {
    /// Values of the tokens, later the averages after them.
    averages: d,
    /// Shares of the average that are kept.
    gates: d,
} }

/// What a layer needs.
pub(super) fn needs(c: &ModelConfig) -> Needs {
    let d = c.d_model as usize;
    Needs {
        matrices: vec![
            MatrixSpec::input(Role::AverageGate, d, d),
            MatrixSpec::input(Role::AverageIn, d, d),
            MatrixSpec::output(Role::AverageOut, d, d),
        ],
        row_floats: widths(d).iter().sum(),
        state_floats: d,
        scores: None,
    }
}

impl MovingAverage {
    /// A layer whose state is `part` of a sequence's recurrent state.
    pub fn new(c: &ModelConfig, part: Range<usize>) -> Self {
        let d = c.d_model as usize;
        Self { d, part }
    }
}

impl Mix for MovingAverage {
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        _at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let d = self.d;
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let Buffers { averages, gates } = Buffers::split(d, rows, &mut s.block);
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let mut products = [
            (&matrices[Role::AverageGate], &mut *gates),
            (&matrices[Role::AverageIn], &mut *averages),
        ];
        Matrix::matmul_all(on, &mut products, input, &mut s.rows);
        on.workers.for_each_chunk_mut(gates, d, &|_, _, gates| {
            gates.iter_mut().for_each(|gate| *gate = sigmoid(*gate));
        });
        let mut first = 0;
        for span in spans {
            let n = span.tokens.len();
            let state = span.sequence.recurrent(self.part.clone());
            let averages = &mut averages[first * d..][..n * d];
            average(state.before, &gates[first * d..][..n * d], averages);
            state.after.copy_from_slice(&averages[(n - 1) * d..]);
            if let Some((rows, to)) = state.marked {
                to.copy_from_slice(&averages[(rows - 1) * d..][..d]);
            }
            first += n;
        }
        let input = Input::new(on.cpu, averages, rows, &mut s.input);
        matrices[Role::AverageOut].matmul(on, input, &mut s.rows, &mut s.out);
    }
}

/// Replaces the values of some rows by the averages after them, from the average `before` on.
fn average(before: &[f32], gates: &[f32], values: &mut [f32]) {
    let d = before.len();
    let mut last = before;
    for (values, gates) in values.chunks_exact_mut(d).zip(gates.chunks_exact(d)) {
        for ((value, gate), last) in values.iter_mut().zip(gates).zip(last) {
            *value = gate * last + (1.0 - gate) * *value;
        }
        last = values;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::floats;

    /// The formula, one element at a time over the whole text.
    fn textbook(gates: &[f32], values: &[f32], d: usize) -> Vec<f32> {
        let mut averages = vec![0.0; values.len()];
        for channel in 0..d {
            let mut average = 0.0f32;
            for at in (channel..values.len()).step_by(d) {
                average = gates[at] * average + (1.0 - gates[at]) * values[at];
                averages[at] = average;
            }
        }
        averages
    }

    #[test]
    fn chunks_change_no_bit_and_the_formula_holds() {
        for (d, rows) in [(1, 5), (36, 17), (3, 64)] {
            let values = floats(1, rows * d);
            let gates: Vec<f32> = floats(2, rows * d).into_iter().map(sigmoid).collect();
            let expected = textbook(&gates, &values, d);
            for chunk in [1, 4, rows] {
                let mut found = Vec::new();
                let mut state = vec![0.0; d];
                for (gates, values) in gates.chunks(chunk * d).zip(values.chunks(chunk * d)) {
                    let mut averages = values.to_vec();
                    average(&state, gates, &mut averages);
                    state.copy_from_slice(&averages[averages.len() - d..]);
                    found.extend(averages);
                }
                let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{d}, {rows} by {chunk}");
            }
        }
    }
}
