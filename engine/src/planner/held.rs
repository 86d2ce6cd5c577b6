//! Search for the clusters that a lane holds, and for the chunk that suits it.

use super::budget::Division;
use super::facts::Planner;
use super::prompts::cheapest;
use crate::cluster::HOT;

/// Number of candidate cluster counts for a lane, evenly spaced.
const CANDIDATES: u64 = 64;

/// Largest slowdown of decode for a longer chunk that a lane computes: prompts gain more.
const MAX_SLOWDOWN: f64 = 1.08;

/// Smallest speedup for which a lane is used: less is within the noise of its measured times.
const MIN_LANE_GAIN: f64 = 1.02;

/// A division with its expected tokens per second, for decode and for a prompt.
struct Candidate {
    decode: f64,
    prompt: f64,
    division: Division,
}

impl Planner {
    /// `division`, or the faster one in which a lane holds clusters and computes prompts.
    pub(super) fn beside_lane(&self, budget: u64, division: Division) -> Division {
        let found = self.with_lane(budget, division.clone());
        self.with_longer_chunk(budget, &division, found)
    }

    /// Takes a longer chunk if a lane computes nearly all of it, decode becomes at most
    /// [`MAX_SLOWDOWN`] times slower, and prompts gain at least the square of that factor. Of several, the one with the
    /// [`cheapest`] prompts.
    fn with_longer_chunk(&self, budget: u64, plain: &Division, found: Division) -> Division {
        // A single text gets long chunks while its prompt is computed (`Planner::for_prompt`).
        if self.batch == 1 || self.lane.as_ref().is_none_or(|lane| lane.at_once == 0) {
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
                same.then(|| self.with_lane(budget, divided))
            });
        let gains = |other: &Division| {
            let [decoded, prompted] = speeds(other);
            let (lost, won) = (decode / decoded.max(1e-9), prompted / prompt.max(1e-9));
            lost <= MAX_SLOWDOWN && won >= lost.powi(2) * MIN_LANE_GAIN
        };
        let costs = others
            .filter(|other| other.widths.streamed(other.chunk) > 0 && gains(other))
            .map(|other| (self.prompt_cost(&other, self.longest_chunk()), other));
        cheapest(costs).map_or(found, |(_, best)| best)
    }

    /// Gives a lane the hottest clusters of each bank: as many as the user asked for, or the
    /// number with the fastest decode (ties: the fastest prompt). Candidates are [`CANDIDATES`]
    /// evenly spaced numbers, and the balanced one, for which lane and CPU finish together if only hot
    /// neurons counted. A lane with other bits than the CPU's has what the user gave it.
    fn with_lane(&self, budget: u64, division: Division) -> Division {
        let Some(lane) = &self.lane else {
            return division;
        };
        let division = Division {
            widths: self.widths(&division, self.threads),
            ..division
        };
        // Its part is fixed, and in the needs.
        if !lane.same_bits {
            return division;
        }
        let clusters = division.needs.clusters;
        let room = (self.room_for_neurons(lane, &division) / lane.cluster_len.max(1)).min(clusters);
        let with = |clusters: u64| {
            let needs = lane.holding(&division.needs, clusters);
            let divided = self.divided(budget, needs, division.chunk, division.batch);
            let same = |d: &Division| d.memory.gate_banks == division.memory.gate_banks;
            divided.ok().filter(same).map(|divided| Division {
                widths: division.widths.clone(),
                ..divided
            })
        };
        if lane.asked {
            let mut fewer = std::iter::successors(Some(room), |&n| Some(n * 3 / 4));
            let found = fewer.by_ref().take_while(|&n| n > 0).find_map(with);
            return found.unwrap_or(division);
        }
        // Experts use a lane only on explicit request: few tokens visit each of them, and only prompts have them in groups.
        if self.shape.visited < 1.0 {
            return division;
        }
        let hot: u64 = if division.scans(&self.shape) {
            clusters
        } else {
            self.hot(division.batch).iter().map(|&n| u64::from(n)).sum()
        };
        // Share of a hot cluster that the CPU computes: all of it, or the neurons that fire.
        let computed = if division.scans(&self.shape) {
            1.0
        } else {
            division.needs.gate_share() * (1.0 - HOT) + HOT
        };
        let cpu = computed * lane.cpu_cluster;
        let balanced = (lane.times).balanced(hot.min(room), cpu, self.shape.layers);
        let apart = (1..=CANDIDATES).map(|i| room * i / CANDIDATES);
        let enough = |&n: &u64| n >= self.shape.layers as u64;
        let candidates = apart.chain([balanced]).filter(enough).filter_map(with);
        self.best_of(division.clone(), candidates)
    }

    /// The candidate with the fastest prompt among those with near-best decode; `plain` if no
    /// candidate reaches [`MIN_LANE_GAIN`].
    fn best_of(&self, plain: Division, others: impl Iterator<Item = Division>) -> Division {
        let candidate = |division: Division| Candidate {
            decode: self.speed(&division, division.batch.max(1)),
            prompt: self.prompt_speed(&division),
            division,
        };
        let plain = candidate(plain);
        let pays = |found: &Candidate| {
            let prompts = found.prompt > MIN_LANE_GAIN * plain.prompt;
            found.decode > MIN_LANE_GAIN * plain.decode
                || prompts && MIN_LANE_GAIN * found.decode >= plain.decode
        };
        let worth_it: Vec<Candidate> = others.map(candidate).filter(pays).collect();
        let fastest = worth_it
            .iter()
            .map(|found| found.decode)
            .fold(0.0, f64::max);
        let near = worth_it
            .into_iter()
            .filter(|found| MIN_LANE_GAIN * found.decode >= fastest);
        let better = |a: Candidate, b: Candidate| if b.prompt > a.prompt { b } else { a };
        near.reduce(better).unwrap_or(plain).division
    }
}
