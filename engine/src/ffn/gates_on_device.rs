//! Gates from resident rows that a device computes beside the threads: a bank's last clusters, which
//! are those that fire least.

use std::ops::Range;
use std::sync::Arc;

use super::gates::{GateWork, add_bias};
use crate::cluster::CLUSTER;
use crate::device::products::{Begun, Products};
use crate::input::Input;
use crate::store::Resident;

/// Products of a bank's last Gate rows, under way on a device.
pub(super) struct BegunGates {
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
        let device = resident.device(bank)?;
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
    pub fn take<T>(&self, tokens: usize, then: impl FnOnce(Rows<'_>) -> T) -> Option<T> {
        let first = self.row;
        self.products.results(&self.begun, tokens, |values| {
            then(Rows {
                values,
                first,
                tokens,
            })
        })
    }
}

/// Products of rows that a device has computed, `[tokens × rows]`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    values: &'a [f32],
    first: usize,
    tokens: usize,
}

impl GateWork<'_> {
    /// As [`GateWork::resident`], from products of rows.
    pub fn of_products(&self, rows: Rows<'_>, neurons: Range<usize>, gates: &mut [f32]) {
        let all = rows.values.len() / rows.tokens;
        for (gates, n) in gates.chunks_exact_mut(rows.tokens).zip(neurons.clone()) {
            let products = rows.values.chunks_exact(all).map(|v| v[n - rows.first]);
            gates.iter_mut().zip(products).for_each(|(g, p)| *g = p);
        }
        add_bias(self.bias.get(neurons).unwrap_or(&[]), gates);
        self.gating.apply(self.cpu, self.cutoffs, gates);
    }
}
