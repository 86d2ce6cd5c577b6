//! Test operands for a graph, and the expected sums.

use std::ops::Range;

use crate::graph::{Form, GROUP, Summed, Weights};
use crate::operands::{Operands, Sums};

/// Pseudo-random rows and tokens, many with the largest magnitude.
pub(crate) struct Trial {
    form: Form,
    rows: Vec<u8>,
    tokens: Vec<i8>,
    outliers: [Vec<i8>; 2],
}

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u8
    }

    /// From -127 to 127; a quarter of the values has the largest magnitude.
    fn quant(&mut self) -> i8 {
        match self.byte() {
            0..32 => 127,
            32..64 => -127,
            _ => (self.byte() as i8).max(-127),
        }
    }
}

impl Trial {
    /// Operands of the given numbers of rows and tokens.
    pub fn new(form: Form, [rows, tokens]: [usize; 2], seed: u64) -> Self {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (seed + 1));
        let bytes = (0..rows * form.row_bytes).map(|_| match form.weights {
            Weights::Bytes => random.quant() as u8,
            Weights::Nibbles(_) => random.byte(),
        });
        let bytes = bytes.collect();
        let mut quants = |count: usize| (0..count).map(|_| random.quant()).collect();
        Self {
            form,
            rows: bytes,
            tokens: quants(tokens * form.groups * GROUP),
            outliers: [rows, tokens].map(|count| quants(count * form.outliers())),
        }
    }

    pub fn operands(&self) -> Operands<'_> {
        Operands {
            rows: &self.rows,
            tokens: &self.tokens,
            outliers: self.outliers.each_ref().map(Vec::as_slice),
        }
    }

    /// Largest error of a sample of the sums, relative to the largest sum. The sample covers every row and every token.
    pub fn apart(&self, found: &Sums<'_>) -> f64 {
        let (rows, tokens) = (found.rows.clone(), found.tokens.clone());
        if rows.is_empty() || tokens.is_empty() {
            return 0.0;
        }
        let (mut off, mut largest) = (0, 1);
        for i in 0..rows.len().max(tokens.len()) {
            let (row, token) = (i % rows.len(), i % tokens.len());
            let offset = row * found.width + token;
            for s in 0..self.form.sums() {
                let expected = self.expected(rows.start + row, tokens.start + token, s);
                off = off.max(found.sums[s * found.group + offset].abs_diff(expected));
                largest = largest.max(expected.unsigned_abs());
            }
        }
        f64::from(off) / f64::from(largest)
    }

    /// Sum `s` of a row and a token.
    fn expected(&self, row: usize, token: usize, s: usize) -> i32 {
        match (self.form.summed, s) {
            (Summed::ByGroup, group) => self.sum(row, token, group..group + 1),
            (Summed::ByRow(_), 0) => self.sum(row, token, 0..self.form.groups),
            (Summed::ByRow(count), _) => {
                let item = |side: usize, i: usize| &self.outliers[side][i * count..][..count];
                let pairs = item(0, row).iter().zip(item(1, token));
                pairs.map(|(&w, &x)| i32::from(w) * i32::from(x)).sum()
            }
        }
    }

    /// The sum over a range of groups.
    fn sum(&self, row: usize, token: usize, groups: Range<usize>) -> i32 {
        let bytes = self.form.weights.group_bytes();
        let row = &self.rows[row * self.form.row_bytes..];
        let token = &self.tokens[token * self.form.groups * GROUP..];
        let sum = |group: usize| -> i32 {
            let (w, x) = (
                &row[group * bytes..][..bytes],
                &token[group * GROUP..][..GROUP],
            );
            let product = |(j, &x): (usize, &i8)| self.weight(w, j) * i32::from(x);
            x.iter().enumerate().map(product).sum()
        };
        groups.map(sum).sum()
    }

    /// Weight `j` of a group's bytes.
    fn weight(&self, group: &[u8], j: usize) -> i32 {
        match self.form.weights {
            Weights::Bytes => i32::from(group[j] as i8),
            Weights::Nibbles(offset) => {
                let byte = group[j % group.len()];
                i32::from(byte >> (4 * (j / group.len())) & 15) - i32::from(offset)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_that_is_off_by_one_is_seen_in_each_row_and_token() {
        let form = Form {
            weights: Weights::Nibbles(8),
            summed: Summed::ByRow(3),
            groups: 2,
            row_bytes: 37,
        };
        const ROWS: usize = 7;
        const TOKENS: usize = 3;
        let trial = Trial::new(form, [ROWS, TOKENS], 1);
        let sums = |s: usize| {
            let row_pairs = move |row| (0..TOKENS).map(move |token| (row, token));
            let pairs = (0..ROWS).flat_map(row_pairs);
            pairs.map(move |(row, token)| (row, token, s))
        };
        let triples = sums(0).chain(sums(1));
        let right: Vec<i32> = triples
            .map(|(row, token, s)| trial.expected(row, token, s))
            .collect();
        let apart = |sums: &[i32]| {
            trial.apart(&Sums {
                rows: 0..ROWS,
                tokens: 0..TOKENS,
                sums,
                group: ROWS * TOKENS,
                width: TOKENS,
            })
        };
        assert_eq!(apart(&right), 0.0);
        let off = |is: &dyn Fn(usize, usize) -> bool| {
            let mut sums = right.clone();
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum += i32::from(is(i / TOKENS % ROWS, i % TOKENS));
            }
            apart(&sums)
        };
        assert!((0..ROWS).all(|row| off(&|r, _| r == row) > 0.0));
        assert!((0..TOKENS).all(|token| off(&|_, t| t == token) > 0.0));
    }
}
