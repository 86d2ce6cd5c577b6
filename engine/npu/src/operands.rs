//! What is multiplied, and what comes out.

use std::ops::Range;

use crate::graph::{Form, GROUP};

/// Sums of a tile that was computed.
#[derive(Debug, Clone)]
pub struct Sums<'a> {
    /// Rows and tokens of the tile.
    pub rows: Range<usize>,
    /// See `rows`.
    pub tokens: Range<usize>,
    /// Sum `(g, row, token)` is at `g · group + row · width + token`, rows and tokens counted from the tile's first. Where they
    /// are by row, `g` is 0, and 1 of its outliers.
    pub sums: &'a [i32],
    /// Distance of groups.
    pub group: usize,
    /// Distance of rows.
    pub width: usize,
}

/// All rows and tokens of a product.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Rows as they are stored, one after the other.
    pub rows: &'a [u8],
    /// Activations, `[tokens × groups × 32]`.
    pub tokens: &'a [i8],
    /// Of a form with outliers: those of each row, `[rows × count]`, and the activations that they meet,
    /// `[tokens × count]`.
    pub outliers: [&'a [i8]; 2],
}

impl Operands<'_> {
    /// The number of rows and of tokens; `None` if lengths do not fit.
    pub(crate) fn counts(&self, form: Form) -> Option<[usize; 2]> {
        let of = |len: usize, one: usize| len.checked_div(one).filter(|count| count * one == len);
        let rows = of(self.rows.len(), form.row_bytes)?;
        let tokens = of(self.tokens.len(), form.groups * GROUP)?;
        let lens = self.outliers.map(<[i8]>::len);
        (lens == [rows, tokens].map(|count| count * form.outliers())).then_some([rows, tokens])
    }
}
