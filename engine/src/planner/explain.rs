//! What a plan chose, in lines for people (`-v`).

use super::plan::Plan;
use crate::error::mib;
use crate::memory::Needs;

impl Plan {
    /// What was chosen, a line for each choice.
    pub fn explain(&self, needs: &Needs) -> Vec<String> {
        let plan = self;
        let memory = &plan.memory;
        let held = (memory.ledger.entries().iter()).filter(|&&(_, bytes)| bytes > 0);
        let held: Vec<String> = held
            .map(|&(what, bytes)| format!("{what} {}", mib(bytes)))
            .collect();
        let gates = if plan.gates_resident {
            "all Gate rows in memory, so only Up and Down of neurons that fire are read"
        } else if plan.reads_per_bundle == 2 {
            "Gate rows on disk, read before Up and Down"
        } else {
            "Gate rows on disk, read together with Up and Down"
        };
        let ahead = match plan.prefetch_clusters {
            0 => "nothing is read beside attention".to_owned(),
            n => format!(
                "the first {n} missing clusters of the next layer are read beside attention"
            ),
        };
        let core = plan.io_core.map_or_else(
            || "on a core that the system chooses".to_owned(),
            |core| format!("on core {core}"),
        );
        let (decode, basis) = (&plan.decode, &plan.basis);
        vec![
            format!(
                "memory: {} in all: {}",
                mib(memory.budget()),
                held.join(", ")
            ),
            format!(
                "FFN: {:.0} % in memory; {gates}; hot region {} of {} clusters, cold region {} of {} neurons",
                100.0 * plan.ffn_resident_share,
                memory.hot_clusters,
                needs.clusters,
                memory.slots,
                needs.neurons
            ),
            format!(
                "reads: {:.1} KiB for a neuron, {:.1} KiB for a cluster in one piece, {} stream buffers; {ahead}",
                plan.random_read_bytes as f64 / 1024.0,
                plan.sequential_read_bytes as f64 / 1024.0,
                plan.stream_buffers
            ),
            format!(
                "computing: {} threads, {} prompt tokens at once, the I/O thread {core}",
                plan.compute_threads, plan.chunk
            ),
            format!(
                "expected of a token: {:.2} ms, {:.2} of them waiting for {:.0} reads ({:.1} KiB); limit: {}",
                decode.ms,
                decode.wait_ms,
                decode.reads,
                decode.bytes_read / 1024.0,
                decode.limit
            ),
            format!(
                "which rests on: the machine, {}; the disk, {}; activation statistics, {}",
                if basis.machine_measured {
                    "measured"
                } else {
                    "assumed"
                },
                basis.device,
                if basis.statistics {
                    "those of the model"
                } else {
                    "none"
                }
            ),
        ]
    }
}
