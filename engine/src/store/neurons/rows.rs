//! Reads rows of tables through the I/O thread of the neurons.
//!
//! The rows of a pass follow from its tokens, so they are requested when it begins and read while earlier
//! layers are computed. A row is identified by its number, so rows requested by another pass are only
//! superfluous reads.

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::container::{TensorRows, layout::Extent};

use super::NeuronStore;
use crate::error::Error;
use crate::store::layout::Layout;
use crate::store::reads::Tag;

/// A table, and its rows that are being read.
pub(crate) struct RowReads {
    /// Index of the table among those of the model.
    table: u32,
    pub rows: TensorRows,
    /// Buffers of rows.
    arrivals: Arena,
    /// Rows in flight, or arrived and not yet taken, with their positions among those wanted.
    coming: Vec<(usize, u32)>,
}

impl RowReads {
    /// Reads of the rows of table `table`, up to `at_once` of them at once.
    /// `read`: most bytes of one.
    pub fn new(
        layout: &Layout,
        table: u32,
        rows: TensorRows,
        read: usize,
        at_once: u32,
    ) -> Result<Self, Error> {
        let (slot_len, align) = layout.piece(read);
        let arrivals = Arena::new(at_once, slot_len, align, ArenaOptions::default())
            .map_err(emberflow_storage::Error::from)?;
        Ok(Self {
            table,
            rows,
            arrivals,
            coming: Vec::with_capacity(at_once as usize),
        })
    }

    /// Bytes of [`RowReads::new`] for reads of at most `read` bytes.
    pub fn bytes_for(layout: &Layout, read: usize, at_once: u32) -> u64 {
        let (slot_len, _) = layout.piece(read);
        Arena::charge(at_once, slot_len)
    }

    /// The position, among the wanted rows, of a row that has arrived; it will not arrive again.
    fn position(&mut self, row: u32) -> Option<usize> {
        let index = self.coming.iter().position(|coming| coming.1 == row)?;
        Some(self.coming.swap_remove(index).0)
    }
}

/// Verifies a row that was read and passes it to `then`.
fn take_row(
    layout: &Layout,
    rows: &TensorRows,
    row: u32,
    slot: &Slot,
    then: impl FnOnce(&[u8]),
) -> Result<(), Error> {
    let Extent { offset, len } = rows.read_of(row as usize);
    let bytes = &slot.as_slice()[layout.shift_of(offset)..][..len as usize];
    then(layout.container.check_row(rows, row as usize, bytes)?);
    Ok(())
}

impl RowReads {
    /// Starts reading the first of the `wanted` rows, as many as there are buffers, for a
    /// [`RowReads::fetch`] of the same rows.
    pub fn ask(
        &mut self,
        store: &mut NeuronStore,
        wanted: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        store.latch.check()?;
        if store.mapped.is_some() {
            return Ok(());
        }
        self.drop_rows(store)?;
        self.request_rows(store, &mut wanted.enumerate())
    }

    /// Requests `wanted` rows while there are buffers.
    fn request_rows(
        &mut self,
        store: &mut NeuronStore,
        wanted: &mut impl Iterator<Item = (usize, u32)>,
    ) -> Result<(), Error> {
        while let Some(slot) = self.arrivals.take() {
            let Some((number, row)) = wanted.next() else {
                self.arrivals.put(slot);
                break;
            };
            let Extent { offset, len } = self.rows.read_of(row as usize);
            let part = store.layout.cover_of(offset, len as usize);
            self.coming.push((number, row));
            let table = self.table;
            store.reads.part(Tag::Row { table, row }, part, slot, 0)?;
        }
        store.reads.submit()
    }

    /// Waits for unclaimed rows, and frees their buffers.
    fn drop_rows(&mut self, store: &mut NeuronStore) -> Result<(), Error> {
        while !self.coming.is_empty() {
            let Some((row, slot)) = self.arrived(store) else {
                store.wait()?;
                continue;
            };
            self.position(row);
            self.arrivals.put(slot);
        }
        Ok(())
    }

    /// A row that has arrived.
    fn arrived(&self, store: &mut NeuronStore) -> Option<(u32, Slot)> {
        let mut rows = store.reads.rows.iter();
        let index = rows.position(|arrived| arrived.0 == self.table)?;
        let (_, row, slot) = store.reads.rows.swap_remove(index);
        Some((row, slot))
    }

    /// Reads the `wanted` rows, as many at a time as there are buffers, including those
    /// [requested](RowReads::ask) before. Passes each verified row to `then` with its position in
    /// `wanted`.
    pub fn fetch(
        &mut self,
        store: &mut NeuronStore,
        wanted: impl Iterator<Item = u32> + Clone,
        then: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Error> {
        store.latch.check()?;
        if let Some(mapped) = &store.mapped {
            return mapped.fetch(&store.layout, &self.rows, wanted, then);
        }
        let mut same = wanted.clone();
        if (self.coming.iter()).any(|&(_, row)| same.next() != Some(row)) {
            self.drop_rows(store)?;
        }
        let mut wanted = wanted.enumerate().skip(self.coming.len());
        loop {
            self.request_rows(store, &mut wanted)?;
            if self.coming.is_empty() {
                return Ok(());
            }
            let Some((row, slot)) = self.arrived(store) else {
                store.wait()?;
                continue;
            };
            let taken = match self.position(row) {
                None => Ok(()),
                Some(n) => take_row(&store.layout, &self.rows, row, &slot, |bytes| {
                    then(n, bytes)
                }),
            };
            self.arrivals.put(slot);
            store.latch.keep(taken)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use emberflow_kernels::DType;
    use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
    use fastrand::Rng;

    use super::*;
    use crate::testing::{StoreOptions, TABLE_ROWS, World, table_row};

    fn table(store: &NeuronStore, number: u32, at_once: u32) -> RowReads {
        let container = &store.layout.container;
        let entry = container.tensor("table").unwrap();
        let rows = container.rows(entry, TABLE_ROWS as usize, 20).unwrap();
        let read = TensorRows::most_read(container, entry, 20);
        RowReads::new(&store.layout, number, rows, read, at_once).unwrap()
    }

    fn ask(store: &mut NeuronStore, table: &mut RowReads, rows: &[u32]) {
        table.ask(store, rows.iter().copied()).unwrap();
    }

    /// Fetches rows and checks each; returns the number of reads since `before`.
    fn fetch(store: &mut NeuronStore, table: &mut RowReads, rows: &[u32], before: u64) -> u64 {
        let mut found = vec![Vec::new(); rows.len()];
        let mut take = |n: usize, bytes: &[u8]| found[n] = bytes.to_vec();
        (table.fetch(store, rows.iter().copied(), &mut take)).unwrap();
        let expected: Vec<_> = rows.iter().map(|&row| table_row(row)).collect();
        assert_eq!(found, expected);
        store.counters().reads - before
    }

    #[test]
    fn rows_that_were_asked_for_are_not_read_again() {
        let world = World::new(&[(0, 0, 300)], 24, DType::F32, 5);
        let mut random = Rng::with_seed(3);
        let faults = Faults {
            delay: 300,
            shuffle: true,
            ..Faults::default()
        };
        let sim = SimOptions::new(Profile::Nvme, 7).faulty(faults);
        for io in [IoChoice::Auto, IoChoice::Pread, IoChoice::Sim(sim)] {
            let options = StoreOptions {
                io,
                ..StoreOptions::default()
            };
            let mut store = world.store(&world.plan(true, 0, 256), &options).unwrap();
            let [mut one, mut two] = [(0, 4), (1, 9)].map(|(n, most)| table(&store, n, most));
            for _ in 0..60 {
                let mut some = |most: usize| -> Vec<u32> {
                    let count = random.usize(1..most);
                    // few rows, so that some are wanted twice
                    (0..count)
                        .map(|_| TABLE_ROWS - 1 - random.u32(..12))
                        .collect()
                };
                let [a, b, other] = [some(20), some(20), some(3)];
                let before = store.counters().reads;
                ask(&mut store, &mut one, &a);
                ask(&mut store, &mut two, &b);
                assert!(store.reads.pending() > 0 || !store.reads.rows.is_empty());
                // in another order than requested
                let read = fetch(&mut store, &mut two, &b, before);
                assert!(read as usize <= b.len() + a.len().min(4));
                let read = fetch(&mut store, &mut one, &a, before);
                assert_eq!(read as usize, a.len() + b.len());
                // after another pass
                let before = store.counters().reads;
                ask(&mut store, &mut one, &a);
                let asked = a.len().min(4);
                let read = fetch(&mut store, &mut one, &other, before) as usize;
                let same = other.starts_with(&a[..asked]);
                assert_eq!(read, other.len() + if same { 0 } else { asked });
                assert!(one.coming.is_empty() && store.reads.rows.is_empty());
            }
        }
    }
}
