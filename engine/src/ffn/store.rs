//! Where the neurons' bytes are: resident Gate rows, the cold cache, and reads
//! for the rest.
//!
//! One layer at a time: [`NeuronStore::begin`] names how many neurons the layer
//! needs, [`issue`](NeuronStore::issue) pins those in memory and requests the
//! others as far as slots allow, [`wait`](NeuronStore::wait) returns when a
//! prefix of them is there, [`bytes`](NeuronStore::bytes) gives their rows and
//! [`release`](NeuronStore::release) lets the cache evict them again. Every
//! byte that comes from flash is checked against its checksum before use.

use std::time::{Duration, Instant};

use emberflow_kernels::Row;
use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{ColdCache, Key, SlotId};
use emberflow_storage::io::{Completion, EngineChoice, FileSource, IoOptions, IoThread, Read};

use super::CLUSTER;
use super::banks::{Banks, Part};
use crate::Error;
use crate::counters::Counters;
use crate::memory::{MemoryPlan, Residency};

/// Reads handed over at once: the first are under way while the next are still
/// looked up.
const BATCH: usize = 256;

/// The bytes of one neuron.
pub(crate) struct NeuronBytes<'a> {
    /// Gate part; empty when Gate rows are resident.
    pub gate: &'a [u8],
    /// Up and Down part.
    pub rest: &'a [u8],
    /// Resident scales; empty when inline.
    pub scales: &'a [u8],
}

/// Neurons under a budget.
pub(crate) struct NeuronStore {
    pub(super) banks: Banks,
    pub(super) part: Part,
    residency: Residency,
    /// Neurons at the start of each bank that are never evicted, when every
    /// token needs every neuron (LRU would then evict each one just before it
    /// is needed again).
    pub(super) kept: Option<u32>,
    /// Gate rows by bank; empty unless resident.
    pub(super) gates: Vec<Vec<u8>>,
    /// Resident scales by bank; empty when inline.
    scales: Vec<Vec<u8>>,
    pub(super) cache: ColdCache,
    pub(super) io: IoThread,
    pub(super) reads: Vec<Read>,
    pub(super) completions: Vec<Completion>,
    hits: u64,
    misses: u64,
    /// Evictions of caches that were replaced.
    past_evictions: u64,
    /// Time the computation waited for reads.
    waited: Duration,
    /// The first failure. What is in memory may be incomplete after it, so the
    /// store refuses to work on.
    failed: Option<String>,

    // the layer being worked on
    bank: u32,
    /// Slot of each needed neuron; `None` until it is there.
    slots: Vec<Option<SlotId>>,
    issued: usize,
    ready: usize,
    released: usize,
    /// Issued and not released neurons that are not kept.
    passing: usize,
    /// How many of those there may be, so that kept ones are never evicted.
    passing_limit: usize,
}

impl NeuronStore {
    /// Starts the I/O thread, allocates the cache and fills it from the front of
    /// every bank (the hottest neurons, where the container is in temperature
    /// order).
    pub fn open(
        banks: Banks,
        source: FileSource,
        plan: &MemoryPlan,
        io: EngineChoice,
        options: IoOptions,
    ) -> Result<Self, Error> {
        let io = IoThread::spawn(source, io, options).map_err(emberflow_storage::Error::from)?;
        let per_neuron = banks.format.resident_scales();
        let scales = (0..banks.count)
            .filter(|_| per_neuron > 0)
            .map(|b| {
                let mut bytes = vec![0; banks.neurons * per_neuron];
                banks.container.read_scales(b, &mut bytes)?;
                Ok(bytes)
            })
            .collect::<Result<_, emberflow_storage::Error>>()?;
        let part = banks.part(plan.residency);
        let mut store = Self {
            cache: new_cache(&banks, &part)?,
            part,
            residency: plan.residency,
            kept: None,
            gates: Vec::new(),
            scales,
            io,
            reads: Vec::with_capacity(BATCH),
            completions: Vec::with_capacity(banks.neurons),
            hits: 0,
            misses: 0,
            past_evictions: 0,
            waited: Duration::ZERO,
            failed: None,
            bank: 0,
            slots: Vec::with_capacity(banks.neurons),
            issued: 0,
            ready: 0,
            released: 0,
            passing: 0,
            passing_limit: usize::MAX,
            banks,
        };
        store.adopt(plan)?;
        Ok(store)
    }

    /// Changes to another plan between two layers. Results do not depend on it.
    pub fn set_plan(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.usable()?;
        if plan.residency == self.residency {
            self.resize(plan);
            return Ok(());
        }
        // The old contents go before the new ones come, so that both never add up.
        self.cache.resize(0);
        self.past_evictions += self.cache.stats().evictions;
        self.gates = Vec::new();
        self.part = self.banks.part(plan.residency);
        self.residency = plan.residency;
        self.cache = new_cache(&self.banks, &self.part)?;
        let adopted = self.adopt(plan);
        self.latch(adopted)
    }

    fn resize(&mut self, plan: &MemoryPlan) {
        let total = self.banks.total();
        let slots = plan.slots.min(total);
        // Nothing is pinned between layers, so the cache can always comply.
        self.cache.resize(u32::try_from(slots).unwrap_or(u32::MAX));
        // Gates in the bundle mean that every neuron is looked at for every token.
        let scans = (self.banks.dense || !self.gates_resident()) && slots < total;
        let spare = (2 * CLUSTER as u64).min(slots);
        let banks = self.banks.count as u64;
        self.kept = scans.then(|| ((slots - spare) / banks) as u32);
        self.passing_limit = self.kept.map_or(usize::MAX, |kept| {
            (slots - u64::from(kept) * banks) as usize
        });
    }

    /// Takes over a plan with an empty cache, and fills it.
    fn adopt(&mut self, plan: &MemoryPlan) -> Result<(), Error> {
        self.resize(plan);
        if self.gates_resident() {
            let len = self.banks.neurons * self.banks.format.gate_len();
            self.gates = (0..self.banks.count).map(|_| vec![0; len]).collect();
        }
        self.fill(plan.slots)
    }

    fn usable(&self) -> Result<(), Error> {
        match &self.failed {
            None => Ok(()),
            Some(first) => Err(Error::Failed {
                first: first.clone(),
            }),
        }
    }

    /// Remembers the first failure.
    fn latch<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(e) = &result {
            self.failed.get_or_insert_with(|| e.to_string());
        }
        result
    }

    /// Whether Gate rows are resident (else they come with the bundle).
    pub fn gates_resident(&self) -> bool {
        self.residency == Residency::GatesResident
    }

    /// A resident Gate row.
    pub fn resident_gate(&self, bank: u32, neuron: u32) -> Row<'_> {
        let len = self.banks.format.gate_len();
        let bytes = &self.gates[bank as usize][neuron as usize * len..][..len];
        self.banks.format.gate(bytes, self.scales_of(bank, neuron))
    }

    fn scales_of(&self, bank: u32, neuron: u32) -> &[u8] {
        let len = self.banks.format.resident_scales();
        match self.scales.get(bank as usize) {
            Some(all) => &all[neuron as usize * len..][..len],
            None => &[],
        }
    }

    /// Starts a layer that needs the neurons `ids`.
    pub fn begin(&mut self, bank: u32, ids: &[u32]) -> Result<(), Error> {
        self.usable()?;
        self.bank = bank;
        self.slots.clear();
        self.slots.resize(ids.len(), None);
        self.issued = 0;
        self.ready = 0;
        self.released = 0;
        self.passing = 0;
        // What is there becomes the newest, so that this layer's own misses do
        // not evict it before its turn. Without evictions, and in a scan, which
        // keeps what it keeps, that is no matter.
        let evicts = u64::from(self.cache.slots()) < self.banks.total();
        for &neuron in ids.iter().filter(|_| evicts && self.kept.is_none()) {
            let key = Key { bank, neuron };
            if let Some(slot) = self.cache.get_pin(key) {
                self.cache.unpin(slot);
            }
        }
        Ok(())
    }

    /// Pins or requests as many of `ids` (the layer's needed neurons) as slots
    /// allow, in order.
    pub fn issue(&mut self, ids: &[u32]) -> Result<(), Error> {
        for (place, &neuron) in ids.iter().enumerate().skip(self.issued) {
            let passing = self.passes(neuron);
            if passing && self.passing == self.passing_limit {
                break;
            }
            let key = Key {
                bank: self.bank,
                neuron,
            };
            if let Some(slot) = self.cache.get_pin(key) {
                self.hits += 1;
                self.slots[place] = Some(slot);
            } else if let Some(slot) = self.cache.reserve(key) {
                self.misses += 1;
                let (offset, len, _) =
                    self.banks
                        .cover(self.bank as usize, neuron, self.part.start, self.part.len);
                self.reads.push(Read::new(place as u64, offset, len, slot));
                if self.reads.len() == BATCH {
                    self.submit()?;
                }
            } else {
                break;
            }
            self.issued = place + 1;
            self.passing += usize::from(passing);
        }
        self.submit()
    }

    fn submit(&mut self) -> Result<(), Error> {
        let sent = self.io.submit(&mut self.reads);
        self.latch(sent.map_err(|e| emberflow_storage::Error::from(e).into()))
    }

    /// Whether a neuron is only passing through: not kept in a scan that is
    /// larger than the cache.
    fn passes(&self, neuron: u32) -> bool {
        self.kept.is_some_and(|kept| neuron >= kept)
    }

    /// Waits until the issued neurons up to the next cluster border are there.
    /// Returns the place before which all are, at most `end`: whole clusters
    /// where reads are still under way, so that computing can go on beside them.
    pub fn wait(&mut self, ids: &[u32], end: usize) -> Result<usize, Error> {
        let limit = end.min(self.issued);
        let border = match ids.get(self.released) {
            Some(&id) => (id as usize / CLUSTER + 1) * CLUSTER,
            None => return Ok(limit),
        };
        let cluster_end = ids[..limit].partition_point(|&id| (id as usize) < border);
        loop {
            while self.ready < limit && self.slots[self.ready].is_some() {
                self.ready += 1;
            }
            if self.ready >= cluster_end {
                return Ok(self.ready);
            }
            let start = Instant::now();
            let waited = self.io.wait(&mut self.completions, 1);
            self.waited += start.elapsed();
            self.latch(waited.map_err(|e| emberflow_storage::Error::from(e).into()))?;
            let admitted = self.admit(ids);
            if admitted.is_err() {
                self.abandon_layer(ids);
                return self.latch(admitted).map(|()| limit);
            }
        }
    }

    /// Takes what arrived into the cache.
    fn admit(&mut self, ids: &[u32]) -> Result<(), Error> {
        let mut outcome = Ok(());
        let mut arrived = std::mem::take(&mut self.completions);
        for done in arrived.drain(..) {
            let place = done.tag as usize;
            let key = Key {
                bank: self.bank,
                neuron: ids[place],
            };
            let checked = done
                .result
                .map_err(|e| emberflow_storage::Error::from(e).into())
                .and_then(|()| self.check(key, done.slot.as_slice()));
            match checked {
                Ok(()) => self.slots[place] = Some(self.cache.admit(key, done.slot)),
                Err(e) => {
                    self.cache.abandon(key, done.slot);
                    if outcome.is_ok() {
                        outcome = Err(e);
                    }
                }
            }
        }
        self.completions = arrived;
        outcome
    }

    /// After an error: takes back every read and unpins everything.
    fn abandon_layer(&mut self, ids: &[u32]) {
        while self.io.outstanding() > 0 {
            if self.io.wait(&mut self.completions, 1).is_err() {
                break;
            }
            // the first error is the one that is told
            let _ = self.admit(ids);
        }
        for slot in self.slots.drain(..).skip(self.released).flatten() {
            self.cache.unpin(slot);
        }
        self.issued = 0;
        self.ready = 0;
        self.released = 0;
    }

    fn check(&self, key: Key, slot: &[u8]) -> Result<(), Error> {
        let (bank, n) = (key.bank as usize, key.neuron);
        let (_, _, shift) = self.banks.cover(bank, n, self.part.start, self.part.len);
        let bytes = &slot[shift..shift + self.part.len];
        let (gate, rest) = bytes.split_at(self.part.gate_span - self.part.start);
        if self.residency == Residency::Bundles {
            self.banks.container.check_gate(bank, n, gate)?;
        }
        self.banks.container.check_rest(bank, n, rest)?;
        Ok(())
    }

    /// The bytes of the needed neuron at `place`, which is `neuron`; it must be
    /// ready and not released.
    pub fn bytes(&self, place: usize, neuron: u32) -> NeuronBytes<'_> {
        let (_, _, shift) =
            self.banks
                .cover(self.bank as usize, neuron, self.part.start, self.part.len);
        let slot = match self.slots[place] {
            Some(slot) => self.cache.bytes(slot),
            None => unreachable!("neuron {neuron} is used before it is ready"),
        };
        let rest_at = shift + self.part.gate_span - self.part.start;
        NeuronBytes {
            gate: match self.residency {
                Residency::Bundles => &slot[shift..shift + self.banks.format.gate_len()],
                Residency::GatesResident => &[],
            },
            rest: &slot[rest_at..rest_at + self.banks.format.rest_len()],
            scales: self.scales_of(self.bank, neuron),
        }
    }

    /// Unpins the needed neurons before place `upto`.
    pub fn release(&mut self, ids: &[u32], upto: usize) {
        for (slot, &id) in self.slots[..upto].iter().zip(ids).skip(self.released) {
            if let Some(slot) = *slot {
                if self.kept.is_some_and(|kept| id >= kept) {
                    self.passing -= 1;
                    self.cache.unpin_first_victim(slot);
                } else {
                    self.cache.unpin(slot);
                }
            }
        }
        self.released = upto;
    }

    /// Name of the I/O engine.
    pub fn io_name(&self) -> &'static str {
        self.io.engine()
    }

    /// What was done since the store was opened.
    pub fn counters(&self) -> Counters {
        let io = self.io.stats();
        Counters {
            hits: self.hits,
            misses: self.misses,
            evictions: self.past_evictions + self.cache.stats().evictions,
            reads: io.reads,
            bytes_read: io.bytes + io.gap_bytes,
            wait_ns: u64::try_from(self.waited.as_nanos()).unwrap_or(u64::MAX),
            busy_ns: io.busy_ns,
            ..Counters::default()
        }
    }

    /// The error of a layer that can get no slot at all.
    pub fn stuck(&mut self) -> Error {
        let slots = self.cache.slots();
        let first = format!("none of {slots} cache slots can be had");
        self.failed.get_or_insert(first.clone());
        Error::Failed { first }
    }
}

/// An empty cache with room for every neuron; how much of it may be used, and
/// so becomes resident, is the plan's matter.
fn new_cache(banks: &Banks, part: &Part) -> Result<ColdCache, Error> {
    let too_many = || Error::Bundles {
        path: banks.container.path().to_path_buf(),
        reason: format!(
            "{} banks of {} neurons are more than a cache can number",
            banks.count, banks.neurons
        ),
    };
    let slots = u32::try_from(banks.total()).map_err(|_| too_many())?;
    let len = banks.slot_len_of(part);
    let arena = Arena::new(slots, len, banks.memory_align(), ArenaOptions::default())
        .map_err(emberflow_storage::Error::from)?;
    ColdCache::new(arena, &vec![banks.neurons as u32; banks.count]).ok_or_else(too_many)
}
