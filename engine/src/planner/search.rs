//! Search for the division of a budget with the highest expected speed. `budget.rs` computes which
//! divisions are possible, `forecast.rs` how fast they are.

use emberflow_storage::mem;

use super::budget::Division;
use super::facts::Planner;
use super::plan::Plan;
use crate::ablation::Policy;
use crate::error::{Error, at_next_start};
use crate::memory::Needs;

/// Number of layer counts with resident Gate rows compared first; a bisection refines the best.
const GATE_STEPS: u64 = 8;

/// A forecast has an error of about 10 %, so a choice that moves more bytes must promise a larger
/// gain: whole clusters instead of single neurons, or a long chunk instead of cached weights.
pub(crate) const FORECAST_MARGIN: f64 = 1.1;

/// Which ways of loading neurons a new division may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Candidates {
    /// The one in use.
    Current,
    /// The fastest of all.
    All,
}

impl Planner {
    /// Divides `budget`, chooses the thread count and forecasts the speed.
    ///
    /// # Errors
    /// As [`Planner::divide`].
    pub fn plan(&self, budget: u64) -> Result<Plan, Error> {
        let division = self.divide(budget)?;
        let threads = self.best_threads(&division)?;
        self.forecast(&division, threads)
    }

    /// Divides `budget` for the configured number of sequences.
    ///
    /// # Errors
    /// [`Error::BudgetTooSmall`], which names the smallest that works.
    pub fn divide(&self, budget: u64) -> Result<Division, Error> {
        let division = self.fastest(|needs| {
            let (chunk, needs) = self.chunk(needs, budget)?;
            self.divided(budget, needs, chunk, self.batch)
        });
        match (division, &self.streamed) {
            (Err(Error::BudgetTooSmall { .. }), Some(needs)) => {
                let divided = self
                    .chunk(needs, budget)
                    .and_then(|(chunk, needs)| self.divided(budget, needs, chunk, self.batch));
                divided.map_err(|mut error| {
                    if let Error::BudgetTooSmall { full, .. } = &mut error {
                        *full = self.needs.full_budget();
                    }
                    error
                })
            }
            (division, _) => Ok(self.beside_lane(budget, division?)),
        }
    }

    /// Divides again for another budget or number of sequences while the engine is open. The chunk
    /// size is kept. The past memory peak is ignored.
    ///
    /// # Errors
    /// As [`Planner::divide`].
    pub(crate) fn divide_again(
        &self,
        settled: &Division,
        budget: u64,
        batch: usize,
        candidates: Candidates,
    ) -> Result<Division, Error> {
        let hot = self.hot(batch).iter().map(|&n| u64::from(n)).sum();
        let again = |needs: &Needs| {
            let needs = Needs {
                process_peak: 0,
                hot_clusters: hot,
                gates_help: needs.gates_help,
                two_phases: needs.two_phases,
                gate_banks: needs.gate_banks,
                ..settled.needs
            };
            let divided = self.divided(budget, needs, settled.chunk, batch)?;
            Ok(Division {
                widths: settled.widths.clone(),
                ..divided
            })
        };
        match candidates {
            Candidates::Current => again(&settled.needs),
            Candidates::All => self.fastest(again),
        }
    }

    /// The candidate loading strategies, as byte sizes: with resident Gate rows; for models with
    /// exact zeros also as whole clusters, as in a dense model; for experts with exact zeros also
    /// Gate rows first, from flash. The fastest depends on how many neurons fire and on the storage
    /// device: resident Gate rows take a third of the memory from clusters that would hit, and
    /// single neurons are short reads. The text is the same for all of them.
    fn candidates(&self) -> Vec<Needs> {
        let mut candidates = vec![self.needs];
        if self.needs.gates_divide && self.firing.known() && self.compares() {
            candidates.push(Needs {
                gates_help: false,
                ..self.needs
            });
        }
        if self.shape.visited < 1.0 && self.needs.gates_help && !self.needs.predicts {
            candidates.extend([false, true].map(|two_phases| Needs {
                gates_help: false,
                two_phases,
                ..self.needs
            }));
        }
        candidates
    }

    /// Whether forecasts of single neurons and of whole clusters are compared. They apply to one
    /// text: with several, the border between the regions follows the batch.
    pub(crate) fn compares(&self) -> bool {
        let full = self.policy == Policy::FULL && !self.gates_stay;
        full && self.batch == 1
    }

    /// The division with the highest expected speed, the first of equal ones.
    ///
    /// If not everything fits, Gate rows may be resident in the first n layers only: those layers
    /// have memory for the neurons that fire, and the others stream. A bisection around the best of
    /// [`GATE_STEPS`] values finds n. If forecasts are compared, this runs up to the budget that
    /// holds everything, so that more memory is never slower; otherwise up to
    /// [`USEFUL_SHARE`](super::budget::USEFUL_SHARE).
    fn fastest(
        &self,
        divide: impl Fn(&Needs) -> Result<Division, Error>,
    ) -> Result<Division, Error> {
        let enough = |d: &Division| {
            if self.compares() {
                d.memory.ffn_resident_share(&d.needs) >= 1.0
            } else {
                self.has_room(d)
            }
        };
        let partly = self.needs.gates_divide && !divide(&self.needs).is_ok_and(|d| enough(&d));
        let candidates = self.candidates();
        if let ([needs], false) = (candidates.as_slice(), partly) {
            return divide(needs);
        }
        let mut best: Option<(f64, Division)> = None;
        let mut outcome = Ok(());
        let mut consider = |needs: &Needs| {
            match divide(needs) {
                Ok(division) => {
                    let reads_more = self.needs.gates_divide && !needs.gates_help;
                    let least = if reads_more { FORECAST_MARGIN } else { 1.0 };
                    let speed = self.speed(&division, 1) / least;
                    if best.as_ref().is_none_or(|(other, _)| speed > *other) {
                        best = Some((speed, division));
                    }
                }
                Err(e) => outcome = std::mem::replace(&mut outcome, Ok(())).and(Err(e)),
            }
            best.as_ref().map_or(0, |(_, best)| best.needs.gate_banks)
        };
        candidates.iter().for_each(|needs| _ = consider(needs));
        if partly {
            let banks = self.needs.banks;
            let with = |gate_banks: u64| Needs {
                gate_banks,
                ..self.needs
            };
            let mut step = banks.div_ceil(GATE_STEPS).next_power_of_two();
            let mut around = banks;
            for gate_banks in (step..banks).step_by(step as usize) {
                around = consider(&with(gate_banks));
            }
            while step > 1 {
                step /= 2;
                let neighbours = [around.saturating_sub(step), around + step];
                for gate_banks in neighbours.into_iter().filter(|n| (1..banks).contains(n)) {
                    around = consider(&with(gate_banks));
                }
            }
        }
        match best {
            Some((_, division)) => Ok(division),
            None => outcome.and_then(|()| Err(self.rates.missing())),
        }
    }

    /// The smallest feasible budget.
    pub fn smallest_budget(&self) -> u64 {
        let candidates = self.candidates().into_iter().chain(self.streamed);
        let least = candidates.map(|needs| needs.smallest_budget()).min();
        least.unwrap_or(u64::MAX)
    }

    /// The smallest budget to report, in whole MiB. Includes a margin, because the process size
    /// varies between starts.
    pub fn smallest_to_name(&self) -> u64 {
        at_next_start(self.smallest_budget())
    }

    /// The budget that holds the whole model with the longest chunk, and what a lane holds if memory is no limit: the CPU has
    /// Gate rows of these neurons too.
    pub fn full_budget(&self) -> u64 {
        let needs = self.needs_with(&self.needs, self.longest_chunk());
        let full = needs.full_budget();
        let follows = self.lane.as_ref().filter(|lane| lane.follows());
        let with_lane = follows.and_then(|lane| {
            let clusters = self.divide(2 * full).ok()?.needs.lane_clusters;
            Some(lane.holding(&needs, clusters).full_budget())
        });
        full.max(with_lane.unwrap_or(0))
    }

    /// Takes note of what the process has held so far.
    pub(crate) fn see_peak(&mut self) {
        let peak = mem::peak_rss().unwrap_or(0);
        for needs in [&mut self.needs].into_iter().chain(&mut self.streamed) {
            needs.process_peak = needs.process_peak.max(peak);
        }
    }

    /// The same if the caller allocates `bytes` more.
    pub(crate) fn reserving(&self, bytes: u64) -> Self {
        let mut planner = self.clone();
        planner.needs.scratch += bytes;
        planner
            .streamed
            .iter_mut()
            .for_each(|needs| needs.scratch += bytes);
        planner.scratch.iter_mut().for_each(|of| of.bytes += bytes);
        planner
    }

    /// The budget that holds everything but tables of which a token needs few rows.
    pub(crate) fn budget_without_tables(&self) -> u64 {
        let needs = Needs {
            tables: [0; 3],
            ..self.needs_with(&self.needs, self.longest_chunk())
        };
        needs.full_budget()
    }

    /// The largest budget that keeps at most `share` (0 to 1) of the FFN weights resident and whose
    /// fastest division does so. If there is none, or only one candidate: the budget with all Gate
    /// rows, or the smallest budget if they do not fit.
    pub(crate) fn budget_for_share(&self, share: f64) -> u64 {
        let kind = |n: &Needs| (n.gates_help, n.two_phases, n.gate_banks);
        let taken = |budget: u64| self.divide(budget).map_or(self.needs, |d| d.needs);
        let candidates = self.candidates();
        if candidates.len() == 1 {
            return self.needs.budget_for_share(share);
        }
        let budgets = candidates
            .into_iter()
            .map(|needs| (needs.budget_for_share(share), needs));
        let settled = budgets.filter(|(budget, needs)| kind(&taken(*budget)) == kind(needs));
        let most = settled.map(|(budget, _)| budget).max();
        most.unwrap_or_else(|| self.needs.budget_for_share(share))
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use crate::counters::Counters;
    use crate::planner::Candidates;
    use crate::planner::firing::Firing;
    use crate::planner::tests::{LAYERS, NEURONS, planner, sparse};

    /// Many firing neurons: long reads of whole clusters. Few: short reads.
    #[test]
    fn exact_models_stream_where_that_is_faster() {
        let often = vec![0.7; NEURONS];
        let busy = Firing::measured((0..LAYERS).map(|_| &often[..]), Some(0.8), None);
        let gates = |firing: &Firing, batch| {
            let mut p = planner(Profile::Ufs4, firing.clone());
            p.batch = batch;
            let budget = p.needs.budget_for_share(0.6);
            let division = p.divide(budget).unwrap();
            let again = p
                .divide_again(&division, budget, batch, Candidates::Current)
                .unwrap();
            assert_eq!(again.memory.gate_banks, division.memory.gate_banks);
            let share = p.divide(p.budget_for_share(0.6)).unwrap();
            assert!(share.memory.ffn_resident_share(&share.needs) <= 0.6);
            division.memory.gates_resident()
        };
        assert!(!gates(&busy, 1));
        // Forecasts compare candidates for one text only.
        assert!(gates(&busy, 2));
        assert!(gates(&sparse(), 1));
    }

    /// Fewer neurons fire than assumed, and they recur: Gate rows of more layers are resident.
    #[test]
    fn first_tokens_change_how_neurons_are_served() {
        let mut p = planner(Profile::Ufs4, Firing::unknown(LAYERS, NEURONS));
        let budget = p.needs.budget_for_share(0.3);
        let before = p.divide(budget).unwrap();
        let seen = Counters {
            fired: 8,
            possible: 100,
            hits: 97,
            looked_up: 100,
            ..Counters::default()
        };
        p.firing = p.corrected_firing(&before, &seen);
        assert!((p.firing.share() - 0.08).abs() < 0.01);
        let same = (p.divide_again(&before, budget, 1, Candidates::Current)).unwrap();
        assert_eq!(same.memory.gate_banks, before.memory.gate_banks);
        let after = p.divide_again(&before, budget, 1, Candidates::All).unwrap();
        assert_eq!(after.memory.budget(), before.memory.budget());
        let [old, new] = [&before, &after].map(|d| d.memory.gate_banks);
        assert!(new > old, "{new} of {old}");
    }
}
