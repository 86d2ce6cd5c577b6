//! Reading neurons of the next bank before its own input is known: a predictor that sees
//! this bank's residual stream instead names most of them (PowerInfer-2 §4.3 leaves the
//! device idle during attention; these reads use that time).
//!
//! Such a neuron becomes resident when it arrives, unpinned and not counted as used. Its checksums
//! are verified when it is first needed, by the thread that computes it. If the bank asks for it
//! while it is on its way, its cluster waits for it like for any other.

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::Key;
use emberflow_storage::io::Read;

use super::super::CLUSTER;
use super::NeuronStore;
use super::layer::{FORESEEN, Held};
use crate::Error;

/// Reads under way beyond which nothing is foreseen: more would only wait in the queue.
const ENOUGH: usize = 768;

/// Missing neurons of a bank in its last pass below which foresight costs more than it
/// saves: they are read while the others are computed.
const FEW_MISSING: u32 = 16;

/// Neurons read ahead for a bank before it is judged how many of them it needed.
const TRIAL: u32 = 64;

/// Passes after which a bank that was not worth it is tried again.
const AGAIN: u32 = 64;

/// What was asked for ahead of its need.
pub(crate) struct Foreseen {
    /// One bit for each neuron, of this bank and the next.
    bits: [Vec<u64>; 2],
    /// One bit for each neuron of each bank: resident, and its checksums not yet verified.
    unchecked: Vec<Vec<u64>>,
    banks: Vec<Record>,
    /// Whether the pass is of one token. Guesses for several are not as good, and say nothing of
    /// those.
    single: bool,
}

/// How well a bank's needs were foreseen.
#[derive(Clone, Copy, Default)]
struct Record {
    /// Passes in which the bank was at work.
    passes: u32,
    /// Neurons missing in the last pass, foreseen or not.
    missing: u32,
    /// Neurons asked for, and those of them that were needed; older ones count less.
    asked: u32,
    needed: u32,
}

impl Record {
    /// Every other guess has to be right: a wrong one costs a read, a place in the
    /// cache, and the chance of one long read in place of many.
    fn is_good(self) -> bool {
        self.asked < TRIAL || 2 * self.needed >= self.asked
    }

    /// It is judged anew.
    fn forget(&mut self) {
        (self.asked, self.needed) = (0, 0);
    }
}

impl Foreseen {
    pub fn new(banks: usize, neurons: usize) -> Self {
        let bits = vec![0; neurons.div_ceil(64)];
        Self {
            unchecked: vec![bits.clone(); banks],
            bits: [bits.clone(), bits],
            banks: vec![Record::default(); banks],
            single: false,
        }
    }

    /// Bytes that [`Foreseen::new`] allocates.
    pub fn bytes_for(banks: usize, neurons: usize) -> u64 {
        let bits = 8 * neurons.div_ceil(64) * (2 + banks);
        (bits + (size_of::<Vec<u64>>() + size_of::<Record>()) * banks) as u64
    }

    /// A bank begins, in a pass of one token or of several: what is said of the one after it is
    /// forgotten.
    pub fn begin(&mut self, bank: u32, single: bool) {
        if bank == 0 && single != self.single {
            self.single = single;
            self.banks.iter_mut().for_each(Record::forget);
        }
        let record = &mut self.banks[bank as usize];
        record.passes = record.passes.wrapping_add(1);
        record.missing = 0;
        if !record.is_good() && record.passes.is_multiple_of(AGAIN) {
            record.forget();
        }
        self.bits[(bank as usize + 1) % 2].fill(0);
    }

    /// Counts missing neurons of `bank`, and among them those that had been foreseen.
    pub fn count(&mut self, bank: u32, missing: usize, foreseen: usize) {
        let record = &mut self.banks[bank as usize];
        record.missing += missing as u32;
        record.needed += foreseen as u32;
    }

    /// Whether it pays to look ahead to a bank.
    fn pays(&self, bank: u32) -> bool {
        let one = self.banks.get(bank as usize);
        one.is_some_and(|r| r.is_good() && (r.passes == 0 || r.missing >= FEW_MISSING))
    }

    fn put(&mut self, key: Key) {
        self.bits[key.bank as usize % 2][key.neuron as usize / 64] |= 1 << (key.neuron % 64);
        self.banks[key.bank as usize].asked += 1;
    }

    /// Lets what is known of a bank fade.
    fn age(&mut self, bank: u32) {
        let record = &mut self.banks[bank as usize];
        if record.asked >= 64 * TRIAL {
            (record.asked, record.needed) = (record.asked / 2, record.needed / 2);
        }
    }

    /// The checksums of a resident neuron are to be verified before it is computed with.
    pub fn set_unchecked(&mut self, key: Key) {
        self.unchecked[key.bank as usize][key.neuron as usize / 64] |= 1 << (key.neuron % 64);
    }

    /// Whether that is so, once.
    #[inline]
    pub fn take_unchecked(&mut self, key: Key) -> bool {
        let bits = &mut self.unchecked[key.bank as usize][key.neuron as usize / 64];
        let due = *bits >> (key.neuron % 64) & 1 == 1;
        *bits &= !(1 << (key.neuron % 64));
        due
    }

    pub fn has(&self, key: Key) -> bool {
        self.bits[key.bank as usize % 2][key.neuron as usize / 64] >> (key.neuron % 64) & 1 == 1
    }
}

impl NeuronStore {
    /// Whether it pays to look ahead to a bank.
    pub fn foresees(&self, bank: u32) -> bool {
        let reads = self.cold.slots() > 0 && !self.scans && !self.reads_gates_first();
        reads && self.policy.foresees() && self.foreseen.pays(bank)
    }

    /// Requests what memory misses of `ids`, neurons of `bank`, the next one. Stops where
    /// the cold region has no slot to give.
    pub fn foresee(&mut self, bank: u32, ids: &[u32]) -> Result<(), Error> {
        self.foreseen.age(bank);
        for &neuron in ids {
            if self.io.outstanding() + self.reads.len() >= ENOUGH {
                break;
            }
            let (key, c) = (Key { bank, neuron }, neuron / CLUSTER as u32);
            let held = self.cold.contains(key) || self.cold.is_loading(key);
            if held || self.hot.contains(bank, c) || self.hot.wants(bank, c) {
                continue;
            }
            let Some(slot) = self.cold.reserve(key) else {
                break;
            };
            self.foreseen.put(key);
            self.counters.foreseen += 1;
            let part = &self.part;
            let (offset, len) = self
                .banks
                .cover(bank as usize, neuron, part.start, part.len);
            let tag = FORESEEN | u64::from(bank) << 32 | u64::from(neuron);
            self.request(Read::new(tag, offset, len, slot).prefetch())?;
        }
        self.submit()
    }

    /// A foreseen neuron is there, or its read has failed.
    pub(super) fn take_foreseen(
        &mut self,
        ids: &[u32],
        key: Key,
        slot: Slot,
        result: Result<(), Error>,
    ) -> Result<(), Error> {
        let awaited = self.awaited(ids, key);
        if let Err(e) = result {
            self.cold.abandon(key, slot);
            return Err(e);
        }
        let Some(place) = awaited else {
            self.cold.admit_ahead(key, slot);
            self.foreseen.set_unchecked(key);
            return Ok(());
        };
        self.layer.held[place] = Held::Read(self.cold.admit(key, slot));
        let c = key.neuron as usize / CLUSTER;
        self.layer.clusters[c].waiting -= 1;
        self.ready_if_complete(c);
        Ok(())
    }

    /// The place where a neuron is waited for.
    fn awaited(&self, ids: &[u32], key: Key) -> Option<usize> {
        if key.bank != self.layer.bank {
            return None;
        }
        let cluster = self.layer.clusters.get(key.neuron as usize / CLUSTER)?;
        let ids = ids.get(cluster.first..cluster.end)?;
        let place = cluster.first + ids.binary_search(&key.neuron).ok()?;
        matches!(self.layer.held[place], Held::Coming).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pass over two banks; of `asked` neurons of the second one it needs `needed`. Whether it was
    /// looked ahead to.
    fn pass(foreseen: &mut Foreseen, single: bool, asked: u32, needed: u32) -> bool {
        foreseen.begin(0, single);
        let pays = foreseen.pays(1);
        if pays {
            (0..asked).for_each(|neuron| foreseen.put(Key { bank: 1, neuron }));
        }
        foreseen.begin(1, single);
        foreseen.count(1, 100, if pays { needed as usize } else { 0 });
        pays
    }

    #[test]
    fn what_does_not_pay_is_tried_again_now_and_then() {
        let mut foreseen = Foreseen::new(2, 256);
        let tried: Vec<bool> = (0..3 * AGAIN)
            .map(|_| pass(&mut foreseen, true, 100, 40))
            .collect();
        assert_eq!(tried.iter().filter(|&&t| t).count(), 3);
        // And goes on where it does.
        (0..AGAIN).for_each(|_| _ = pass(&mut foreseen, true, 100, 60));
        assert!((0..AGAIN).all(|_| pass(&mut foreseen, true, 100, 60)));
    }

    #[test]
    fn a_prompt_says_nothing_of_single_tokens() {
        let mut foreseen = Foreseen::new(2, 256);
        assert!(pass(&mut foreseen, false, 100, 40));
        assert!(!pass(&mut foreseen, false, 100, 40));
        assert!(pass(&mut foreseen, true, 100, 60));
        assert!(pass(&mut foreseen, true, 100, 60));
        assert!(pass(&mut foreseen, false, 100, 40));
        assert!(pass(&mut foreseen, true, 100, 60));
    }
}
