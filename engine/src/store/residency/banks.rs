//! How the neurons of each bank are loaded: whether Gate rows are resident, whether all neurons are
//! needed, and the layout of a slot.

use std::sync::Arc;

use crate::store::content::SlotContent;
use crate::store::layout::Layout;

/// How a layer's active set is determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Every token needs every neuron.
    All,
    /// Neurons whose gate is nonzero.
    Gates,
    /// Neurons that the predictor selects.
    Predictor,
}

/// How each bank is loaded.
pub(in crate::store) struct Banks {
    layout: Arc<Layout>,
    naming: Naming,
    /// By layer: every token needs all neurons, while other layers are sparse.
    always: Vec<bool>,
    /// Slot layouts without and with resident Gate rows.
    contents: [SlotContent; 2],
    /// Number of leading banks with resident Gate rows.
    pub with_gates: usize,
}

impl Banks {
    /// All banks without resident Gate rows.
    pub fn new(layout: &Arc<Layout>, naming: Naming, always: Vec<bool>) -> Self {
        Self {
            naming,
            always,
            contents: [false, true].map(|resident| layout.content(resident)),
            with_gates: 0,
            layout: Arc::clone(layout),
        }
    }

    /// Layout of cold and hot slots. If any bank has resident Gate rows, they hold only Up and
    /// Down.
    pub fn slots(&self, gates_resident: bool) -> &SlotContent {
        &self.contents[usize::from(gates_resident)]
    }

    /// Slot layout of a bank's neurons.
    #[inline]
    pub fn content(&self, bank: u32) -> &SlotContent {
        self.slots(self.gates_resident(bank))
    }

    /// Whether a bank's Gate rows are resident. If not, they are read with the bundle.
    #[inline]
    pub fn gates_resident(&self, bank: u32) -> bool {
        (bank as usize) < self.with_gates
    }

    /// Whether some banks have resident Gate rows and others do not.
    pub fn gates_partly(&self) -> bool {
        (1..self.layout.banks()).contains(&self.with_gates)
    }

    /// Whether a cold slot can hold a bank's neurons, and the bank is sparse.
    pub fn suits_cold(&self, bank: u32) -> bool {
        self.gates_resident(bank) == (self.with_gates > 0) && !self.is_always_needed(bank)
    }

    /// Whether every token needs every neuron of a bank in a model with other, sparse layers.
    fn is_always_needed(&self, bank: u32) -> bool {
        self.always.get(self.layout.layer_of(bank)) == Some(&true)
    }

    /// Whether every token needs every neuron of a bank, or its Gate row from flash.
    pub fn scans(&self, bank: u32) -> bool {
        match self.naming {
            Naming::All => true,
            Naming::Gates => !self.gates_resident(bank) || self.is_always_needed(bank),
            Naming::Predictor => self.is_always_needed(bank),
        }
    }

    /// Whether gates determine the active set.
    pub fn names_by_gates(&self) -> bool {
        self.naming == Naming::Gates
    }

    /// Number of neurons in banks that stream while others have resident Gate rows.
    pub fn streamed(&self) -> u64 {
        let banks = self.layout.sizes().get(self.with_gates..).unwrap_or(&[]);
        if self.gates_partly() {
            banks.iter().map(|&neurons| u64::from(neurons)).sum()
        } else {
            0
        }
    }
}
