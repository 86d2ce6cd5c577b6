//! The items of a layer against maps: for any order of arrivals and of taking clusters, each
//! cluster is ready exactly once, when everything it waits for has arrived.

use std::collections::{BTreeMap, BTreeSet};

use emberflow_storage::arena::{Arena, ArenaOptions};
use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::store::costs::ReadCosts;
use crate::store::rules::{BankState, Settings};
use crate::testing::chance;

const BANKS: u32 = 5;

fn rules(scans: bool) -> Rules {
    let settings = Settings {
        mapped: false,
        bundles: true,
        costs: ReadCosts {
            cluster: 1.0,
            gate: 1.0,
            rest: 1.0,
            bundle: 1.0,
            fire_share: 1.0,
        },
        gates_first: false,
    };
    let bank = BankState {
        scans,
        cold: !scans,
        gates_resident: false,
    };
    settings.rules(bank, false, false)
}

/// The test's record of an item.
#[derive(Debug)]
struct Known {
    bank: u32,
    cluster: u32,
    ids: Vec<u32>,
    /// The cluster is read whole; otherwise neuron by neuron, or it needs no neuron.
    whole: bool,
    serves: bool,
    requested: bool,
    /// Places of the reads in flight; `None` for the read of a whole cluster.
    reads: BTreeSet<Option<usize>>,
}

impl Known {
    fn is_ready(&self) -> bool {
        self.serves && self.requested && self.reads.is_empty()
    }
}

struct World {
    random: Rng,
    arena: Arena,
    job: Job,
    items: BTreeMap<usize, Known>,
    taken: BTreeSet<usize>,
}

impl World {
    /// Sets the active set of the next cluster of a unit.
    fn name(&mut self, unit: usize) {
        let (bank, cluster) = (self.job.unit(unit).bank, self.job.next_cluster(unit));
        let random = &mut self.random;
        let item = self.items.len();
        let mut known = Known {
            bank,
            cluster,
            ids: Vec::new(),
            whole: false,
            serves: false,
            requested: false,
            reads: BTreeSet::new(),
        };
        if chance(random, 0.1) {
            self.job.leave(unit);
            assert!(self.job.is_left(item) && self.job.is_needed(item));
            self.items.insert(item, known);
            return;
        }
        let first = cluster * CLUSTER as u32;
        known.ids = (first..first + CLUSTER as u32)
            .filter(|_| chance(random, 0.03))
            .collect();
        let source = match random.usize(..4) {
            _ if known.ids.is_empty() => ByteSource::Unused,
            0 => ByteSource::Mapped,
            1 => ByteSource::Stream(None),
            _ => ByteSource::Cold,
        };
        known.serves = !known.ids.is_empty();
        known.whole = matches!(source, ByteSource::Stream(None));
        let places = self.job.add_places(&known.ids);
        assert_eq!(self.job.ids[places.clone()], known.ids);
        (self.job.items).push(Item::new(bank, cluster, places, source));
        assert_eq!(self.job.is_needed(item), known.serves);
        self.items.insert(item, known);
    }

    /// Requests the next item: all of its reads, or as many as memory allows.
    fn request(&mut self) {
        let next = self.items.values().filter(|known| known.requested).count();
        assert_eq!(self.job.next(), next);
        assert_eq!(self.job.is_short_of_memory(), next < self.items.len());
        let Some(item) = self.job.next_item() else {
            assert_eq!(next, self.items.len());
            return;
        };
        assert_eq!(item, next);
        let known = self.items.entry(item).or_insert_with(|| unreachable!());
        let it = &mut self.job.items[item];
        if known.whole {
            assert_eq!(self.job.awaits_cluster(known.bank, known.cluster), None);
            self.job.items[item].waiting = 1;
            known.reads.insert(None);
        } else if known.serves && matches!(it.source, ByteSource::Cold) {
            for place in it.issued..it.end {
                it.issued = place;
                if chance(&mut self.random, 0.1) {
                    return;
                }
                if chance(&mut self.random, 0.5) {
                    it.waiting += 1;
                    self.job.held[place] = Held::Coming;
                    known.reads.insert(Some(place));
                }
            }
            it.issued = it.end;
        }
        known.requested = true;
        self.job.requested();
    }

    /// One read in flight arrives.
    fn arrive(&mut self) {
        let coming = |(&item, known): (&usize, &Known)| {
            let reads: Vec<_> = known.reads.iter().map(|&read| (item, read)).collect();
            reads
        };
        let reads: Vec<_> = self.items.iter().flat_map(coming).collect();
        let Some(&(item, read)) = reads.get(self.random.usize(..reads.len().max(1))) else {
            return;
        };
        let known = self.items.entry(item).or_insert_with(|| unreachable!());
        let (bank, cluster) = (known.bank, known.cluster);
        match read {
            None => {
                assert_eq!(self.job.awaits_cluster(bank, cluster), Some(item));
                let buffer = self.arena.take().expect("a buffer");
                self.job.attach(item, buffer, false);
                self.job.mark_if_ready(item);
                assert_eq!(self.job.awaits_cluster(bank, cluster), None);
            }
            Some(place) => {
                let neuron = self.job.ids[place];
                let found = self.job.awaits_neuron(bank, neuron);
                assert_eq!(found, Some((item, place)));
                self.job.arrived(item, place, Held::Nothing);
                assert_eq!(self.job.awaits_neuron(bank, neuron), None);
            }
        }
        known.reads.remove(&read);
    }

    /// Takes some of the ready items.
    fn take(&mut self) {
        let end = 1 + self.random.usize(..self.items.len().max(1));
        let (most, longer) = (1 + self.random.usize(..3), 1 + self.random.usize(..5));
        let ready = |whole: bool| {
            let items = self.items.range(..end);
            let ready = items.filter(|(item, known)| {
                known.is_ready() && known.whole == whole && !self.taken.contains(item)
            });
            ready.map(|(&item, _)| item).collect::<BTreeSet<_>>()
        };
        let (whole, others) = (ready(true), ready(false));
        let mut out = Vec::new();
        self.job.take_ready(end, most, longer, &mut out);
        let first = whole.len().min(most);
        let count = match first {
            0 => others.len().min(longer),
            _ => (first + others.len()).min(most),
        };
        assert_eq!(out.len(), count);
        for (n, (item, step)) in out.into_iter().enumerate() {
            let item = item as usize;
            assert_eq!(step, Step::Sums);
            assert!(if n < first { &whole } else { &others }.contains(&item));
            assert!(self.taken.insert(item), "{item} twice");
            let source = &mut self.job.items[item].source;
            if let ByteSource::Stream(Some(buffer)) = std::mem::replace(source, ByteSource::Unused)
            {
                self.arena.put(buffer);
            }
        }
    }

    fn layer(&mut self, number: usize) {
        let rows = [1, MANY - 1, MANY][self.random.usize(..3)];
        self.job.begin(number, rows);
        assert_eq!((self.job.layer(), self.job.many), (number, rows >= MANY));
        self.items.clear();
        self.taken.clear();
        let mut banks: Vec<u32> = (0..BANKS).collect();
        self.random.shuffle(&mut banks);
        banks.truncate(self.random.usize(..=BANKS as usize));
        let mut clusters = Vec::new();
        for (unit, &bank) in banks.iter().enumerate() {
            let count = 1 + self.random.usize(..3);
            self.job
                .add_unit(bank, count, rules(number.is_multiple_of(2)));
            clusters.extend(vec![unit; count]);
        }
        (0..BANKS).for_each(|bank| assert_eq!(self.job.visits(bank), banks.contains(&bank)));
        let mut named = clusters.iter();
        loop {
            match self.random.usize(..4) {
                0 => named.by_ref().take(1).for_each(|&unit| self.name(unit)),
                1 => self.request(),
                2 => self.arrive(),
                _ => self.take(),
            }
            let requested = self.items.len() == clusters.len()
                && self.items.values().all(|known| known.requested);
            assert_eq!(self.job.is_requested(), requested);
            let served = self.items.values().filter(|known| known.serves).count();
            if requested && self.taken.len() == served {
                break;
            }
        }
        for (unit, &bank) in banks.iter().enumerate() {
            let unit_items = self.items.values().filter(|known| known.bank == bank);
            let ids: Vec<u32> = unit_items.flat_map(|known| known.ids.clone()).collect();
            assert_eq!(self.job.needed_of(unit), ids);
        }
        assert!(!self.job.any_ready());
        self.job.close();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    #[test]
    fn each_cluster_is_ready_once_when_all_it_waits_for_is_there(seed: u64) {
        let mut world = World {
            random: Rng::with_seed(seed),
            arena: Arena::new(16, 8, 1, ArenaOptions::default()).unwrap(),
            job: Job::new(BANKS as usize, 64, 8),
            items: BTreeMap::new(),
            taken: BTreeSet::new(),
        };
        for number in 0..12 {
            world.layer(number);
        }
        prop_assert_eq!(world.arena.free(), 16);
    }
}

#[test]
fn a_scan_without_cold_neurons_streams_what_is_missing() {
    for (scans, source, streams) in [
        (true, ByteSource::Stream(None), true),
        (true, ByteSource::Mapped, false),
        (false, ByteSource::Stream(None), false),
    ] {
        let mut job = Job::new(1, 8, 1);
        job.begin(0, 1);
        job.add_unit(0, 1, rules(scans));
        let places = job.add_places(&[3]);
        job.items.push(Item::new(0, 0, places, source));
        assert_eq!(job.streams(), streams);
    }
}
