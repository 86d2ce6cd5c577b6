//! A page: a block of memory from a pool.

use emberflow_storage::arena::Slot;

/// One page of a pool.
#[derive(Debug)]
pub(super) struct Page(Slot);

impl Page {
    pub fn new(slot: Slot) -> Self {
        Self(slot)
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    /// The whole page, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }

    /// The same as floats. Pages of floats are aligned for them, and their length is a multiple of
    /// four.
    pub fn floats(&self) -> &[f32] {
        bytemuck::cast_slice(self.bytes())
    }

    /// See [`Page::floats`].
    pub fn floats_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}
