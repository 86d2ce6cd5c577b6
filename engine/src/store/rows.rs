//! Reads rows of dense tensors between two layers, through the same I/O thread as the neurons.

use emberflow_storage::arena::{Arena, Slot};
use emberflow_storage::container::TensorRows;
use emberflow_storage::io::Read;

use super::neurons::NeuronStore;
use super::tag::Tag;
use crate::error::Error;

impl NeuronStore {
    /// Reads the `wanted` rows of a tensor into slots of `arena`, limited by its free slots, and
    /// passes each verified row to `then` with its position in `wanted`.
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
            let mapped = &mapped.bundles;
            mapped.still_whole()?;
            for (n, row) in wanted {
                let row = row as usize;
                then(n, mapped.row(&self.layout.container, rows, row)?);
                mapped.release_row(rows, row)?;
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
                let from = rows.offset_of(row as usize);
                let (offset, len) = self.layout.cover_of(from, rows.row_len());
                let number = n as u32;
                self.rows.coming += 1;
                self.request(Read::new(
                    Tag::Row { number, row }.bits(),
                    offset,
                    len,
                    slot,
                ))?;
            }
            self.submit()?;
            if self.rows.coming == 0 {
                return self.latch(outcome);
            }
            let slept = self.sleep();
            if slept.is_err() {
                // After an error no further reads complete.
                self.rows.coming = self.rows.arrived.len();
            }
            outcome = outcome.and(slept);
            let mut arrived = std::mem::take(&mut self.rows.arrived);
            for (number, row, slot) in arrived.drain(..) {
                self.rows.coming -= 1;
                if outcome.is_ok() {
                    outcome = self.take_row(rows, row, &slot, |bytes| then(number as usize, bytes));
                }
                arena.put(slot);
            }
            self.rows.arrived = arrived;
        }
    }

    fn take_row(
        &self,
        rows: &TensorRows,
        row: u32,
        slot: &Slot,
        then: impl FnOnce(&[u8]),
    ) -> Result<(), Error> {
        let shift = self.layout.shift_of(rows.offset_of(row as usize));
        let bytes = &slot.as_slice()[shift..shift + rows.row_len()];
        self.layout.container.check_row(rows, row as usize, bytes)?;
        then(bytes);
        Ok(())
    }
}
