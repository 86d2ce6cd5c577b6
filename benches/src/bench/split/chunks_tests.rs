//! No placement of chunks is slower than one processor alone.

use proptest::prelude::*;

use emberflow_devices::split::{Curve, Pair, Product};

use super::chunks::chunks;
use super::snapdragon::{GPU, NPU, PAIR};

/// `launch + rows · n · each`.
#[derive(Debug)]
struct Rate {
    launch: f64,
    each: f64,
}

impl Curve for Rate {
    fn seconds(&self, of: Product) -> f64 {
        self.launch + (of.rows * of.n) as f64 * self.each
    }
}

fn rate() -> impl Strategy<Value = Rate> {
    (0.0..1e-3f64, 1e-9..1e-6f64).prop_map(|(launch, each)| Rate { launch, each })
}

proptest! {
    #[test]
    fn never_slower_than_one_processor_and_every_token_once(
        first in rate(), second in rate(), sync in 0.0..1e-3f64,
        rows in 1..5000usize, n in 1..3000usize, chunk in 1..600usize,
    ) {
        let pair = Pair { first: &first, second: &second, sync };
        let of = Product { rows, cols: 64, n };
        let placed = chunks(&pair, of, chunk, false);
        let graphs = n.div_ceil(chunk);
        let padded = graphs as f64 * second.seconds(Product { n: chunk, ..of }) + sync;
        prop_assert!(placed.seconds <= first.seconds(of));
        prop_assert!(placed.seconds <= padded);
        prop_assert!(placed.second * chunk + placed.first >= n);
        prop_assert!(placed.first == 0 || placed.second * chunk + placed.first == n);
        // The paper's rule: smallest difference of the two times.
        let whole = n / chunk;
        let theirs = |i: usize| i as f64 * second.seconds(Product { n: chunk, ..of });
        let mine = |i: usize| match n - i * chunk {
            0 => 0.0,
            n => first.seconds(Product { n, ..of }),
        };
        let apart = |i: &usize| (theirs(*i) - mine(*i)).abs();
        let paper = (0..=whole).min_by(|a, b| apart(a).total_cmp(&apart(b))).unwrap();
        let paper = mine(paper).max(theirs(paper) + if paper > 0 { sync } else { 0.0 });
        prop_assert!(placed.seconds <= paper + 1e-12);
    }

    #[test]
    fn a_busy_first_processor_has_the_rest_only_and_ends_no_earlier(
        first in rate(), second in rate(), n in 1..3000usize, chunk in 1..600usize,
    ) {
        let pair = Pair { first: &first, second: &second, sync: 1e-4 };
        let of = Product { rows: 1000, cols: 64, n };
        let placed = chunks(&pair, of, chunk, true);
        if n < chunk {
            prop_assert_eq!(placed, chunks(&pair, of, chunk, false));
            return Ok(());
        }
        prop_assert_eq!(placed.second, n / chunk);
        prop_assert_eq!(placed.first, n % chunk);
        if placed.first > 0 {
            let rest = first.seconds(Product { n: placed.first, ..of });
            let theirs = placed.second as f64 * second.seconds(Product { n: chunk, ..of });
            prop_assert!(placed.defer + rest >= theirs - 1e-12);
        }
    }
}

#[test]
fn a_phones_processors_share_a_prompt() {
    let of = Product {
        rows: 4096,
        cols: 4096,
        n: 700,
    };
    let idle = chunks(&PAIR, of, 128, false);
    assert!(idle.seconds < GPU.seconds(of));
    let padded = 6.0 * NPU.seconds(Product { n: 128, ..of }) + PAIR.sync;
    assert!(idle.seconds <= padded);
    let busy = chunks(&PAIR, of, 128, true);
    assert_eq!([busy.second, busy.first], [5, 60]);
    // Without a graph only one processor is used.
    assert_eq!(chunks(&PAIR, of, 0, true).second, 0);
}
