use proptest::prelude::*;

use super::{Curve, Linear, Pair, Product};

proptest! {
    /// Any number of rows: what bisection finds is as fast as the fastest of all.
    #[test]
    fn bisection_equals_counting_out(
        launches in [0.0..1e-3, 0.0..1e-3],
        each in [1e-8..1e-5, 1e-8..1e-5],
        sync in 0.0..1e-3,
        rows in 0..2000usize,
    ) {
        let curve = |i: usize| Linear { launch: launches[i], row: each[i] };
        let (first, second) = (curve(0), curve(1));
        let pair = Pair { first: &first, second: &second, sync };
        let of = Product { rows, cols: 1, n: 1 };
        let time = |taken: usize| {
            let theirs = second.seconds(Product { rows: taken, ..of });
            let theirs = if taken > 0 { theirs + sync } else { 0.0 };
            theirs.max(first.seconds(Product { rows: rows - taken, ..of }))
        };
        let best = (0..=rows).map(time).fold(f64::INFINITY, f64::min);
        prop_assert_eq!(time(pair.rows_of_second(of)), best);
    }
}
