//! Capacities hold their expected load, and no token is dropped.

use proptest::prelude::*;

use super::{
    ExpertTimes, GROUPS, GroupLimits, RouteCounts, SMALLEST, capacity, expected, imbalance,
};

/// Costs of a launch, an expert, a row; and of a token on the CPU.
#[derive(Debug, Clone, Copy)]
struct Prices {
    launch: f64,
    row: f64,
    token: f64,
}

impl ExpertTimes for Prices {
    fn on_npu(&self, experts: usize, capacity: usize) -> f64 {
        self.launch + (experts * capacity) as f64 * self.row
    }

    fn on_cpu(&self, tokens: f64) -> f64 {
        tokens * self.token
    }
}

fn prices() -> impl Strategy<Value = Prices> {
    (0.0..100.0f64, 0.01..2.0f64, 0.01..4.0f64).prop_map(|(launch, row, token)| Prices {
        launch,
        row,
        token,
    })
}

fn limits() -> impl Strategy<Value = GroupLimits> {
    let limits = (1..600usize, 1..400u64, 100..5000u64, any::<bool>());
    limits.prop_map(|(rows, expert_bytes, graph_bytes, short)| GroupLimits {
        rows,
        expert_bytes,
        graph_bytes,
        short,
    })
}

proptest! {
    /// A group has experts of one capacity, at most as many as its graph may hold; each expert occurs once; no
    /// other border between hot and cold groups ends earlier.
    #[test]
    fn groups_have_one_capacity_and_fit(
        loads in proptest::collection::vec(0.0..300.0f64, 1..40), limits in limits(), prices in prices(),
        holds: u64,
    ) {
        let held = |expert: usize| (holds >> (expert % 64)) & 1 == 1;
        let all = limits.groups(&loads, held);
        let placed = limits.place(&loads, held, &prices);
        let mut seen: Vec<usize> = placed.on_cpu.clone();
        seen.extend(placed.groups.iter().flat_map(|group| group.experts.clone()));
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..loads.len()).collect::<Vec<_>>());
        prop_assert_eq!(&placed.groups[..], &all[..placed.groups.len()]);
        for group in &all {
            let size = group.experts.len();
            prop_assert!(size <= GROUPS[0]);
            prop_assert!(size == 1 || size as u64 * limits.expert_bytes <= limits.graph_bytes);
            for &expert in &group.experts {
                prop_assert!(held(expert));
                prop_assert_eq!(capacity(loads[expert], limits.rows), group.capacity);
            }
        }
        let ends = |hot: usize| {
            let npu: f64 = all[..hot].iter().map(|g| prices.on_npu(g.experts.len(), g.capacity)).sum();
            let cold = all[hot..].iter().flat_map(|g| g.experts.clone());
            let cold = cold.chain((0..loads.len()).filter(|&expert| !held(expert)));
            npu.max(cold.map(|e| prices.on_cpu(loads[e])).sum())
        };
        let best = ends(placed.groups.len());
        for hot in 0..=all.len() {
            prop_assert!(best <= ends(hot) * (1.0 + 1e-9));
        }
    }

    /// The smallest tier that holds the load; never more than the pass has tokens, rounded up.
    #[test]
    fn capacities_are_the_smallest_that_suffice(load in 0.0..2000.0f64, rows in 1..1000usize) {
        let found = capacity(load, rows);
        let most = rows.next_power_of_two().max(SMALLEST);
        prop_assert!(found >= SMALLEST && found <= most && (found / SMALLEST).is_power_of_two());
        prop_assert!(found as f64 >= load || found == most);
        prop_assert!(found == SMALLEST || ((found / 2) as f64) < load);
    }

    /// Every route is computed once: on the NPU, beyond a capacity, or because its expert is on the CPU; and every row of a
    /// graph has a token or none.
    #[test]
    fn routes_are_counted_once(
        tokens in proptest::collection::vec(0..300u64, 1..40), seen in any::<u64>(), limits in limits(),
        prices in prices(), holds: u64,
    ) {
        let mut random = fastrand::Rng::with_seed(seen);
        let visits: Vec<f64> = tokens.iter().map(|_| random.f64()).collect();
        let held = |expert: usize| (holds >> (expert % 64)) & 1 == 1;
        let placed = limits.place(&expected(&visits, limits.rows, 2), held, &prices);
        let mut routes = RouteCounts::default();
        routes.add(&placed, &tokens);
        let all: u64 = tokens.iter().sum();
        prop_assert_eq!(routes.npu + routes.overflow + routes.cold, all);
        let rows = placed.groups.iter().map(|group| group.experts.len() * group.capacity).sum::<usize>();
        prop_assert_eq!(routes.npu + routes.padding, rows as u64);
        let shares = [routes.padding_share(), routes.overflow_share()];
        prop_assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)));
    }

    /// Expected tokens add up to all routes, and the busiest expert's are r·c.
    #[test]
    fn the_busiest_expert_has_r_times_the_mean(
        counted in proptest::collection::vec(0..5000u64, 1..64), rows in 1..600usize, chosen in 1..9usize,
    ) {
        let visits: Vec<f64> = counted.iter().map(|&n| n as f64).collect();
        let loads = expected(&visits, rows, chosen);
        let (sum, most) = loads.iter().fold((0.0, 0.0f64), |(sum, most), &load| (sum + load, most.max(load)));
        let base = (rows * chosen) as f64 / counted.len() as f64;
        prop_assert!((sum - (rows * chosen) as f64).abs() < 1e-6 * sum);
        prop_assert!((most - imbalance(&counted) * base).abs() < 1e-6 * most);
    }
}

#[test]
fn a_layer_of_the_paper_is_grouped() {
    // 512 tokens, two of 16 experts: 64 each; a busiest expert of three times that has the tier of 256.
    let mut visits = vec![60.0; 15];
    visits.push(3.0 * 60.0 + 6.0);
    let loads = expected(&visits, 512, 2);
    let limits = GroupLimits {
        rows: 512,
        expert_bytes: 150 << 20,
        graph_bytes: 1200 << 20,
        short: false,
    };
    let groups = limits.groups(&loads, |_| true);
    let shapes: Vec<_> = groups
        .iter()
        .map(|group| [group.experts.len(), group.capacity])
        .collect();
    // 16 experts exceed the graph; 8 do not.
    assert_eq!(
        shapes,
        [[1, 256], [8, 64], [4, 64], [1, 64], [1, 64], [1, 64]]
    );
    let short = GroupLimits {
        short: true,
        ..limits
    };
    let sizes = short.groups(&loads, |_| true);
    let sizes: Vec<_> = sizes.iter().map(|group| group.experts.len()).collect();
    assert_eq!(sizes, [1, 8, 7]);
}
