//! Division of the memory while a prompt is computed.

use std::time::Duration;

use emberflow_storage::profile::Pattern;

use super::budget::Division;
use super::facts::{ChunkMemory, Planner};
use super::search::FORECAST_MARGIN;

/// Time to shrink the cache and grow it back: 1 ms with 1 MB of buffers for a chunk, 10 ms with 20 MB.
const MOVE_TIME: Duration = Duration::from_micros(500);

/// Bytes of a chunk's buffers that are made per nanosecond: their pages are touched first.
const BUFFERS_PER_NS: u64 = 2;

impl Planner {
    /// The fastest division for a prompt of `tokens` tokens, with a longer chunk that takes memory
    /// from the cache. The time to read the evicted weights again is included. `None` unless it is
    /// [`FORECAST_MARGIN`] times as fast as `usual`.
    pub(crate) fn for_prompt(&self, usual: &Division, tokens: usize) -> Option<Division> {
        let longer = self.scratch.iter().map(|s: &ChunkMemory| s.chunk);
        let longer = longer.filter(|&chunk| chunk > usual.chunk && chunk < 2 * tokens);
        let seconds = |d: &Division| {
            let rows = d.chunk.min(tokens).max(2);
            tokens as f64 / self.speed(d, rows).max(1e-9)
        };
        let divisions = longer.filter_map(|chunk| {
            let mut long = self.with_chunk(usual, chunk)?;
            if self.stream_buffers(usual) == 0 {
                long.widths.keep_to_held();
            }
            Some(long)
        });
        let timed = divisions.map(|d| {
            let moves = MOVE_TIME + Duration::from_nanos(d.needs.scratch / BUFFERS_PER_NS);
            let seconds = seconds(&d) + refill(self, usual, &d) + moves.as_secs_f64();
            (seconds, d)
        });
        let (best, division) = timed.min_by(|a, b| a.0.total_cmp(&b.0))?;
        (best * FORECAST_MARGIN < seconds(usual)).then_some(division)
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

/// Seconds to reload what `prompt` takes from the cache of `usual`. If it takes all Gate rows, slots have another
/// layout: both divisions then fill an empty cache, `usual` from whole clusters of the banks with Gate rows.
fn refill(planner: &Planner, usual: &Division, prompt: &Division) -> f64 {
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
    if gate_banks > 0 && prompt.memory.gate_banks == 0 {
        let filled = held(prompt, "hot") + held(prompt, "cold");
        let clusters = usual.needs.clusters as f64 * gate_banks as f64 / usual.memory.banks as f64;
        return (filled as f64 + clusters * s.cluster_read as f64) * long;
    }
    lost("cold") * short + (lost("hot") + lost("gates")) * long
}

#[cfg(test)]
mod tests {
    use emberflow_storage::io::Profile;

    use crate::planner::Planner;
    use crate::planner::tests::{planner, sparse};

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
