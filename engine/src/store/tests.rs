//! The store against a naive reference: with any residency, reads in flight, damage or lack of
//! slots, every needed neuron has the bytes of the file, or there is an error.

use emberflow_kernels::DType;
use emberflow_storage::io::{Faults, IoChoice, Profile, SimClock, SimOptions};
use proptest::prelude::*;

use super::job::Step;
use super::{Naming, NeuronStore};
use crate::ablation::Ablation;
use crate::cluster::CLUSTER;
use crate::error::Error;
use crate::memory::MemoryPlan;
use fastrand::Rng;

use crate::testing::{StoreOptions, World, chance};

/// Layers of one bank and of several, with partial clusters.
fn world() -> World {
    let banks = [
        (0, 0, 300),
        (1, 0, 140),
        (1, 1, 260),
        (1, 2, 100),
        (2, 0, 129),
    ];
    World::new(&banks, 24, DType::F32, 5)
}

/// The active set of one unit, cluster by cluster.
struct Needs {
    bank: u32,
    clusters: Vec<Vec<u32>>,
}

fn needs(world: &World, layer: usize, share: f64, random: &mut Rng) -> Vec<Needs> {
    let banks = world.banks_of(layer);
    let single = banks.len() == 1;
    let mut chosen = Vec::new();
    for bank in banks {
        if !single && chance(random, 0.3) {
            continue;
        }
        let neurons = world.neurons(bank);
        let cluster = |first: usize| {
            let ids = first..(first + CLUSTER).min(neurons);
            let needed = ids.filter(|_| chance(random, share));
            needed.map(|n| n as u32).collect()
        };
        let clusters = (0..neurons).step_by(CLUSTER).map(cluster).collect();
        chosen.push(Needs { bank, clusters });
    }
    chosen
}

/// Whether a neuron fires, in two-phase loading.
fn fires(bank: u32, neuron: u32) -> bool {
    chance(
        &mut Rng::with_seed(u64::from(bank) << 32 | u64::from(neuron)),
        0.4,
    )
}

/// Runs a layer as the FFN does and checks every byte. Returns the number of neurons seen.
fn run(
    world: &World,
    store: &mut NeuronStore,
    layer: usize,
    needs: &[Needs],
    random: &mut Rng,
) -> Result<usize, Error> {
    let tokens = 1 + 40 * usize::from(chance(random, 0.3));
    let banks = needs.iter().map(|n| n.bank);
    store.begin_layer(layer, banks, [].into_iter(), tokens)?;
    let mut open = 0;
    for (unit, of) in needs.iter().enumerate() {
        for ids in &of.clusters {
            open += usize::from(!ids.is_empty());
            store.need(unit, ids);
            if chance(random, 0.5) {
                store.poll()?;
                store.advance()?;
            }
        }
    }
    let (mut ready, mut done, mut seen) = (Vec::new(), Vec::new(), 0);
    while open > 0 {
        store.poll()?;
        store.advance()?;
        let (most, longer) = (1 + random.usize(..4), 1 + random.usize(..8));
        store.job.take_ready(usize::MAX, most, longer, &mut ready);
        if ready.is_empty() {
            if done.is_empty() {
                store.wait()?;
            }
            for item in done.drain(..) {
                let keep = random.u64(..);
                store.release(item, true, |neuron| keep >> (neuron % 64) & 1 == 1);
            }
            continue;
        }
        let mut checked = Vec::new();
        for &(item, step) in &ready {
            checked.push(check(world, store, item as usize, step));
        }
        store.intact()?;
        for (&(item, step), count) in ready.iter().zip(checked) {
            match step {
                Step::Sums => {
                    seen += count;
                    open -= 1;
                    done.push(item as usize);
                }
                Step::Gates => {
                    let bank = store.job.items[item as usize].bank;
                    store.resolve(item, |neuron| fires(bank, neuron))?;
                }
            }
        }
        if store.job.is_short_of_memory() || chance(random, 0.3) {
            for item in done.drain(..) {
                store.release(item, true, |neuron| neuron % 3 != 0);
            }
        }
    }
    for item in done {
        store.release(item, true, |_| true);
    }
    store.end_layer();
    Ok(seen)
}

/// Compares a ready cluster with the file. Returns the number of its neurons with bytes.
fn check(world: &World, store: &NeuronStore, item: usize, step: Step) -> usize {
    let cluster = store.cluster(item);
    let bank = store.job.items[item].bank;
    let mut seen = 0;
    for (i, &neuron) in cluster.ids().iter().enumerate() {
        let Some(bytes) = cluster.neuron(i) else {
            continue;
        };
        seen += 1;
        let [gate, up, down] = world.vectors(bank, neuron);
        if store.residency.banks.gates_resident(bank) {
            let resident = store.residency.resident();
            let row = resident.gate(bank, neuron).expect("a resident row");
            assert_eq!(row.quants(), gate);
            assert!(bytes.gate.is_empty());
        } else {
            assert_eq!(bytes.gate, gate, "gate of {neuron} in bank {bank}");
        }
        if step == Step::Sums {
            assert_eq!(bytes.up, up, "up of {neuron} in bank {bank}");
            assert_eq!(bytes.down, down, "down of {neuron} in bank {bank}");
        }
    }
    seen
}

fn sim(seed: u64, faults: Faults) -> IoChoice {
    let options = SimOptions {
        clock: SimClock::Skip,
        ..SimOptions::new(Profile::Nvme, seed).faulty(faults)
    };
    IoChoice::Sim(options)
}

/// Neurons of the world.
const NEURONS: u64 = 929;

/// A plan with resident Gate rows of some banks; the others stream.
fn partly(world: &World, random: &mut Rng) -> MemoryPlan {
    world.plan_partly(random.u64(1..5), 0, 256 + random.u64(..600))
}

/// A random plan that is valid for `options`.
fn any_plan(world: &World, options: &StoreOptions, random: &mut Rng) -> MemoryPlan {
    let slots = match random.usize(..4) {
        0 => 0,
        1 => 256,
        _ => 256 + random.u64(..NEURONS - 256),
    };
    // Without a cold region everything streams, which requires a scan.
    let streams = options.naming == Naming::All || !options.gates_first && slots == 0;
    let resident = options.naming != Naming::All && chance(random, 0.5);
    let slots = if streams && !resident {
        0
    } else {
        slots.max(256)
    };
    if resident && chance(random, 0.3) {
        return partly(world, random);
    }
    world.plan(resident, random.u64(..5), slots)
}

/// Runs a random sequence of passes, budgets and border moves. Returns [needed, seen] neurons.
fn live(options: &StoreOptions, seed: u64, passes: usize) -> Result<[usize; 2], Error> {
    let world = world();
    let mut random = Rng::with_seed(seed);
    let mut options = options.clone();
    let first = any_plan(&world, &options, &mut random);
    if first.slots == 0 && !first.gates_resident() {
        options.naming = Naming::All;
    }
    let mut store = world.store(&first, &options)?;
    let [mut needed, mut seen] = [0, 0];
    for _ in 0..passes {
        match random.usize(..5) {
            0 if options.naming == Naming::Gates && chance(&mut random, 0.5) => {
                store.set_plan(&partly(&world, &mut random))?;
            }
            0 if options.naming != Naming::All => {
                let (gates, hot) = (chance(&mut random, 0.5), random.u64(..5));
                store.set_plan(&world.plan(gates, hot, 256 + random.u64(..NEURONS - 256)))?;
            }
            1 if options.naming != Naming::All => {
                let hot = random.u64(..5);
                let slots = 256 + random.u64(..200);
                let plan = if store.residency.banks.gates_partly() {
                    world.plan_partly(store.residency.banks.with_gates as u64, 0, slots)
                } else {
                    world.plan(store.residency.banks.gates_resident(0), hot, slots)
                };
                store.residency.aim_border(&plan, &[2, 1, 1, 0, 1]);
            }
            _ => {}
        }
        store.step_border()?;
        store.begin_pass(chance(&mut random, 0.7));
        let share = [0.02, 0.2, 0.6, 1.0][random.usize(..4)];
        for layer in 0..world.layers() {
            let share = if options.naming == Naming::All {
                1.0
            } else {
                share
            };
            let needs = needs(&world, layer, share, &mut random);
            let ids = needs.iter().flat_map(|n| &n.clusters).map(Vec::len);
            needed += ids.sum::<usize>();
            seen += run(&world, &mut store, layer, &needs, &mut random)?;
            if layer == 1 && store.guesses_save(2).is_some() {
                let ids: Vec<u32> = (0..129).filter(|_| chance(&mut random, 0.3)).collect();
                store.guess(2, 4, &ids)?;
            }
        }
        store.residency.cold.cache.check_invariants();
    }
    Ok([needed, seen])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_needed_byte_is_that_of_the_file(
        seed: u64, naming in 0..3usize, ablation in 0..8usize, buffers in 1..5u32, short in 0..300u16
    ) {
        let faults = Faults { short, again: short / 2, shuffle: true, ..Faults::default() };
        let options = StoreOptions {
            naming: [Naming::All, Naming::Gates, Naming::Predictor][naming],
            ablation: Ablation::ALL[ablation],
            buffers,
            io: sim(seed, faults),
            ..StoreOptions::default()
        };
        let [needed, seen] = live(&options, seed, 12).unwrap();
        prop_assert_eq!(needed, seen);
    }

    #[test]
    fn two_phases_read_exactly_the_firing_neurons(seed: u64, buffers in 1..5u32) {
        let options = StoreOptions {
            gates_first: true,
            buffers,
            io: sim(seed, Faults { shuffle: true, ..Faults::default() }),
            ..StoreOptions::default()
        };
        let [needed, seen] = live(&options, seed, 8).unwrap();
        prop_assert!(seen <= needed && seen > needed / 5, "{} of {}", seen, needed);
    }

    #[test]
    fn a_failing_device_gives_an_error_and_never_wrong_bytes(seed: u64, eio: bool) {
        // Rare enough that the regions often fill first.
        let faults = if eio {
            Faults { eio: 20, ..Faults::default() }
        } else {
            Faults { flip: 20, ..Faults::default() }
        };
        let options = StoreOptions { io: sim(seed, faults), ..StoreOptions::default() };
        match live(&options, seed, 40) {
            Ok([needed, seen]) => prop_assert_eq!(needed, seen),
            Err(Error::Storage(_)) => {}
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn after_a_failure_the_store_refuses_to_work() {
    let world = world();
    let mut failed = 0;
    for seed in 0..60 {
        let faults = Faults {
            flip: 60,
            ..Faults::default()
        };
        let options = StoreOptions {
            io: sim(seed, faults),
            ..StoreOptions::default()
        };
        let Ok(mut store) = world.store(&world.plan(true, 0, 256), &options) else {
            continue;
        };
        let mut random = Rng::with_seed(seed);
        for _ in 0..30 {
            store.begin_pass(true);
            let needs = needs(&world, 0, 0.6, &mut random);
            if run(&world, &mut store, 0, &needs, &mut random).is_err() {
                failed += 1;
                store.residency.cold.cache.check_invariants();
                let again = store.begin_layer(1, [1].into_iter(), [].into_iter(), 1);
                assert!(matches!(again, Err(Error::Failed { .. })), "{again:?}");
                let plan = store.set_plan(&world.plan(false, 0, 300));
                assert!(matches!(plan, Err(Error::Failed { .. })));
                break;
            }
        }
    }
    assert!(failed > 5, "only {failed} stores met damage");
}

/// Every policy that caches neurons fills all its slots, from the start and for any text: policies
/// are compared at equal bytes.
#[test]
fn every_policy_that_keeps_neurons_fills_its_slots() {
    for ablation in Ablation::ALL {
        if ablation == Ablation::Mmap {
            continue;
        }
        let options = StoreOptions {
            ablation,
            ..StoreOptions::default()
        };
        let world = world();
        let mut store = world.store(&world.plan(true, 0, 500), &options).unwrap();
        let mut random = Rng::with_seed(7);
        for pass in 0..24 {
            let held = store.residency.cold.cache.resident();
            match ablation {
                Ablation::NoCache | Ablation::Baseline | Ablation::BundleOnly => {
                    assert_eq!(held, 0, "{} after {pass}", ablation.name());
                }
                _ => assert_eq!(held, 500, "{} after {pass}", ablation.name()),
            }
            store.begin_pass(true);
            for layer in 0..world.layers() {
                let needs = needs(&world, layer, 0.02, &mut random);
                run(&world, &mut store, layer, &needs, &mut random).unwrap();
            }
        }
    }
}

/// Four layers of three clusters in which every token needs every neuron.
fn scan() -> (World, NeuronStore) {
    let banks: Vec<_> = (0..4).map(|layer| (layer, 0, 384)).collect();
    let world = World::new(&banks, 24, DType::F32, 3);
    let options = StoreOptions {
        naming: Naming::All,
        buffers: 8,
        io: sim(1, Faults::default()),
        ..StoreOptions::default()
    };
    let store = world.store(&world.plan(false, 0, 0), &options).unwrap();
    (world, store)
}

fn every_neuron(bank: u32) -> Vec<Needs> {
    let clusters = (0..3).map(|c| (c * 128..(c + 1) * 128).collect()).collect();
    vec![Needs { bank, clusters }]
}

/// Clusters prefetched for later layers.
fn underway(store: &NeuronStore) -> Vec<(u32, u32)> {
    let mut reads: Vec<_> = store.reads.underway().collect();
    reads.retain(|a| a.0 as usize != store.job.layer());
    reads.sort_unstable();
    reads
}

/// Begins a layer with one bank that needs all its neurons.
fn begin_whole(store: &mut NeuronStore, layer: u32) {
    store
        .begin_layer(layer as usize, [layer].into_iter(), [].into_iter(), 1)
        .unwrap();
    for ids in &every_neuron(layer)[0].clusters {
        store.need(0, ids);
    }
}

#[test]
fn a_scan_reads_the_layers_to_come_while_buffers_are_free() {
    let (_world, mut store) = scan();
    store.begin_pass(true);
    begin_whole(&mut store, 0);
    store.advance().unwrap();
    // Eight buffers: three clusters of this layer, and five of the next two layers.
    let next = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)];
    assert_eq!(underway(&store), next);
}

#[test]
fn a_scan_reads_beyond_the_end_of_a_pass() {
    let (world, mut store) = scan();
    let mut random = Rng::with_seed(1);
    store.begin_pass(true);
    for layer in 0..3 {
        run(
            &world,
            &mut store,
            layer,
            &every_neuron(layer as u32),
            &mut random,
        )
        .unwrap();
    }
    begin_whole(&mut store, 3);
    store.poll().unwrap();
    store.advance().unwrap();
    assert_eq!(underway(&store), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]);
}

#[test]
fn a_scan_reads_every_cluster_once_a_pass() {
    let (world, mut store) = scan();
    let mut random = Rng::with_seed(2);
    for pass in 0..20 {
        store.begin_pass(true);
        for layer in 0..4 {
            let needs = every_neuron(layer as u32);
            let seen = run(&world, &mut store, layer, &needs, &mut random).unwrap();
            assert_eq!(seen, 384, "pass {pass}, layer {layer}");
        }
    }
    let reads = store.counters().reads;
    assert!((20 * 12..=20 * 12 + 8).contains(&reads), "{reads} reads");
}

/// A parked pass leaves buffers filled for its next layer; other passes may run in between.
#[test]
fn a_scan_may_go_on_at_any_layer() {
    let (world, mut store) = scan();
    let mut random = Rng::with_seed(4);
    for _ in 0..60 {
        let layer = random.usize(..4);
        let needs = every_neuron(layer as u32);
        let seen = run(&world, &mut store, layer, &needs, &mut random).unwrap();
        assert_eq!(seen, 384);
    }
    store.set_plan(&world.plan(false, 3, 0)).unwrap();
    assert_eq!(store.reads.free_buffers(), 8);
}

/// At most one cluster is promoted per layer and pass. Moving the border back reads nothing.
#[test]
fn the_border_moves_without_a_burst_of_reads() {
    let world = World::new(&[(0, 0, 640)], 24, DType::F32, 9);
    let options = StoreOptions::default();
    let mut store = world.store(&world.plan(true, 0, 500), &options).unwrap();
    let mut random = Rng::with_seed(3);
    let needs = [Needs {
        bank: 0,
        clusters: (0..5).map(|c| (c * 128..(c + 1) * 128).collect()).collect(),
    }];
    store.residency.aim_border(&world.plan(true, 4, 100), &[4]);
    let mut hot = Vec::new();
    for _ in 0..8 {
        store.step_border().unwrap();
        store.begin_pass(true);
        run(&world, &mut store, 0, &needs, &mut random).unwrap();
        hot.push(store.residency.hot.held());
    }
    assert!(hot.windows(2).all(|w| w[1] <= w[0] + 1), "{hot:?}");
    assert_eq!(hot.last(), Some(&4));
}
