//! Memory arithmetic of a division: bytes and counts, no times. It takes microseconds, so it runs
//! whenever a sequence joins or leaves and whenever the budget changes.

use super::facts::{ChunkMemory, Planner};
use super::pass::{CostModel, Shape};
use crate::cluster::{CLUSTER, prefixes};
use crate::error::Error;
use crate::lane::{LanePart, Widths};
use crate::memory::{MemoryPlan, Needs};

/// A longer chunk may use at most 1/`CHUNK_PART` of the neuron memory: prefill gains much, decode
/// loses little.
const CHUNK_PART: u64 = 32;

/// The same limit if every missing cluster is read for every token, as a fraction of the missing
/// bytes: a longer chunk reads as much per pass, in fewer passes.
const READ_PART: u64 = 24;

/// Smallest useful cache: this share of the neurons that fire per token.
const USEFUL_SHARE: f64 = 0.5;

/// The result of a division.
#[derive(Debug, Clone)]
pub struct Division {
    /// Division of the memory.
    pub memory: MemoryPlan,
    /// Byte sizes it is based on.
    pub needs: Needs,
    /// Prompt tokens per pass.
    pub chunk: usize,
    /// Number of sequences.
    pub batch: usize,
    /// Clusters and rows that a lane computes, by the number of rows in a pass.
    pub widths: Widths,
}

impl Division {
    /// Whether every token reads every missing neuron, or at least its Gate row.
    pub(super) fn scans(&self, shape: &Shape) -> bool {
        shape.dense || !self.memory.gates_resident() && !self.needs.predicts
    }

    /// Whether all neurons are in memory, so that nothing is read.
    pub fn is_resident(&self) -> bool {
        let whole = self.memory.whole_clusters(&self.needs);
        self.memory.slots + whole * self.needs.cluster >= self.needs.neurons
            && self.memory.tile_slots == self.needs.tiles
    }
}

impl Planner {
    pub(super) fn divided(
        &self,
        budget: u64,
        needs: Needs,
        chunk: usize,
        batch: usize,
    ) -> Result<Division, Error> {
        Ok(Division {
            memory: needs.plan(budget)?.limited_to(self.policy, &needs),
            needs,
            chunk,
            batch,
            widths: Widths::default(),
        })
    }

    /// The longest affordable chunk, with the byte sizes that include its scratch.
    pub(super) fn chunk(&self, base: &Needs, budget: u64) -> Result<(usize, Needs), Error> {
        let least = base.plan(budget)?;
        let cache: u64 = ["gates", "hot", "cold", "tiles"]
            .iter()
            .map(|what| least.ledger.held(what))
            .sum();
        let all_fits = budget >= base.full_budget();
        let most = if streams(&self.shape, base, &least) {
            missing(base, &least) as u64 / READ_PART
        } else {
            cache / CHUNK_PART
        };
        let mut best = None;
        let held = |needs: &Needs| needs.scratch + needs.predictor;
        for &ChunkMemory { chunk, .. } in &self.scratch {
            let needs = self.needs_with(base, chunk);
            let fits = if all_fits {
                needs.full_budget() <= budget
            } else {
                held(&needs).saturating_sub(held(base)) <= most
            };
            let same = |plan: &MemoryPlan| plan.gate_banks == least.gate_banks;
            if fits && needs.plan(budget).is_ok_and(|p| same(&p)) {
                best = Some((chunk, needs));
            }
        }
        let first = self.scratch.first().map_or(1, |s| s.chunk);
        Ok(best.unwrap_or((first, *base)))
    }

    /// Whether Gate rows are resident and [`USEFUL_SHARE`] of the neurons that fire per token fit.
    pub(super) fn has_room(&self, division: &Division) -> bool {
        let (memory, needs) = (&division.memory, &division.needs);
        let room = memory.slots + memory.hot_clusters * CLUSTER as u64;
        memory.gates_resident()
            && room as f64 >= USEFUL_SHARE * self.firing.share() * needs.neurons as f64
    }

    /// Expected share of the visited experts that is resident. Without routing statistics: the
    /// share of all experts, as for uniform, independent routing.
    pub(super) fn expert_hits(&self, division: &Division) -> f64 {
        let needs = &division.needs;
        let held = division.memory.whole_clusters(needs);
        let held = held as f64 / needs.clusters.max(1) as f64;
        match self.expert_misses.and_then(|misses| misses.rate(held)) {
            Some(missed) => 1.0 - missed,
            None => held,
        }
    }

    /// First neuron outside the hot region, by layer.
    pub fn first_cold(&self, division: &Division) -> Vec<usize> {
        if self.shape.visited < 1.0 {
            let hits = self.expert_hits(division);
            let first = (self.shape.neurons as f64 * hits) as usize;
            return vec![first; self.shape.layers];
        }
        let hot = self.hot(division.batch);
        let clusters = vec![self.shape.neurons.div_ceil(CLUSTER) as u32; hot.len()];
        let wanted = if division.scans(&self.shape) {
            &clusters
        } else {
            hot
        };
        let whole = division.memory.whole_clusters(&division.needs);
        let prefix = prefixes(whole, wanted, &clusters);
        let outside = prefixes(division.needs.lane_clusters, &clusters, &clusters);
        let neuron = |c: u32| (c as usize * CLUSTER).min(self.shape.neurons);
        let ends = prefix.iter().zip(outside);
        ends.map(|(&hot, outside)| neuron(hot.max(outside)))
            .collect()
    }

    /// Cost model for `threads` threads without a lane. `None` without rates for that thread
    /// count.
    pub(super) fn pass(&self, division: &Division, threads: usize) -> Option<CostModel<'_>> {
        Some(CostModel {
            shape: &self.shape,
            firing: &self.firing,
            machine: &self.rates,
            rates: self.rates.with_threads(threads)?,
            storage: &self.storage,
            stream: &self.stream,
            predictor: self.predictor,
            stream_buffers: division.memory.stream_buffers,
            two_phases: division.needs.two_phases && division.memory.slots > 0,
            foresees: self.policy.prefetches && !self.gates_first,
            beside: LanePart::default(),
        })
    }
}

/// Whether whole clusters are read for every token.
pub(super) fn streams(shape: &Shape, needs: &Needs, plan: &MemoryPlan) -> bool {
    let scans = shape.dense || !plan.gates_resident() && !needs.predicts;
    scans && (plan.slots == 0 || plan.gates_partly())
}

/// Bytes that are not in memory: of neurons, tiles and matrices that are read for every pass.
fn missing(needs: &Needs, plan: &MemoryPlan) -> f64 {
    let neuron = (needs.gate_len + needs.rest_len) as f64;
    let tiles = needs.tiles.saturating_mul(needs.tile_slot) as f64;
    let ffn = (1.0 - plan.ffn_resident_share(needs)) * (needs.neurons as f64 * neuron + tiles);
    ffn + needs.streamed as f64
}
