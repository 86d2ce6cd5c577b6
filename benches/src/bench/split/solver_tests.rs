use emberflow_engine::split::{Curve, Product};
use proptest::prelude::*;

use super::solver::{Grid, Pair, Solver};

#[test]
fn numbers_of_tokens_are_padded_to_whole_graphs() {
    let grid = Grid {
        ratios: &[],
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
        assert_eq!(grid.padded(n), Some(padded), "{n}");
    }
    let none = Grid {
        ratios: &[],
        graphs: &[],
    };
    assert_eq!(none.padded(5), None);
}

/// A cost curve with a constant, a cost per row and token, and steps.
#[derive(Debug, Clone, Copy)]
struct Stepped {
    launch: f64,
    each: f64,
    step: usize,
}

impl Curve for Stepped {
    fn seconds(&self, of: Product) -> f64 {
        match of.rows * of.n {
            0 => 0.0,
            _ => self.launch + (of.rows * of.n.next_multiple_of(self.step)) as f64 * self.each,
        }
    }
}

fn stepped() -> impl Strategy<Value = Stepped> {
    (0.0..1e-3, 1e-9..1e-6, 1..64usize).prop_map(|(launch, each, step)| Stepped {
        launch,
        each,
        step,
    })
}

proptest! {
    /// The solver's choice is the fastest of all enumerated partitions, and never slower than the better
    /// processor alone.
    #[test]
    fn the_solver_equals_counting_out(
        first in stepped(),
        second in stepped(),
        sync in 0.0..1e-3,
        rows in 1..5000usize,
        n in 1..700usize,
        mut graphs in proptest::collection::vec(1..300usize, 0..5),
        ratios in proptest::collection::vec([1..5usize, 1..5usize], 0..5),
    ) {
        graphs.sort_unstable();
        let pair = Pair { first: &first, second: &second, sync };
        let grid = Grid { ratios: &ratios, graphs: &graphs };
        let of = Product { rows, cols: 64, n };
        let found = pair.solve(of, &grid);
        prop_assert_eq!(pair.seconds(of, found.partition), Some(found.seconds));

        let mut best = first.seconds(of);
        if let Some(&last) = graphs.last() {
            // Token counts that fill graphs: multiples of the largest, and one of the others.
            let filled = |n: usize| n == 0 || graphs.iter().any(|&g| n % last == g % last && n >= g);
            let padded = (n..).find(|&n| filled(n)).unwrap_or(n);
            best = best.min(second.seconds(Product { n: padded, ..of }) + sync);
            for &[a, b] in &ratios {
                let mine = rows * a / (a + b);
                if mine > 0 {
                    let theirs = Product { rows: rows - mine, n: padded, ..of };
                    let mine = first.seconds(Product { rows: mine, ..of });
                    best = best.min(mine.max(second.seconds(theirs)) + sync);
                }
            }
            let whole = (n - 1) / last * last;
            for tokens in (1..n).filter(|&n| filled(n) && n >= whole) {
                let mine = first.seconds(Product { n: n - tokens, ..of });
                let theirs = second.seconds(Product { n: tokens, ..of });
                best = best.min(mine.max(theirs) + sync);
            }
        }
        prop_assert_eq!(found.seconds, best);
        prop_assert!(found.seconds <= first.seconds(of));
    }
}
