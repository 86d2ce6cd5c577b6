//! Gates from resident rows that a device computes beside the threads: a bank's last clusters, which
//! are those that fire least.

use std::ops::Range;
use std::sync::Arc;

use crate::cluster::CLUSTER;
use crate::device::products::{Begun, Products};
use crate::input::Input;
use crate::store::Resident;

/// Products of a bank's last Gate rows, under way on a device.
pub(crate) struct BegunGates {
    products: Arc<Products>,
    begun: Begun,
    /// The first row.
    row: usize,
    /// The first cluster whose rows are all among them.
    pub first: usize,
}

impl BegunGates {
    /// Begins to compute gates of a bank's neurons, if a device has its rows and is worth it.
    pub fn begin(
        resident: &Resident,
        bank: u32,
        neurons: Range<usize>,
        input: Input<'_>,
    ) -> Option<Self> {
        let device = resident.matrix(bank)?.device()?;
        let products = Arc::clone(&device.of);
        let begun = products.begin(&[(device.matrix, neurons)], input)?;
        let row = *begun.left.first()?;
        Some(Self {
            products,
            begun,
            row,
            first: row.div_ceil(CLUSTER),
        })
    }

    /// Waits for them. `then` is given the products, `[tokens × rows]`. `None` if the device was lost.
    pub fn take<T>(&self, tokens: usize, then: impl FnOnce(GateProducts<'_>) -> T) -> Option<T> {
        let first = self.row;
        self.products.results(&self.begun, tokens, |values| {
            then(GateProducts {
                values,
                first,
                tokens,
            })
        })
    }
}

/// Products of rows that a device has computed, `[tokens × rows]`.
#[derive(Clone, Copy)]
pub(crate) struct GateProducts<'a> {
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
