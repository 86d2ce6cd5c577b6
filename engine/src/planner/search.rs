//! The search for the division of a budget that is expected to be the fastest, among those that the arithmetic of
//! `budget.rs` allows.

use super::budget::Division;
use super::facts::Planner;
use super::plan::Plan;
use crate::ablation::Ablation;
use crate::cluster::HOT;
use crate::error::{Error, at_next_start};
use crate::memory::Needs;

/// How many divisions between CPU and device are compared.
const CANDIDATES: u64 = 64;

/// How many numbers of layers with resident Gate rows are compared at first, those between follow.
const GATE_STEPS: u64 = 8;

/// How much slower decoding may become by the memory of a longer chunk of which a device computes most: as much
/// again is less than prompts gain.
const MOST_LOST: f64 = 1.08;

/// How much faster whole clusters must promise to be than single neurons, of which a token reads fewer bytes.
const READS_MORE: f64 = 1.1;

/// Speedup that a device must promise.
const WORTH_IT: f64 = 1.02;

/// A division beside others, and what it is expected to give.
struct Candidate {
    decode: f64,
    prompt: f64,
    division: Division,
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
        let division = self.fastest(|way| {
            let (chunk, needs) = self.chunk(way, budget)?;
            self.divided(budget, needs, chunk, self.batch)
        })?;
        let found = self.with_device(budget, division.clone());
        Ok(self.with_longer_chunk(budget, &division, found))
    }

    /// With a longer chunk, if a device computes nearly all of it and prompts gain more by that than decoding loses
    /// by the memory that it takes.
    fn with_longer_chunk(&self, budget: u64, plain: &Division, found: Division) -> Division {
        // A single text has long chunks while its prompt is computed.
        if self.batch == 1 || self.tier.as_ref().is_none_or(|tier| tier.at_once == 0) {
            return found;
        }
        let speeds =
            |d: &Division| [d.batch.max(1), d.chunk.max(2)].map(|rows| self.speed(d, rows));
        let [decode, prompt] = speeds(&found);
        let longer = self.scratch.iter().map(|s| s.chunk);
        let others = longer
            .filter(|&chunk| chunk > found.chunk)
            .filter_map(|chunk| {
                let needs = self.needs_with(&plain.needs, chunk);
                let divided = self.divided(budget, needs, chunk, plain.batch).ok()?;
                let same = divided.memory.gate_banks == plain.memory.gate_banks;
                same.then(|| self.with_device(budget, divided))
            });
        let best = others
            .filter(|other| other.widths.streamed(other.chunk) > 0)
            .map(|other| (speeds(&other), other))
            .filter(|([one, many], _)| {
                let (lost, won) = (decode / one.max(1e-9), many / prompt.max(1e-9));
                lost <= MOST_LOST && won >= lost.powi(2) * WORTH_IT
            })
            .max_by(|a, b| a.0[1].total_cmp(&b.0[1]));
        best.map_or(found, |(_, best)| best)
    }

    /// Gives the device the hottest clusters: as many as were asked for, or those with the highest expected
    /// speed of decoding, and among these of prompts. Candidates are all the same number of clusters apart;
    /// and where it and the CPU would end at the same time if nothing but hot neurons counted, by the solver
    /// of [`split`](crate::split).
    fn with_device(&self, budget: u64, division: Division) -> Division {
        let Some(tier) = &self.tier else {
            return division;
        };
        let division = Division {
            widths: self.widths(&division, self.threads),
            ..division
        };
        let all = division.needs.clusters;
        let room = (self.room_for_neurons(tier, &division) / tier.cluster_len.max(1)).min(all);
        let with = |clusters: u64| {
            let needs = Needs {
                device_clusters: clusters,
                device: match tier.unified {
                    true => clusters * tier.cluster_len,
                    false => 0,
                },
                ..division.needs
            };
            let divided = self.divided(budget, needs, division.chunk, division.batch);
            let same = |d: &Division| d.memory.gate_banks == division.memory.gate_banks;
            divided.ok().filter(same).map(|divided| Division {
                widths: division.widths.clone(),
                ..divided
            })
        };
        if tier.asked {
            let mut fewer = std::iter::successors(Some(room), |&n| Some(n * 3 / 4));
            let found = fewer.by_ref().take_while(|&n| n > 0).find_map(with);
            return found.unwrap_or(division);
        }
        let hot: u64 = match division.scans(&self.shape) {
            true => all,
            false => self.hot(division.batch).iter().map(|&n| u64::from(n)).sum(),
        };
        // What the CPU computes of a hot cluster: all of it, or what fires.
        let computed = match division.scans(&self.shape) {
            true => 1.0,
            false => division.needs.gate_share() * (1.0 - HOT) + HOT,
        };
        let balanced = tier.balanced(hot.min(room), computed, self.shape.layers);
        let apart = (1..=CANDIDATES).map(|i| room * i / CANDIDATES);
        let enough = |&n: &u64| n >= self.shape.layers as u64;
        let candidates = apart.chain([balanced]).filter(enough).filter_map(with);
        self.best_of(division.clone(), candidates)
    }

    /// Of the candidates that are worth it the one with the fastest prompts among those that decode fastest;
    /// else `plain`.
    fn best_of(&self, plain: Division, others: impl Iterator<Item = Division>) -> Division {
        let of = |division: Division| Candidate {
            decode: self.speed(&division, division.batch.max(1)),
            prompt: self.prompt_speed(&division),
            division,
        };
        let plain = of(plain);
        let pays = |one: &Candidate| {
            let prompts = one.prompt > WORTH_IT * plain.prompt;
            one.decode > WORTH_IT * plain.decode || prompts && WORTH_IT * one.decode >= plain.decode
        };
        let worth_it: Vec<Candidate> = others.map(of).filter(pays).collect();
        let fastest = worth_it.iter().map(|one| one.decode).fold(0.0, f64::max);
        let near = worth_it
            .into_iter()
            .filter(|one| WORTH_IT * one.decode >= fastest);
        let better = |a: Candidate, b: Candidate| match b.prompt > a.prompt {
            true => b,
            false => a,
        };
        near.reduce(better).unwrap_or(plain).division
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
                gate_banks: way.gate_banks,
                ..settled.needs
            };
            let divided = self.divided(budget, needs, settled.chunk, batch)?;
            Ok(Division {
                widths: settled.widths.clone(),
                ..divided
            })
        };
        match budget == settled.memory.budget() {
            true => again(&settled.needs),
            false => self.fastest(again),
        }
    }

    /// The ways in which neurons can be served, by the needs that lead to them: with resident Gate rows;
    /// of models with exact zeros in whole clusters as well, as a dense model's are; and of experts with
    /// exact zeros by their Gate parts first. Which is the fastest depends on how many neurons fire and on
    /// the device: Gate rows take a third of the memory from clusters that would be hits, and single
    /// neurons are short reads. Whatever is read, the text is the same.
    fn ways(&self) -> Vec<Needs> {
        let mut ways = vec![self.needs];
        if self.needs.gates_divide && self.firing.measured && self.compares() {
            ways.push(Needs {
                gates_help: false,
                ..self.needs
            });
        }
        if self.shape.visited < 1.0 && self.needs.gates_help && !self.needs.predicts {
            ways.extend([false, true].map(|two_phases| Needs {
                gates_help: false,
                two_phases,
                ..self.needs
            }));
        }
        ways
    }

    /// Whether forecasts of single neurons and of whole clusters are compared. They are of one text; with several
    /// the border between the regions follows the batch. A device for dense work is divided for by itself.
    fn compares(&self) -> bool {
        let full = self.ablation == Ablation::Full && !self.gates_stay;
        full && self.batch == 1 && self.tier.is_none()
    }

    /// The division of a budget with the highest expected speed, the first of equal ones.
    ///
    /// Where not everything fits, Gate rows may be resident in the first layers alone: these have room for
    /// the neurons that fire, and the others stream. In how many layers is found by halving steps around the
    /// best one. It is compared up to the budget that holds everything, so that more memory is never slower;
    /// where forecasts are not compared, up to [`ENOUGH`] of the neurons that fire for a token.
    fn fastest(
        &self,
        divide: impl Fn(&Needs) -> Result<Division, Error>,
    ) -> Result<Division, Error> {
        let enough = |d: &Division| match self.compares() {
            true => d.memory.ffn_resident_share(&d.needs) >= 1.0,
            false => self.has_room(d),
        };
        let partly = self.needs.gates_divide && !divide(&self.needs).is_ok_and(|d| enough(&d));
        let ways = self.ways();
        if let ([way], false) = (ways.as_slice(), partly) {
            return divide(way);
        }
        let mut best: Option<(f64, Division)> = None;
        let mut outcome = Ok(());
        let mut consider = |way: &Needs| {
            match divide(way) {
                Ok(division) => {
                    let reads_more = self.needs.gates_divide && !way.gates_help;
                    let least = if reads_more { READS_MORE } else { 1.0 };
                    let speed = self.speed(&division, 1) / least;
                    if best.as_ref().is_none_or(|(other, _)| speed > *other) {
                        best = Some((speed, division));
                    }
                }
                Err(e) => outcome = std::mem::replace(&mut outcome, Ok(())).and(Err(e)),
            }
            best.as_ref().map_or(0, |(_, best)| best.needs.gate_banks)
        };
        ways.iter().for_each(|way| _ = consider(way));
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
                let beside = [around.saturating_sub(step), around + step];
                for gate_banks in beside.into_iter().filter(|n| (1..banks).contains(n)) {
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
        let least = self.ways().iter().map(Needs::smallest_budget).min();
        least.unwrap_or(u64::MAX)
    }

    /// The smallest budget to report, in whole MiB, with a margin for the process size, which
    /// varies between starts.
    pub fn smallest_to_name(&self) -> u64 {
        at_next_start(self.smallest_budget())
    }

    /// The largest budget of a way that keeps at most `share` (0 to 1) of the FFN's weights resident
    /// and is then the fastest one. Where no way is, or there is one alone, it is the budget with all Gate
    /// rows, or the smallest one if they do not fit.
    pub(crate) fn budget_for_share(&self, share: f64) -> u64 {
        let kind = |n: &Needs| (n.gates_help, n.two_phases, n.gate_banks);
        let taken = |budget: u64| self.divide(budget).map_or(self.needs, |d| d.needs);
        let ways = self.ways();
        if ways.len() == 1 {
            return self.needs.budget_for_share(share);
        }
        let budgets = ways
            .into_iter()
            .map(|way| (way.budget_for_share(share), way));
        let settled = budgets.filter(|(budget, way)| kind(&taken(*budget)) == kind(way));
        let most = settled.map(|(budget, _)| budget).max();
        most.unwrap_or_else(|| self.needs.budget_for_share(share))
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use crate::planner::firing::Firing;
    use crate::planner::tests::{LAYERS, NEURONS, planner, sparse};

    /// Many firing neurons are long reads of whole clusters; few are short reads.
    #[test]
    fn exact_models_stream_where_that_is_faster() {
        let often = vec![0.7; NEURONS];
        let busy = Firing::measured((0..LAYERS).map(|_| &often[..]), Some(0.8), None);
        let gates = |firing: &Firing, batch| {
            let mut p = planner(Profile::Ufs4, firing.clone());
            p.batch = batch;
            let budget = p.needs.budget_for_share(0.6);
            let division = p.divide(budget).unwrap();
            let again = p.divide_again(&division, budget, batch).unwrap();
            assert_eq!(again.memory.gate_banks, division.memory.gate_banks);
            let share = p.divide(p.budget_for_share(0.6)).unwrap();
            assert!(share.memory.ffn_resident_share(&share.needs) <= 0.6);
            division.memory.gates_resident()
        };
        assert!(!gates(&busy, 1));
        // Forecasts are of one text.
        assert!(gates(&busy, 2));
        assert!(gates(&sparse(), 1));
    }
}
