//! Taking back what a bank holds or has asked for: where memory is short, after an error, and
//! before the regions change.

use std::ops::Range;

use emberflow_storage::cache::Key;

use super::NeuronStore;
use super::layer::{Cluster, Held};
use crate::Error;

impl NeuronStore {
    /// Every slot is held by a cluster that misses another: the last ones give up
    /// what they hold, so that the first one can be completed.
    pub(super) fn make_room(&mut self, ids: &[u32]) -> Result<(), Error> {
        let before = self.layer.next;
        while let Some((_, _, slot)) = self.layer.arrived.pop() {
            self.stream.put(slot);
        }
        for c in (before..self.layer.clusters.len()).rev() {
            let Cluster { first, end, .. } = self.layer.clusters[c];
            let from = first.max(if c == before {
                self.layer.clusters[c].issued
            } else {
                first
            });
            self.verify_places(ids, from..end);
            self.unpin_places(ids, from..end);
        }
        self.intact(ids)?;
        self.advance(ids)?;
        let moved = self.layer.next > before || self.io.outstanding() > 0;
        if moved || !self.layer.ready.is_empty() {
            return Ok(());
        }
        let slots = self.cold.slots();
        let first = format!("none of {slots} cache slots can be had");
        self.latch(Err(Error::Failed { first }))
    }

    /// Verifies here what no thread has computed yet, so that it can be given up.
    fn verify_places(&mut self, ids: &[u32], places: Range<usize>) {
        for place in places {
            if let Held::Read(slot) = self.layer.held[place] {
                let bytes = self.cold.bytes(slot);
                if self.verified(ids[place], bytes).is_some() {
                    self.layer.held[place] = Held::Pinned(slot);
                }
            }
        }
    }

    /// After an error: takes back every read and unpins everything.
    pub(super) fn abandon_layer(&mut self, ids: &[u32]) {
        while self.io.outstanding() > 0 {
            if self.io.wait(&mut self.completions, 1).is_err() {
                break;
            }
            let mut arrived = std::mem::take(&mut self.completions);
            for done in arrived.drain(..) {
                // the first error is the one that is told
                let _ = self.take_one(ids, done);
            }
            self.completions = arrived;
            let _ = self.submit_last();
        }
        for c in 0..self.layer.clusters.len() {
            let Cluster { first, end, .. } = self.layer.clusters[c];
            for (place, &neuron) in (first..end).zip(&ids[first..end]) {
                if let Held::Gate(slot) =
                    std::mem::replace(&mut self.layer.held[place], Held::Nothing)
                {
                    let bank = self.layer.bank;
                    self.cold.abandon(Key { bank, neuron }, slot);
                }
            }
            self.release(ids, c as u32, |_| false);
        }
        self.layer.ready.clear();
    }

    /// Waits for whole clusters that were read ahead, and gives their buffers back.
    pub(super) fn drain_stream(&mut self) -> Result<(), Error> {
        while self.io.outstanding() > 0 {
            self.io
                .wait(&mut self.completions, 1)
                .map_err(emberflow_storage::Error::from)?;
            self.take_arrived(&[])?;
        }
        while let Some((_, _, slot)) = self.layer.arrived.pop() {
            self.stream.put(slot);
        }
        Ok(())
    }
}
