//! Activations that do not fit into 8 bits (llm.npu, §3.3, Eq. 1).
//!
//! ```text
//! q = round(x / s)    c = min(max(q, -127), 127)    r = q - c
//! q · w = c · w + r · w        all in integers, so exact
//! ```
//!
//! The NPU multiplies c, and the CPU the few channels with nonzero r. The paper writes the remainder as
//! `floor(q / 128) · 128` and clips to 128, which 8 bits cannot hold; the difference above is exact for any q.

/// Largest magnitude of a clipped activation.
pub const MOST: i32 = 127;

/// Rows of activations, quantised with one scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shadowed {
    /// Columns.
    pub cols: usize,
    /// `c`, `[rows x cols]`.
    pub clipped: Vec<i8>,
    /// Columns in which some row has a nonzero remainder, ascending.
    pub channels: Vec<usize>,
    /// `r` of these columns, `[rows x channels]`.
    pub rest: Vec<i32>,
}

impl Shadowed {
    /// Splits `q`, `[rows x cols]`.
    pub fn new(q: &[i32], cols: usize) -> Self {
        let clip = |q: i32| q.clamp(-MOST, MOST);
        let rows = || q.chunks_exact(cols.max(1));
        let has_rest = |&col: &usize| rows().any(|row| clip(row[col]) != row[col]);
        let channels: Vec<usize> = (0..cols).filter(has_rest).collect();
        let rest = rows().flat_map(|row| channels.iter().map(|&col| row[col] - clip(row[col])));
        Self {
            cols,
            clipped: q.iter().map(|&q| clip(q) as i8).collect(),
            rest: rest.collect(),
            channels,
        }
    }

    /// Quantises and splits `x`, `[rows x cols]`.
    pub fn quantised(x: &[f32], cols: usize, scale: f32) -> Self {
        let q: Vec<i32> = x
            .iter()
            .map(|x| (x / scale).round_ties_even() as i32)
            .collect();
        Self::new(&q, cols)
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.clipped.len() / self.cols.max(1)
    }

    /// `c · w` of one row and one row of weights: the NPU's part.
    pub fn clipped_product(&self, row: usize, weights: &[i8]) -> i64 {
        let clipped = &self.clipped[row * self.cols..][..self.cols];
        let products = clipped.iter().zip(weights);
        products.map(|(&c, &w)| i64::from(c) * i64::from(w)).sum()
    }

    /// `r · w` of one row and one row of weights: the CPU's part, over outlier channels only.
    pub fn rest_product(&self, row: usize, weights: &[i8]) -> i64 {
        let rest = &self.rest[row * self.channels.len()..][..self.channels.len()];
        let products = rest.iter().zip(&self.channels);
        products
            .map(|(&r, &col)| i64::from(r) * i64::from(weights[col]))
            .sum()
    }
}

/// Channels with outliers of one matrix's inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelCounts {
    /// Values with a nonzero remainder, by channel.
    values: Vec<u64>,
    /// Channels that had one, summed over passes.
    of_passes: u64,
    passes: u64,
}

impl ChannelCounts {
    /// For `channels` channels.
    pub fn new(channels: usize) -> Self {
        Self {
            values: vec![0; channels],
            of_passes: 0,
            passes: 0,
        }
    }

    /// Adds the inputs of a pass.
    pub fn add(&mut self, x: &Shadowed) {
        for rest in x.rest.chunks_exact(x.channels.len().max(1)) {
            for (&channel, &rest) in x.channels.iter().zip(rest) {
                self.values[channel] += u64::from(rest != 0);
            }
        }
        self.of_passes += x.channels.len() as u64;
        self.passes += 1;
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.values.len()
    }

    /// Channels with an outlier in a pass, mean.
    pub fn per_pass(&self) -> f64 {
        self.of_passes as f64 / self.passes.max(1) as f64
    }

    /// Share of the channels with an outlier in a pass, mean.
    pub fn share(&self) -> f64 {
        self.per_pass() / self.values.len().max(1) as f64
    }

    /// Share of the channels that had an outlier at all.
    pub fn ever(&self) -> f64 {
        let ever = self.values.iter().filter(|&&values| values > 0).count();
        ever as f64 / self.values.len().max(1) as f64
    }

    /// All values beyond the limit.
    pub fn outliers(&self) -> u64 {
        self.values.iter().sum()
    }

    /// Smallest number of channels that together have at least `share` of the outliers.
    pub fn hot(&self, share: f64) -> usize {
        let mut values = self.values.clone();
        values.sort_unstable_by(|a, b| b.cmp(a));
        let wanted = share * self.outliers() as f64;
        let mut sum = 0;
        let covered = values.iter().take_while(|&&values| {
            let more = (sum as f64) < wanted;
            sum += values;
            more
        });
        covered.count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Eq. 1: the two parts add up to the original product, for any integers.
        #[test]
        fn the_parts_add_up_to_the_product(
            rows in 1..6usize, cols in 1..40usize, seed in any::<u64>(), range in 1..100_000i32,
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let q: Vec<i32> = (0..rows * cols)
                .map(|_| if random.u8(..) < 200 { random.i32(-MOST..=MOST) } else { random.i32(-range..=range) })
                .collect();
            let w: Vec<i8> = (0..cols).map(|_| random.i8(..)).collect();
            let split = Shadowed::new(&q, cols);
            prop_assert_eq!(split.rows(), rows);
            for (row, q) in q.chunks_exact(cols).enumerate() {
                let whole: i64 = q.iter().zip(&w).map(|(&q, &w)| i64::from(q) * i64::from(w)).sum();
                prop_assert_eq!(split.clipped_product(row, &w) + split.rest_product(row, &w), whole);
            }
            let beyond = |col: &usize| q.chunks_exact(cols).any(|row| row[*col].abs() > MOST);
            prop_assert_eq!(split.channels, (0..cols).filter(beyond).collect::<Vec<_>>());
        }

        /// The remainder is zero where possible, and the clipped part is at its maximum elsewhere.
        #[test]
        fn a_rest_is_what_does_not_fit(q in proptest::collection::vec(any::<i16>(), 1..50)) {
            let q: Vec<i32> = q.into_iter().map(i32::from).collect();
            let split = Shadowed::new(&q, q.len());
            for (col, &q) in q.iter().enumerate() {
                let rest = split.channels.iter().position(|&c| c == col).map_or(0, |at| split.rest[at]);
                let clipped = i32::from(split.clipped[col]);
                prop_assert_eq!(clipped + rest, q);
                prop_assert!(rest == 0 || clipped.abs() == MOST && (rest > 0) == (q > 0));
            }
        }
    }

    #[test]
    fn channels_are_counted_once_a_pass() {
        let mut counts = ChannelCounts::new(4);
        let scale = 1.0 / MOST as f32;
        for x in [
            &[0.5, 2.0, -3.0, 0.0, 0.1, 1.5, 0.2, 1.0][..],
            &[0.0, -1.1, 0.0, 0.0],
        ] {
            counts.add(&Shadowed::quantised(x, 4, scale));
        }
        assert_eq!(
            [counts.per_pass(), counts.share(), counts.ever()],
            [1.5, 0.375, 0.5]
        );
        assert_eq!(counts.outliers(), 4);
        // One of the two channels has three of the four.
        assert_eq!(
            [counts.hot(0.75), counts.hot(0.76), counts.hot(0.0)],
            [1, 2, 0]
        );
    }
}
