//! The part of the neurons that is always resident: scales, if the container stores them
//! separately, and the Gate rows of the banks that the plan selects.
//!
//! Immutable during a layer, so that threads can read it while the store handles requests.

use std::sync::Arc;

use emberflow_kernels::Row;
use emberflow_storage::arena::{Arena, ArenaOptions, ArenaPages, Slot};

use crate::bundle::NeuronFormat;
use crate::error::Error;
use crate::lane::HostMatrix;
use crate::matrix::Matrix;
use crate::store::layout::Layout;

/// Gate rows and scales by bank.
pub(crate) struct Resident {
    format: NeuronFormat,
    /// Without scales if these are stored separately.
    gates: Vec<Option<Matrix>>,
    scales: Vec<Vec<u8>>,
}

/// Gate rows of a bank at a constant stride.
#[derive(Clone, Copy)]
pub(crate) struct ResidentGates<'a> {
    pub bytes: &'a [u8],
    /// Bytes from one row to the next.
    pub stride: usize,
}

impl Resident {
    /// Reads the scales from the container.
    pub fn read(layout: &Layout) -> Result<Self, Error> {
        let per_neuron = layout.format.resident_scales();
        let scales = (0..layout.banks())
            .filter(|_| per_neuron > 0)
            .map(|bank| {
                let mut bytes = vec![0; layout.neurons(bank as u32) * per_neuron];
                layout.container.read_scales(bank, &mut bytes)?;
                Ok(bytes)
            })
            .collect::<Result<_, emberflow_storage::Error>>()?;
        Ok(Self {
            format: layout.format,
            gates: (0..layout.banks()).map(|_| None).collect(),
            scales,
        })
    }

    /// Allocates Gate rows for the first `banks` banks and frees those of all others.
    pub fn hold_gates(&mut self, layout: &Layout, banks: usize) -> Result<(), Error> {
        for (bank, gates) in self.gates.iter_mut().enumerate() {
            if bank >= banks {
                *gates = None;
            } else if gates.is_none() {
                let (rows, format) = (layout.neurons(bank as u32), &self.format);
                let bytes = Arc::new(region(rows * format.gate_len())?);
                *gates = Some(Matrix::new(format.dtype, rows, format.d, bytes));
            }
        }
        Ok(())
    }

    /// A Gate row; `None` if not resident.
    #[inline]
    pub fn gate(&self, bank: u32, neuron: u32) -> Option<Row<'_>> {
        let len = self.format.gate_len();
        let gates = self.gates[bank as usize].as_ref()?.bytes();
        let bytes = &gates[neuron as usize * len..][..len];
        Some(self.format.gate(bytes, self.scales(bank, neuron)))
    }

    /// All Gate rows of a bank, if resident with inline scales.
    pub fn gates(&self, bank: u32) -> Option<ResidentGates<'_>> {
        let bytes = self.gates[bank as usize].as_ref()?.bytes();
        self.format.inline_scales.then(|| ResidentGates {
            bytes,
            stride: self.format.gate_len(),
        })
    }

    /// Mutable Gate rows of a bank, if resident and not shared with a lane.
    pub fn gates_mut(&mut self, bank: u32) -> Option<&mut [u8]> {
        self.gates[bank as usize].as_mut()?.bytes_mut()
    }

    /// Memory of a bank's Gate rows, if resident.
    pub fn gate_pages(&self, bank: u32) -> Option<ArenaPages> {
        self.gates[bank as usize].as_ref()?.pages()
    }

    /// A bank's Gate rows as a matrix, if resident with inline scales.
    pub fn matrix(&self, bank: u32) -> Option<&Matrix> {
        let gates = self.gates[bank as usize].as_ref();
        gates.filter(|_| self.format.inline_scales)
    }

    /// The same for all banks, for a lane that multiplies some of their rows.
    pub fn matrices_mut(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let whole = self.format.inline_scales;
        self.gates.iter_mut().flatten().filter(move |_| whole)
    }

    /// Returns all gates to the CPU.
    pub fn unshare(&mut self) {
        self.matrices_mut().for_each(|matrix| matrix.set_lane(None));
    }

    /// The scales of a neuron; empty if inline.
    #[inline]
    pub fn scales(&self, bank: u32, neuron: u32) -> &[u8] {
        let len = self.format.resident_scales();
        match self.scales.get(bank as usize) {
            Some(all) => &all[neuron as usize * len..][..len],
            None => &[],
        }
    }
}

/// Memory for resident weights, on huge pages: sequential reads are up to 40 % faster.
pub(crate) fn region(len: usize) -> Result<Slot, Error> {
    let options = ArenaOptions {
        huge_pages: true,
        ..ArenaOptions::default()
    };
    let mut arena = Arena::new(1, len, 1, options).map_err(emberflow_storage::Error::from)?;
    match arena.take() {
        Some(slot) => Ok(slot),
        None => unreachable!("a new arena has a free slot"),
    }
}
