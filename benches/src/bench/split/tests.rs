//! The solver reproduces the published table from the published curves.

use emberflow_devices::split::{Curve, Pair, Partition, Product};

use super::measured::Padded;
use super::ratio;
use super::snapdragon::{GPU, GRAPHED, NPU, PAIR, SLOW_SYNC, SPACE, TABLE};

/// A partition as Table 3 names it.
fn named(of: Product, Partition { rows, tokens }: Partition) -> String {
    let is_padded = GRAPHED.padded(of.n) != Some(of.n);
    match (rows == of.rows, tokens) {
        _ if rows == 0 => "GPU alone".into(),
        (true, n) if n < of.n => format!("activations n-{n}:{n}"),
        (true, _) if is_padded => "NPU alone, padded".into(),
        (true, _) => "NPU alone".into(),
        (false, _) => {
            let kind = if is_padded { "hybrid" } else { "weights" };
            format!("{kind} {}", ratio(of, rows))
        }
    }
}

#[test]
fn numbers_of_tokens_are_padded_to_whole_graphs() {
    let npu = Padded {
        of: &NPU,
        graphs: &[1, 32, 128],
    };
    let cases = [
        (1, 1),
        (2, 32),
        (32, 32),
        (33, 128),
        (129, 129),
        (130, 160),
        (300, 384),
    ];
    for (n, padded) in cases {
        assert_eq!(npu.padded(n), Some(padded), "{n}");
        let [rows, cols] = [4096; 2];
        let seconds = [n, padded].map(|n| Product { rows, cols, n });
        assert_eq!(npu.seconds(seconds[0]), NPU.seconds(seconds[1]));
    }
    let none = Padded { graphs: &[], ..npu };
    assert_eq!(none.padded(5), None);
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
                let found = named(of, pair.solve(of, SPACE).partition);
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
    assert_eq!(pair.solve(of, SPACE).partition, Partition::default());
}
