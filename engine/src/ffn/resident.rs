//! What of the neurons stays in memory whatever the regions hold: their scales where the
//! container has them apart, and their Gate rows where the plan says so.
//!
//! It does not change while a layer is worked on, so that threads can read it while the
//! store takes in what they found.

use emberflow_kernels::Row;
use emberflow_storage::arena::Slot;

use super::banks::Banks;
use crate::Error;
use crate::bundle::NeuronFormat;
use crate::weights::region;

/// By bank; either may be empty.
pub(crate) struct Resident {
    format: NeuronFormat,
    gates: Vec<Slot>,
    scales: Vec<Vec<u8>>,
}

impl Resident {
    /// Reads the scales.
    pub fn read(banks: &Banks) -> Result<Self, Error> {
        let per_neuron = banks.format.resident_scales();
        let scales = (0..banks.count)
            .filter(|_| per_neuron > 0)
            .map(|b| {
                let mut bytes = vec![0; banks.neurons * per_neuron];
                banks.container.read_scales(b, &mut bytes)?;
                Ok(bytes)
            })
            .collect::<Result<_, emberflow_storage::Error>>()?;
        Ok(Self {
            format: banks.format,
            gates: Vec::new(),
            scales,
        })
    }

    /// Memory for all Gate rows, or none.
    pub fn hold_gates(&mut self, banks: &Banks, hold: bool) -> Result<(), Error> {
        self.gates = Vec::new();
        if hold {
            let len = banks.neurons * self.format.gate_len();
            self.gates = (0..banks.count)
                .map(|_| region(len))
                .collect::<Result<_, Error>>()?;
        }
        Ok(())
    }

    /// A Gate row that is there.
    pub fn gate(&self, bank: u32, neuron: u32) -> Row<'_> {
        let len = self.format.gate_len();
        let bytes = &self.gates[bank as usize].as_slice()[neuron as usize * len..][..len];
        self.format.gate(bytes, self.scales(bank, neuron))
    }

    /// All Gate rows of a bank and the bytes from one to the next, where their scales lie
    /// with them.
    pub fn gates(&self, bank: u32) -> Option<(&[u8], usize)> {
        let bytes = self.gates.get(bank as usize)?.as_slice();
        (self.format.inline_scales).then(|| (bytes, self.format.gate_len()))
    }

    /// Where the Gate rows of a bank go, if they are held.
    pub fn gates_mut(&mut self, bank: usize) -> Option<&mut [u8]> {
        self.gates.get_mut(bank).map(Slot::as_mut_slice)
    }

    /// The scales of a neuron; empty where they lie with its rows.
    pub fn scales(&self, bank: u32, neuron: u32) -> &[u8] {
        let len = self.format.resident_scales();
        match self.scales.get(bank as usize) {
            Some(all) => &all[neuron as usize * len..][..len],
            None => &[],
        }
    }
}
