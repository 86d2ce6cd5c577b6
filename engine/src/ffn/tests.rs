//! A layer of several units against a naive reference: units over some rows, weights, and bit
//! equality for any residency.

use emberflow_kernels::{Activations, Compute, DType};
use emberflow_models::config::{Activation, FfnKind};

use super::shape::FfnShape;
use super::state::{Ffn, FfnRoom, clusters_per_group};
use super::units::{BankWork, Bias, LayerInput, Rows};
use crate::ablation::Ablation;
use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::memory::MemoryPlan;
use crate::store::Naming;
use crate::testing::{StoreOptions, World, floats};
use crate::thread_buffer;

const D: usize = 64;
const ROWS: usize = 5;

/// A dense layer, and a layer of four experts.
fn world(dtype: DType) -> World {
    let banks = [
        (0, 0, 300),
        (1, 0, 200),
        (1, 1, 200),
        (1, 2, 200),
        (1, 3, 130),
    ];
    World::new(&banks, D, dtype, 17)
}

fn ffn(world: &World, plan: &MemoryPlan, options: &StoreOptions, threads: usize) -> Ffn {
    let shape = FfnShape {
        format: world.format,
        kind: FfnKind {
            activation: Activation::Relu,
            relu_on_up: false,
            ungated: false,
        },
        dense: options.naming == Naming::All,
    };
    let room = FfnRoom {
        rows: ROWS,
        neurons: 730,
        clusters: 8,
        chosen: 4,
        threads,
        observe: false,
        counts: false,
    };
    thread_buffer::reserve(super::thread_floats(D, ROWS));
    Ffn::new(shape, world.store(plan, options).unwrap(), None, None, room)
}

/// Owned form of [`BankWork`].
struct Unit {
    bank: u32,
    rows: Vec<u32>,
    weights: Vec<f32>,
    /// Weights scale the input of the bank, not its output.
    scales: bool,
}

/// Runs layer `number` over `units` for rows of `x`.
fn run(ffn: &mut Ffn, on: &Compute, number: usize, units: &[Unit], x: &[f32]) -> Vec<f32> {
    let rows = x.len() / D;
    let work: Vec<BankWork<'_>> = units
        .iter()
        .map(|unit| {
            if unit.rows.len() == rows && unit.weights.is_empty() {
                BankWork {
                    bank: unit.bank,
                    rows: Rows::All(rows),
                    weights: None,
                    scales: None,
                    bias: Bias::NONE,
                    hidden: None,
                }
            } else {
                BankWork {
                    bank: unit.bank,
                    rows: if unit.rows.len() == rows {
                        Rows::All(rows)
                    } else {
                        Rows::Some(&unit.rows)
                    },
                    weights: (!unit.scales).then_some(&unit.weights),
                    scales: unit.scales.then_some(&unit.weights),
                    bias: Bias::NONE,
                    hidden: None,
                }
            }
        })
        .collect();
    let mut memory = Activations::default();
    let input = Input::new(on.cpu, x, rows, &mut memory);
    let at = LayerInput::alone(number, &work, input, x);
    let mut out = vec![f32::NAN; x.len()];
    ffn.begin_pass((0..rows).map(|_| 1), true);
    ffn.layer(on, &at, &mut out).unwrap();
    out
}

/// Naive reference in f64.
fn textbook(world: &World, units: &[Unit], x: &[f32]) -> Vec<f64> {
    let mut out = vec![0.0f64; x.len()];
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    for unit in units {
        for neuron in 0..world.neurons(unit.bank) as u32 {
            let [gate, up, down] = world.floats(unit.bank, neuron);
            for (place, &row) in unit.rows.iter().enumerate() {
                let x = &x[row as usize * D..][..D];
                let weight = unit.weights.get(place).map_or(1.0, |&w| f64::from(w));
                let (scale, weight) = if unit.scales {
                    (weight, 1.0)
                } else {
                    (1.0, weight)
                };
                let hidden = (scale * dot(&gate, x)).max(0.0) * scale * dot(&up, x);
                for (y, d) in out[row as usize * D..][..D].iter_mut().zip(&down) {
                    *y += weight * hidden * f64::from(*d);
                }
            }
        }
    }
    out
}

/// A dense layer, and experts with overlapping rows.
fn cases() -> [(usize, Vec<Unit>); 4] {
    let unit = |bank, rows: &[u32], weights: &[f32]| Unit {
        bank,
        rows: rows.to_vec(),
        weights: weights.to_vec(),
        scales: false,
    };
    let scaled = |bank, rows, weights| Unit {
        scales: true,
        ..unit(bank, rows, weights)
    };
    let all: Vec<u32> = (0..ROWS as u32).collect();
    [
        (0, vec![unit(0, &all, &[])]),
        (
            1,
            vec![
                unit(1, &[0, 2, 3], &[0.5, 0.25, 1.5]),
                unit(3, &[1, 2], &[0.75, 0.125]),
                unit(4, &[4], &[2.0]),
            ],
        ),
        // A shared expert and routed ones.
        (1, vec![unit(2, &all, &[]), unit(4, &[3], &[0.5])]),
        // The experts' inputs are scaled, for some rows and for all.
        (
            1,
            vec![
                scaled(1, &[0, 3], &[0.5, 0.25]),
                scaled(2, &all, &[0.75, 0.3, 0.6, 0.9, 0.2, 0.4][..ROWS]),
                unit(4, &all, &[]),
            ],
        ),
    ]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_layer_is_the_weighted_sum_of_its_units() {
    let on = Compute::new(2, None);
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::Q8, 0.2)] {
        let world = world(dtype);
        let x = floats(4, ROWS * D);
        let plan = world.plan(true, 0, 300);
        let options = StoreOptions {
            naming: Naming::Gates,
            ..StoreOptions::default()
        };
        let mut ffn = ffn(&world, &plan, &options, 2);
        for (number, units) in cases() {
            let found = run(&mut ffn, &on, number, &units, &x);
            let expected = textbook(&world, &units, &x);
            let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                let error = (f64::from(*found) - expected).abs() / largest;
                assert!(error < tolerance, "{dtype:?}: {found}, expected {expected}");
            }
        }
    }
}

#[test]
fn residency_changes_no_bit() {
    for dtype in [DType::F32, DType::Q4] {
        let world = world(dtype);
        let x = floats(6, ROWS * D);
        let mut expected: Option<Vec<Vec<u32>>> = None;
        for (naming, gates_first, resident, hot, slots, ablation, threads) in [
            (Naming::Gates, false, true, 0, 1030, Ablation::Full, 1),
            (Naming::Gates, false, true, 4, 300, Ablation::Full, 3),
            (Naming::Gates, false, true, 0, 256, Ablation::NoBundle, 2),
            (Naming::Gates, true, false, 0, 256, Ablation::NoPipeline, 2),
            (Naming::Gates, false, false, 3, 0, Ablation::Full, 2),
            (Naming::All, false, false, 0, 0, Ablation::Full, 2),
            (Naming::All, false, false, 9, 0, Ablation::Mmap, 2),
        ] {
            let options = StoreOptions {
                naming,
                gates_first,
                ablation,
                ..StoreOptions::default()
            };
            let plan = world.plan(resident, hot, slots);
            let mut ffn = ffn(&world, &plan, &options, threads);
            let on = Compute::new(threads, None);
            let found: Vec<_> = cases()
                .iter()
                .map(|(number, units)| bits(&run(&mut ffn, &on, *number, units, &x)))
                .collect();
            match &expected {
                None => expected = Some(found),
                Some(expected) => assert!(found == *expected, "{dtype:?} {options:?} {plan:?}"),
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    let world = world(DType::Q8);
    let on = Compute::new(2, None);
    let x = floats(8, ROWS * D);
    let options = StoreOptions {
        naming: Naming::Gates,
        ..StoreOptions::default()
    };
    let mut ffn = ffn(&world, &world.plan(true, 1, 300), &options, 2);
    for (number, units) in cases() {
        let together = run(&mut ffn, &on, number, &units, &x);
        for row in 0..ROWS {
            let alone: Vec<Unit> = units
                .iter()
                .filter_map(|unit| {
                    let place = unit.rows.iter().position(|&r| r as usize == row)?;
                    Some(Unit {
                        bank: unit.bank,
                        rows: vec![0],
                        weights: unit.weights.get(place).copied().into_iter().collect(),
                        scales: unit.scales,
                    })
                })
                .collect();
            let found = run(&mut ffn, &on, number, &alone, &x[row * D..][..D]);
            assert!(bits(&found) == bits(&together[row * D..][..D]), "row {row}");
        }
    }
}

#[test]
fn groups_of_clusters_fit_the_partial_sums() {
    let room = FfnRoom {
        rows: 512,
        neurons: 11008,
        clusters: 86,
        chosen: 0,
        threads: 2,
        observe: false,
        counts: false,
    };
    for rows in [1, 2, 40, 512] {
        let group = clusters_per_group(rows, 4096, 86, 2);
        assert!((4..=86).contains(&group));
        assert!(group * rows * 4096 <= room.partials(4096));
    }
    assert_eq!(room.pairs(), 86 * CLUSTER * 512);
}
