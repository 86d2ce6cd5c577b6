//! The current layer: each cluster is requested with its needed neurons in order, looked up or
//! read, handed out when complete, and released.
//!
//! ```text
//! need ── all resident ─────────────────────────────────────────► ready ─► release
//!   │                                                              ▲
//!   ├─ whole cluster missing ── one sequential read ───────────────┤
//!   ├─ some neurons missing ─── one read each ─────────────────────┤
//!   └─ two phases cheaper ───── Gate parts ─► gates ─► resolve ────┘
//!                                              Up/Down where the gate fires
//! ```

use std::ops::Range;
use std::time::Duration;

use emberflow_storage::arena::Slot;
use emberflow_storage::cache::{Key, SlotCache};
use emberflow_storage::io::{Priority, Read};

use super::asked::Guesses;
use super::neurons::NeuronStore;
use super::plan::{Found, Way};
use super::regions::CLUSTER;
use super::tag::{Half, Tag};
use super::tier::{PassRows, Tier};
use super::work::{Held, Item, MANY, Source, Step, UnitWork};
use crate::ablation::Keep;
use crate::device::{DeviceError, Part, Taken, Ticket, Work};
use crate::error::Error;
use crate::split::Product;

/// Looks up a neuron in the cold region and pins it on a hit.
fn hold(cold: &mut SlotCache, guesses: &mut Guesses, key: Key) -> Option<Held> {
    let slot = cold.get_pin(key)?;
    Some(match guesses.take_unchecked(key) {
        true => Held::Read(slot),
        false => Held::Pinned(slot),
    })
}

impl NeuronStore {
    /// Begins a pass over all layers, of one token or several.
    pub fn begin_pass(&mut self, single: bool) {
        self.cold.begin_pass();
        self.hot.begin_pass();
        self.guesses.begin_pass(single);
        self.foresight.begin_pass(single);
    }

    /// Begins layer `number` for `rows` rows, or a part of it. It visits `banks`, banks of that
    /// layer, in this order, and then `after`: the banks of the layer's next part.
    pub fn begin_layer(
        &mut self,
        number: usize,
        banks: impl Iterator<Item = u32> + Clone,
        after: impl Iterator<Item = u32>,
        rows: PassRows,
    ) -> Result<(), Error> {
        self.usable()?;
        if let Some(mapped) = &mut self.mapped {
            let whole = mapped.bundles.still_whole().map_err(Error::from);
            let begun = whole.and_then(|()| mapped.begin(&self.layout, banks.clone()));
            self.latch(begun)?;
        }
        self.layer.after.clear();
        self.layer.after.extend(after);
        let end = match self.layer.after.first() {
            Some(&next) => next,
            None => self.layout.banks_of(number).end,
        };
        self.cold.begin_layer(end.saturating_sub(1));
        self.hot.begin_layer(end.saturating_sub(1));
        self.guesses.begin_layer(&self.layout, number);
        self.judge_guess(number, banks.clone())?;
        self.layer.close();
        self.go_on_to(number);
        self.layer.many = rows.all() >= MANY;
        if let Some(tier) = &mut self.tier {
            tier.begin(rows);
        }
        self.layer.ready.clear();
        self.layer.next = 0;
        self.layer.promoting = false;
        for bank in banks.clone() {
            let unit = UnitWork {
                bank,
                first: self.layer.total,
                rules: self.rules(bank),
            };
            self.layer.unit_of[bank as usize] = Some(self.layer.units.len() as u32);
            self.layer.total += self.layout.clusters(bank);
            self.layer.units.push(unit);
        }
        self.drop_strays();
        self.read_certain(banks)
    }

    /// Requests the next cluster of unit `unit` with its needed neurons, ascending. Units and their
    /// clusters are requested in order, each once.
    pub fn need(&mut self, unit: usize, ids: &[u32]) {
        let UnitWork { bank, first, rules } = self.layer.units[unit];
        let cluster = (self.layer.items.len() - first) as u32;
        let places = self.layer.ids.len()..self.layer.ids.len() + ids.len();
        self.layer.ids.extend_from_slice(ids);
        self.layer.held.resize_with(places.end, || Held::Nothing);
        let needed = ids.len() as u64;
        let mut found = Found {
            needed: ids.len(),
            ..Found::default()
        };
        let shared = (cluster as usize) < self.held_on_device(bank);
        let hot = match found.needed > 0 && !rules.mapped && !shared {
            true => self.hot.get_pin(bank, cluster),
            false => None,
        };
        found.hot = hot.is_some() || shared;
        if found.needed > 0 && !found.hot {
            found.belongs_hot = self.belongs_hot(bank, cluster);
            found.underway = self.layer.is_underway(bank, cluster);
            found.promoting = self.layer.promoting;
        }
        let way = rules.before_lookup(&found).unwrap_or_else(|| {
            found.absent = self.look_up(bank, places.clone());
            rules.after_lookup(&found)
        });
        let source = match (way, hot) {
            (Way::Hot, Some(slot)) => {
                self.counters.hot_hits += needed;
                Source::Hot(slot)
            }
            (Way::Hot, None) => {
                self.counters.hot_hits += needed;
                Source::Shared
            }
            (Way::Whole, _) => {
                if found.absent == 0 {
                    // No lookup took place.
                    self.counters.misses += needed;
                } else {
                    self.unpin_places(bank, places.clone());
                }
                self.layer.promoting |= found.belongs_hot;
                Source::Stream(None)
            }
            (Way::Neurons { .. }, _) => Source::Cold,
            (Way::Mapped, _) => Source::Mapped,
            (Way::Unused, _) => Source::Unused,
        };
        let gates_first = way == Way::Neurons { gates_first: true };
        self.layer.items.push(Item {
            bank,
            cluster,
            first: places.start,
            end: places.end,
            source,
            step: if gates_first { Step::Gates } else { Step::Sums },
            gates_first,
            unchecked: false,
            waiting: 0,
            issued: places.start,
        });
    }

    /// How many clusters of a bank, from the first on, a device computes in this pass.
    pub fn on_device(&self, bank: u32) -> usize {
        let tier = self.tier.as_ref();
        tier.map_or(0, |tier| tier.clusters(bank) as usize)
    }

    /// How many of them it has for everybody.
    pub fn held_on_device(&self, bank: u32) -> usize {
        let tier = self.tier.as_ref();
        tier.map_or(0, |tier| tier.held(bank) as usize)
    }

    /// How many clusters of all banks a device computes in a pass of `rows` rows.
    pub fn computed_on_device(&self, rows: usize) -> u64 {
        let of = |tier: &Tier| {
            let banks = 0..self.layout.banks() as u32;
            banks
                .map(|bank| u64::from(tier.clusters_for(bank, rows)))
                .sum()
        };
        self.tier.as_ref().map_or(0, of)
    }

    /// Leaves the next cluster of unit `unit` to the device.
    pub fn need_on_device(&mut self, unit: usize) {
        let UnitWork { bank, first, .. } = self.layer.units[unit];
        let place = self.layer.ids.len();
        self.layer.items.push(Item {
            bank,
            cluster: (self.layer.items.len() - first) as u32,
            first: place,
            end: place,
            source: Source::Device,
            step: Step::Sums,
            gates_first: false,
            unchecked: false,
            waiting: 0,
            issued: place,
        });
    }

    /// Whether a device computes an item.
    #[inline]
    pub fn is_on_device(&self, item: usize) -> bool {
        matches!(self.layer.items[item].source, Source::Device)
    }

    /// Has the device compute clusters of a bank; see [`Tier::submit`].
    pub fn submit_work<'a>(
        &mut self,
        bank: u32,
        work: impl FnOnce(Part) -> Work<'a>,
    ) -> Result<Option<Ticket>, Error> {
        let submitted = match &mut self.tier {
            Some(tier) => tier.submit(bank, work),
            None => Ok(None),
        };
        self.latch(submitted)
    }

    /// Waits for the device's sums; see [`Tier::take`].
    pub fn take_sums(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Option<Taken>, Error> {
        let taken = match &mut self.tier {
            Some(tier) => tier.take(ticket, out),
            None => Ok(None),
        };
        self.latch(taken)
    }

    /// Time that the device's sums were waited for.
    pub fn waited_for_device(&self) -> Duration {
        self.tier.as_ref().map_or(Duration::ZERO, Tier::waited)
    }

    /// Share of the gates of a token that a device computes from resident rows, and the time that was
    /// waited for it.
    pub fn gates_on_device(&self) -> (f64, Duration) {
        let Some(products) = &self.gate_products else {
            return (0.0, Duration::ZERO);
        };
        let banks = (0..self.layout.banks() as u32).map(|bank| {
            let all = self.layout.neurons(bank);
            let its = self
                .tier
                .as_ref()
                .map_or(0, |tier| tier.clusters_for(bank, 1));
            let rows = all.saturating_sub(its as usize * CLUSTER);
            let (cols, n) = (self.layout.format.d, 1);
            [products.rows(Product { rows, cols, n }), all]
        });
        let [its, all] = banks.fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]]);
        (its as f64 / all.max(1) as f64, products.waited())
    }

    /// Why the device is not used any longer, if so.
    pub fn lost_device(&self) -> Option<&DeviceError> {
        self.tier.as_ref()?.lost()
    }

    /// Pins the neurons at `places` that hit in the cold region. Returns how many are neither
    /// resident nor in flight.
    fn look_up(&mut self, bank: u32, places: Range<usize>) -> usize {
        let (mut coming, mut absent) = (0, 0);
        let ids = &self.layer.ids[places.clone()];
        for (&neuron, held) in ids.iter().zip(&mut self.layer.held[places.clone()]) {
            let key = Key { bank, neuron };
            let guessed = self.guesses.has(key);
            coming += usize::from(guessed);
            match hold(&mut self.cold, &mut self.guesses, key) {
                Some(found) => *held = found,
                None if guessed => {}
                None => absent += 1,
            }
        }
        let missing = coming + absent;
        self.guesses.count(self.layer.number, missing, coming);
        self.counters.guessed_needed += coming as u64;
        self.counters.hits += (places.len() - missing) as u64;
        self.counters.misses += missing as u64;
        absent
    }

    /// Requests the misses of the clusters so far, in order, as far as free slots allow.
    pub fn advance(&mut self) -> Result<(), Error> {
        while self.layer.next < self.layer.items.len() {
            let item = self.layer.next;
            if !self.issue(item)? {
                break;
            }
            self.layer.next += 1;
            self.ready_if_complete(item);
        }
        if self.layer.next == self.layer.total {
            self.read_ahead()?;
        }
        self.submit()
    }

    /// Requests the misses of an item. False if no slot is available.
    fn issue(&mut self, item: usize) -> Result<bool, Error> {
        let Item { bank, cluster, .. } = self.layer.items[item];
        match self.layer.items[item].source {
            Source::Unused | Source::Hot(_) | Source::Shared | Source::Mapped | Source::Device => {
                Ok(true)
            }
            Source::Cold => self.issue_neurons(item),
            Source::Stream(_) => {
                if let Some(slot) = self.layer.claim(bank, cluster) {
                    let attached = self.attach(item, slot);
                    if attached.is_err() {
                        self.abandon_layer();
                    }
                    return attached.map(|()| true);
                }
                let coming = self.layer.coming.contains(&(bank, cluster));
                if !coming && !self.request_cluster(bank, cluster, Priority::Now)? {
                    return Ok(false);
                }
                self.layer.items[item].waiting = 1;
                Ok(true)
            }
        }
    }

    /// Requests the misses of an item, continuing where it stopped.
    fn issue_neurons(&mut self, item: usize) -> Result<bool, Error> {
        let Item {
            bank,
            end,
            step,
            issued,
            ..
        } = self.layer.items[item];
        for place in issued..end {
            self.layer.items[item].issued = place;
            if matches!(self.layer.held[place], Held::Pinned(_) | Held::Read(_)) {
                continue;
            }
            let neuron = self.layer.ids[place];
            let key = Key { bank, neuron };
            // A pin may have been released to make room.
            if let Some(found) = hold(&mut self.cold, &mut self.guesses, key) {
                self.layer.held[place] = found;
                continue;
            }
            if self.cold.is_loading(key) {
                self.layer.held[place] = Held::Coming;
                self.layer.items[item].waiting += 1;
                continue;
            }
            let Some(slot) = self.cold.reserve(key) else {
                return Ok(false);
            };
            self.layer.items[item].waiting += 1;
            let content = self.content(bank);
            let part = match step {
                Step::Gates => content.gate_span,
                Step::Sums => content.len,
            };
            let (offset, len) = self.layout.cover(bank, neuron, content.start, part);
            let apart = !self.ablation.bundles() && step == Step::Sums;
            let (len, half) = match apart {
                true => (self.first_half(len), Half::First),
                false => (len, Half::Whole),
            };
            let tag = Tag::Neuron {
                item: item as u32,
                place: place as u32,
                half,
            };
            let request = Read::new(tag.bits(), offset, len, slot);
            self.request(request)?;
        }
        self.layer.items[item].issued = end;
        Ok(true)
    }

    /// Length of the first of two reads that replace one of `len` bytes.
    fn first_half(&self, len: u32) -> u32 {
        let unit = self.layout.slack() as u32;
        (len / 2).next_multiple_of(unit).min(len)
    }

    /// Ablation without bundles: the second of a neuron's two reads, as if from another matrix.
    pub(super) fn request_second_half(
        &mut self,
        item: u32,
        place: u32,
        slot: Slot,
    ) -> Result<(), Error> {
        let bank = self.layer.items[item as usize].bank;
        let (neuron, content) = (self.layer.ids[place as usize], self.content(bank));
        let (offset, len) = self.layout.cover(bank, neuron, content.start, content.len);
        let first = self.first_half(len);
        let half = Half::Whole;
        let tag = Tag::Neuron { item, place, half }.bits();
        let read = Read::new(tag, offset + u64::from(first), len - first, slot).at(first);
        self.request(read)
    }

    /// Queues a read of a whole cluster. False if no buffer is free.
    pub(super) fn request_cluster(
        &mut self,
        bank: u32,
        cluster: u32,
        priority: Priority,
    ) -> Result<bool, Error> {
        let sent = (self.reader).request_cluster(&self.layout, bank, cluster, priority);
        let sent = self.latch(sent)?;
        if sent {
            self.layer.coming.push((bank, cluster));
        }
        Ok(sent)
    }

    pub(super) fn request(&mut self, read: Read) -> Result<(), Error> {
        let sent = self.reader.request(read);
        self.latch(sent)
    }

    pub(super) fn submit(&mut self) -> Result<(), Error> {
        let sent = self.reader.submit();
        self.latch(sent)
    }

    /// Marks an item ready once it is fully requested and nothing is in flight.
    pub(super) fn ready_if_complete(&mut self, item: usize) {
        let it = &self.layer.items[item];
        let requested = match it.source {
            Source::Unused | Source::Device => false,
            Source::Hot(_) | Source::Shared | Source::Stream(_) | Source::Mapped => true,
            Source::Cold => it.issued == it.end,
        };
        if requested && it.waiting == 0 {
            self.layer.ready.push(item as u32);
        }
    }

    /// Moves up to `most` of the ready items below `end` to `out`: first those in stream buffers,
    /// which are wanted for further reads. Up to `longer` if none of them is.
    pub fn take_ready(
        &mut self,
        end: usize,
        most: usize,
        longer: usize,
        out: &mut Vec<(u32, Step)>,
    ) {
        out.clear();
        let items = &self.layer.items;
        let mut take = |read: bool, most: usize, out: &mut Vec<(u32, Step)>| {
            self.layer.ready.retain(|&item| {
                let it = &items[item as usize];
                let is_read = matches!(it.source, Source::Stream(_));
                let takes = (item as usize) < end && is_read == read && out.len() < most;
                if takes {
                    out.push((item, it.step));
                }
                !takes
            });
        };
        take(true, most, out);
        let most = if out.is_empty() { longer } else { most };
        take(false, most, out);
    }

    /// Whether the current layer is a scan whose missing clusters pass through stream buffers, and any
    /// is missing.
    pub fn streams(&self) -> bool {
        let misses = |item: &Item| matches!(item.source, Source::Stream(_));
        let units = &self.layer.units;
        units.iter().any(|unit| unit.rules.streams()) && self.layer.items.iter().any(misses)
    }

    /// Whether clusters wait for slots that others hold.
    pub fn is_short_of_memory(&self) -> bool {
        self.layer.next < self.layer.items.len()
    }

    /// Whether reads are in flight.
    pub fn reading(&self) -> bool {
        self.reader.outstanding() > 0
    }

    /// Index of the current layer.
    pub fn layer_number(&self) -> usize {
        self.layer.number
    }

    /// The needed neurons of a unit.
    pub fn needed_of(&self, unit: usize) -> &[u32] {
        let (_, places) = self.of_unit(unit);
        &self.layer.ids[places]
    }

    /// Whether an item's gates are computed before its sums.
    #[inline]
    pub fn gates_known(&self, item: usize) -> bool {
        let it = &self.layer.items[item];
        self.gates_resident(it.bank) || it.gates_first && matches!(it.source, Source::Cold)
    }

    /// Whether any neuron of an item is needed.
    #[inline]
    pub fn is_needed(&self, item: usize) -> bool {
        let it = &self.layer.items[item];
        it.first < it.end || self.is_on_device(item)
    }

    /// After an item's gates are computed: requests Up and Down of the neurons that fire and drops
    /// the rest.
    pub fn resolve(&mut self, item: u32, fires: impl Fn(u32) -> bool) -> Result<(), Error> {
        let Item {
            bank, first, end, ..
        } = self.layer.items[item as usize];
        self.layer.items[item as usize].step = Step::Sums;
        let content = *self.content(bank);
        for place in first..end {
            let neuron = self.layer.ids[place];
            match std::mem::replace(&mut self.layer.held[place], Held::Nothing) {
                Held::Gate(slot) if fires(neuron) => {
                    let gate = (content.start, content.gate_span);
                    let (from, _) = self.layout.cover(bank, neuron, gate.0, gate.1);
                    let rest = content.stride - content.rest_read;
                    let (offset, len) = self.layout.cover(bank, neuron, content.rest_read, rest);
                    let tag = Tag::Neuron {
                        item,
                        place: place as u32,
                        half: Half::Whole,
                    };
                    let at = (offset - from) as u32;
                    self.layer.items[item as usize].waiting += 1;
                    self.request(Read::new(tag.bits(), offset, len, slot).at(at))?;
                }
                Held::Gate(slot) => self.cold.abandon(Key { bank, neuron }, slot),
                other => self.layer.held[place] = other,
            }
        }
        self.ready_if_complete(item as usize);
        Ok(())
    }

    /// Ends a layer; evicts what the ablation does not keep.
    pub fn end_layer(&mut self) {
        if self.ablation.keep() == Keep::Nothing {
            for unit in 0..self.layer.units.len() {
                let (bank, ids) = self.of_unit(unit);
                for &neuron in &self.layer.ids[ids] {
                    self.cold.remove(Key { bank, neuron });
                }
            }
        }
        self.layer.close();
    }

    /// The bank of a unit, and the places of its needed neurons.
    fn of_unit(&self, unit: usize) -> (u32, Range<usize>) {
        let UnitWork { bank, first, .. } = self.layer.units[unit];
        let items = &self.layer.items[first..][..self.layout.clusters(bank)];
        let start = items.first().map_or(0, |item| item.first);
        (bank, start..items.last().map_or(start, |item| item.end))
    }
}
