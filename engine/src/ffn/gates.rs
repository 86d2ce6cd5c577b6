//! Gates computed ahead of Up and Down: from resident Gate rows, or from Gate parts read first
//! (two-phase loading).

use std::ops::Range;

use arrayvec::ArrayVec;
use emberflow_kernels::{Cpu, Row};

use super::lane_gates::GateProducts;
use super::mask;
use super::products::{RowList, WantedPairs, products, products_floats};
use crate::activation::Gating;
use crate::bundle::NeuronFormat;
use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::store::{ClusterBytes, Resident};
use crate::thread_buffer::with_thread_buffer;
use crate::trace;

/// Shared inputs of a gate computation.
#[derive(Clone, Copy)]
pub(super) struct GateWork<'a> {
    pub cpu: Cpu,
    pub format: NeuronFormat,
    pub gating: Gating,
    pub input: Input<'a>,
    /// Biases of the bank's gates, by packed id; empty without any.
    pub bias: &'a [f32],
    /// By row: the threshold that a gate must exceed; empty if it is unknown or unused.
    pub cutoffs: &'a [f32],
}

impl GateWork<'_> {
    /// Activated gates of at most a cluster of a bank's `neurons`, from resident Gate rows:
    /// `gates [neurons × tokens]`.
    pub fn resident(
        &self,
        resident: &Resident,
        bank: u32,
        neurons: Range<usize>,
        gates: &mut [f32],
    ) {
        let (cpu, tokens, dtype) = (self.cpu, self.input.tokens(), self.format.dtype);
        match resident.gates(bank) {
            // Contiguous rows: 10 % faster than a row list.
            Some(rows) if tokens == 1 && dtype.is_grouped() => {
                let bytes = &rows.bytes[neurons.start * rows.stride..neurons.end * rows.stride];
                cpu.matvec_q(dtype, bytes, rows.stride, self.input.quantized, gates);
            }
            _ => {
                let row = |id: usize| resident.gate(bank, id as u32);
                let rows: ArrayVec<Row<'_>, CLUSTER> = neurons.clone().filter_map(row).collect();
                with_thread_buffer(products_floats(self.input.n(), tokens), |memory| {
                    let all = WantedPairs::new(tokens, false);
                    products(cpu, &rows, self.input, &all, gates, memory);
                });
            }
        }
        add_bias(self.bias.get(neurons).unwrap_or(&[]), gates);
        self.gating.apply(cpu, self.cutoffs, gates);
    }

    /// Like [`GateWork::resident`], for any number of neurons starting at a cluster boundary, but
    /// only for the pairs in the mask `wanted`. Other gates become zero.
    pub fn wanted(
        &self,
        resident: &Resident,
        bank: u32,
        neurons: Range<usize>,
        wanted: &[u64],
        gates: &mut [f32],
    ) {
        let (cpu, tokens) = (self.cpu, self.input.tokens());
        let (per_cluster, first) = (mask::words(tokens), neurons.start);
        let bits = |i: usize| &wanted[i / CLUSTER * per_cluster..][..per_cluster];
        gates.fill(0.0);
        let values_len = CLUSTER * tokens;
        with_thread_buffer(
            values_len + products_floats(self.input.n(), tokens),
            |memory| {
                let (values, memory) = memory.split_at_mut(values_len);
                let is_wanted = |&i: &usize| mask::count(bits(i), tokens, i % CLUSTER) > 0;
                let mut left = (0..neurons.len()).filter(is_wanted).peekable();
                while left.peek().is_some() {
                    let mut rows = ArrayVec::<Row<'_>, CLUSTER>::new_const();
                    let mut at = ArrayVec::<usize, CLUSTER>::new_const();
                    let mut pairs = WantedPairs::new(tokens, true);
                    for i in left.by_ref().take(CLUSTER) {
                        if let Some(row) = resident.gate(bank, (first + i) as u32) {
                            rows.push(row);
                            at.push(i);
                            pairs.push(|t| mask::has(bits(i), tokens, i % CLUSTER, t));
                        }
                    }
                    let values = &mut values[..rows.len() * tokens];
                    products(cpu, &rows, self.input, &pairs, values, memory);
                    self.add_bias(at.iter().map(|i| first + i), values);
                    self.gating.apply(cpu, self.cutoffs, values);
                    for (i, values) in at.into_iter().zip(values.chunks_exact_mut(tokens)) {
                        mask::keep_wanted(bits(i), i % CLUSTER, values);
                        gates[i * tokens..][..tokens].copy_from_slice(values);
                    }
                }
            },
        );
    }

    /// Activated gates of a cluster's needed neurons, from their bundles, for the pairs in the mask
    /// `wanted` or all. `gates [CLUSTER × tokens]`; other gates become zero.
    pub fn of_bundles(&self, bytes: &ClusterBytes<'_>, wanted: Option<&[u64]>, gates: &mut [f32]) {
        let _span = bytes.trace(&trace::GATE);
        let tokens = self.input.tokens();
        gates.fill(0.0);
        let mut rows = RowList::new();
        let mut pairs = WantedPairs::new(tokens, wanted.is_some());
        for (i, &id) in bytes.ids().iter().enumerate() {
            if let Some(neuron) = bytes.neuron(i) {
                rows.push(id, self.format.gate(neuron.gate, neuron.scales));
                if let Some(wanted) = wanted {
                    pairs.push(|t| mask::has(wanted, tokens, id as usize % CLUSTER, t));
                }
            }
        }
        let values_len = CLUSTER * tokens;
        with_thread_buffer(
            values_len + products_floats(self.input.n(), tokens),
            |memory| {
                let (values, memory) = memory.split_at_mut(values_len);
                let values = &mut values[..rows.len() * tokens];
                products(self.cpu, rows.list(), self.input, &pairs, values, memory);
                let cluster = bytes.cluster() as usize * CLUSTER;
                self.add_bias(rows.ids(0..rows.len()).map(|n| cluster + n), values);
                self.gating.apply(self.cpu, self.cutoffs, values);
                for (i, values) in values.chunks_exact_mut(tokens).enumerate() {
                    let n = rows.id(i);
                    if let Some(wanted) = wanted {
                        mask::keep_wanted(wanted, n, values);
                    }
                    gates[n * tokens..][..tokens].copy_from_slice(values);
                }
            },
        );
    }

    /// As [`GateWork::resident`], from products of rows.
    pub fn of_products(
        &self,
        products: GateProducts<'_>,
        neurons: Range<usize>,
        gates: &mut [f32],
    ) {
        products.of(neurons.clone(), gates);
        add_bias(self.bias.get(neurons).unwrap_or(&[]), gates);
        self.gating.apply(self.cpu, self.cutoffs, gates);
    }

    /// Adds the biases of the neurons `ids` to `values [ids × tokens]`.
    fn add_bias(&self, ids: impl Iterator<Item = usize>, values: &mut [f32]) {
        if self.bias.is_empty() {
            return;
        }
        for (id, values) in ids.zip(values.chunks_exact_mut(self.input.tokens())) {
            add_bias(&self.bias[id..=id], values);
        }
    }
}

/// Adds `bias`, one for each neuron, to `values [neurons × tokens]`.
pub(super) fn add_bias(bias: &[f32], values: &mut [f32]) {
    if bias.is_empty() {
        return;
    }
    let tokens = values.len() / bias.len();
    for (values, bias) in values.chunks_exact_mut(tokens.max(1)).zip(bias) {
        values.iter_mut().for_each(|value| *value += bias);
    }
}
