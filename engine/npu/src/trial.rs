//! Operands that a graph is tried with, and the sums to expect.

use std::ops::Range;

use crate::graph::{Form, GROUP, Summed, Weights};
use crate::operands::{Operands, Sums};

/// Rows and tokens of pseudo-random numbers, the largest among them.
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

    /// From -127 to 127, of which a quarter has the largest magnitude.
    fn quant(&mut self) -> i8 {
        match self.byte() {
            0..32 => 127,
            32..64 => -127,
            _ => (self.byte() as i8).max(-127),
        }
    }
}

impl Trial {
    /// So many rows and tokens of a form; other ones for each seed.
    pub fn new(form: Form, [rows, tokens]: [usize; 2], seed: u64) -> Self {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (seed + 1));
        let bytes = (0..rows * form.row_bytes).map(|_| match form.weights {
            Weights::Bytes => random.quant() as u8,
            Weights::Nibbles(_) => random.byte(),
        });
        let rows_of = bytes.collect();
        let mut quants = |count: usize| (0..count).map(|_| random.quant()).collect();
        Self {
            form,
            rows: rows_of,
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

    /// How far some sums are from those of integers, as a share of the largest: of each row with some token, and of each
    /// token with some row.
    pub fn apart(&self, found: &Sums<'_>) -> f64 {
        let (rows, tokens) = (found.rows.clone(), found.tokens.clone());
        if rows.is_empty() || tokens.is_empty() {
            return 0.0;
        }
        let (mut off, mut largest) = (0, 1);
        for i in 0..rows.len().max(tokens.len()) {
            let (row, token) = (i % rows.len(), i % tokens.len());
            let at = row * found.width + token;
            for s in 0..self.form.sums() {
                let expected = self.expected(rows.start + row, tokens.start + token, s);
                off = off.max(found.sums[s * found.group + at].abs_diff(expected));
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
                let of = |i: usize, at: usize| &self.outliers[i][at * count..][..count];
                let pairs = of(0, row).iter().zip(of(1, token));
                pairs.map(|(&w, &x)| i32::from(w) * i32::from(x)).sum()
            }
        }
    }

    /// The sum of some groups.
    fn sum(&self, row: usize, token: usize, groups: Range<usize>) -> i32 {
        let bytes = self.form.weights.group_bytes();
        let row = &self.rows[row * self.form.row_bytes..];
        let token = &self.tokens[token * self.form.groups * GROUP..];
        let of_group = |group: usize| -> i32 {
            let (w, x) = (
                &row[group * bytes..][..bytes],
                &token[group * GROUP..][..GROUP],
            );
            let product = |(j, &x): (usize, &i8)| self.weight(w, j) * i32::from(x);
            x.iter().enumerate().map(product).sum()
        };
        groups.map(of_group).sum()
    }

    fn weight(&self, of_group: &[u8], j: usize) -> i32 {
        match self.form.weights {
            Weights::Bytes => i32::from(of_group[j] as i8),
            Weights::Nibbles(less) => {
                let byte = of_group[j % of_group.len()];
                i32::from(byte >> (4 * (j / of_group.len())) & 15) - i32::from(less)
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
            let of_row = move |row| (0..TOKENS).map(move |token| (row, token));
            let pairs = (0..ROWS).flat_map(of_row);
            pairs.map(move |(row, token)| (row, token, s))
        };
        let all = sums(0).chain(sums(1));
        let right: Vec<i32> = all
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
