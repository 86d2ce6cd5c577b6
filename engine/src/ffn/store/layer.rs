//! One bank at work: clusters are named in order with the neurons they need,
//! found in memory or read, handed out when all their bytes are there, and
//! released.
//!
//! ```text
//! need ── all there ───────────────────────────────────────────► ready ─► release
//!   │                                                              ▲
//!   ├─ whole cluster missing ── one sequential read ───────────────┤
//!   ├─ some neurons missing ─── their Up and Down, one read each ──┤
//!   └─ gates unknown, and two phases are cheaper:                  │
//!        Gate parts ─► gates ready ─► resolve ─► Up/Down where it fires
//! ```

use std::ops::Range;
use std::time::Instant;

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::{ColdCache, Key, SlotId};
use emberflow_storage::io::{Completion, Read};

use super::super::CLUSTER;
use super::super::banks::PREFILL;
use super::{BATCH, Foreseen, NeuronStore};
use crate::Error;
use crate::policy::Keep;
use crate::trace::WAIT;

/// How a needed neuron of the cold region is held.
pub(super) enum Held {
    Nothing,
    /// Resident and pinned.
    Pinned(SlotId),
    /// The same, just read: its checksums are verified by the thread that computes it.
    Read(SlotId),
    /// Its Gate part is there.
    Gate(Slot),
    /// On its way since before the bank began.
    Coming,
}

/// Where a cluster's bytes are or will be.
pub(super) enum Source {
    /// No neuron of it is needed.
    Unused,
    Hot(SlotId),
    /// A stream buffer; `None` until it is there.
    Stream(Option<Slot>),
    /// Slots of the cold region, neuron by neuron.
    Cold,
    /// The mapped file.
    Mapped,
}

/// What a cluster is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Its Gate parts are there; [`NeuronStore::resolve`] comes next.
    Gates,
    /// Everything that is needed is there.
    Sums,
}

pub(super) struct Cluster {
    /// Places of its needed neurons in the layer's list.
    pub first: usize,
    pub end: usize,
    pub source: Source,
    step: Step,
    /// Reads under way.
    pub(super) waiting: usize,
    /// Places before this one are held or requested.
    pub(super) issued: usize,
}

/// The bank being worked on.
pub(super) struct Layer {
    pub bank: u32,
    /// Many tokens are computed at once.
    pub(super) many: bool,
    /// The clusters named so far.
    pub clusters: Vec<Cluster>,
    /// By place.
    pub held: Vec<Held>,
    /// Clusters before this one have all their reads requested.
    pub(super) next: usize,
    pub(super) ready: Vec<u32>,
    /// Whole clusters of this bank or the next that nobody has claimed.
    pub(super) arrived: Vec<(u32, u32, Slot)>,
    /// Whole clusters under way: bank and cluster.
    pub(super) coming: Vec<(u32, u32)>,
    /// Clusters of the next bank that were looked at for reading ahead.
    pub(super) ahead: usize,
    /// Whether a cluster of this bank is on its way into the hot region.
    promoting: bool,
}

impl Layer {
    pub fn new(neurons: usize, clusters: usize) -> Self {
        Self {
            bank: 0,
            many: false,
            clusters: Vec::with_capacity(clusters),
            held: Vec::with_capacity(neurons),
            next: 0,
            ready: Vec::with_capacity(clusters),
            arrived: Vec::with_capacity(16),
            coming: Vec::with_capacity(16),
            ahead: 0,
            promoting: false,
        }
    }
}

/// Tags of reads: a place of the current layer, or a cluster of a bank.
const STREAMED: u64 = 1 << 63;

/// With a place: the first of two reads.
const HALF: u64 = 1 << 62;

/// A neuron of a bank, asked for before the bank began.
pub(super) const FORESEEN: u64 = 1 << 61;

/// A row of a dense tensor, and its place among those asked for together.
pub(super) const PIECE: u64 = 1 << 60;

/// Looks a neuron up and pins it.
fn hold(cold: &mut ColdCache, foreseen: &mut Foreseen, key: Key) -> Option<Held> {
    let slot = cold.get_pin(key)?;
    Some(match foreseen.take_unchecked(key) {
        true => Held::Read(slot),
        false => Held::Pinned(slot),
    })
}

impl NeuronStore {
    /// Starts a bank, for `tokens` tokens.
    pub fn begin(&mut self, bank: u32, tokens: usize) -> Result<(), Error> {
        self.usable()?;
        if let Some(mapped) = &self.mapped {
            let whole = mapped.still_whole();
            self.latch(whole.map_err(Error::from))?;
        }
        self.cold.begin(bank);
        self.foreseen.begin(bank, tokens == 1);
        let layer = &mut self.layer;
        layer.bank = bank;
        layer.many = tokens >= PREFILL;
        layer.clusters.clear();
        layer.held.clear();
        layer.ready.clear();
        layer.next = 0;
        layer.ahead = 0;
        layer.promoting = false;
        // What was read ahead for a bank that did not come.
        let mut i = 0;
        while i < layer.arrived.len() {
            if layer.arrived[i].0 == bank {
                i += 1;
            } else {
                self.stream.put(layer.arrived.swap_remove(i).2);
            }
        }
        Ok(())
    }

    /// Names the next cluster and its needed neurons, `ids` at `places` of the
    /// layer's list. Clusters are named in order, each once.
    pub fn need(&mut self, ids: &[u32], places: Range<usize>) {
        let c = self.layer.clusters.len();
        let (bank, n) = (self.layer.bank, places.len());
        self.layer.held.resize_with(places.end, || Held::Nothing);
        let mut source = Source::Unused;
        let mut step = Step::Sums;
        if n > 0 {
            if self.mapped.is_some() {
                source = Source::Mapped;
            } else if let Some(slot) = self.hot.get_pin(bank, c as u32) {
                self.counters.hot_hits += n as u64;
                source = Source::Hot(slot);
            } else if self.comes_whole(bank, c as u32)
                || self.is_coming(bank, c as u32) && self.promotes()
            {
                self.counters.misses += n as u64;
                source = Source::Stream(None);
            } else {
                source = Source::Cold;
                // Not in memory: foreseen, or to be read still.
                let (mut coming, mut absent) = (0, 0);
                for (&neuron, held) in ids[places.clone()]
                    .iter()
                    .zip(&mut self.layer.held[places.clone()])
                {
                    let key = Key { bank, neuron };
                    let foreseen = self.foreseen.has(key);
                    coming += usize::from(foreseen);
                    match hold(&mut self.cold, &mut self.foreseen, key) {
                        Some(found) => *held = found,
                        None if foreseen => {}
                        None => absent += 1,
                    }
                }
                let missing = coming + absent;
                self.foreseen.count(bank, missing, coming);
                self.counters.foreseen_needed += coming as u64;
                self.counters.hits += (n - missing) as u64;
                self.counters.misses += missing as u64;
                let whole = match self.part.has_gate {
                    true => self.costs.cluster_over_bundles(absent),
                    false => self.costs.whole_cluster(absent),
                };
                if self.reads_gates_first() {
                    step = Step::Gates;
                } else if self.policy.bundles() && whole {
                    self.unpin_places(ids, places.clone());
                    source = Source::Stream(None);
                }
            }
        }
        self.layer.clusters.push(Cluster {
            first: places.start,
            end: places.end,
            source,
            step,
            waiting: 0,
            issued: places.start,
        });
    }

    /// Clusters that have become hot come one for each layer and pass, the others meanwhile
    /// neuron by neuron: many at once would hold up a token.
    fn promotes(&mut self) -> bool {
        let first = !std::mem::replace(&mut self.layer.promoting, true);
        first || self.cold.slots() == 0
    }

    /// Requests what the named clusters miss, in order, as far as memory allows.
    pub fn advance(&mut self, ids: &[u32]) -> Result<(), Error> {
        while self.layer.next < self.layer.clusters.len() {
            let c = self.layer.next;
            if !self.issue(ids, c)? {
                break;
            }
            self.layer.next += 1;
            self.ready_if_complete(c);
        }
        let certain = self.scans || self.layer.many;
        if certain && self.layer.next == self.banks.clusters() {
            self.read_ahead()?;
        }
        self.submit()
    }

    /// Requests what cluster `c` misses. False when memory is short.
    fn issue(&mut self, ids: &[u32], c: usize) -> Result<bool, Error> {
        let bank = self.layer.bank;
        match self.layer.clusters[c].source {
            Source::Unused | Source::Hot(_) | Source::Mapped => return Ok(true),
            Source::Stream(_) => {
                let key = (bank, c as u32);
                let arrived = &mut self.layer.arrived;
                if let Some(i) = arrived.iter().position(|a| (a.0, a.1) == key) {
                    let slot = arrived.swap_remove(i).2;
                    self.layer.clusters[c].source = Source::Stream(Some(slot));
                    return Ok(true);
                }
                if !self.layer.coming.contains(&key) && !self.request_cluster(bank, c)? {
                    return Ok(false);
                }
                self.layer.clusters[c].waiting = 1;
                return Ok(true);
            }
            Source::Cold => {}
        }
        let Cluster {
            end, step, issued, ..
        } = self.layer.clusters[c];
        for (place, &neuron) in ids.iter().enumerate().take(end).skip(issued) {
            self.layer.clusters[c].issued = place;
            if matches!(self.layer.held[place], Held::Pinned(_) | Held::Read(_)) {
                continue;
            }
            let key = Key { bank, neuron };
            // A pin may have been given up for another cluster.
            if let Some(found) = hold(&mut self.cold, &mut self.foreseen, key) {
                self.layer.held[place] = found;
                continue;
            }
            if self.cold.is_loading(key) {
                self.layer.held[place] = Held::Coming;
                self.layer.clusters[c].waiting += 1;
                continue;
            }
            let Some(slot) = self.cold.reserve(key) else {
                return Ok(false);
            };
            let part = &self.part;
            let len = match step {
                Step::Gates => part.gate_span,
                Step::Sums => part.len,
            };
            let (offset, len) = self.banks.cover(bank as usize, neuron, part.start, len);
            self.layer.clusters[c].waiting += 1;
            if self.policy.bundles() || step == Step::Gates {
                self.request(Read::new(place as u64, offset, len, slot))?;
            } else {
                let half = self.first_half(len);
                self.request(Read::new(HALF | place as u64, offset, half, slot))?;
            }
        }
        self.layer.clusters[c].issued = end;
        Ok(true)
    }

    /// Length of the first of two reads of what one read of `len` bytes would bring.
    fn first_half(&self, len: u32) -> u32 {
        let unit = self.banks.slack() as u32;
        (len / 2).next_multiple_of(unit).min(len)
    }

    /// The second of two reads of a neuron without bundles, of another matrix as it were.
    fn request_second_half(&mut self, ids: &[u32], place: usize, slot: Slot) -> Result<(), Error> {
        let (bank, part) = (self.layer.bank as usize, &self.part);
        let (offset, len) = self.banks.cover(bank, ids[place], part.start, part.len);
        let first = self.first_half(len);
        let read = Read::new(place as u64, offset + u64::from(first), len - first, slot).at(first);
        self.request(read)
    }

    /// Requests a whole cluster. False when no buffer is free.
    pub(super) fn request_cluster(&mut self, bank: u32, c: usize) -> Result<bool, Error> {
        let Some(slot) = self.stream.take() else {
            return Ok(false);
        };
        let neurons = self.banks.cluster_neurons(c);
        let len = neurons.len() * self.part.stride;
        let first = neurons.start as u32;
        let (offset, len) = self.banks.cover(bank as usize, first, 0, len);
        let tag = STREAMED | u64::from(bank) << 32 | c as u64;
        self.layer.coming.push((bank, c as u32));
        self.request(Read::new(tag, offset, len, slot))?;
        Ok(true)
    }

    /// Adds a read to the batch; its buffer never grows.
    pub(super) fn request(&mut self, read: Read) -> Result<(), Error> {
        if self.reads.len() == BATCH {
            self.submit()?;
        }
        self.reads.push(read);
        Ok(())
    }

    pub(super) fn submit(&mut self) -> Result<(), Error> {
        if self.reads.is_empty() {
            return Ok(());
        }
        let sent = self.io.submit(&mut self.reads);
        self.latch(sent.map_err(|e| emberflow_storage::Error::from(e).into()))
    }

    /// Takes what has arrived, without waiting.
    pub fn poll(&mut self, ids: &[u32]) -> Result<(), Error> {
        let polled = self.io.try_drain(&mut self.completions);
        self.latch(polled.map_err(|e| emberflow_storage::Error::from(e).into()))?;
        self.take_arrived(ids)
    }

    /// Waits for something to arrive. Called when no cluster is ready.
    pub fn wait(&mut self, ids: &[u32]) -> Result<(), Error> {
        self.submit_last()?;
        if self.io.outstanding() == 0 {
            return self.make_room(ids);
        }
        self.sleep(ids)
    }

    /// Waits for a read and takes in what has arrived.
    pub(super) fn sleep(&mut self, ids: &[u32]) -> Result<(), Error> {
        let start = Instant::now();
        let span = self.tracer.open(&WAIT, [u64::from(self.layer.bank), 0]);
        let waited = self.io.wait(&mut self.completions, 1);
        drop(span);
        self.waited += start.elapsed();
        self.latch(waited.map_err(|e| emberflow_storage::Error::from(e).into()))?;
        self.take_arrived(ids)
    }

    /// After the bank was computed for the neurons `ids`: forgets what the policy does not
    /// keep.
    pub fn end(&mut self, ids: &[u32]) {
        let bank = self.layer.bank;
        match self.policy.keep() {
            Keep::All => {}
            Keep::Window => self.window.slide(bank, ids, &mut self.cold),
            Keep::Nothing => {
                for &neuron in ids {
                    self.cold.remove(Key { bank, neuron });
                }
            }
        }
        // Between two banks nobody can be asked for by its place.
        self.layer.clusters.clear();
        self.layer.held.clear();
    }

    /// Whether named clusters wait for memory that others hold.
    pub fn is_short_of_memory(&self) -> bool {
        self.layer.next < self.layer.clusters.len()
    }

    /// Whether reads are under way.
    pub fn reading(&self) -> bool {
        self.io.outstanding() > 0
    }

    pub(super) fn unpin_places(&mut self, ids: &[u32], places: Range<usize>) {
        let bank = self.layer.bank;
        for (held, &neuron) in self.layer.held[places.clone()].iter_mut().zip(&ids[places]) {
            let key = Key { bank, neuron };
            match held {
                Held::Read(_) => self.foreseen.set_unchecked(key),
                Held::Pinned(_) => {}
                _ => continue,
            }
            self.cold.unpin(key);
            *held = Held::Nothing;
        }
    }

    /// What the computing threads found damaged, as an error; everything is then taken back.
    pub fn intact(&mut self, ids: &[u32]) -> Result<(), Error> {
        let damage = self.damage.get_mut().unwrap_or_else(|e| e.into_inner());
        let Some(error) = damage.take() else {
            return Ok(());
        };
        self.abandon_layer(ids);
        self.latch(Err(error))
    }

    /// Takes completions in. After an error everything is taken back.
    pub(super) fn take_arrived(&mut self, ids: &[u32]) -> Result<(), Error> {
        let mut arrived = std::mem::take(&mut self.completions);
        let mut outcome = Ok(());
        for done in arrived.drain(..) {
            let taken = self.take_one(ids, done);
            if outcome.is_ok() {
                outcome = taken;
            }
        }
        self.completions = arrived;
        if outcome.is_err() {
            self.abandon_layer(ids);
        }
        self.latch(outcome)?;
        self.submit_last()
    }

    /// Without bundles: asks for the second matrix when all of the first one has come.
    pub(super) fn submit_last(&mut self) -> Result<(), Error> {
        if self.io.outstanding() > 0 {
            return Ok(());
        }
        self.submit()
    }

    pub(super) fn take_one(&mut self, ids: &[u32], done: Completion) -> Result<(), Error> {
        let result = done
            .result
            .map_err(|e| Error::from(emberflow_storage::Error::from(e)));
        if done.tag & STREAMED != 0 {
            let (bank, c) = ((done.tag >> 32) as u32 & 0x7fff_ffff, done.tag as u32);
            return self.take_cluster(bank, c, done.slot, result);
        }
        if done.tag & FORESEEN != 0 {
            let (bank, neuron) = ((done.tag >> 32) as u32 & 0x1fff_ffff, done.tag as u32);
            return self.take_foreseen(ids, Key { bank, neuron }, done.slot, result);
        }
        if done.tag & PIECE != 0 {
            self.pieces.push((done.tag, done.slot));
            return result;
        }
        let place = (done.tag & !HALF) as usize;
        if done.tag & HALF != 0 && result.is_ok() {
            return self.request_second_half(ids, place, done.slot);
        }
        let (bank, neuron) = (self.layer.bank, ids[place]);
        let c = neuron as usize / CLUSTER;
        let key = Key { bank, neuron };
        let step = self.layer.clusters[c].step;
        let checked = match step {
            Step::Gates => result.and_then(|()| self.check(key, done.slot.as_slice(), step)),
            Step::Sums => result,
        };
        if let Err(e) = checked {
            self.cold.abandon(key, done.slot);
            return Err(e);
        }
        self.layer.held[place] = match step {
            Step::Gates => Held::Gate(done.slot),
            Step::Sums => Held::Read(self.cold.admit(key, done.slot)),
        };
        self.layer.clusters[c].waiting -= 1;
        self.ready_if_complete(c);
        Ok(())
    }

    fn take_cluster(
        &mut self,
        bank: u32,
        c: u32,
        slot: Slot,
        result: Result<(), Error>,
    ) -> Result<(), Error> {
        self.layer.coming.retain(|&key| key != (bank, c));
        let checked = result.and_then(|()| self.check_cluster(bank, c, slot.as_slice()));
        if let Err(e) = checked {
            self.stream.put(slot);
            return Err(e);
        }
        let claimed = bank == self.layer.bank && (c as usize) < self.layer.next;
        match self.layer.clusters.get_mut(c as usize) {
            Some(cluster) if claimed && matches!(cluster.source, Source::Stream(None)) => {
                cluster.source = Source::Stream(Some(slot));
                cluster.waiting = 0;
                self.ready_if_complete(c as usize);
            }
            _ => self.layer.arrived.push((bank, c, slot)),
        }
        Ok(())
    }

    pub(super) fn ready_if_complete(&mut self, c: usize) {
        let cluster = &self.layer.clusters[c];
        let requested = match cluster.source {
            Source::Unused => false,
            Source::Hot(_) | Source::Stream(_) | Source::Mapped => true,
            Source::Cold => cluster.issued == cluster.end,
        };
        if requested && cluster.waiting == 0 {
            self.layer.ready.push(c as u32);
        }
    }

    /// Moves the clusters below `end` that are ready to `out`.
    pub fn take_ready(&mut self, end: usize, out: &mut Vec<(u32, Step)>) {
        out.clear();
        let clusters = &self.layer.clusters;
        self.layer.ready.retain(|&c| {
            let takes = (c as usize) < end;
            if takes {
                out.push((c, clusters[c as usize].step));
            }
            !takes
        });
    }

    /// Places of a cluster's needed neurons in the layer's list.
    pub fn places(&self, c: u32) -> Range<usize> {
        let cluster = &self.layer.clusters[c as usize];
        cluster.first..cluster.end
    }

    /// After the gates of cluster `c` were computed: requests Up and Down of the
    /// neurons that fire and gives up the others.
    pub fn resolve(
        &mut self,
        ids: &[u32],
        c: u32,
        fires: impl Fn(u32) -> bool,
    ) -> Result<(), Error> {
        let bank = self.layer.bank;
        let places = self.places(c);
        self.layer.clusters[c as usize].step = Step::Sums;
        for place in places {
            let neuron = ids[place];
            let key = Key { bank, neuron };
            match std::mem::replace(&mut self.layer.held[place], Held::Nothing) {
                Held::Gate(slot) if fires(neuron) => {
                    let part = &self.part;
                    let b = bank as usize;
                    let (from, _) = self.banks.cover(b, neuron, part.start, part.gate_span);
                    let rest = self.banks.rest_read();
                    let (offset, len) = self.banks.cover(b, neuron, rest, part.stride - rest);
                    let at = (offset - from) as u32;
                    let read = Read::new(place as u64, offset, len, slot).at(at);
                    self.layer.clusters[c as usize].waiting += 1;
                    self.request(read)?;
                }
                Held::Gate(slot) => self.cold.abandon(key, slot),
                other => self.layer.held[place] = other,
            }
        }
        self.ready_if_complete(c as usize);
        Ok(())
    }
}
