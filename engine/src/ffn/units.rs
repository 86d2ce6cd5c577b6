//! What a layer's FFN is given to do.

use crate::input::Input;

/// Rows of a pass: each is a token of some sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// The first so many, which is all of them.
    All(usize),
    /// Some of them, by number, ascending.
    #[cfg_attr(not(test), expect(dead_code, reason = "experts choose rows"))]
    Some(&'a [u32]),
}

impl Rows<'_> {
    /// How many.
    pub fn len(self) -> usize {
        match self {
            Self::All(rows) => rows,
            Self::Some(rows) => rows.len(),
        }
    }

    /// The place among them of row number `row` of the pass.
    pub fn place(self, row: usize) -> Option<usize> {
        match self {
            Self::All(rows) => (row < rows).then_some(row),
            Self::Some(rows) => rows.binary_search(&(row as u32)).ok(),
        }
    }
}

/// One bank's part of a layer: a dense FFN is one over all rows; a mixture of experts has one for
/// each expert that is chosen, with the rows that chose it and the router's weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BankWork<'a> {
    pub bank: u32,
    pub rows: Rows<'a>,
    /// What the bank's result is multiplied with, row by row; `None` for 1.
    pub weights: Option<&'a [f32]>,
}

/// The norm before a layer's FFN.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

/// A layer's FFN and its input.
#[derive(Clone, Copy)]
pub(crate) struct LayerInput<'a> {
    /// Number of the layer.
    pub number: usize,
    /// In the order in which their results are added.
    pub units: &'a [BankWork<'a>],
    /// `residual` after the norm.
    pub input: Input<'a>,
    /// The residual stream, `[rows × d_model]`.
    pub residual: &'a [f32],
    /// The norm before the next layer's FFN.
    pub next: Option<Norm<'a>>,
}
