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
use emberflow_models::config::ModelConfig;
use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{ColdCache, Key, SlotId};
use emberflow_storage::container::Container;
use emberflow_storage::io::{Completion, EngineChoice, FileSource, IoOptions, IoThread, Read};

use super::{CLUSTER, FfnShape};
use crate::Error;
use crate::bundle::NeuronFormat;
use crate::memory::{MemoryPlan, Residency};

/// Reads during start-up: this many at once, of this size.
const STAGING_SLOTS: u32 = 4;
const STAGING_BYTES: usize = 256 << 10;

/// A checked container, ready to be planned for and opened.
pub(crate) struct Prepared {
    pub container: Container,
    source: FileSource,
    format: NeuronFormat,
    banks: usize,
    neurons: usize,
    /// Offset and memory alignment of direct I/O; 1 when reads are buffered.
    align: (usize, usize),
    /// Every token needs every neuron.
    dense: bool,
}

impl Prepared {
    /// Checks that the banks are those of the model.
    pub fn new(container: Container, c: &ModelConfig, shape: &FfnShape) -> Result<Self, Error> {
        let bad = |reason: String| Error::Bundles {
            path: container.path().to_path_buf(),
            reason,
        };
        if c.experts != 1 {
            return Err(bad(format!(
                "{} experts per layer; this version runs dense FFNs (1 expert)",
                c.experts
            )));
        }
        let banks = container.banks();
        if banks.len() != c.layers as usize {
            return Err(bad(format!(
                "{} banks, expected one for each of {} layers",
                banks.len(),
                c.layers
            )));
        }
        for (l, bank) in banks.iter().enumerate() {
            if (bank.layer as usize, bank.expert, bank.neurons) != (l, 0, c.ffn) {
                return Err(bad(format!(
                    "bank {l} is layer {} expert {} with {} neurons, \
                     expected layer {l} expert 0 with {}",
                    bank.layer, bank.expert, bank.neurons, c.ffn
                )));
            }
        }
        let file = container
            .file()
            .try_clone()
            .map_err(|e| bad(format!("cannot open the file a second time: {e}")))?;
        let label = container.path().display().to_string();
        let source = FileSource::from_file(file, label, container.base());
        let align = source
            .dio_align()
            .map_or((1, 1), |a| (a.offset as usize, a.mem as usize));
        Ok(Self {
            source,
            format: shape.format,
            banks: banks.len(),
            neurons: shape.neurons,
            align,
            dense: shape.dense,
            container,
        })
    }

    /// Neurons of the whole model.
    pub fn neurons(&self) -> u64 {
        (self.banks * self.neurons) as u64
    }

    /// Bytes of all Gate rows.
    pub fn gate_bytes(&self) -> u64 {
        self.neurons() * self.format.gate_len() as u64
    }

    /// Bytes of the resident scales.
    pub fn resident_scales(&self) -> u64 {
        self.neurons() * self.format.resident_scales() as u64
    }

    /// Fewest slots a layer can be worked on with: two clusters, so that one
    /// can be read while the other is computed.
    pub fn min_slots(&self) -> u64 {
        (2 * CLUSTER as u64).min(self.neurons())
    }

    /// Bytes of queues, tables and start-up staging.
    pub fn io_bytes(&self) -> u64 {
        let per_layer = self.neurons * (size_of::<Read>() + size_of::<Completion>() + 16);
        let tables = self.neurons() as usize * 32;
        (per_layer + tables) as u64 + u64::from(STAGING_SLOTS) * self.staging_len() as u64
    }

    fn staging_len(&self) -> usize {
        let stride = self.container.geometry().stride as usize;
        let align = self.align.0.max(self.align.1);
        (STAGING_BYTES.max(stride) + align).next_multiple_of(align)
    }

    /// Bytes of a cache slot.
    pub fn slot_len(&self, residency: Residency) -> u64 {
        self.part(residency).slot_len(self.align) as u64
    }

    fn part(&self, residency: Residency) -> Part {
        let g = self.container.geometry();
        let start = match residency {
            Residency::Bundles => 0,
            Residency::GatesResident => g.rest_read() as usize,
        };
        Part {
            start,
            len: g.stride as usize - start,
            stride: g.stride as usize,
            gate_span: g.gate_span as usize,
        }
    }
}

/// The bytes of a bundle that a slot holds: `[start, start + len)`.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: usize,
    len: usize,
    stride: usize,
    gate_span: usize,
}

impl Part {
    /// Bytes of a slot for reads of this part with `(offset, memory)` alignment.
    fn slot_len(&self, (offset, memory): (usize, usize)) -> usize {
        let cover = if self.start.is_multiple_of(offset) && self.stride.is_multiple_of(offset) {
            self.len.next_multiple_of(offset)
        } else {
            self.len.next_multiple_of(offset) + offset
        };
        cover.next_multiple_of(memory)
    }
}

/// The bytes of one neuron.
pub(crate) struct NeuronBytes<'a> {
    /// Gate part; empty when Gate rows are resident.
    pub gate: &'a [u8],
    /// Up and Down part.
    pub rest: &'a [u8],
    /// Resident scales; empty when inline.
    pub scales: &'a [u8],
}

/// Counters since the start-up fill.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StoreCounters {
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    pub reads: u64,
    pub bytes_read: u64,
    /// Time the computation waited for reads.
    pub wait: Duration,
}

/// Neurons under a budget.
pub(crate) struct NeuronStore {
    container: Container,
    format: NeuronFormat,
    part: Part,
    align: usize,
    residency: Residency,
    /// Neurons at the start of each bank that are never evicted, when every
    /// token needs every neuron (LRU would then evict each one just before it
    /// is needed again).
    kept: Option<u32>,
    /// Gate rows by bank; empty unless resident.
    gates: Vec<Vec<u8>>,
    /// Resident scales by bank; empty when inline.
    scales: Vec<Vec<u8>>,
    cache: ColdCache,
    io: IoThread,
    reads: Vec<Read>,
    completions: Vec<Completion>,
    counters: StoreCounters,
    /// Evictions and I/O before the counted part.
    before: StoreCounters,

    // the layer being worked on
    bank: u32,
    /// Slot of each needed neuron; `None` until it is there.
    slots: Vec<Option<SlotId>>,
    issued: usize,
    ready: usize,
    released: usize,
}

impl NeuronStore {
    /// Allocates the cache and fills it from the front of every bank (the
    /// hottest neurons, where the container is in temperature order).
    pub fn open(prepared: Prepared, plan: &MemoryPlan, io: EngineChoice) -> Result<Self, Error> {
        let part = prepared.part(plan.residency);
        let staging_len = prepared.staging_len();
        let gates_resident = plan.residency == Residency::GatesResident;
        let Prepared {
            container,
            source,
            format,
            banks,
            neurons,
            align,
            dense,
        } = prepared;
        let slots = u32::try_from(plan.slots).unwrap_or(u32::MAX - 1);
        let arena = Arena::new(
            slots,
            part.slot_len(align),
            align.1,
            ArenaOptions::default(),
        )
        .map_err(emberflow_storage::Error::from)?;
        let sizes = vec![neurons as u32; banks];
        let cache = ColdCache::new(arena, &sizes).ok_or_else(|| Error::Bundles {
            path: container.path().to_path_buf(),
            reason: format!("{banks} banks of {neurons} neurons are more than a table holds"),
        })?;
        let io = IoThread::spawn(source, io, IoOptions::default())
            .map_err(emberflow_storage::Error::from)?;
        let scales = (0..banks)
            .filter(|_| format.resident_scales() > 0)
            .map(|b| {
                let mut bytes = vec![0; neurons * format.resident_scales()];
                container.read_scales(b, &mut bytes)?;
                Ok(bytes)
            })
            .collect::<Result<_, emberflow_storage::Error>>()?;
        // Gates in the bundle mean that every neuron is looked at for every token.
        let scans = (dense || !gates_resident) && plan.slots < (banks * neurons) as u64;
        let spare = (2 * CLUSTER as u64).min(plan.slots);
        let mut store = Self {
            part,
            align: align.0,
            residency: plan.residency,
            kept: scans.then(|| ((plan.slots - spare) / banks as u64) as u32),
            gates: Vec::new(),
            scales,
            cache,
            io,
            reads: Vec::with_capacity(neurons),
            completions: Vec::with_capacity(neurons),
            counters: StoreCounters::default(),
            before: StoreCounters::default(),
            bank: 0,
            slots: Vec::with_capacity(neurons),
            issued: 0,
            ready: 0,
            released: 0,
            container,
            format,
        };
        if gates_resident {
            let len = neurons * format.gate_len();
            store.gates = (0..banks).map(|_| vec![0; len]).collect();
        }
        store.fill(neurons, plan, staging_len, align.1)?;
        store.before = store.totals();
        Ok(store)
    }

    /// Reads the banks in large sequential pieces: all Gate rows where they stay
    /// resident, and the first neurons of every bank until the cache is full.
    fn fill(
        &mut self,
        neurons: usize,
        plan: &MemoryPlan,
        staging_len: usize,
        memory_align: usize,
    ) -> Result<(), Error> {
        let banks = self.container.banks().len();
        let prefix = match self.kept {
            Some(kept) => kept as usize,
            None => (plan.slots as usize).div_ceil(banks).min(neurons),
        };
        let wanted = if self.gates.is_empty() {
            prefix
        } else {
            neurons
        };
        let stride = self.part.stride;
        let per_piece = ((staging_len - self.align) / stride).max(1);
        let mut staging = Arena::new(
            STAGING_SLOTS,
            staging_len,
            memory_align,
            ArenaOptions::default(),
        )
        .map_err(emberflow_storage::Error::from)?;
        let mut pieces = (0..banks)
            .flat_map(|b| (0..wanted).step_by(per_piece).map(move |n| (b, n)))
            .peekable();
        while pieces.peek().is_some() || self.io.outstanding() > 0 {
            while let Some(&(bank, first)) = pieces.peek() {
                let Some(slot) = staging.take() else { break };
                pieces.next();
                let count = per_piece.min(wanted - first);
                let (offset, len, _) = self.cover(bank, first as u32, 0, count * stride);
                let tag = (bank as u64) << 32 | first as u64;
                self.reads.push(Read::new(tag, offset, len, slot));
            }
            self.io
                .submit(&mut self.reads)
                .map_err(emberflow_storage::Error::from)?;
            let mut arrived = std::mem::take(&mut self.completions);
            self.io
                .wait(&mut arrived, 1)
                .map_err(emberflow_storage::Error::from)?;
            for done in arrived.drain(..) {
                done.result.map_err(emberflow_storage::Error::from)?;
                let (bank, first) = ((done.tag >> 32) as usize, done.tag as u32 as usize);
                let count = per_piece.min(wanted - first);
                self.take_piece(bank, first, count, prefix, done.slot.as_slice())?;
                staging.put(done.slot);
            }
            self.completions = arrived;
        }
        Ok(())
    }

    /// Distributes a piece of `count` neurons from `first` on.
    fn take_piece(
        &mut self,
        bank: usize,
        first: usize,
        count: usize,
        prefix: usize,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let stride = self.part.stride;
        let (_, _, shift) = self.cover(bank, first as u32, 0, count * stride);
        let gate_len = self.format.gate_len();
        for (n, bundle) in (first..first + count).zip(bytes[shift..].chunks_exact(stride)) {
            let (gate, rest) = bundle.split_at(self.part.gate_span);
            if let Some(gates) = self.gates.get_mut(bank) {
                self.container.check_gate(bank, n as u32, gate)?;
                gates[n * gate_len..(n + 1) * gate_len].copy_from_slice(&gate[..gate_len]);
            }
            let key = Key {
                bank: bank as u32,
                neuron: n as u32,
            };
            if n >= prefix {
                continue;
            }
            let Some(mut slot) = self.cache.reserve_if_free(key) else {
                continue;
            };
            if self.gates.is_empty() {
                self.container.check_gate(bank, n as u32, gate)?;
            }
            self.container.check_rest(bank, n as u32, rest)?;
            let (_, _, shift) = self.cover(bank, n as u32, self.part.start, self.part.len);
            slot.as_mut_slice()[shift..shift + self.part.len]
                .copy_from_slice(&bundle[self.part.start..]);
            let id = self.cache.admit(key, slot);
            self.cache.unpin(id);
        }
        Ok(())
    }

    /// Aligned read that covers `len` bytes from byte `start` of a bundle on:
    /// offset in the container, length, and where the wanted bytes begin.
    fn cover(&self, bank: usize, neuron: u32, start: usize, len: usize) -> (u64, u32, usize) {
        let align = self.align as u64;
        let from = self.container.neuron_offset(bank, neuron) + start as u64;
        let low = from - from % align;
        let high = (from + len as u64).next_multiple_of(align);
        (low, (high - low) as u32, (from - low) as usize)
    }

    /// Whether Gate rows are resident (else they come with the bundle).
    pub fn gates_resident(&self) -> bool {
        self.residency == Residency::GatesResident
    }

    /// A resident Gate row.
    pub fn resident_gate(&self, bank: u32, neuron: u32) -> Row<'_> {
        let len = self.format.gate_len();
        let bytes = &self.gates[bank as usize][neuron as usize * len..][..len];
        self.format.gate(bytes, self.scales_of(bank, neuron))
    }

    fn scales_of(&self, bank: u32, neuron: u32) -> &[u8] {
        let len = self.format.resident_scales();
        match self.scales.get(bank as usize) {
            Some(all) => &all[neuron as usize * len..][..len],
            None => &[],
        }
    }

    /// Starts a layer that needs `needed` neurons.
    pub fn begin(&mut self, bank: u32, needed: usize) {
        self.bank = bank;
        self.slots.clear();
        self.slots.resize(needed, None);
        self.issued = 0;
        self.ready = 0;
        self.released = 0;
    }

    /// Pins or requests as many of `ids` (the layer's needed neurons) as slots
    /// allow, in order.
    pub fn issue(&mut self, ids: &[u32]) -> Result<(), Error> {
        for (place, &neuron) in ids.iter().enumerate().skip(self.issued) {
            let key = Key {
                bank: self.bank,
                neuron,
            };
            if let Some(slot) = self.cache.get_pin(key) {
                self.counters.hits += 1;
                self.slots[place] = Some(slot);
            } else if let Some(slot) = self.cache.reserve(key) {
                self.counters.misses += 1;
                let (offset, len, _) =
                    self.cover(self.bank as usize, neuron, self.part.start, self.part.len);
                self.reads.push(Read::new(place as u64, offset, len, slot));
            } else {
                break;
            }
            self.issued = place + 1;
        }
        self.io
            .submit(&mut self.reads)
            .map_err(emberflow_storage::Error::from)?;
        Ok(())
    }

    /// Waits until all issued neurons before place `end` are there. Returns the
    /// place up to which they are.
    pub fn wait(&mut self, ids: &[u32], end: usize) -> Result<usize, Error> {
        let target = end.min(self.issued);
        loop {
            while self.ready < target && self.slots[self.ready].is_some() {
                self.ready += 1;
            }
            if self.ready == target {
                return Ok(target);
            }
            let start = Instant::now();
            self.io
                .wait(&mut self.completions, 1)
                .map_err(emberflow_storage::Error::from)?;
            self.counters.wait += start.elapsed();
            if let Err(first) = self.admit(ids) {
                self.abandon_layer(ids);
                return Err(first);
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
        let (_, _, shift) = self.cover(bank, n, self.part.start, self.part.len);
        let bytes = &slot[shift..shift + self.part.len];
        let (gate, rest) = bytes.split_at(self.part.gate_span - self.part.start);
        if self.residency == Residency::Bundles {
            self.container.check_gate(bank, n, gate)?;
        }
        self.container.check_rest(bank, n, rest)?;
        Ok(())
    }

    /// The bytes of the needed neuron at `place`, which is `neuron`; it must be
    /// ready and not released.
    pub fn bytes(&self, place: usize, neuron: u32) -> NeuronBytes<'_> {
        let (_, _, shift) = self.cover(self.bank as usize, neuron, self.part.start, self.part.len);
        let slot = match self.slots[place] {
            Some(slot) => self.cache.bytes(slot),
            None => unreachable!("neuron {neuron} is used before it is ready"),
        };
        let rest_at = shift + self.part.gate_span - self.part.start;
        NeuronBytes {
            gate: match self.residency {
                Residency::Bundles => &slot[shift..shift + self.format.gate_len()],
                Residency::GatesResident => &[],
            },
            rest: &slot[rest_at..rest_at + self.format.rest_len()],
            scales: self.scales_of(self.bank, neuron),
        }
    }

    /// Unpins the needed neurons before place `upto`.
    pub fn release(&mut self, ids: &[u32], upto: usize) {
        for (slot, &id) in self.slots[..upto].iter().zip(ids).skip(self.released) {
            if let Some(slot) = *slot {
                if self.kept.is_some_and(|kept| id >= kept) {
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

    fn totals(&self) -> StoreCounters {
        let io = self.io.stats();
        StoreCounters {
            evictions: self.cache.stats().evictions,
            reads: io.reads,
            bytes_read: io.bytes,
            ..self.counters
        }
    }

    /// Counters since the start-up fill.
    pub fn counters(&self) -> StoreCounters {
        let now = self.totals();
        StoreCounters {
            evictions: now.evictions - self.before.evictions,
            reads: now.reads - self.before.reads,
            bytes_read: now.bytes_read - self.before.bytes_read,
            ..now
        }
    }
}
