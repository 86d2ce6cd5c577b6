//! A page: keys and values of consecutive positions, all layers.

use emberflow_storage::arena::Slot;

/// One page of the pool.
#[derive(Debug)]
pub(super) struct Page(Slot);

impl Page {
    pub fn new(slot: Slot) -> Self {
        Self(slot)
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    /// All of it, to be changed anywhere.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}
