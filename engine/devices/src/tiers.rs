//! Experts in static shapes (NPUMoE, §4): capacity tiers, groups of experts in one graph, and the remainder on
//! the CPU. Pure arithmetic, which simulations use too.
//!
//! ```text
//! r = max n_e / mean n_e    c = S·k / E    busiest expert: r·c     n_e tokens of expert e, S tokens, k of E experts
//! capacity of an expert = smallest of 16, 32, 64, ... that is at least its expected tokens, at most S rounded up
//! ```
//!
//! The paper drops tokens beyond a capacity. Here the CPU computes them, so that the result is that of the mixture.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

/// Smallest capacity.
pub const SMALLEST: usize = 16;
/// Experts of a graph, largest first.
pub const GROUPS: [usize; 3] = [16, 8, 4];

/// Imbalance `r` of a layer: tokens of the busiest expert over the mean.
pub fn imbalance(tokens: &[u64]) -> f64 {
    let sum: u64 = tokens.iter().sum();
    let busiest = tokens.iter().copied().max().unwrap_or(0);
    match sum {
        0 => 1.0,
        sum => busiest as f64 * tokens.len() as f64 / sum as f64,
    }
}

/// Capacities for passes of up to `rows` tokens, ascending.
pub fn capacities(rows: usize) -> impl Iterator<Item = usize> {
    let most = rows.next_power_of_two().max(SMALLEST);
    let all = std::iter::successors(Some(SMALLEST), |&capacity| Some(2 * capacity));
    all.take_while(move |&capacity| capacity <= most)
}

/// Smallest capacity that is at least `expected` tokens, for passes of `rows` tokens.
pub fn capacity(expected: f64, rows: usize) -> usize {
    let most = capacities(rows).last().unwrap_or(SMALLEST);
    let holds = |&capacity: &usize| capacity as f64 >= expected;
    capacities(rows).find(holds).unwrap_or(most)
}

/// Expected tokens of each expert in a pass of `rows` tokens that each choose `chosen`; `visits` as counted or as shares.
pub fn expected(visits: &[f64], rows: usize, chosen: usize) -> Vec<f64> {
    let sum: f64 = visits.iter().sum();
    let routes = (rows * chosen) as f64;
    let even = routes / visits.len().max(1) as f64;
    let of = |&visits: &f64| match sum > 0.0 {
        false => even,
        true => routes * visits / sum,
    };
    visits.iter().map(of).collect()
}

/// Experts of one capacity in one graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapacityGroup {
    /// Numbers of the experts, the most popular first.
    pub experts: Vec<usize>,
    /// Tokens of each.
    pub capacity: usize,
}

/// Placement of the experts of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Groups on the NPU.
    pub groups: Vec<CapacityGroup>,
    /// Experts on the CPU.
    pub on_cpu: Vec<usize>,
}

/// Constraints of groups.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupLimits {
    /// Tokens of a pass.
    pub rows: usize,
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// Bytes of a graph above which the NPU refuses it.
    pub graph_bytes: u64,
    /// A group may have any number of experts, as graphs may have places without one; else those of [`GROUPS`], or one.
    pub short: bool,
}

impl GroupLimits {
    /// Experts that fit into a graph of at most `most` experts; at least one.
    fn fits(&self, most: usize) -> usize {
        let fit = self.graph_bytes / self.expert_bytes.max(1);
        most.min(usize::try_from(fit).unwrap_or(most)).max(1)
    }

    /// Experts of the next group when `left` are left.
    fn size(&self, left: usize) -> usize {
        if self.short {
            return self.fits(GROUPS[0]).min(left);
        }
        let sizes = GROUPS.iter().copied().chain([1]);
        let mut sizes = sizes.map(|most| self.fits(most));
        sizes.find(|&size| size <= left).unwrap_or(1)
    }

    /// Groups the experts that are held by capacity, those of one capacity by popularity, as many per group as fit.
    pub fn groups(&self, expected: &[f64], held: impl Fn(usize) -> bool) -> Vec<CapacityGroup> {
        let mut order: Vec<usize> = (0..expected.len()).filter(|&expert| held(expert)).collect();
        order.sort_by(|&a, &b| expected[b].total_cmp(&expected[a]));
        let mut out: Vec<CapacityGroup> = Vec::new();
        let capacity_of = |expert: usize| capacity(expected[expert], self.rows);
        for tier in order.chunk_by(|&a, &b| capacity_of(a) == capacity_of(b)) {
            let mut tier = tier;
            while let Some(&first) = tier.first() {
                let (group, rest) = tier.split_at(self.size(tier.len()));
                out.push(CapacityGroup {
                    experts: group.to_vec(),
                    capacity: capacity_of(first),
                });
                tier = rest;
            }
        }
        out
    }

    /// Keeps the most popular groups of held experts on the NPU and assigns the rest to the CPU, which computes at
    /// the same time: as many as minimize the later end.
    pub fn place(
        &self,
        expected: &[f64],
        held: impl Fn(usize) -> bool,
        times: &dyn ExpertTimes,
    ) -> Placement {
        let groups = self.groups(expected, &held);
        let cold: Vec<usize> = (0..expected.len())
            .filter(|&expert| !held(expert))
            .collect();
        let seconds = |experts: &[usize]| {
            let tokens = experts.iter().map(|&expert| expected[expert]);
            tokens.map(|tokens| times.on_cpu(tokens)).sum::<f64>()
        };
        let cpu = |group: &CapacityGroup| seconds(&group.experts);
        let npu = |group: &CapacityGroup| times.on_npu(group.experts.len(), group.capacity);
        let ends = |hot: usize| {
            let hot_ends: f64 = groups[..hot].iter().map(npu).sum();
            let cold_ends: f64 = groups[hot..].iter().map(cpu).sum();
            hot_ends.max(seconds(&cold) + cold_ends)
        };
        let by_end = |a: &usize, b: &usize| ends(*a).total_cmp(&ends(*b));
        let hot = (0..=groups.len()).rev().min_by(by_end);
        let hot = hot.unwrap_or(groups.len());
        Placement {
            on_cpu: groups[hot..]
                .iter()
                .flat_map(|group| group.experts.clone())
                .chain(cold)
                .collect(),
            groups: groups[..hot].to_vec(),
        }
    }
}

/// Seconds of experts.
pub trait ExpertTimes {
    /// A graph of `experts` experts of `capacity` tokens each.
    fn on_npu(&self, experts: usize, capacity: usize) -> f64;
    /// One expert with `tokens` tokens.
    fn on_cpu(&self, tokens: f64) -> f64;
}

/// Routes of a pass by processor: a token of k experts counts k times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteCounts {
    /// On the NPU.
    pub npu: u64,
    /// Rows of graphs without a token.
    pub padding: u64,
    /// On the CPU because a capacity was full.
    pub overflow: u64,
    /// On the CPU because their experts are.
    pub cold: u64,
}

impl RouteCounts {
    /// Adds a pass: `tokens` of each expert.
    pub fn add(&mut self, placed: &Placement, tokens: &[u64]) {
        for group in &placed.groups {
            for &expert in &group.experts {
                let taken = tokens[expert].min(group.capacity as u64);
                self.npu += taken;
                self.padding += group.capacity as u64 - taken;
                self.overflow += tokens[expert] - taken;
            }
        }
        self.cold += placed
            .on_cpu
            .iter()
            .map(|&expert| tokens[expert])
            .sum::<u64>();
    }

    /// Rows without a token over all rows of graphs.
    pub fn padding_share(&self) -> f64 {
        self.padding as f64 / (self.padding + self.npu).max(1) as f64
    }

    /// Routes beyond a capacity over all routes.
    pub fn overflow_share(&self) -> f64 {
        self.overflow as f64 / self.all().max(1) as f64
    }

    /// Routes to experts on the CPU over all routes.
    pub fn cold_share(&self) -> f64 {
        self.cold as f64 / self.all().max(1) as f64
    }

    fn all(&self) -> u64 {
        self.npu + self.overflow + self.cold
    }
}
