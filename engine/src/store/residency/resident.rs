//! The part of the neurons that is always resident: scales, if the container stores them
//! separately, and the Gate rows of the banks that the plan selects.
//!
//! Immutable during a layer, so that threads can read it while the store handles requests.

use std::sync::Arc;

use emberflow_kernels::Row;
use emberflow_storage::arena::{Arena, ArenaOptions, ArenaPages, Slot};

use crate::bundle::NeuronFormat;
use crate::device::products::{OnDevice, Products};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::matrix::Sharing;
use crate::store::layout::Layout;

/// Gate rows and scales by bank.
pub(crate) struct Resident {
    format: NeuronFormat,
    gates: Vec<Option<Gates>>,
    scales: Vec<Vec<u8>>,
}

/// The Gate rows of a bank.
struct Gates {
    bytes: Arc<Slot>,
    /// The device that computes some of them, if any.
    device: Option<OnDevice>,
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
                let len = layout.neurons(bank as u32) * self.format.gate_len();
                *gates = Some(Gates {
                    bytes: Arc::new(region(len)?),
                    device: None,
                });
            }
        }
        Ok(())
    }

    /// A Gate row; `None` if not resident.
    #[inline]
    pub fn gate(&self, bank: u32, neuron: u32) -> Option<Row<'_>> {
        let len = self.format.gate_len();
        let gates = self.gates[bank as usize].as_ref()?.bytes.as_slice();
        let bytes = &gates[neuron as usize * len..][..len];
        Some(self.format.gate(bytes, self.scales(bank, neuron)))
    }

    /// All Gate rows of a bank, if resident with inline scales.
    pub fn gates(&self, bank: u32) -> Option<ResidentGates<'_>> {
        let bytes = self.gates[bank as usize].as_ref()?.bytes.as_slice();
        self.format.inline_scales.then(|| ResidentGates {
            bytes,
            stride: self.format.gate_len(),
        })
    }

    /// Mutable Gate rows of a bank, if resident and not shared with a device.
    pub fn gates_mut(&mut self, bank: u32) -> Option<&mut [u8]> {
        let gates = self.gates[bank as usize].as_mut()?;
        Arc::get_mut(&mut gates.bytes).map(Slot::as_mut_slice)
    }

    /// Memory of a bank's Gate rows, if resident.
    pub fn gate_pages(&self, bank: u32) -> Option<ArenaPages> {
        let gates = self.gates[bank as usize].as_ref()?;
        Some(gates.bytes.pages())
    }

    /// A bank's Gate rows as a matrix, if resident with inline scales.
    fn gate_matrix(&self, bank: u32) -> Option<Matrix> {
        let gates = self.gates[bank as usize].as_ref()?;
        let format = &self.format;
        let rows = gates.bytes.as_slice().len() / format.gate_len();
        (format.inline_scales)
            .then(|| Matrix::new(format.dtype, rows, format.d, Arc::clone(&gates.bytes)))
    }

    /// Lets a device compute part of the gates if that is faster. Returns its products, if so.
    pub fn try_on(&mut self, sharing: &mut Sharing<'_>) -> Result<Option<Arc<Products>>, Error> {
        let banks = 0..self.gates.len() as u32;
        let mut all: Vec<_> = banks.map(|bank| self.gate_matrix(bank)).collect();
        sharing.share(all.iter_mut().flatten())?;
        let mut products = None;
        for (gates, matrix) in self.gates.iter_mut().zip(all) {
            let device = matrix.and_then(|matrix| matrix.device().cloned());
            if let (Some(gates), Some(device)) = (gates, device) {
                products = Some(Arc::clone(&device.of));
                gates.device = Some(device);
            }
        }
        Ok(products)
    }

    /// Lets a device compute part of the gates again after they became resident.
    pub fn share(&mut self, products: &Arc<Products>) {
        for bank in 0..self.gates.len() {
            let matrix = self.gate_matrix(bank as u32);
            let device = matrix.and_then(|matrix| products.share(matrix.shared()));
            if let Some(gates) = &mut self.gates[bank] {
                gates.device = device;
            }
        }
    }

    /// Returns all gates to the CPU.
    pub fn unshare(&mut self) {
        let shared = self.gates.iter_mut().flatten();
        for device in shared.filter_map(|gates| gates.device.take()) {
            device.give_back();
        }
    }

    /// The device that computes some of a bank's gates.
    pub fn device(&self, bank: u32) -> Option<&OnDevice> {
        self.gates[bank as usize].as_ref()?.device.as_ref()
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
