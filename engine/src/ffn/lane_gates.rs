//! Products of Gate rows that a [lane](crate::lane) takes.

use std::ops::Range;
use std::sync::Arc;

use crate::input::Input;
use crate::lane::{MatrixRows, ProductShare, Products};
use crate::store::Resident;

/// Products of a bank's last Gate rows, under way on a lane.
pub(super) struct LaneGates {
    products: Arc<dyn Products>,
    share: ProductShare,
}

impl LaneGates {
    /// Begins products of some neurons' Gate rows, if a lane takes any.
    pub fn begin(
        resident: &Resident,
        bank: u32,
        neurons: Range<usize>,
        input: Input<'_>,
    ) -> Option<Self> {
        let matrix = resident.matrix(bank)?.lane()?;
        let rows = MatrixRows {
            number: matrix.number,
            rows: neurons,
        };
        let share = matrix.products.offer(&[rows], input, true)?;
        Some(Self {
            products: Arc::clone(&matrix.products),
            share,
        })
    }

    /// The first row that the lane multiplies.
    pub fn first(&self) -> usize {
        self.share.left.first().copied().unwrap_or(0)
    }

    /// Waits for the products and hands them to `then`. False if they are missing.
    pub fn collect(&self, tokens: usize, then: &mut dyn FnMut(GateProducts<'_>)) -> bool {
        let first = self.first();
        self.products.collect(&mut |values| {
            then(GateProducts {
                values,
                first,
                tokens,
            });
        })
    }
}

/// Products of the rows from `first` on, `[tokens × rows]`.
#[derive(Clone, Copy)]
pub(super) struct GateProducts<'a> {
    values: &'a [f32],
    first: usize,
    tokens: usize,
}

impl GateProducts<'_> {
    /// Those of neurons, `[neurons × tokens]`.
    pub fn of(&self, neurons: Range<usize>, gates: &mut [f32]) {
        let all = self.values.len() / self.tokens;
        for (gates, n) in gates.chunks_exact_mut(self.tokens).zip(neurons) {
            let products = (self.values.chunks_exact(all)).map(|v| v[n - self.first]);
            gates.iter_mut().zip(products).for_each(|(g, p)| *g = p);
        }
    }
}
