//! N-gram embeddings: a table of rows for the last tokens of a text, read by one layer.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_WIDTH, ModelConfig};
use crate::limits::MAX_TAPS;

/// Rows selected by hashes of the last two, three, … tokens, whose values are added to all streams
/// before one layer (Qwen3.8-Flash-Next). A hash is the exclusive or of each token times a factor,
/// modulo the rows of a head; hashes do not cross an end-of-text token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NGrams {
    /// The layer.
    pub layer: u32,
    /// Rows of the table.
    pub rows: u32,
    /// Elements of a row.
    pub width: u32,
    /// Taps of the values' convolution, including the current token, with a dilation of
    /// [`NGrams::longest`].
    pub taps: u32,
    /// End-of-text token.
    pub end: u32,
    /// Factors of the current token, of the one before it, and so on.
    pub factors: Vec<u64>,
    /// Rows of each head, all heads of two tokens first: the first row, and their number.
    pub heads: Vec<[u32; 2]>,
}

impl NGrams {
    /// Most tokens of a hash.
    pub fn longest(&self) -> usize {
        self.factors.len()
    }

    /// Elements of a token's rows.
    pub fn embedding(&self) -> usize {
        self.heads.len() * self.width as usize
    }

    /// Row of head `head` for the text that ends with `before`, then `token`. Missing tokens count as
    /// end-of-text tokens.
    pub fn row(&self, head: usize, token: u32, before: impl Iterator<Item = u32>) -> u32 {
        let end = u64::from(self.end);
        let reach = 1 + head / self.each();
        let product = |token: u64, factor: u64| token.wrapping_mul(factor);
        let mut hash = product(token.into(), self.factors[0]);
        let (mut before, mut ended) = (before, false);
        for &factor in &self.factors[1..=reach] {
            let token = before.next().map_or(end, u64::from);
            ended |= token == end;
            hash ^= product(if ended { end } else { token }, factor);
        }
        let [first, rows] = self.heads[head];
        first + (hash % u64::from(rows)) as u32
    }

    /// Heads per n-gram length.
    fn each(&self) -> usize {
        self.heads.len() / (self.factors.len() - 1)
    }

    /// Whether all sizes are consistent.
    fn is_sound(&self) -> bool {
        const LONGEST: usize = 8;
        let inside = |[first, rows]: &[u32; 2]| {
            *rows > 0 && first.checked_add(*rows).is_some_and(|end| end <= self.rows)
        };
        (2..=LONGEST).contains(&self.longest())
            && !self.heads.is_empty()
            && self.heads.len().is_multiple_of(self.longest() - 1)
            && self.heads.iter().all(inside)
            && (1..=MAX_WIDTH).contains(&self.width)
            && self.embedding() <= MAX_WIDTH as usize
            && (2..=MAX_TAPS).contains(&self.taps)
    }

    /// The first invalid or unsupported field.
    pub(super) fn bad(&self, config: &ModelConfig) -> Option<BadField> {
        let nets = config.form.delta_net.as_ref();
        let placed = nets.is_some_and(|nets| nets.layers.contains(&self.layer));
        let hyper = config.form.hyper.is_some();
        if !(placed && hyper && self.end < config.vocab && self.is_sound()) {
            let expected = "rows in a table, for a layer with a DeltaNet and several streams";
            return BadField::some("n-grams", self, expected);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_ends_at_an_end_of_text() {
        let ngrams = NGrams {
            layer: 0,
            rows: 12,
            width: 4,
            taps: 4,
            end: 9,
            factors: vec![3, 5, 7],
            heads: vec![[0, 7], [7, 5]],
        };
        let row = |head, token, before: &[u32]| ngrams.row(head, token, before.iter().copied());
        let pair = |token: u32, before: u32| (token * 3) ^ (before * 5);
        assert_eq!(row(0, 2, &[4, 6]), pair(2, 4) % 7);
        assert_eq!(row(1, 2, &[4, 6]), 7 + (pair(2, 4) ^ (6 * 7)) % 5);
        // its own end does not count; an earlier one and the beginning do
        assert_eq!(row(0, 9, &[4]), pair(9, 4) % 7);
        let ended = 7 + (pair(2, 9) ^ (9 * 7)) % 5;
        assert_eq!(row(1, 2, &[9, 6]), ended);
        assert_eq!(row(1, 2, &[]), ended);
    }
}
