//! Reading rows of dense tensors between two banks, by the same thread as the neurons.

use emberflow_storage::arena::{Arena, Slot};
use emberflow_storage::container::TensorRows;
use emberflow_storage::io::Read;

use super::NeuronStore;
use super::layer::PIECE;
use crate::Error;

impl NeuronStore {
    /// Reads rows number `wanted` of a tensor into slots of `arena`, as many at once as it has, and
    /// hands each to `then`, with its place among the wanted ones, once its checksum is right.
    pub fn fetch(
        &mut self,
        rows: &TensorRows,
        wanted: impl Iterator<Item = u32>,
        arena: &mut Arena,
        then: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Error> {
        self.usable()?;
        let mut wanted = wanted.enumerate();
        if let Some(mapped) = &self.mapped {
            mapped.still_whole()?;
            for (n, row) in wanted {
                then(n, mapped.row(&self.banks.container, rows, row as usize)?);
            }
            return Ok(());
        }
        let mut outcome = Ok(());
        loop {
            while let Some(slot) = arena.take() {
                let Some((n, row)) = wanted.next().filter(|_| outcome.is_ok()) else {
                    arena.put(slot);
                    break;
                };
                let (offset, len) = self
                    .banks
                    .cover_of(rows.offset_of(row as usize), rows.row_len());
                let tag = PIECE | (n as u64) << 32 | u64::from(row);
                self.pieces_coming += 1;
                self.request(Read::new(tag, offset, len, slot))?;
            }
            self.submit()?;
            if self.pieces_coming == 0 {
                return self.latch(outcome);
            }
            let slept = self.sleep(&[]);
            if slept.is_err() {
                // All that will ever come has come.
                self.pieces_coming = self.pieces.len();
            }
            outcome = outcome.and(slept);
            let mut pieces = std::mem::take(&mut self.pieces);
            for (tag, slot) in pieces.drain(..) {
                self.pieces_coming -= 1;
                if outcome.is_ok() {
                    outcome = self.take_row(rows, tag, &slot, then);
                }
                arena.put(slot);
            }
            self.pieces = pieces;
        }
    }

    fn take_row(
        &self,
        rows: &TensorRows,
        tag: u64,
        slot: &Slot,
        then: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Error> {
        let (n, row) = ((tag & !PIECE) >> 32, tag as u32 as usize);
        let shift = self.banks.shift_of(rows.offset_of(row));
        let bytes = &slot.as_slice()[shift..shift + rows.row_len()];
        self.banks.container.check_row(rows, row, bytes)?;
        then(n as usize, bytes);
        Ok(())
    }
}
