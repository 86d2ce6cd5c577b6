//! Operands and results of a product.

use std::ops::Range;

use crate::graph::{Form, GROUP};

/// Sums of a computed tile.
#[derive(Debug, Clone)]
pub struct Sums<'a> {
    /// Rows of the tile.
    pub rows: Range<usize>,
    /// Tokens of the tile.
    pub tokens: Range<usize>,
    /// Sum `(g, row, token)` is at `g · group + row · width + token`, rows and tokens counted from the tile's first. For sums
    /// by row `g` is 0, or 1 for the sum of outliers.
    pub sums: &'a [i32],
    /// Stride of groups.
    pub group: usize,
    /// Stride of rows.
    pub width: usize,
}

/// Rows and tokens of a product.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Stored rows.
    pub rows: &'a [u8],
    /// Activations, `[tokens × groups × 32]`.
    pub tokens: &'a [i8],
    /// Outlier weights, `[rows × count]`, and the activations of their channels, `[tokens × count]`; empty without
    /// outliers.
    pub outliers: [&'a [i8]; 2],
}

impl Operands<'_> {
    /// The numbers of rows and tokens; `None` if a length does not match.
    pub(crate) fn counts(&self, form: Form) -> Option<[usize; 2]> {
        let whole = |len: usize, item: usize| {
            let count = len.checked_div(item)?;
            (count * item == len).then_some(count)
        };
        let rows = whole(self.rows.len(), form.row_bytes)?;
        let tokens = whole(self.tokens.len(), form.groups * GROUP)?;
        let lens = self.outliers.map(<[i8]>::len);
        (lens == [rows, tokens].map(|count| count * form.outliers())).then_some([rows, tokens])
    }
}
