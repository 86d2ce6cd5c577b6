//! Division of the memory while a prompt is computed.

use std::time::Duration;

use emberflow_storage::profile::Pattern;

use super::budget::Division;
use super::facts::{ChunkMemory, Planner};
use super::search::FORECAST_MARGIN;

/// Time to shrink the cache and grow it back: 1 ms with 1 MB of buffers for a chunk, 10 ms with 20 MB.
const MOVE_TIME: Duration = Duration::from_micros(500);

/// Times that differ by this factor are equal: measurements of one machine differ by as much.
const TIE: f64 = 1.02;

/// Bytes of a chunk's buffers that are made per nanosecond: their pages are touched first.
const BUFFERS_PER_NS: u64 = 2;

/// Costs of a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PromptCost {
    pub seconds: f64,
    /// Bytes read.
    pub bytes: f64,
}

impl PromptCost {
    /// Whether the times differ by no more than forecasts of the same machine do.
    fn ties(self, other: Self) -> bool {
        self.seconds <= TIE * other.seconds && other.seconds <= TIE * self.seconds
    }

    /// With what is read in addition.
    fn and(self, more: Self) -> Self {
        Self {
            seconds: self.seconds + more.seconds,
            bytes: self.bytes + more.bytes,
        }
    }
}

/// The fastest; of those that tie with it, the one that reads the fewest bytes.
pub(super) fn cheapest<T>(all: impl Iterator<Item = (PromptCost, T)>) -> Option<(PromptCost, T)> {
    let all: Vec<(PromptCost, T)> = all.collect();
    let costs = all.iter().map(|of| of.0);
    let fastest = costs.min_by(|a, b| a.seconds.total_cmp(&b.seconds))?;
    let near = all.into_iter().filter(|of| of.0.ties(fastest));
    near.min_by(|a, b| a.0.bytes.total_cmp(&b.0.bytes))
}

impl Planner {
    /// The fastest division for a prompt of `tokens` tokens, with a longer chunk that takes memory
    /// from the cache. The time to read the evicted weights again is included. `None` unless it is
    /// [`FORECAST_MARGIN`] times as fast as `usual`. Beside a lane, whose work hides reads, it may also be as fast and read
    /// less.
    pub(crate) fn for_prompt(&self, usual: &Division, tokens: usize) -> Option<Division> {
        let longer = self.scratch.iter().map(|s: &ChunkMemory| s.chunk);
        let longer = longer.filter(|&chunk| chunk > usual.chunk && chunk < 2 * tokens);
        let divisions = longer.filter_map(|chunk| {
            let mut long = self.with_chunk(usual, chunk)?;
            if self.stream_buffers(usual) == 0 {
                long.widths.keep_to_held();
            }
            Some(long)
        });
        let costs = divisions.map(|d| {
            let moves = MOVE_TIME + Duration::from_nanos(d.needs.scratch / BUFFERS_PER_NS);
            let moves = PromptCost {
                seconds: moves.as_secs_f64(),
                bytes: 0.0,
            };
            let cost = self.prompt_cost(&d, tokens).and(moves);
            (cost.and(refill(self, usual, &d)), d)
        });
        let (best, division) = cheapest(costs)?;
        let before = self.prompt_cost(usual, tokens);
        let hidden = self.lane.is_some() && best.seconds <= TIE * before.seconds;
        let pays =
            best.seconds * FORECAST_MARGIN < before.seconds || hidden && best.bytes < before.bytes;
        pays.then_some(division)
    }

    /// Costs of a prompt of `tokens` tokens.
    pub(super) fn prompt_cost(&self, d: &Division, tokens: usize) -> PromptCost {
        let rows = d.chunk.min(tokens).max(2);
        let (speed, bytes) = (self.expected(d, rows))
            .map_or((0.0, 0.0), |pass| (pass.tokens_per_s, pass.bytes_read));
        PromptCost {
            seconds: tokens as f64 / speed.max(1e-9),
            bytes: bytes * tokens as f64 / rows as f64,
        }
    }

    /// Expected prefill speed in tokens per second. A single text uses the long chunks of its
    /// prompt division.
    pub(super) fn prompt_speed(&self, division: &Division) -> f64 {
        match self.long(division) {
            Some(long) => self.speed(&long, long.chunk),
            None => self.speed(division, division.chunk.max(2)),
        }
    }
}

/// What it costs to reload what `prompt` takes from the cache of `usual`. If it takes all Gate rows, slots have another
/// layout: both divisions then fill an empty cache, `usual` from whole clusters of the banks with Gate rows.
fn refill(planner: &Planner, usual: &Division, prompt: &Division) -> PromptCost {
    let held = |d: &Division, what| d.memory.ledger.held(what);
    let lost = |what| held(usual, what).saturating_sub(held(prompt, what)) as f64;
    let per_byte = |len: u64, ns: f64| ns / len.max(1) as f64 * 1e-9;
    let s = &planner.shape;
    let neuron = match usual.memory.gate_banks {
        0 => s.stride,
        _ => s.rest_read,
    };
    let short = per_byte(neuron, planner.storage.read_ns(neuron, Pattern::Random));
    let long = per_byte(
        s.cluster_read,
        (planner.stream).read_ns(s.cluster_read, Pattern::Sequential),
    );
    let gate_banks = usual.memory.gate_banks;
    let [cold, rest] = match gate_banks > 0 && prompt.memory.gate_banks == 0 {
        true => {
            let filled = held(prompt, "hot") + held(prompt, "cold");
            let share = gate_banks as f64 / usual.memory.banks as f64;
            let clusters = usual.needs.clusters as f64 * share;
            [0.0, filled as f64 + clusters * s.cluster_read as f64]
        }
        false => [lost("cold"), lost("hot") + lost("gates")],
    };
    let (tiles, len) = (lost("tiles"), s.tiles.len);
    let tile = per_byte(len, planner.storage.read_ns(len, Pattern::Sequential));
    PromptCost {
        seconds: cold * short + rest * long + tiles * tile,
        bytes: cold + rest + tiles,
    }
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use std::sync::Arc;

    use super::*;
    use crate::lane::{CpuTimes, LaneFacts, LaneOutlook, LanePart, LanePlan, LaneTimes, Widths};
    use crate::planner::tests::{even_lane, planner, sparse};

    #[test]
    fn of_chunks_that_take_as_long_the_one_that_reads_less_is_taken() {
        let taken = |costs: &[(f64, f64)]| {
            let cost = |&(seconds, bytes): &(f64, f64)| PromptCost { seconds, bytes };
            let all = costs.iter().enumerate().map(|(at, of)| (cost(of), at));
            cheapest(all).map(|(_, at)| at)
        };
        assert_eq!(taken(&[(1.0, 1.56), (1.019, 1.2)]), Some(1));
        assert_eq!(taken(&[(1.019, 1.2), (1.0, 1.56)]), Some(0));
        assert_eq!(taken(&[(1.0, 1.56), (1.021, 1.2)]), Some(0), "slower");
        assert_eq!(taken(&[(1.0, 3.0), (1.01, 2.0), (1.03, 1.0)]), Some(1));
        assert_eq!(taken(&[]), None);
    }

    /// A lane that takes a tenth of a second for each row of each layer, in which all reads are hidden.
    #[derive(Debug)]
    struct SlowTimes;

    impl LaneTimes for SlowTimes {
        fn balanced(&self, hot: u64, _: f64, _: usize) -> u64 {
            hot
        }

        fn widths(&self, _: &dyn CpuTimes, _: u64) -> Widths {
            Widths::default()
        }

        fn part(&self, _: &dyn CpuTimes, _: &Widths, _: u64, rows: usize) -> LanePart {
            LanePart {
                ns: 1e8 * rows as f64,
                ..LanePart::default()
            }
        }

        fn explain(&self, _: &LaneOutlook<'_>) -> Vec<LanePlan> {
            Vec::new()
        }
    }

    #[test]
    fn a_long_chunk_that_a_lane_computes_as_fast_reads_less() {
        let mut p = planner(Profile::Nvme, sparse());
        p.shape.dense = true;
        p.needs.gates_divide = false;
        let usual = p.divide(p.budget_for_share(0.5)).unwrap();
        p.lane = Some(LaneFacts {
            times: Arc::new(SlowTimes),
            ..even_lane()
        });
        let bytes = |d: &Division| p.prompt_cost(d, 2000).bytes;
        let long = p.for_prompt(&usual, 2000).unwrap();
        assert!(long.chunk > usual.chunk);
        assert!(2.0 * bytes(&long) < bytes(&usual));
        let longest = p.scratch.iter().map(|s| s.chunk).max();
        assert_eq!(Some(long.chunk), longest);
    }

    /// A longer chunk pays off if the prompt waits for reads and is long enough.
    #[test]
    fn long_prompts_take_memory_from_the_cache_where_they_wait_for_reads() {
        let chunk = |profile, share, tokens| {
            let mut p = planner(profile, sparse());
            p.needs.gates_divide = false;
            let usual = p.divide(p.budget_for_share(share)).unwrap();
            let found = p.for_prompt(&usual, tokens);
            if let Some(d) = &found {
                assert!(d.memory.ledger.used() <= usual.memory.budget());
                assert!(d.chunk > usual.chunk && d.memory.slots < usual.memory.slots);
                assert_eq!(d.memory.gate_banks, usual.memory.gate_banks);
            }
            (usual.chunk, found.map(|d| d.chunk))
        };
        let (usual, long) = chunk(Profile::Emmc, 0.45, 2000);
        assert!(long.unwrap() >= 4 * usual, "{usual} {long:?}");
        assert_eq!(chunk(Profile::Emmc, 0.45, usual / 2).1, None);
        assert_eq!(chunk(Profile::Nvme, 1.0, 2000).1, None);
    }

    /// Where Gate rows leave little memory, a long chunk takes theirs, unless they must stay.
    #[test]
    fn a_long_chunk_may_take_the_memory_of_gate_rows() {
        let mut p = planner(Profile::Nvme, sparse());
        let all = p.full_budget();
        let takes = |p: &Planner| {
            (1..100).any(|part| {
                let usual = p.divide(all / 100 * part).ok();
                let usual = usual.filter(|usual| usual.memory.gate_banks > 0);
                let long = usual.and_then(|usual| p.for_prompt(&usual, 2000));
                long.is_some_and(|long| long.memory.gate_banks == 0)
            })
        };
        assert!(takes(&p));
        p.gates_stay = true;
        assert!(!takes(&p));
    }
}
