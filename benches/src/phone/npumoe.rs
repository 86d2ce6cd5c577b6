//! Experts in static shapes on an M2 Ultra's NPU (NPUMoE), from its Table 5.
//!
//! ```text
//! graph of G experts of C tokens = launch + G · (expert + C · token)     ms/token = launch / (G·C) + expert / C + token
//! ```
//!
//! Three cells of the table give the three prices; the other five test them.

use super::schedule::{Operation, Planned, makespan, simulate};
use fastrand::Rng;

use emberflow_devices::tiers::{
    ExpertTimes, GroupLimits, Placement, RouteCounts, capacity, expected,
};

use crate::report::csv::Csv;

use super::draw::{Drawn, Lanes};
use super::figures::{FigureValue, simulated};
use super::subgraphs::{CPU, NPU, PHONE};

const EXPERTS_TABLE: &str = include_str!("curves/npumoe_experts.csv");

/// Phi-3.5-MoE: experts, experts per token (5.1), and tokens of a pass.
const EXPERTS: usize = 16;
const CHOSEN: usize = 2;
const ROWS: usize = 512;
/// Bytes of an expert (5.1) and of the largest graph (4.2).
const LIMITS: GroupLimits = GroupLimits {
    rows: ROWS,
    expert_bytes: 150_000_000,
    graph_bytes: 1_200_000_000,
    short: false,
};
/// Time of the CPU over the NPU's, without a launch: the middle of 1.4 and 2.3 (2, Fig. 7).
const CPU_SLOWER: f64 = 1.85;
/// Simulated passes.
const PASSES: usize = 64;

/// Costs in milliseconds of the table's tokens.
#[derive(Debug, Clone, Copy)]
struct Prices {
    launch: f64,
    expert: f64,
    token: f64,
}

impl Prices {
    /// From the cells named `fit`: two single experts and one group.
    fn fitted() -> Self {
        let table = Csv::parse(EXPERTS_TABLE);
        let mut cells: Vec<[f64; 3]> = table
            .rows()
            .filter(|row| row.text("use") == "fit")
            .map(|row| ["experts", "capacity", "ms_per_token"].map(|column| row.or_zero(column)))
            .collect();
        cells.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        let [small, large, group] = [0, 1, 2].map(|i| cells.get(i).copied().unwrap_or([1.0; 3]));
        // Milliseconds per expert.
        let ms = |cell: [f64; 3]| cell[1] * cell[2];
        let token = (ms(large) - ms(small)) / (large[1] - small[1]);
        let launch = (ms(small) - ms(group)) / (1.0 - 1.0 / group[0]);
        Self {
            launch,
            expert: ms(small) - launch - token * small[1],
            token,
        }
    }

    fn per_token(&self, experts: usize, capacity: usize) -> f64 {
        self.on_npu(experts, capacity) / (experts * capacity) as f64
    }
}

impl ExpertTimes for Prices {
    fn on_npu(&self, experts: usize, capacity: usize) -> f64 {
        self.launch + experts as f64 * (self.expert + self.token * capacity as f64)
    }

    fn on_cpu(&self, tokens: f64) -> f64 {
        if tokens > 0.0 {
            CPU_SLOWER * (self.expert + self.token * tokens)
        } else {
            0.0
        }
    }
}

/// Tokens of each expert in a pass, each token's experts drawn by popularity 1 / sqrt(rank).
fn pass(random: &mut Rng) -> Vec<u64> {
    let mut tokens = vec![0; EXPERTS];
    for _ in 0..ROWS {
        let mut weights: Vec<f64> = (1..=EXPERTS).map(|rank| (rank as f64).powf(-0.5)).collect();
        for _ in 0..CHOSEN {
            let mut left = random.f64() * weights.iter().sum::<f64>();
            let at = weights.iter().position(|weight| {
                left -= weight;
                left < 0.0
            });
            let expert = at.unwrap_or(EXPERTS - 1);
            tokens[expert] += 1;
            weights[expert] = 0.0;
        }
    }
    tokens
}

/// The pieces of a layer: groups on the NPU, and the CPU's parallel work.
fn graph(prices: &Prices, placed: &Placement, tokens: &[u64]) -> Vec<Operation> {
    let piece = |on: usize, ms: f64| Operation {
        kind: "experts",
        on,
        seconds: ms / 1e3,
        draws: 0.0,
        after: Vec::new(),
    };
    let mut out = Vec::new();
    for group in &placed.groups {
        out.push(piece(
            NPU,
            prices.on_npu(group.experts.len(), group.capacity),
        ));
        for &expert in &group.experts {
            let overflow = tokens[expert].saturating_sub(group.capacity as u64);
            out.push(piece(CPU, prices.on_cpu(overflow as f64)));
        }
    }
    let cold = placed.on_cpu.iter();
    out.extend(cold.map(|&expert| piece(CPU, prices.on_cpu(tokens[expert] as f64))));
    out.retain(|work| work.seconds > 0.0);
    out
}

/// A layer with capacities, groups and residency, or some of them.
struct Variant {
    name: &'static str,
    placed: Placement,
}

/// One capacity for all, tiers, groups, residency (5.8).
fn variants(prices: &Prices, loads: &[f64]) -> [Variant; 4] {
    let alone = GroupLimits {
        graph_bytes: 0,
        ..LIMITS
    };
    let all_hot = |limits: &GroupLimits| Placement {
        groups: limits.groups(loads, |_| true),
        on_cpu: Vec::new(),
    };
    let tiers = all_hot(&alone);
    let mut fixed = tiers.clone();
    // The capacity that the busiest expert needs.
    let most = capacity(loads.iter().copied().fold(0.0, f64::max), ROWS);
    fixed
        .groups
        .iter_mut()
        .for_each(|group| group.capacity = most);
    let of = |name, placed| Variant { name, placed };
    [
        of("a graph for each expert", fixed),
        of("tiers", tiers),
        of("groups", all_hot(&LIMITS)),
        of("residency", LIMITS.place(loads, |_| true, prices)),
    ]
}

/// Time of a variant over all passes.
struct Outcome {
    name: &'static str,
    seconds: f64,
    routes: RouteCounts,
    /// The first pass.
    part: Lanes,
}

fn run(prices: &Prices, variant: &Variant, passes: &[Vec<u64>]) -> Outcome {
    let mut routes = RouteCounts::default();
    let mut seconds = 0.0;
    let mut part = None;
    for tokens in passes {
        routes.add(&variant.placed, tokens);
        let graph = graph(prices, &variant.placed, tokens);
        let order: Vec<usize> = (0..graph.len()).collect();
        let mut order = Planned::new(&graph, PHONE.names.len(), &order);
        let slots = simulate(&graph, &PHONE, &mut order);
        seconds += makespan(&slots);
        part.get_or_insert_with(|| Lanes::new(variant.name, &PHONE, &graph, &slots));
    }
    Outcome {
        name: variant.name,
        seconds,
        routes,
        part: part.unwrap_or_else(|| Lanes::new(variant.name, &PHONE, &[], &[])),
    }
}

/// All variants on the same passes; capacities come from as many others.
pub struct Variants {
    prices: Prices,
    outcomes: Vec<Outcome>,
}

impl Variants {
    /// Simulates them.
    pub fn run() -> Self {
        let prices = Prices::fitted();
        let mut random = Rng::with_seed(5);
        let mut passes = || (0..PASSES).map(|_| pass(&mut random)).collect::<Vec<_>>();
        let (seen, passes) = (passes(), passes());
        let sum = |expert: usize| seen.iter().map(|tokens| tokens[expert]).sum::<u64>();
        let counted: Vec<f64> = (0..EXPERTS).map(|expert| sum(expert) as f64).collect();
        let loads = expected(&counted, ROWS, CHOSEN);
        let all = variants(&prices, &loads);
        Self {
            outcomes: all
                .iter()
                .map(|variant| run(&prices, variant, &passes))
                .collect(),
            prices,
        }
    }

    /// Simulated figures.
    pub fn figures(&self) -> Vec<FigureValue> {
        let cell =
            |key, experts, capacity| simulated(key, self.prices.per_token(experts, capacity));
        let [base, _, groups, all] = [0, 1, 2, 3].map(|i| &self.outcomes[i]);
        vec![
            cell("group-1x64", 1, 64),
            cell("group-4x32", 4, 32),
            cell("group-4x64", 4, 64),
            cell("group-8x64", 8, 64),
            cell("group-8x96", 8, 96),
            simulated("moe-padding", 100.0 * groups.routes.padding_share()),
            simulated("moe-overflow", 100.0 * groups.routes.overflow_share()),
            simulated("moe-all", base.seconds / all.seconds),
            simulated("moe-residency", groups.seconds / all.seconds),
        ]
    }

    /// The steps, as text.
    pub fn note(&self) -> String {
        let first = self.outcomes[0].seconds;
        let of = |outcome: &Outcome| format!("{} {:.2}", outcome.name, first / outcome.seconds);
        let steps: Vec<String> = self.outcomes.iter().map(of).collect();
        format!("NPUMoE, speed step by step: {}", steps.join(", "))
    }

    /// Lanes of the first pass.
    pub fn drawn(self) -> Drawn {
        Drawn {
            title: format!("NPUMoE, Phi-3.5-MoE: the experts of one layer, {ROWS} tokens"),
            parts: self
                .outcomes
                .into_iter()
                .map(|outcome| outcome.part)
                .collect(),
        }
    }
}
