//! Gates from resident rows that a device computes beside the threads: a bank's last clusters, which
//! are those that fire least, for all tokens of a pass.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{DeviceLane, Sharing};

use crate::cluster::CLUSTER;
use crate::device::products::{Begun, OnDevice, Products};
use crate::error::Error;
use crate::input::Input;
use crate::split::{Forms, Product};
use crate::store::{NeuronStore, Resident};

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
        let begun = products.begin(&[(&device.matrices, neurons)], input, Forms::Weights)?;
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
        self.products.results(&self.begun, |values| {
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

impl DeviceLane {
    /// Leaves some of the resident gates to the device, where it is worth it.
    ///
    /// # Errors
    /// The driver's, or wrong products.
    pub fn share_gates(
        &mut self,
        store: &mut NeuronStore,
        sharing: &mut Sharing<'_>,
    ) -> Result<(), Error> {
        sharing.share(store.residency.gates_mut().matrices_mut())?;
        let resident = store.residency.resident();
        let mut banks = 0..self.parts.len() as u32;
        let of = |bank| Some(Arc::clone(&resident.matrix(bank)?.device()?.of));
        self.gates = banks.find_map(of);
        Ok(())
    }

    /// The same with gates that are resident again.
    pub fn share_gates_again(&self, store: &mut NeuronStore) {
        let Some(products) = &self.gates else { return };
        for matrix in store.residency.gates_mut().matrices_mut() {
            let device = products.share(&matrix.shared());
            matrix.set_device(device);
        }
    }

    /// Share of the gates of a token that it computes from resident rows, and the time that was
    /// waited for it.
    pub fn gates_share(&self, store: &NeuronStore) -> (f64, Duration) {
        let Some(products) = &self.gates else {
            return (0.0, Duration::ZERO);
        };
        let resident = store.residency.resident();
        let banks = (0..self.parts.len() as u32).map(|bank| {
            let all = self.layout.neurons(bank);
            let its = self.clusters_for(&store.outside, bank, 1) as usize;
            let rows = all.saturating_sub(its * CLUSTER);
            let (cols, n) = (self.layout.format.d, 1);
            let of = resident.matrix(bank).and_then(|matrix| matrix.device());
            let product = Product { rows, cols, n };
            let its = |of: &OnDevice| {
                products.rows(std::iter::once(&of.matrices), product, Forms::Weights)
            };
            [of.map_or(0.0, its), all as f64]
        });
        let [its, all] = banks.fold([0.0, 0.0], |sum, of| [sum[0] + of[0], sum[1] + of[1]]);
        (its / all.max(1.0), products.waited())
    }
}
