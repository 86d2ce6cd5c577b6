//! A causal convolution of each channel over a few tokens:
//!
//! ```text
//! y[t] = bias + Σⱼ w[j] ∘ x[t − every · (taps − 1 − j)]
//! ```
//!
//! Its state is `x` of the last `every · (taps − 1)` tokens, the oldest first; zeros before the first token.

/// The convolution of one sequence's rows.
#[derive(Clone, Copy)]
pub(crate) struct Convolution<'a> {
    pub channels: usize,
    /// `[taps × channels]`.
    pub weights: &'a [f32],
    /// Tokens from one tap to the next.
    pub every: usize,
    /// One number for each channel; `None` for zeros.
    pub bias: Option<&'a [f32]>,
    /// State before the first row, `[every · (taps − 1) × channels]`.
    pub before: &'a [f32],
    /// Rows that begin with the channels.
    pub rows: &'a [f32],
    /// Distance between rows, in elements.
    pub stride: usize,
}

/// Floats of the state.
pub(crate) fn state_floats(channels: usize, taps: usize) -> usize {
    (taps - 1) * channels
}

/// The weights `[taps × channels]`, from weights stored channel by channel.
pub(crate) fn by_tap(by_channel: &[f32], taps: usize) -> Vec<f32> {
    let tap = |j| by_channel.iter().skip(j).step_by(taps).copied();
    (0..taps).flat_map(tap).collect()
}

impl Convolution<'_> {
    /// `x` of the token `back` tokens before row `row`.
    fn token(&self, row: usize, back: usize) -> &[f32] {
        match row.checked_sub(back) {
            Some(row) => &self.rows[row * self.stride..][..self.channels],
            None => {
                // the newest entry of the state is one token before row 0
                let age = back - row;
                &self.before[self.before.len() - age * self.channels..][..self.channels]
            }
        }
    }

    /// `y` of row `row`: the bias, then taps in order, the oldest token first.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let taps = self.weights.len() / self.channels;
        match self.bias {
            Some(bias) => out.copy_from_slice(bias),
            None => out.fill(0.0),
        }
        for (tap, w) in self.weights.chunks_exact(self.channels).enumerate() {
            let x = self.token(row, (taps - 1 - tap) * self.every);
            for ((y, w), x) in out.iter_mut().zip(w).zip(x) {
                *y += w * x;
            }
        }
    }

    /// The state after the first `rows` rows, at least one.
    pub fn state(&self, rows: usize, to: &mut [f32]) {
        let tokens = to.len() / self.channels;
        for (at, to) in to.chunks_exact_mut(self.channels).enumerate() {
            to.copy_from_slice(self.token(rows - 1, tokens - 1 - at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::floats;

    /// The formula, one element at a time over the whole text.
    fn textbook(weights: &[f32], bias: Option<&[f32]>, channels: usize, text: &[f32]) -> Vec<f32> {
        let taps = weights.len() / channels;
        let element = |t: usize, i: usize| {
            let mut sum = bias.map_or(0.0, |bias| bias[i]);
            for j in 0..taps {
                if let Some(t) = (t + j + 1).checked_sub(taps) {
                    sum += weights[j * channels + i] * text[t * channels + i];
                }
            }
            sum
        };
        (0..text.len() / channels)
            .flat_map(|t| (0..channels).map(move |i| (t, i)))
            .map(|(t, i)| element(t, i))
            .collect()
    }

    #[test]
    fn chunks_change_no_bit_and_the_formula_holds() {
        for (channels, taps, rows) in [(1, 2, 5), (5, 3, 17), (40, 4, 9), (8, 3, 2), (3, 7, 11)] {
            let weights = floats(1, taps * channels);
            let text = floats(2, rows * channels);
            let bias = floats(3, channels);
            let bias = Some(&bias[..]).filter(|_| taps.is_multiple_of(2));
            let expected = textbook(&weights, bias, channels, &text);
            for chunks in [&[rows][..], &[1], &[2, 1, 3], &[4]] {
                let mut state = vec![0.0; state_floats(channels, taps)];
                let (mut found, mut first) = (Vec::new(), 0);
                for &chunk in chunks.iter().cycle() {
                    let n = chunk.min(rows - first);
                    if n == 0 {
                        break;
                    }
                    let conv = Convolution {
                        channels,
                        weights: &weights,
                        every: 1,
                        bias,
                        before: &state,
                        rows: &text[first * channels..][..n * channels],
                        stride: channels,
                    };
                    let mut out = vec![f32::NAN; n * channels];
                    for (row, out) in out.chunks_exact_mut(channels).enumerate() {
                        conv.row(row, out);
                    }
                    let mut after = vec![f32::NAN; state.len()];
                    conv.state(n, &mut after);
                    found.extend(out);
                    state = after;
                    first += n;
                }
                let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&found),
                    bits(&expected),
                    "{channels} {taps} {chunks:?}"
                );
            }
        }
    }

    #[test]
    fn weights_are_stored_by_channel() {
        assert_eq!(
            by_tap(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3),
            [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]
        );
    }
}
