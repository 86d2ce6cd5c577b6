//! Division of a budget. Pure arithmetic that takes microseconds, so it runs whenever a sequence
//! joins or leaves and whenever the budget changes.

use super::facts::{Planner, Scratched};
use crate::error::Error;
use crate::memory::{MemoryPlan, Needs};
use crate::store::regions::{CLUSTER, HOT, prefixes};

/// Largest share of neuron memory that a longer chunk may cost: it speeds up prefill much and slows
/// decode a little.
const CHUNK_SHARE: f64 = 1.0 / 32.0;

/// Largest increase of what each token reads, where every cluster out of memory is read for every
/// token, for a longer chunk: its passes read the same, but fewer of them do.
const READ_SHARE: f64 = 1.0 / 24.0;

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
}

impl Planner {
    /// Divides `budget` for the configured number of sequences.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`], which names the smallest that works.
    pub fn divide(&self, budget: u64) -> Result<Division, Error> {
        let division = self.fastest(&self.ways(), |way| {
            let (chunk, needs) = self.chunk(way, budget)?;
            self.divided(budget, needs, chunk, self.batch)
        })?;
        Ok(self.with_device(budget, division))
    }

    /// Gives the device the hottest clusters, as many as it has room for and as make it and the CPU
    /// end at the same time. Where its memory is the machine's, these are clusters that would have
    /// been hot, and fewer where the rest of the plan would suffer.
    fn with_device(&self, budget: u64, division: Division) -> Division {
        let Some(tier) = &self.tier else {
            return division;
        };
        let memory = &division.memory;
        let hot: u64 = match tier.asked || self.scans(&division) {
            true => division.needs.clusters,
            false => self.hot(division.batch).iter().map(|&n| u64::from(n)).sum(),
        };
        let most = match tier.unified && !tier.asked {
            true => hot.min(memory.hot_clusters),
            false => hot,
        };
        let room = (tier.memory / tier.cluster_len.max(1)).min(most);
        // What the CPU computes of a hot cluster: all of it, or what fires.
        let computed = match self.scans(&division) {
            true => 1.0,
            false => division.needs.gate_share() * (1.0 - HOT) + HOT,
        };
        let mut clusters = match tier.asked {
            true => room,
            false => room.min(tier.balanced(hot, computed, self.shape.layers)),
        };
        while clusters > 0 {
            let needs = Needs {
                device_clusters: clusters,
                device: match tier.unified {
                    true => clusters * tier.cluster_len,
                    false => 0,
                },
                ..division.needs
            };
            let divided = self.divided(budget, needs, division.chunk, division.batch);
            match divided {
                Ok(divided) if divided.memory.residency == memory.residency => return divided,
                _ => clusters = clusters * 3 / 4,
            }
        }
        division
    }

    /// Divides again for another budget or number of sequences of an open engine. The chunk size is
    /// kept, and so is the way in which neurons are served where the budget is; the past memory peak
    /// is ignored.
    ///
    /// # Errors
    /// As [`Planner::divide`].
    pub fn divide_again(
        &self,
        settled: &Division,
        budget: u64,
        batch: usize,
    ) -> Result<Division, Error> {
        let hot = self.hot(batch).iter().map(|&n| u64::from(n)).sum();
        let again = |way: &Needs| {
            let needs = Needs {
                process_peak: 0,
                hot_clusters: hot,
                gates_help: way.gates_help,
                two_phases: way.two_phases,
                ..settled.needs
            };
            self.divided(budget, needs, settled.chunk, batch)
        };
        match budget == settled.memory.budget() {
            true => again(&settled.needs),
            false => self.fastest(&self.ways(), again),
        }
    }

    /// The ways in which neurons can be served, by the needs that lead to them: as a dense model's
    /// are; and of experts with exact zeros, whole ones as well, or their Gate parts first. Which is
    /// the fastest depends on how many neurons fire and on the device: Gate rows take a third of the
    /// memory from experts that would be hits, and single neurons are short reads.
    fn ways(&self) -> Vec<Needs> {
        let mut ways = vec![self.needs];
        if self.shape.visited < 1.0 && self.needs.gates_help && !self.needs.predicts {
            ways.extend([false, true].map(|two_phases| Needs {
                gates_help: false,
                two_phases,
                ..self.needs
            }));
        }
        ways
    }

    /// The division with the highest expected speed, the first of equal ones.
    fn fastest(
        &self,
        ways: &[Needs],
        divide: impl Fn(&Needs) -> Result<Division, Error>,
    ) -> Result<Division, Error> {
        let mut best: Option<(f64, Division)> = None;
        let mut outcome = Ok(());
        for way in ways {
            match divide(way) {
                Ok(division) if ways.len() == 1 => return Ok(division),
                Ok(division) => {
                    let speed = self.speed(&division);
                    if best.as_ref().is_none_or(|(other, _)| speed > *other) {
                        best = Some((speed, division));
                    }
                }
                Err(e) => outcome = outcome.and(Err(e)),
            }
        }
        match best {
            Some((_, division)) => Ok(division),
            None => outcome.and_then(|()| Err(self.no_rates())),
        }
    }

    /// The smallest feasible budget.
    pub fn smallest_budget(&self) -> u64 {
        let least = self.ways().iter().map(Needs::smallest_budget).min();
        least.unwrap_or(u64::MAX)
    }

    /// The largest budget of a way that keeps at most `share` (0 to 1) of the FFN's weights resident
    /// and is then the fastest one.
    pub(crate) fn budget_for_share(&self, share: f64) -> u64 {
        let ways = self.ways();
        let budgets = ways.iter().map(|way| (way.budget_for_share(share), way));
        let settled = |&(budget, way): &(u64, &Needs)| {
            let taken = self.divide(budget).map(|division| division.needs);
            taken.is_ok_and(|n| (n.gates_help, n.two_phases) == (way.gates_help, way.two_phases))
        };
        let most = budgets
            .clone()
            .filter(settled)
            .map(|(budget, _)| budget)
            .max();
        most.unwrap_or_else(|| self.needs.budget_for_share(share))
    }

    fn divided(
        &self,
        budget: u64,
        needs: Needs,
        chunk: usize,
        batch: usize,
    ) -> Result<Division, Error> {
        Ok(Division {
            memory: needs.plan(budget)?.limited_to(self.ablation, &needs),
            needs,
            chunk,
            batch,
        })
    }

    /// The longest affordable chunk, and the needs with it.
    fn chunk(&self, base: &Needs, budget: u64) -> Result<(usize, Needs), Error> {
        let least = base.plan(budget)?;
        let cache: u64 = ["gates", "hot", "cold"]
            .iter()
            .map(|what| least.ledger.held(what))
            .sum();
        let spare = budget.saturating_sub(base.full_budget());
        // If everything fits, keep everything resident.
        let most = match spare {
            0 if self.streams(base, &least) => (missing(base, &least) * READ_SHARE) as u64,
            0 => (cache as f64 * CHUNK_SHARE) as u64,
            spare => spare,
        };
        let mut best = None;
        let held = |needs: &Needs| needs.scratch + needs.predictor;
        for &Scratched { chunk, .. } in &self.scratch {
            let needs = self.needs_with(base, chunk);
            let fits = held(&needs).saturating_sub(held(base)) <= most;
            let same = |plan: &MemoryPlan| plan.residency == least.residency;
            if fits && needs.plan(budget).is_ok_and(|p| same(&p)) {
                best = Some((chunk, needs));
            }
        }
        let first = self.scratch.first().map_or(1, |s| s.chunk);
        Ok(best.unwrap_or((first, *base)))
    }

    /// Whether whole clusters are read for every token.
    pub(super) fn streams(&self, needs: &Needs, plan: &MemoryPlan) -> bool {
        let scans = self.shape.dense || !plan.gates_resident() && !needs.predicts;
        scans && plan.slots == 0
    }

    /// Whether every token needs every neuron, or its Gate part from flash.
    pub(super) fn scans(&self, division: &Division) -> bool {
        let resident = division.memory.gates_resident();
        self.shape.dense || !resident && !division.needs.predicts
    }

    /// Expected share of the visited experts that is resident: by the statistics, or as much as of
    /// all experts, as if tokens were routed evenly and independently.
    pub(super) fn expert_hits(&self, division: &Division) -> f64 {
        let needs = &division.needs;
        let held = division.memory.hot_clusters as f64 / needs.clusters.max(1) as f64;
        match self.expert_misses.and_then(|misses| misses.rate(held)) {
            Some(missed) => 1.0 - missed,
            None => held,
        }
    }

    /// First neuron outside the hot region, by layer.
    pub(super) fn first_cold(&self, division: &Division) -> Vec<usize> {
        if self.shape.visited < 1.0 {
            let hits = self.expert_hits(division);
            let first = (self.shape.neurons as f64 * hits) as usize;
            return vec![first; self.shape.layers];
        }
        let hot = self.hot(division.batch);
        let all = vec![self.shape.neurons.div_ceil(CLUSTER) as u32; hot.len()];
        let wanted = if self.scans(division) { &all } else { hot };
        let whole = division.memory.hot_clusters + division.needs.device_clusters;
        let prefix = prefixes(whole, wanted, &all);
        let neuron = |&c: &u32| (c as usize * CLUSTER).min(self.shape.neurons);
        prefix.iter().map(neuron).collect()
    }
}

/// Bytes of the neurons that are not in memory.
fn missing(needs: &Needs, plan: &MemoryPlan) -> f64 {
    let neuron = (needs.gate_len + needs.rest_len) as f64;
    (1.0 - plan.ffn_resident_share(needs)) * needs.neurons as f64 * neuron
}
