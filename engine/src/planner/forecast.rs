//! Expected speed of a division, and its bottleneck. A forecast takes longer than a division; it
//! runs when its result is needed: in the search, for the thread count, and for the report.

use emberflow_storage::profile::Origin;

use super::budget::{Division, streams};
use super::facts::{BATCHES, Planner};
use super::firing::{Absent, Firing};
use super::pass::{CostModel, Forecast};
use super::plan::{Basis, DraftPass, HotCut, Plan};
use crate::cluster::CLUSTER;
use crate::counters::Counters;
use crate::error::Error;

/// Numbers of drafts whose passes are forecast.
const DRAFTS: [usize; 3] = [2, 4, 8];

/// Speedup that fewer threads than cores must promise.
const MIN_SPEEDUP: f64 = 1.2;

/// Shared inputs of a division's forecasts.
struct ForecastInputs {
    /// First neuron outside the hot region, by layer.
    first: Vec<usize>,
    /// Miss rates of the cold region.
    absent: Absent,
}

/// Slots of the cold region for visited neurons, and the first neuron that it serves of each bank in `first`, or of
/// each bank with resident Gate rows.
fn cold<'a>(planner: &Planner, division: &Division, first: &'a [usize]) -> (u64, &'a [usize]) {
    let memory = &division.memory;
    if memory.gates_partly() {
        let with_gates = first.len().min(memory.gate_banks as usize);
        (memory.slots, &first[..with_gates])
    } else if division.scans(&planner.shape) {
        (0, first)
    } else {
        let visited = memory.slots as f64 * planner.shape.visited.min(1.0);
        (visited as u64, first)
    }
}

fn outlook(planner: &Planner, division: &Division) -> ForecastInputs {
    let first = planner.first_cold(division);
    let (slots, served) = cold(planner, division, &first);
    let fixed = division.needs.lane_clusters * CLUSTER as u64;
    let absent = planner.firing.absent_beside(fixed, slots, served);
    ForecastInputs { absent, first }
}

impl Planner {
    /// The thread count with the highest expected speed.
    pub(crate) fn best_threads(&self, division: &Division) -> Result<usize, Error> {
        let counts = self.rates.threads.iter().map(|t| t.threads as usize);
        let fewer: Vec<usize> = counts.filter(|&n| n < self.threads).collect();
        if self.threads_fixed || fewer.is_empty() {
            return Ok(self.threads);
        }
        let outlook = outlook(self, division);
        let mut best: Option<(f64, usize)> = None;
        for threads in [self.threads].into_iter().chain(fewer) {
            let speed = self.pass(division, threads).map(|pass| {
                let decode = self.expect(&pass, division, &outlook, 1);
                decode.tokens_per_s
            });
            if let Some(speed) = speed
                && best.is_none_or(|(other, _)| speed > MIN_SPEEDUP * other)
            {
                best = Some((speed, threads));
            }
        }
        best.map(|(_, threads)| threads)
            .ok_or_else(|| self.rates.missing())
    }

    /// Expected tokens per second of `division` with all threads, in passes of `tokens` tokens. 0
    /// without rates.
    pub(crate) fn speed(&self, division: &Division, tokens: usize) -> f64 {
        let expected = self.expected(division, tokens);
        expected.map_or(0.0, |expected| expected.tokens_per_s)
    }

    /// The forecast of a pass of `tokens` tokens with all threads. `None` without rates.
    pub(super) fn expected(&self, division: &Division, tokens: usize) -> Option<Forecast> {
        let outlook = outlook(self, division);
        let pass = self.pass(division, self.threads)?;
        Some(self.expect(&pass, division, &outlook, tokens))
    }

    /// Forecasts `division` with `threads` compute threads.
    ///
    /// # Errors
    /// Rates without any thread count.
    pub fn forecast(&self, division: &Division, threads: usize) -> Result<Plan, Error> {
        let Division {
            memory,
            needs,
            chunk,
            ..
        } = division;
        let outlook = outlook(self, division);
        let pass = self
            .pass(division, threads)
            .ok_or_else(|| self.rates.missing())?;
        let gates_resident = memory.gates_resident();
        let (random, reads_per_bundle) = match () {
            () if memory.gate_banks > 0 => (self.shape.rest_read, 1),
            () if !self.gates_first => (self.shape.stride, 1),
            () => (self.shape.gate_read, if memory.slots == 0 { 1 } else { 2 }),
        };
        let experts = self.shape.visited < 1.0;
        // With resident Gate rows, neurons of models with exact zeros are read one by one.
        let visits = experts && streams(&self.shape, needs, memory);
        let misses = memory.hot_clusters < needs.host_clusters();
        let scan = division.scans(&self.shape);
        let prefetch = scan && !needs.two_phases && memory.hot_clusters < needs.host_clusters();
        let decode = self.expect(&pass, division, &outlook, 1);
        let time = |rows| rows as f64 / self.expect(&pass, division, &outlook, rows).tokens_per_s;
        let drafts = match decode.reads > 0.0 {
            true => DRAFTS
                .map(|drafts| DraftPass::new(drafts, time(1 + drafts) / time(1)))
                .to_vec(),
            false => Vec::new(),
        };
        Ok(Plan {
            ffn_resident_share: memory.ffn_resident_share(needs),
            gates_resident,
            gates_resident_share: memory.gate_banks as f64 / memory.banks.max(1) as f64,
            reads_per_bundle,
            hot_cut: BATCHES.map(|batch| self.hot_cut(division, batch)).to_vec(),
            random_read_bytes: random,
            sequential_read_bytes: self.shape.cluster_read,
            streamed_bytes: memory.streamed,
            stream_buffers: memory.stream_buffers,
            prefetch_clusters: if prefetch { memory.stream_buffers } else { 0 },
            compute_threads: threads,
            io_core: self.io_core,
            chunk: *chunk,
            predictor: self.predictor,
            devices: self.explain_beside(division, threads),
            decode,
            drafts,
            prefill: self.expect(&pass, division, &outlook, (*chunk).max(2)),
            basis: Basis {
                machine_measured: self.rates.measured,
                machine_doubt: self.rates.doubt.clone(),
                device_measured: !matches!(self.storage.origin(), Origin::Assumed(_)),
                device_doubtful: self.storage.origin() == Origin::Doubtful,
                device: self.storage.origin().to_string(),
                statistics: if experts {
                    !visits || !misses || self.expert_misses.is_some()
                } else {
                    self.firing.measured
                },
                neurons_assumed: experts && !visits && misses && !self.firing.measured,
            },
            expert_hit_rate: visits.then(|| self.expert_hits(division)),
            memory: memory.clone(),
        })
    }

    /// The assumed firing statistics, corrected by measured tokens with this division.
    pub(crate) fn corrected_firing(&self, division: &Division, seen: &Counters) -> Firing {
        let share = seen.fired as f64 / seen.possible.max(1) as f64;
        let missed = 1.0 - seen.hits as f64 / seen.looked_up.max(1) as f64;
        let first = self.first_cold(division);
        let (slots, served) = cold(self, division, &first);
        let missed = (seen.looked_up > 0).then_some(missed);
        (self.firing).corrected(share, missed, slots, served)
    }

    /// Forecast of a pass of `tokens` tokens. Decode: in the middle of the context. Prefill: a
    /// chunk in the middle of a prompt as long as the longest chunk, so that chunk sizes are
    /// compared on the same prompt.
    fn expect(
        &self,
        pass: &CostModel<'_>,
        division: &Division,
        outlook: &ForecastInputs,
        tokens: usize,
    ) -> Forecast {
        let longest = self.scratch.iter().map(|s| s.chunk).max().unwrap_or(0);
        let before = match tokens {
            0..=1 => self.context / 2,
            _ => longest.saturating_sub(tokens) / 2,
        };
        let ForecastInputs { first, absent } = outlook;
        let pass = CostModel {
            beside: self.part_beside(division, tokens),
            ..*pass
        };
        pass.forecast(&division.memory, first, absent, tokens, before)
    }

    fn hot_cut(&self, division: &Division, batch: usize) -> HotCut {
        let clusters = division.needs.clusters.max(1);
        let hot = if division.scans(&self.shape) {
            clusters
        } else {
            self.hot(batch).iter().map(|&n| u64::from(n)).sum()
        };
        HotCut {
            batch,
            clusters: hot,
            resident: hot.min(division.memory.hot_clusters),
            share: hot as f64 / clusters as f64,
        }
    }
}
