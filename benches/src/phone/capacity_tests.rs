//! Capacities hold their expected load, no token is dropped, and the result is that of the mixture.

use emberflow_engine::Choice;
use proptest::prelude::*;

use super::capacity::{
    ExpertTimes, GROUPS, GroupLimits, Packed, Residency, Routes, SMALLEST, capacity, expected,
    imbalance,
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
    (1..600usize, 1..400u64, 100..5000u64).prop_map(|(rows, expert_bytes, graph_bytes)| {
        GroupLimits {
            rows,
            expert_bytes,
            graph_bytes,
        }
    })
}

/// Choices of distinct experts, `[tokens x chosen]`, skewed towards small numbers.
fn choices(tokens: usize, experts: usize, chosen: usize, seed: u64) -> Vec<Choice> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut out: Vec<Choice> = Vec::new();
    for _ in 0..tokens {
        let mut of_token: Vec<u32> = Vec::new();
        while of_token.len() < chosen {
            let expert = random
                .u32(..experts as u32)
                .min(random.u32(..experts as u32));
            if !of_token.contains(&expert) {
                of_token.push(expert);
            }
        }
        out.extend(of_token.into_iter().map(|expert| Choice {
            expert,
            weight: random.f32(),
        }));
    }
    out
}

fn counts(choices: &[Choice], experts: usize) -> Vec<u64> {
    let mut out = vec![0; experts];
    choices
        .iter()
        .for_each(|choice| out[choice.expert as usize] += 1);
    out
}

/// An expert: any function of its number and a row.
fn compute(expert: usize, x: &[f32]) -> Vec<f32> {
    let of = |(i, x): (usize, &f32)| (x * (expert + 1) as f32 + i as f32).tanh();
    x.iter().enumerate().map(of).collect()
}

/// The mixture, token by token.
fn mixture(x: &[f32], choices: &[Choice], width: usize, chosen: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for ((x, out), choices) in x
        .chunks(width)
        .zip(out.chunks_mut(width))
        .zip(choices.chunks(chosen))
    {
        for choice in choices {
            let result = compute(choice.expert as usize, x);
            out.iter_mut()
                .zip(result)
                .for_each(|(sum, result)| *sum += choice.weight * result);
        }
    }
    out
}

/// The same in groups: gathered, computed in static shapes, scattered, and summed in the order of choices.
fn in_groups(
    placed: &Residency,
    x: &[f32],
    choices: &[Choice],
    width: usize,
    chosen: usize,
) -> Vec<f32> {
    let packed = Packed::new(placed, choices);
    let mut results = vec![f32::NAN; choices.len() * width];
    for (number, group) in placed.groups.iter().enumerate() {
        let rows = packed.gather(number, x, width, chosen);
        assert_eq!(rows.len(), group.experts.len() * group.capacity * width);
        let slices = rows.chunks(group.capacity * width).zip(&group.experts);
        let computed: Vec<f32> = slices
            .flat_map(|(slice, &expert)| slice.chunks(width).flat_map(move |x| compute(expert, x)))
            .collect();
        packed.scatter(number, &computed, width, &mut results);
    }
    for &place in &packed.on_cpu {
        let x = &x[place / chosen * width..][..width];
        results[place * width..][..width]
            .copy_from_slice(&compute(choices[place].expert as usize, x));
    }
    let mut out = vec![0.0; x.len()];
    for (place, choice) in choices.iter().enumerate() {
        let to = &mut out[place / chosen * width..][..width];
        let result = &results[place * width..][..width];
        to.iter_mut()
            .zip(result)
            .for_each(|(sum, result)| *sum += choice.weight * result);
    }
    out
}

proptest! {
    /// For any capacities, no route is lost and the bits are the mixture's.
    #[test]
    fn groups_and_overflow_equal_the_mixture(
        tokens in 1..80usize, experts in 2..24usize, chosen in 1..4usize, seed in any::<u64>(),
        seen in any::<u64>(), limits in limits(), prices in prices(),
    ) {
        let chosen = chosen.min(experts);
        let now = choices(tokens, experts, chosen, seed);
        // Capacities come from another text.
        let before = counts(&choices(200, experts, chosen, seen), experts);
        let placed = limits.place(&expected(&before, tokens, chosen), &prices);
        let width = 3;
        let x: Vec<f32> = (0..tokens * width).map(|i| (i as f32 * 0.7).sin()).collect();
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let whole = bits(mixture(&x, &now, width, chosen));
        prop_assert_eq!(bits(in_groups(&placed, &x, &now, width, chosen)), whole);

        // the counts agree with the packing
        let mut routes = Routes::default();
        routes.add(&placed, &counts(&now, experts));
        let packed = Packed::new(&placed, &now);
        let rows = packed.groups.iter().flatten();
        prop_assert_eq!(routes.npu, rows.clone().flatten().count() as u64);
        prop_assert_eq!(routes.padding, rows.filter(|place| place.is_none()).count() as u64);
        prop_assert_eq!(routes.overflow + routes.cold, packed.on_cpu.len() as u64);
        prop_assert_eq!(routes.npu + routes.overflow + routes.cold, (tokens * chosen) as u64);
    }

    /// A group has experts of one capacity, at most as many as its graph may hold; each expert occurs once; no
    /// other border between hot and cold groups ends earlier.
    #[test]
    fn groups_have_one_capacity_and_fit(
        loads in proptest::collection::vec(0.0..300.0f64, 1..40), limits in limits(), prices in prices(),
    ) {
        let all = limits.groups(&loads);
        let placed = limits.place(&loads, &prices);
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
                prop_assert_eq!(capacity(loads[expert], limits.rows), group.capacity);
            }
        }
        let ends = |hot: usize| {
            let npu: f64 = all[..hot].iter().map(|g| prices.on_npu(g.experts.len(), g.capacity)).sum();
            let cold = all[hot..].iter().flat_map(|g| &g.experts);
            npu.max(cold.map(|&e| prices.on_cpu(loads[e])).sum())
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

    /// Expected tokens add up to all routes, and the busiest expert's are r·c.
    #[test]
    fn the_busiest_expert_has_r_times_the_mean(
        counted in proptest::collection::vec(0..5000u64, 1..64), rows in 1..600usize, chosen in 1..9usize,
    ) {
        let loads = expected(&counted, rows, chosen);
        let (sum, most) = loads.iter().fold((0.0, 0.0f64), |(sum, most), &load| (sum + load, most.max(load)));
        let base = (rows * chosen) as f64 / counted.len() as f64;
        prop_assert!((sum - (rows * chosen) as f64).abs() < 1e-6 * sum);
        prop_assert!((most - imbalance(&counted) * base).abs() < 1e-6 * most);
    }
}

#[test]
fn a_layer_of_the_paper_is_grouped() {
    // 512 tokens, two of 16 experts: 64 each; a busiest expert of three times that has the tier of 256.
    let mut tokens = vec![60u64; 15];
    tokens.push(3 * 60 + 6);
    let loads = expected(&tokens, 512, 2);
    let limits = GroupLimits {
        rows: 512,
        expert_bytes: 150 << 20,
        graph_bytes: 1200 << 20,
    };
    let groups = limits.groups(&loads);
    let shapes: Vec<_> = groups
        .iter()
        .map(|group| [group.experts.len(), group.capacity])
        .collect();
    // 16 experts exceed the graph; 8 do not.
    assert_eq!(
        shapes,
        [[1, 256], [8, 64], [4, 64], [1, 64], [1, 64], [1, 64]]
    );
}
