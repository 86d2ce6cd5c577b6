//! Mean and standard deviation of a token's gates or scores, from which the cutoff of Gaussian
//! top-k is computed.

/// Independent accumulators of a sum.
const LANES: usize = 8;

/// `Φ⁻¹(share)`: number of standard deviations above the mean below which `share` of normally
/// distributed gates lie (`_gaussian_topk` in `modeling_gemma3n.py`).
pub fn top_multiple(share: f32) -> f32 {
    // erfc keeps precision for shares near 1.
    let below = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if below(middle) < f64::from(share) {
            low = middle
        } else {
            high = middle
        }
    }
    (0.5 * (low + high)) as f32
}

/// Mean and standard deviation of a token's values.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Moments {
    /// The mean.
    pub mean: f64,
    /// The standard deviation.
    pub deviation: f64,
}

impl Moments {
    /// From the sum and the sum of squares of `count` values.
    pub(crate) fn of(sum: f64, squares: f64, count: usize) -> Self {
        let mean = sum / count as f64;
        let variance = (squares / count as f64 - mean * mean).max(0.0);
        Self {
            mean,
            deviation: libm::sqrt(variance),
        }
    }

    /// `multiple` deviations above the mean.
    pub fn above(&self, multiple: f32) -> f32 {
        (self.mean + self.deviation * f64::from(multiple)) as f32
    }
}

/// Buffers for computing [`Moments`].
#[derive(Debug, Default)]
pub struct Sums {
    /// Sums and sums of squares, `[2 × LANES × tokens]`.
    sums: Vec<f64>,
}

impl Sums {
    /// For up to `tokens` tokens.
    pub fn with_capacity(tokens: usize) -> Self {
        Self {
            sums: Vec::with_capacity(2 * LANES * tokens),
        }
    }

    /// Bytes allocated by [`Sums::with_capacity`].
    pub fn bytes_for(tokens: usize) -> usize {
        (2 * LANES * size_of::<f64>()).saturating_mul(tokens)
    }

    /// Moments of `tokens` tokens with `values [neurons × tokens]`. Neuron `i` is added to
    /// accumulator `i % LANES`, in order, so a token's result does not depend on other tokens.
    pub fn moments(
        &mut self,
        values: &[f32],
        tokens: usize,
    ) -> impl ExactSizeIterator<Item = Moments> + '_ {
        self.sums.clear();
        self.sums.resize(2 * LANES * tokens, 0.0);
        let (sums, squares) = self.sums.split_at_mut(LANES * tokens);
        for block in values.chunks(LANES * tokens) {
            for ((sum, square), &value) in sums.iter_mut().zip(&mut *squares).zip(block) {
                let value = f64::from(value);
                *sum += value;
                *square += value * value;
            }
        }
        let neurons = values.len() / tokens.max(1);
        let (sums, squares) = (&*sums, &*squares);
        (0..tokens).map(move |token| {
            let total = |lanes: &[f64]| (0..LANES).map(|l| lanes[l * tokens + token]).sum::<f64>();
            Moments::of(total(sums), total(squares), neurons)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_multiple_is_that_of_the_normal_distribution() {
        for (share, expected) in [(0.5, 0.0), (0.95, 1.644_853_6), (0.1, -1.281_551_6)] {
            assert!((top_multiple(share) - expected).abs() < 1e-6, "{share}");
        }
    }

    #[test]
    fn a_token_has_the_same_moments_alone_and_among_others() {
        let gate = |n: usize, row: usize| ((n * 37 + row * 11) % 101) as f32 / 17.0 - 3.0;
        let neurons = 301;
        let gates = |of: &[usize]| -> Vec<f32> {
            let all = (0..neurons).flat_map(|n| of.iter().map(move |&row| gate(n, row)));
            all.collect()
        };
        let mut sums = Sums::default();
        let all: Vec<Moments> = sums.moments(&gates(&[0, 1, 2, 3, 4]), 5).collect();
        for (row, &among) in all.iter().enumerate() {
            let alone = sums.moments(&gates(&[row]), 1).next();
            assert_eq!(alone, Some(among));
        }
        let of_row = gates(&[2]);
        let mean = of_row.iter().sum::<f32>() / neurons as f32;
        let square = of_row.iter().map(|g| (g - mean) * (g - mean)).sum::<f32>();
        let expected = mean + 1.6 * (square / neurons as f32).sqrt();
        assert!((all[2].above(1.6) - expected).abs() < 1e-4);
    }
}
