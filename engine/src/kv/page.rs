//! A page: keys and values of some positions of every layer.

use emberflow_storage::arena::Slot;

/// Keys and values of as many positions as a page has.
#[derive(Debug)]
pub(super) struct Page(Slot);

impl Page {
    pub fn new(slot: Slot) -> Self {
        Self(slot)
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}
