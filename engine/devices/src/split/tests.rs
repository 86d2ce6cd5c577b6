use proptest::prelude::*;

use super::{Curve, Linear, Product, seconds, shares};

/// Seconds of the last of some processors that take so many rows each.
fn time(of: Product, all: &[&dyn Curve], rows: &[usize]) -> f64 {
    let each = all.iter().zip(rows);
    let each = each.map(|(curve, &rows)| curve.seconds(Product { rows, ..of }));
    each.fold(0.0, f64::max)
}

/// All ways to divide rows among so many processors.
fn ways(rows: usize, among: usize) -> Vec<Vec<usize>> {
    match among {
        0 => Vec::new(),
        1 => vec![vec![rows]],
        _ => (0..=rows)
            .flat_map(|own| {
                let others = ways(rows - own, among - 1).into_iter();
                others.map(move |others| [vec![own], others].concat())
            })
            .collect(),
    }
}

proptest! {
    /// Any number of rows, two to four processors: what is found is as fast as the fastest of all ways.
    #[test]
    fn shares_are_as_fast_as_the_fastest_of_all_ways(
        of in prop::collection::vec((0.0..1e-3, 1e-6..1e-4), 2..=4),
        rows in 0..24usize,
    ) {
        let curves: Vec<Linear> = of.iter().map(|&(launch, row)| Linear { launch, row }).collect();
        let all: Vec<&dyn Curve> = curves.iter().map(|curve| curve as &dyn Curve).collect();
        let of = Product { rows, cols: 1, n: 1 };
        let found = shares(of, &all);
        prop_assert_eq!(found.iter().sum::<usize>(), rows);
        let best = ways(rows, all.len()).iter().map(|rows| time(of, &all, rows)).fold(f64::INFINITY, f64::min);
        prop_assert_eq!(time(of, &all, &found), best);
        prop_assert_eq!(seconds(of, &all), best);
    }

    /// The same with many rows, between two.
    #[test]
    fn bisection_equals_counting_out(
        launches in [0.0..1e-3, 0.0..1e-3],
        each in [1e-8..1e-5, 1e-8..1e-5],
        rows in 0..2000usize,
    ) {
        let curve = |i: usize| Linear { launch: launches[i], row: each[i] };
        let (first, second) = (curve(0), curve(1));
        let all: [&dyn Curve; 2] = [&first, &second];
        let of = Product { rows, cols: 1, n: 1 };
        let best = ways(rows, 2).iter().map(|rows| time(of, &all, rows)).fold(f64::INFINITY, f64::min);
        prop_assert_eq!(time(of, &all, &shares(of, &all)), best);
    }
}

/// As many clusters as devices of one speed: each of them takes one.
#[test]
fn processors_of_one_speed_are_all_at_work() {
    let one = Linear {
        launch: 1e-9,
        row: 1e-9,
    };
    for among in 2..=4 {
        let all = [&one as &dyn Curve; 4];
        for rows in [among, 2 * among] {
            let of = Product {
                rows,
                cols: 1,
                n: 1,
            };
            let each = vec![rows / among; among];
            assert_eq!(shares(of, &all[..among])[..], each);
        }
    }
}
