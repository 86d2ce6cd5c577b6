//! Recovery of slots and reads: when slots run out, after an error, and before the regions change.

use std::ops::Range;

use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;
use super::work::{Ahead, Held, Item, Source};
use crate::error::Error;

impl NeuronStore {
    /// Breaks a deadlock in which every slot is held by an incomplete cluster: later clusters
    /// release theirs so that the first one can complete.
    pub(super) fn make_room(&mut self) -> Result<(), Error> {
        let before = self.layer.next;
        while let Some((_, _, slot)) = self.layer.arrived.pop() {
            self.reader.put(slot);
        }
        for item in (before..self.layer.items.len()).rev() {
            let Item {
                bank,
                first,
                end,
                issued,
                ..
            } = self.layer.items[item];
            let from = if item == before { issued } else { first };
            self.verify_places(bank, from..end);
            self.unpin_places(bank, from..end);
        }
        self.intact()?;
        self.advance()?;
        let moved = self.layer.next > before || self.reader.outstanding() > 0;
        if moved || !self.layer.ready.is_empty() {
            return Ok(());
        }
        let slots = self.cold.slots();
        let first = format!("none of {slots} cache slots can be had");
        self.latch(Err(Error::Failed { first }))
    }

    /// Verifies neurons not yet computed, so that their slots can be released.
    fn verify_places(&mut self, bank: u32, places: Range<usize>) {
        for place in places {
            if let Held::Read(slot) = self.layer.held[place] {
                let key = Key::new(bank, self.layer.ids[place]);
                if self.verified(key, self.cold.bytes(slot)).is_some() {
                    self.layer.held[place] = Held::Pinned(slot);
                }
            }
        }
    }

    /// Unpins neurons that were not computed.
    pub(super) fn unpin_places(&mut self, bank: u32, places: Range<usize>) {
        let ids = &self.layer.ids[places.clone()];
        for (held, &neuron) in self.layer.held[places].iter_mut().zip(ids) {
            let key = Key { bank, neuron };
            match held {
                Held::Read(_) => self.guesses.set_unchecked(key),
                Held::Pinned(_) => {}
                _ => continue,
            }
            self.cold.unpin(key);
            *held = Held::Nothing;
        }
    }

    /// Aborts the layer after an error: waits for every read and unpins everything.
    pub(super) fn abandon_layer(&mut self) {
        while self.reader.outstanding() > 0 {
            let Ok(mut arrived) = self.reader.wait(self.layer.number) else {
                break;
            };
            for done in arrived.drain(..) {
                // Report the first error only.
                let _ = self.take_one(done);
            }
            self.reader.give_back(arrived);
            let _ = self.submit_last();
        }
        for item in 0..self.layer.items.len() {
            let Item {
                bank, first, end, ..
            } = self.layer.items[item];
            if let Source::Stream(slot) = &mut self.layer.items[item].source
                && let Some(slot) = slot.take()
            {
                // Perhaps not checked: nothing of it stays.
                self.reader.put(slot);
            }
            for place in first..end {
                if let Held::Gate(slot) =
                    std::mem::replace(&mut self.layer.held[place], Held::Nothing)
                {
                    let key = Key::new(bank, self.layer.ids[place]);
                    self.cold.abandon(key, slot);
                }
            }
            self.release(item, false, |_| false);
        }
        self.layer.ready.clear();
    }

    /// Waits for prefetched clusters and returns their buffers.
    pub(super) fn drain_stream(&mut self) -> Result<(), Error> {
        while self.reader.outstanding() > 0 {
            self.sleep()?;
        }
        self.layer.ahead = Ahead::default();
        while let Some((_, _, slot)) = self.layer.arrived.pop() {
            self.reader.put(slot);
        }
        Ok(())
    }
}
