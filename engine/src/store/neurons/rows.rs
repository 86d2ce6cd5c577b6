//! Reads rows of dense tensors between layers, through the I/O thread of the neurons.

use emberflow_storage::arena::{Arena, Slot};
use emberflow_storage::container::TensorRows;

use super::NeuronStore;
use crate::error::Error;
use crate::store::layout::Layout;
use crate::store::reads::Tag;

/// Verifies a row that was read and passes it to `then`.
fn take_row(
    layout: &Layout,
    rows: &TensorRows,
    row: u32,
    slot: &Slot,
    then: impl FnOnce(&[u8]),
) -> Result<(), Error> {
    let shift = layout.shift_of(rows.offset_of(row as usize));
    let bytes = &slot.as_slice()[shift..shift + rows.stored_len()];
    then(layout.container.check_row(rows, row as usize, bytes)?);
    Ok(())
}

impl NeuronStore {
    /// Reads the `wanted` rows of a tensor into slots of `arena`, as many at a time as it has free
    /// slots. Passes each verified row to `then` with its position in `wanted`.
    pub fn fetch(
        &mut self,
        rows: &TensorRows,
        wanted: impl Iterator<Item = u32>,
        arena: &mut Arena,
        then: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Error> {
        self.latch.check()?;
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
        let (mut outcome, mut coming) = (Ok(()), 0);
        loop {
            while let Some(slot) = arena.take() {
                let Some((n, row)) = wanted.next().filter(|_| outcome.is_ok()) else {
                    arena.put(slot);
                    break;
                };
                let from = rows.offset_of(row as usize);
                let part = self.layout.cover_of(from, rows.stored_len());
                let number = n as u32;
                coming += 1;
                let tag = Tag::Row { number, row };
                self.reads.part(tag, part, slot, 0)?;
            }
            self.reads.submit()?;
            if coming == 0 {
                return self.latch.keep(outcome);
            }
            let slept = self.wait();
            if slept.is_err() {
                // No further reads complete after an error.
                coming = self.reads.rows.len();
            }
            outcome = outcome.and(slept);
            while let Some((number, row, slot)) = self.reads.rows.pop() {
                coming -= 1;
                if outcome.is_ok() {
                    let then = |bytes: &[u8]| then(number as usize, bytes);
                    outcome = take_row(&self.layout, rows, row, &slot, then);
                }
                arena.put(slot);
            }
        }
    }
}
