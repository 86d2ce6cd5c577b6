//! Reads tiles of matrices through the I/O thread of the neurons, into slots of the caller.

use emberflow_storage::arena::Slot;

use super::NeuronStore;
use crate::error::Error;
use crate::matrix::{FileRange, TiledMatrix};
use crate::store::reads::Tag;

impl NeuronStore {
    /// Queues a read of the sectors that hold a tile into `slot`, for [`NeuronStore::submit_tiles`].
    pub fn read_tile(
        &mut self,
        bank: u32,
        tile: u32,
        place: FileRange,
        slot: Slot,
    ) -> Result<(), Error> {
        let part = self.layout.cover_of(place.offset, place.len);
        self.reads.part(Tag::Tile { bank, tile }, part, slot, 0)
    }

    /// Submits the queued reads.
    pub fn submit_tiles(&mut self) -> Result<(), Error> {
        self.reads.submit()
    }

    /// The next tile that was read: its bank, its number and its slot.
    pub fn take_tile(&mut self) -> Result<Option<(u32, u32, Slot)>, Error> {
        self.latch.check()?;
        Ok(self.reads.tiles.pop())
    }

    /// Whether no read is queued or in flight.
    pub fn is_idle(&self) -> bool {
        self.reads.pending() == 0
    }

    /// Ends all passes with this error.
    pub fn fail(&self, first: String) -> Result<(), Error> {
        self.latch.keep(Err(Error::Failed { first }))
    }

    /// Fails, and ends all passes, if a tile that was read into `slot` is damaged, or its file has changed.
    pub fn check_tile(&self, of: &TiledMatrix, tile: u32, slot: &Slot) -> Result<(), Error> {
        let FileRange { offset, len } = of.place_of(tile);
        let Some((stripes, first)) = of.stripes_of(tile) else {
            return self.check_file(offset);
        };
        let bytes = &slot.as_slice()[self.layout.shift_of(offset)..][..len];
        let checked = self.layout.container.check_stripes(stripes, first, bytes);
        self.latch.keep(checked.map_err(Error::from))
    }

    /// Fails, and ends all passes, if the file that contains `offset` has changed.
    pub fn check_file(&self, offset: u64) -> Result<(), Error> {
        let checked = self.layout.container.check_unchanged(offset);
        self.latch.keep(checked.map_err(Error::from))
    }
}
