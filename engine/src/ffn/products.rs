//! Dot products of rows and tokens; row lists.

use std::ops::Range;

use arrayvec::ArrayVec;
use emberflow_kernels::{Columns, Cpu, Row};

use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::matrix::Matrix;

/// Floats of scratch that [`products`] needs.
pub(super) fn products_floats(d: usize, tokens: usize) -> usize {
    CLUSTER * tokens + Matrix::scratch_len(d).max(d)
}

/// Tokens of the largest pass whose pairs are computed one by one.
const PAIR_TOKENS: usize = 128;

/// Which (row, token) pairs of a list of rows are wanted.
pub(super) struct WantedPairs {
    /// A bit for each token of a row, in whole words.
    masks: ArrayVec<u64, { CLUSTER * PAIR_TOKENS / 64 }>,
    /// Tokens of a row; 0 where all pairs are wanted.
    tokens: usize,
    wanted: usize,
}

impl WantedPairs {
    /// An empty list. All pairs are wanted unless `some` are, and in passes of one token or of more
    /// tokens than masks support.
    #[inline]
    pub fn new(tokens: usize, some: bool) -> Self {
        let masked = some && (2..=PAIR_TOKENS).contains(&tokens);
        Self {
            masks: ArrayVec::new_const(),
            tokens: if masked { tokens } else { 0 },
            wanted: 0,
        }
    }

    /// Appends a row with the mask of the tokens that want it.
    #[inline]
    pub fn push(&mut self, mut wanted: impl FnMut(usize) -> bool) {
        for first in (0..self.tokens).step_by(64) {
            let mut word = 0;
            for t in first..self.tokens.min(first + 64) {
                word |= u64::from(wanted(t)) << (t - first);
            }
            self.wanted += word.count_ones() as usize;
            self.masks.push(word);
        }
    }

    /// Whether so few pairs are wanted that computing them one by one is faster than a matrix
    /// product.
    fn is_sparse(&self, rows: usize) -> bool {
        self.tokens > 0 && 4 * self.wanted <= 3 * rows * self.tokens
    }
}

/// `out[r × tokens + t] = rows[r] · token t`, with [`products_floats`] of scratch; pairs that are
/// not `wanted` may be left zero. Each product is independent of the others in the batch.
pub(super) fn products(
    cpu: Cpu,
    rows: &[Row<'_>],
    input: Input<'_>,
    wanted: &WantedPairs,
    out: &mut [f32],
    memory: &mut [f32],
) {
    let tokens = input.tokens();
    let Some(first) = rows.first() else { return };
    let is_grouped = first.dtype().is_grouped();
    if is_grouped && wanted.is_sparse(rows.len()) {
        cpu.dot_pairs_q(rows, input.quantized, &wanted.masks, out);
        return;
    }
    match (is_grouped, tokens) {
        (true, 1) => cpu.dot_rows_q(rows, input.quantized, out),
        (true, _) => {
            let (by_token, memory) = memory.split_at_mut(CLUSTER * tokens);
            let mut y = Columns::new(by_token, tokens, rows.len(), rows.len());
            cpu.matmul_rows_q(rows, input.quantized, &mut y, memory);
            for (r, out) in out.chunks_exact_mut(tokens).enumerate() {
                for (t, out) in out.iter_mut().enumerate() {
                    *out = by_token[t * rows.len() + r];
                }
            }
        }
        (false, 1) => {
            for (row, out) in rows.iter().zip(out) {
                *out = cpu.dot(*row, input.x);
            }
        }
        (false, _) => {
            // Dequantize once for all tokens; this is exact.
            let decoded = &mut memory[..input.n()];
            for (row, out) in rows.iter().zip(out.chunks_exact_mut(tokens)) {
                cpu.dequantize(*row, decoded);
                for (x, out) in input.x.chunks_exact(input.n()).zip(out) {
                    *out = cpu.dot_f32(decoded, x);
                }
            }
        }
    }
}

/// Rows of up to a cluster's number of neurons, on the stack. Long lists keep the memory bus busy.
pub(super) struct RowList<'a> {
    rows: ArrayVec<Row<'a>, CLUSTER>,
    /// Neuron index inside its cluster, by row.
    ids: ArrayVec<u8, CLUSTER>,
}

impl<'a> RowList<'a> {
    pub fn new() -> Self {
        Self {
            rows: ArrayVec::new_const(),
            ids: ArrayVec::new_const(),
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn push(&mut self, neuron: u32, row: Row<'a>) {
        self.rows.push(row);
        self.ids.push((neuron as usize % CLUSTER) as u8);
    }

    /// Neuron index inside its cluster of row `i`.
    pub fn id(&self, i: usize) -> usize {
        usize::from(self.ids[i])
    }

    /// Neuron indices of a range of rows.
    pub fn ids(&self, rows: Range<usize>) -> impl Iterator<Item = usize> {
        self.ids[rows].iter().map(|&id| usize::from(id))
    }

    /// Compacts the rows from `first` on, and their `factors`, to those with a nonzero factor.
    /// Returns their number.
    pub fn keep_if_not_zero(&mut self, first: usize, factors: &mut [f32]) -> usize {
        let mut count = 0;
        for i in 0..factors.len() {
            if factors[i] != 0.0 {
                factors[count] = factors[i];
                self.rows[first + count] = self.rows[first + i];
                count += 1;
            }
        }
        count
    }

    pub fn list(&self) -> &[Row<'a>] {
        &self.rows
    }
}
