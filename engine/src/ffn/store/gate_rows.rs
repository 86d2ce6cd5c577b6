//! Resident Gate rows of a bank, apart from the rest of the store: threads compute on them
//! while the store looks up what was found so far.

use std::sync::Arc;

use emberflow_kernels::Row;
use emberflow_storage::arena::Slot;
use emberflow_storage::trace::{self, Kind, Tracer};

use super::NeuronStore;
use crate::bundle::NeuronFormat;

/// A handle to the resident Gate rows of one bank.
pub(crate) struct GateRows {
    bank: u32,
    gates: Arc<Vec<Slot>>,
    scales: Arc<Vec<Vec<u8>>>,
    format: NeuronFormat,
    tracer: Tracer,
}

impl NeuronStore {
    /// The Gate rows of `bank`, where they are resident.
    pub fn gate_rows(&self, bank: u32) -> Option<GateRows> {
        self.gates_resident().then(|| GateRows {
            bank,
            gates: Arc::clone(&self.gates),
            scales: Arc::clone(&self.scales),
            format: self.banks.format,
            tracer: self.tracer.clone(),
        })
    }
}

impl GateRows {
    fn bytes(&self) -> &[u8] {
        self.gates[self.bank as usize].as_slice()
    }

    /// One of them.
    pub fn row(&self, neuron: u32) -> Row<'_> {
        let (len, scales) = (self.format.gate_len(), self.format.resident_scales());
        let bytes = &self.bytes()[neuron as usize * len..][..len];
        let scales = match self.scales.get(self.bank as usize) {
            Some(all) => &all[neuron as usize * scales..][..scales],
            None => &[],
        };
        self.format.gate(bytes, scales)
    }

    /// All of them and the bytes from one to the next, where their scales lie with them.
    pub fn stream(&self) -> Option<(&[u8], usize)> {
        let format = self.format;
        (format.inline_scales).then(|| (self.bytes(), format.gate_len()))
    }

    /// Records from now on what the calling thread does for cluster `c`.
    pub fn trace(&self, kind: &'static Kind, c: usize) -> Option<trace::Open<'_>> {
        (self.tracer).open(kind, [u64::from(self.bank), c as u64])
    }
}
