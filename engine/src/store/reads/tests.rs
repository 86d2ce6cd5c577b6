//! Reads against a map of requests: each arrives exactly once with the bytes of the file, and no
//! buffer is lost.

use std::collections::{BTreeMap, BTreeSet};

use emberflow_kernels::DType;
use emberflow_storage::io::{Faults, Profile, SimClock, SimOptions};
use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::cluster::CLUSTER;
use crate::options::Lab;
use crate::testing::{World, chance};

/// Stream buffers.
const BUFFERS: u32 = 5;

/// Banks of several clusters; the last cluster of each is partial.
const BANKS: [(u32, u32, u32); 3] = [(0, 0, 300), (1, 0, 140), (2, 0, 129)];

struct Bench {
    world: World,
    layout: Arc<Layout>,
    reads: Reads,
    random: Rng,
    /// Slots of single neurons.
    slots: Arena,
    /// Requested bundles: (bank, first neuron, count).
    wanted: BTreeMap<u64, (u32, u32, usize)>,
    /// Whole clusters in flight; those that may be cancelled (`prefetched`); those that have
    /// arrived (`unclaimed`).
    coming: BTreeSet<(u32, u32)>,
    prefetched: BTreeSet<(u32, u32)>,
    unclaimed: BTreeSet<(u32, u32)>,
    /// Buffers held by the test.
    buffers: Vec<Slot>,
}

impl Bench {
    fn new(seed: u64, faults: Faults) -> Self {
        let world = World::new(&BANKS, 24, DType::F32, seed);
        let (layout, source) = world.layout().unwrap();
        let layout = Arc::new(layout);
        let sim = SimOptions {
            clock: SimClock::Skip,
            ..SimOptions::new(Profile::Nvme, seed).faulty(faults)
        };
        let options = Options {
            lab: Lab {
                io: IoChoice::Sim(sim),
                ..Lab::default()
            },
            ..Options::default()
        };
        let memory = ArenaOptions::default();
        let (latch, tracer) = (Arc::default(), Tracer::default());
        let io = IoDriver::open(&layout, source, &options, true, Tracer::default()).unwrap();
        let new = Reads::new(Arc::clone(&layout), io, BUFFERS, memory, latch, tracer);
        let mut reads = new.unwrap();
        assert_eq!(reads.free_buffers(), 0);
        reads.set_buffers(BUFFERS);
        let (len, align) = (layout.stream_len(), layout.memory_align());
        Self {
            slots: Arena::new(8, len, align, memory).unwrap(),
            random: Rng::with_seed(seed),
            reads,
            layout,
            world,
            wanted: BTreeMap::new(),
            coming: BTreeSet::new(),
            prefetched: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            buffers: Vec::new(),
        }
    }

    fn want(&mut self, tag: Tag, bank: u32, neuron: u32, count: usize) {
        let before = self.wanted.insert(tag.bits(), (bank, neuron, count));
        assert_eq!(before, None);
    }

    /// Requests a whole cluster that is not underway.
    fn cluster(&mut self) {
        let bank = self.random.u32(..BANKS.len() as u32);
        let cluster = self.random.u32(..self.layout.clusters(bank) as u32);
        if self.reads.is_underway(bank, cluster) {
            return;
        }
        let priority = if chance(&mut self.random, 0.5) {
            Priority::Now
        } else {
            Priority::Prefetch
        };
        let free = self.reads.free_buffers() > 0;
        let sent = self.reads.cluster(bank, cluster, priority).unwrap();
        assert_eq!(sent, free);
        if sent {
            let neurons = self.layout.cluster_neurons(bank, cluster);
            let tag = Tag::Cluster { bank, cluster };
            self.want(tag, bank, neurons.start, neurons.len());
            self.coming.insert((bank, cluster));
            if priority == Priority::Prefetch {
                self.prefetched.insert((bank, cluster));
            }
        }
    }

    /// Requests a single neuron at a byte offset of its slot.
    fn neuron(&mut self) {
        let bank = self.random.u32(..BANKS.len() as u32);
        let neuron = self.random.u32(..self.layout.neurons(bank) as u32);
        let tag = Tag::Neuron {
            item: bank,
            place: neuron,
            half: Half::Whole,
        };
        if self.wanted.contains_key(&tag.bits()) {
            return;
        }
        let Some(slot) = self.slots.take() else {
            return;
        };
        let part = self.layout.cover(bank, neuron, 0, self.stride());
        self.want(tag, bank, neuron, 1);
        self.reads.part(tag, part, slot, self.at()).unwrap();
    }

    fn stride(&self) -> usize {
        self.layout.container.geometry().stride as usize
    }

    /// Offset of a single neuron in its slot.
    fn at(&self) -> u32 {
        self.layout.memory_align() as u32
    }

    fn take(&mut self, wait: bool) {
        if wait && self.reads.outstanding() > 0 {
            self.reads.wait(0).unwrap()
        } else {
            self.reads.poll().unwrap()
        }
        while let Some(arrival) = self.reads.next() {
            self.took(arrival);
        }
    }

    fn took(&mut self, arrival: Arrival) {
        let Arrival { tag, slot, .. } = arrival;
        if let (true, Tag::Cluster { bank, cluster }) = (arrival.cancelled, tag) {
            assert!(arrival.result.is_err());
            assert!(self.prefetched.remove(&(bank, cluster)), "only prefetches");
            assert!(!self.reads.is_coming(bank, cluster));
            if chance(&mut self.random, 0.5) {
                let again = (self.reads).cluster_into(bank, cluster, Priority::Now, slot);
                return again.unwrap();
            }
            self.coming.remove(&(bank, cluster));
            self.wanted.remove(&tag.bits());
            return self.reads.put(slot);
        }
        arrival.result.unwrap();
        let wanted = self.wanted.remove(&tag.bits());
        let (bank, first, count) = wanted.expect("requested and not yet arrived");
        let offset = match tag {
            Tag::Cluster { .. } => 0,
            _ => self.at() as usize,
        };
        let bytes = &slot.as_slice()[offset + self.layout.shift(bank, first, 0)..];
        for (neuron, bundle) in (first..).zip(bytes.chunks(self.stride())).take(count) {
            let [gate, up, down] = self.world.vectors(bank, neuron);
            assert_eq!(&bundle[..gate.len()], gate, "{neuron} of {bank}");
            let span = self.layout.container.geometry().gate_span as usize;
            let rest = [up, down].concat();
            assert_eq!(&bundle[span..][..rest.len()], rest, "{neuron} of {bank}");
        }
        let Tag::Cluster { bank, cluster } = tag else {
            return self.slots.put(slot);
        };
        assert!(self.coming.remove(&(bank, cluster)));
        self.prefetched.remove(&(bank, cluster));
        match self.random.usize(..3) {
            0 => self.reads.put(slot),
            1 => self.buffers.push(slot),
            _ => {
                self.reads.keep(bank, cluster, slot);
                self.unclaimed.insert((bank, cluster));
            }
        }
    }

    fn check(&self) {
        let underway: BTreeSet<_> = self.reads.underway().collect();
        assert_eq!(underway, &self.coming | &self.unclaimed);
        for bank in 0..BANKS.len() as u32 {
            for cluster in 0..self.layout.clusters(bank) as u32 {
                let key = (bank, cluster);
                assert_eq!(
                    self.reads.is_coming(bank, cluster),
                    self.coming.contains(&key)
                );
                assert_eq!(
                    self.reads.is_underway(bank, cluster),
                    underway.contains(&key)
                );
            }
        }
        let used = underway.len() + self.buffers.len();
        assert_eq!(self.reads.free_buffers(), BUFFERS as usize - used);
        assert_eq!(self.reads.pending(), self.wanted.len());
    }

    fn step(&mut self) {
        match self.random.usize(..10) {
            0..3 => self.cluster(),
            3 | 4 => self.neuron(),
            5 => self.reads.submit().unwrap(),
            6 => self.take(true),
            7 => self.take(false),
            8 => match self.random.usize(..4) {
                0 => self.reads.cancel_prefetches().unwrap(),
                1 => {
                    let bank = self.random.u32(..BANKS.len() as u32);
                    let in_bank = |neuron: &(u32, u32)| neuron.0 == bank;
                    self.reads.drop_unclaimed(|neuron, _| neuron == bank);
                    self.unclaimed.retain(in_bank);
                }
                _ => self
                    .buffers
                    .drain(..)
                    .for_each(|buffer| self.reads.put(buffer)),
            },
            _ => {
                let bank = self.random.u32(..BANKS.len() as u32);
                let cluster = self.random.u32(..3);
                let claimed = self.reads.claim(bank, cluster);
                assert_eq!(claimed.is_some(), self.unclaimed.remove(&(bank, cluster)));
                self.buffers.extend(claimed);
            }
        }
        self.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_read_arrives_once_with_the_bytes_of_the_file(seed: u64, short in 0..300u16) {
        let faults = Faults { short, again: short / 2, shuffle: true, ..Faults::default() };
        let mut bench = Bench::new(seed, faults);
        for _ in 0..400 {
            bench.step();
        }
        bench.reads.submit().unwrap();
        while bench.reads.outstanding() > 0 {
            bench.take(true);
            bench.reads.submit().unwrap();
        }
        bench.check();
        prop_assert!(bench.wanted.is_empty() && bench.coming.is_empty());
        prop_assert_eq!(bench.slots.free(), 8);
    }
}

#[test]
fn a_neuron_fits_its_slot() {
    let bench = Bench::new(1, Faults::default());
    let len = bench.layout.cover(0, 0, 0, bench.stride()).len;
    assert!(len as usize + bench.at() as usize <= bench.layout.stream_len());
    assert!(bench.layout.stream_len() >= CLUSTER * bench.stride());
}
