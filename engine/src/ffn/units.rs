//! The input of a layer's FFN: units of work.

use crate::input::Input;
use crate::lane::HiddenRows;
use crate::norm::Norm;

/// Rows of a pass; a row is a token of some sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// All rows; their number.
    All(usize),
    /// A contiguous range: first, count.
    From(usize, usize),
    /// Some rows, by index, ascending.
    Some(&'a [u32]),
}

impl Rows<'_> {
    /// Number of rows.
    pub fn len(self) -> usize {
        match self {
            Self::All(rows) | Self::From(_, rows) => rows,
            Self::Some(rows) => rows.len(),
        }
    }

    /// The row of the pass at index `place` of the list.
    pub fn row(self, place: usize) -> usize {
        match self {
            Self::All(_) => place,
            Self::From(first, _) => first + place,
            Self::Some(rows) => rows[place] as usize,
        }
    }

    /// Index of the pass's row `row` in the list.
    pub fn place(self, row: usize) -> Option<usize> {
        match self {
            Self::All(rows) => (row < rows).then_some(row),
            Self::From(first, rows) => row.checked_sub(first).filter(|&place| place < rows),
            Self::Some(rows) => rows.binary_search(&(row as u32)).ok(),
        }
    }
}

/// An expert that a row visits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Choice {
    /// Index in its layer.
    pub expert: u32,
    /// Factor of its result.
    pub weight: f32,
}

/// One bank's share of a layer. A dense FFN is one unit over all rows; a mixture of experts has one
/// per chosen expert, with the rows routed to it and their router weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BankWork<'a> {
    pub bank: u32,
    pub rows: Rows<'a>,
    /// Factor of the bank's result by row; `None` for 1.
    pub weights: Option<&'a [f32]>,
    /// Factor of the bank's input by row; `None` for 1.
    pub scales: Option<&'a [f32]>,
    pub bias: Bias<'a>,
    /// The rows, all of them, whose hidden values a lane computes.
    pub hidden: Option<HiddenRows>,
}

/// Biases of a layer's FFN, in packed order, bank after bank. All banks have the same size.
#[derive(Debug)]
pub(crate) struct FfnBiases {
    pub banks: usize,
    /// Of Gate and Up, `[banks × neurons]` each; Up's is empty without a gate.
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    /// Of Down, `[banks × d_model]`.
    pub down: Vec<f32>,
}

/// Biases of a bank's matrices; empty without any.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bias<'a> {
    /// Of Gate and Up, by packed id.
    pub gate: &'a [f32],
    pub up: &'a [f32],
    /// Of Down, `[d_model]`.
    pub down: &'a [f32],
}

impl<'a> Bias<'a> {
    pub const NONE: Bias<'static> = Bias {
        gate: &[],
        up: &[],
        down: &[],
    };

    /// The biases of a layer's bank `bank`, from 0; empty without any.
    pub fn of(biases: Option<&'a FfnBiases>, bank: usize) -> Self {
        let Some(biases) = biases else {
            return Self::NONE;
        };
        let part = |all: &'a [f32]| {
            let each = all.len() / biases.banks;
            &all[bank * each..][..each]
        };
        Self {
            gate: part(&biases.gate),
            up: part(&biases.up),
            down: part(&biases.down),
        }
    }
}

/// Properties of the next layer for guesses.
#[derive(Clone, Copy)]
pub(crate) struct NextLayer<'a> {
    /// The norm before its FFN, if it has one.
    pub norm: Option<&'a Norm>,
    /// Biases of its gates, if it has one bank; empty without any.
    pub bias: &'a [f32],
}

/// One layer's FFN and its input.
#[derive(Clone, Copy)]
pub(crate) struct LayerInput<'a> {
    /// Index of the layer.
    pub number: usize,
    /// Units in the order of reduction.
    pub units: &'a [BankWork<'a>],
    /// Units computed after these from another input; usually none.
    pub then: &'a [BankWork<'a>],
    /// The residual stream after the norm.
    pub input: Input<'a>,
    /// The residual stream, `[rows × d_model]`.
    pub residual: &'a [f32],
    /// The next layer's FFN; `None` in the last layer.
    pub next: Option<NextLayer<'a>>,
    /// Banks of the next layer that a guess selects; empty without one.
    pub ahead: &'a [u32],
    /// What is not in memory is left out: the pass makes drafts.
    pub held_only: bool,
}

impl<'a> LayerInput<'a> {
    /// A layer whose next one is not guessed.
    pub fn alone(
        number: usize,
        units: &'a [BankWork<'a>],
        input: Input<'a>,
        residual: &'a [f32],
    ) -> Self {
        Self {
            number,
            units,
            then: &[],
            input,
            residual,
            next: None,
            ahead: &[],
            held_only: false,
        }
    }
}
