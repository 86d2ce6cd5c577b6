//! Reads tiles of matrices through the I/O thread of the neurons. Their memory is their owner's.

use emberflow_storage::arena::Slot;

use super::NeuronStore;
use crate::error::Error;
use crate::store::reads::Tag;

impl NeuronStore {
    /// Requests the `len` bytes of a tile from offset `from` on, into `slot` from its sector on. They are read at the next
    /// [`NeuronStore::submit_tiles`].
    pub fn read_tile(
        &mut self,
        [bank, tile]: [u32; 2],
        (from, len): (u64, usize),
        slot: Slot,
    ) -> Result<(), Error> {
        let part = self.layout.cover_of(from, len);
        self.reads.part(Tag::Tile { bank, tile }, part, slot, 0)
    }

    /// Begins the requested reads.
    pub fn submit_tiles(&mut self) -> Result<(), Error> {
        self.reads.submit()
    }

    /// A tile that has arrived: its bank and number, and its slot. Fails if its file has changed.
    pub fn take_tile(&mut self) -> Result<Option<(u32, u32, Slot)>, Error> {
        self.latch.check()?;
        Ok(self.reads.tiles.pop())
    }

    /// Whether nothing is being read.
    pub fn is_idle(&self) -> bool {
        self.reads.pending() == 0
    }

    /// Ends all passes with this error.
    pub fn fail(&self, first: String) -> Result<(), Error> {
        self.latch.keep(Err(Error::Failed { first }))
    }

    /// Ends all passes if the file has changed in which `offset` is.
    pub fn check_file(&self, offset: u64) -> Result<(), Error> {
        let checked = self.layout.container.check_unchanged(offset);
        self.latch.keep(checked.map_err(Error::from))
    }
}
