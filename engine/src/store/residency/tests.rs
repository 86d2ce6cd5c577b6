//! The regions against sets: every neuron found has the bytes that were inserted, only inserted
//! neurons are found, unverified neurons stay marked, and no region exceeds its memory.

use std::collections::{BTreeMap, BTreeSet};

use emberflow_kernels::DType;
use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::testing::{World, chance};

/// Layers of one bank and of several, with partial clusters.
const BANKS: [(u32, u32, u32); 4] = [(0, 0, 300), (1, 0, 140), (1, 1, 260), (2, 0, 129)];

struct Model {
    world: World,
    layout: Arc<Layout>,
    regions: Residency,
    random: Rng,
    /// Inserted neurons and clusters; some of them have been evicted.
    cold: BTreeSet<(u32, u32)>,
    hot: BTreeSet<(u32, u32)>,
    /// Number of pins of each neuron.
    pins: BTreeMap<(u32, u32), usize>,
    unchecked: BTreeSet<(u32, u32)>,
    /// Neurons being read, and their slots.
    loading: BTreeMap<(u32, u32), Slot>,
    naming: Naming,
    found: usize,
}

impl Model {
    fn new(seed: u64, naming: Naming, keep: Keep) -> Self {
        let world = World::new(&BANKS, 24, DType::F32, seed);
        let layout = Arc::new(world.layout().unwrap().0);
        let plan = world.plan(naming != Naming::All, 2, 300);
        let prefers = Preferences {
            naming,
            always: Vec::new(),
            hot_wanted: vec![1; BANKS.len()],
            known: &Known::default(),
            keep,
            memory: ArenaOptions::default(),
        };
        let mut model = Self {
            regions: Residency::new(Arc::clone(&layout), &plan, prefers).unwrap(),
            world,
            layout,
            random: Rng::with_seed(seed),
            cold: BTreeSet::new(),
            hot: BTreeSet::new(),
            pins: BTreeMap::new(),
            unchecked: BTreeSet::new(),
            loading: BTreeMap::new(),
            naming,
            found: 0,
        };
        model.regions.adopt(&plan).unwrap();
        model.fill(0);
        model
    }

    /// Reads the contents for a plan.
    fn fill(&mut self, first: usize) {
        let cold_per_bank = self.regions.cold_per_bank();
        for (bank, cluster) in self.regions.clusters_to_fill(first) {
            assert!(bank as usize >= first);
            let buffer = self.world.cluster_bytes(&self.layout, bank, cluster);
            self.regions.fill_gates(bank, cluster, &buffer);
            self.regions.fill(bank, cluster, cold_per_bank, &buffer);
            self.put(bank, cluster);
        }
        for bank in 0..BANKS.len() as u32 {
            let row = self.layout.neurons(bank) as u32 - 1;
            let gate = self.regions.gates().gate(bank, row);
            assert_eq!(gate.is_some(), self.regions.banks.gates_resident(bank));
            let [wanted, ..] = self.world.vectors(bank, row);
            assert!(gate.is_none_or(|gate| gate.quants() == wanted));
        }
    }

    /// From here on a cluster or its neurons may be resident.
    fn put(&mut self, bank: u32, cluster: u32) {
        self.hot.insert((bank, cluster));
        let neurons = self.layout.cluster_neurons(bank, cluster);
        self.cold.extend(neurons.map(|neuron| (bank, neuron)));
    }

    fn any_cluster(&mut self) -> (u32, u32) {
        let bank = self.random.u32(..BANKS.len() as u32);
        (bank, self.random.u32(..self.layout.clusters(bank) as u32))
    }

    fn any_neuron(&mut self) -> (u32, u32) {
        let bank = self.random.u32(..BANKS.len() as u32);
        (bank, self.random.u32(..self.layout.neurons(bank) as u32))
    }

    fn pin_neuron(&mut self) {
        // Tries several neurons that may be resident.
        let found = (0..8).find_map(|_| {
            let key = self.any_neuron();
            Some((key, self.regions.cold.pin(Key::new(key.0, key.1))?))
        });
        let Some((key, (slot, unchecked))) = found else {
            return;
        };
        assert!(self.cold.contains(&key), "{key:?} was not put there");
        assert_eq!(unchecked, self.unchecked.remove(&key));
        let (content, format) = (self.regions.banks.content(key.0), self.layout.format);
        let shift = self.layout.shift(key.0, key.1, content.start);
        let bytes = &self.regions.cold.cache.bytes(slot)[shift..];
        let [gate, up, down] = self.world.vectors(key.0, key.1);
        if content.has_gate {
            assert_eq!(&bytes[..gate.len()], gate);
        }
        let rest = format.split_rest(&bytes[content.gate_span - content.start..]);
        assert_eq!(rest, (up.as_slice(), down.as_slice()), "{key:?}");
        self.found += 1;
        *self.pins.entry(key).or_default() += 1;
        if unchecked {
            self.unchecked.insert(key);
            self.forget_pin(key);
            self.regions.cold.give_back(Key::new(key.0, key.1), true);
        }
    }

    fn unpin_neuron(&mut self) {
        let Some((&key, _)) = self.pins.iter().next() else {
            return;
        };
        let leave = [Leave::Used, Leave::Unused, Leave::First][self.random.usize(..3)];
        self.regions.cold.unpin(Key::new(key.0, key.1), leave);
        self.forget_pin(key);
    }

    /// Removes one of a neuron's pins.
    fn forget_pin(&mut self, key: (u32, u32)) {
        let pins = self.pins.remove(&key).unwrap_or(0) - 1;
        if pins > 0 {
            self.pins.insert(key, pins);
        }
    }

    fn pin_cluster(&mut self) {
        let key = self.any_cluster();
        let Some(slot) = self.regions.hot.get_pin(key.0, key.1) else {
            return;
        };
        assert!(self.hot.contains(&key), "{key:?} was not put there");
        let content = *self.regions.banks.content(key.0);
        for (i, neuron) in self.layout.cluster_neurons(key.0, key.1).enumerate() {
            let [gate, up, down] = vectors(&content, self.regions.hot.bytes(slot), i);
            let wanted = self.world.vectors(key.0, neuron);
            assert!(if content.has_gate {
                gate == wanted[0]
            } else {
                gate.is_empty()
            });
            assert_eq!([up, down], [&wanted[1][..], &wanted[2]]);
        }
        self.found += 1;
        if chance(&mut self.random, 0.5) {
            self.regions.hot.unpin(key.0, key.1)
        } else {
            self.regions.hot.unpin_unused(key.0, key.1)
        }
    }

    /// A read of a single neuron begins, or ends.
    fn read(&mut self) {
        let ends = chance(&mut self.random, 0.6);
        if ends && let Some((key, mut slot)) = self.loading.pop_first() {
            let (bank, slot_key) = (key.0, Key::new(key.0, key.1));
            let content = *self.regions.banks.content(bank);
            let (cluster, stride) = (key.1 / CLUSTER as u32, content.stride);
            let buffer = self.world.cluster_bytes(&self.layout, bank, cluster);
            let first = cluster * CLUSTER as u32;
            let bundle = self.layout.shift(bank, first, 0) + (key.1 - first) as usize * stride;
            let to = self.layout.shift(bank, key.1, content.start);
            slot.as_mut_slice()[to..to + content.len]
                .copy_from_slice(&buffer[bundle + content.start..bundle + stride]);
            match self.random.usize(..3) {
                0 => self.regions.cold.cache.abandon(slot_key, slot),
                1 => {
                    self.regions.cold.admit_ahead(slot_key, slot);
                    self.unchecked.insert(key);
                    self.cold.insert(key);
                }
                _ => {
                    self.regions.cold.cache.admit(slot_key, slot);
                    *self.pins.entry(key).or_default() += 1;
                    self.cold.insert(key);
                }
            }
            return;
        }
        let key = self.any_neuron();
        let has_cold = self.regions.has_cold(key.0);
        let (slot_key, cache) = (Key::new(key.0, key.1), &mut self.regions.cold.cache);
        let free = has_cold && !cache.contains(slot_key) && !cache.is_loading(slot_key);
        if let (true, Some(slot)) = (free, free.then(|| cache.reserve(slot_key)).flatten()) {
            self.loading.insert(key, slot);
        }
    }

    /// A whole cluster was read and computed.
    fn keep(&mut self) {
        let (bank, cluster) = self.any_cluster();
        let neurons = self.layout.cluster_neurons(bank, cluster);
        // After computation none of its neurons is in use.
        for neuron in neurons.clone() {
            let (key, slot_key) = ((bank, neuron), Key { bank, neuron });
            for _ in 0..self.pins.remove(&key).unwrap_or(0) {
                self.regions.cold.unpin(slot_key, Leave::Used);
            }
            if let Some(slot) = self.loading.remove(&key) {
                self.regions.cold.cache.abandon(slot_key, slot);
            }
        }
        let buffer = self.world.cluster_bytes(&self.layout, bank, cluster);
        let again = chance(&mut self.random, 0.7);
        let before = self.regions.hot.contains(bank, cluster);
        let stays = self.regions.belongs_hot(bank, cluster);
        let copies = !before && chance(&mut self.random, 0.3);
        if copies && let Some(mut slot) = self.regions.reserve_hot(bank, cluster, again) {
            assert!(stays);
            let content = *self.regions.banks.content(bank);
            let shift = self.layout.shift(bank, neurons.start, 0);
            let bundles = content.bundles(&buffer[shift..], neurons.len(), self.layout.format);
            write(&content, &mut slot, bundles);
            let intact = chance(&mut self.random, 0.7);
            self.regions.settle_hot(bank, cluster, slot, intact);
            assert_eq!(self.regions.hot.contains(bank, cluster), intact);
            if intact {
                self.hot.insert((bank, cluster));
            }
            return;
        }
        let ids: Vec<u32> = neurons.filter(|_| chance(&mut self.random, 0.2)).collect();
        let keeps = |neuron: u32| !neuron.is_multiple_of(3);
        (self.regions).keep_read([bank, cluster], &ids, again, keeps, &buffer);
        if !before && self.regions.hot.contains(bank, cluster) {
            assert!(stays);
            let missing = self.regions.cold.missing(&self.layout, bank, cluster);
            let count = self.layout.cluster_neurons(bank, cluster).len();
            assert_eq!(missing, count, "one copy is enough");
            self.hot.insert((bank, cluster));
        }
        self.cold
            .extend(ids.into_iter().filter(|&n| keeps(n)).map(|n| (bank, n)));
    }

    /// Nothing is pinned between two passes: plans change and the border moves.
    fn between(&mut self) {
        while !self.pins.is_empty() {
            self.unpin_neuron();
        }
        while let Some((key, slot)) = self.loading.pop_first() {
            self.regions
                .cold
                .cache
                .abandon(Key::new(key.0, key.1), slot);
        }
        let (hot, slots) = (self.random.u64(..5), 256 + self.random.u64(..400));
        let gates = match self.naming {
            Naming::All => 0,
            Naming::Predictor => self.random.u64(..2) * BANKS.len() as u64,
            Naming::Gates => self.random.u64(..=BANKS.len() as u64),
        };
        // If only some banks have resident Gate rows, the others stream and nothing is hot.
        let no_hot = |gates: u64| (1..BANKS.len() as u64).contains(&gates);
        if chance(&mut self.random, 0.2) {
            let hot = if no_hot(gates) { 0 } else { hot };
            let plan = self.world.plan_partly(gates, hot, slots);
            let had = self.regions.banks.with_gates > 0;
            let first = self.regions.set_plan(&plan).unwrap();
            if had != (gates > 0) {
                assert_eq!(first, Some(0));
                assert_eq!(
                    [
                        self.regions.hot.held(),
                        self.regions.cold.cache.resident().into()
                    ],
                    [0; 2]
                );
                self.cold.clear();
                self.hot.clear();
                self.unchecked.clear();
            }
            assert_eq!(self.regions.hot.units(), hot);
            if let Some(first) = first {
                self.fill(first);
            }
        } else if chance(&mut self.random, 0.3) {
            let gates = self.regions.banks.with_gates as u64;
            let hot = if no_hot(gates) { 0 } else { hot };
            let plan = self.world.plan_partly(gates, hot, slots);
            self.regions.aim_border(&plan, &[2, 1, 1, 1]);
            assert!(self.regions.border_moves());
        }
        let aim = self.regions.goal;
        let mut buffer = region(self.layout.stream_len()).unwrap();
        let buffer = chance(&mut self.random, 0.8).then_some(&mut buffer);
        self.regions.step_border(buffer);
        if let Some(aim) = aim {
            let unit = self.regions.hot.unit_len();
            let slots = u64::from(self.regions.cold.cache.slots());
            let bytes = self.regions.hot.units() * unit + slots * self.regions.slot_charge();
            assert!(bytes <= aim.bytes, "{bytes} of {}", aim.bytes);
            // Hot neurons may have become cold.
            for (bank, cluster) in self.hot.clone() {
                self.put(bank, cluster);
            }
        }
    }

    fn step(&mut self) {
        match self.random.usize(..20) {
            0..8 => self.read(),
            8..12 => self.pin_neuron(),
            12..15 => self.unpin_neuron(),
            15 | 16 => self.pin_cluster(),
            17 | 18 => self.keep(),
            _ if chance(&mut self.random, 0.3) => self.between(),
            _ => {
                self.regions.begin_pass();
                self.regions
                    .begin_layer(self.random.u32(..BANKS.len() as u32));
            }
        }
        self.regions.cold.cache.check_invariants();
        assert!(self.regions.hot.held() <= self.regions.hot.units());
        assert!(self.regions.cold.cache.resident() <= self.regions.cold.cache.slots());
        let resident: u64 = self
            .regions
            .by_layer(|_| 0)
            .iter()
            .map(|layer| layer.hot + layer.cold)
            .sum();
        assert!(resident <= self.regions.capacity());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_is_found_was_put_there(seed: u64, naming in 0..3usize, window: bool) {
        let naming = [Naming::All, Naming::Gates, Naming::Predictor][naming];
        let keep = if window { Keep::Window } else { Keep::All };
        let mut model = Model::new(seed, naming, keep);
        for _ in 0..400 {
            model.step();
        }
        prop_assert!(model.found > 5, "only {} found", model.found);
    }
}

/// A damaged neuron with other pins was returned once and counted as free.
#[test]
fn pins_of_a_damaged_neuron_are_counted() {
    let mut model = Model::new(8_536_176_151_032_993_408, Naming::All, Keep::All);
    for _ in 0..400 {
        model.step();
    }
}
