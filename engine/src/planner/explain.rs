//! The plan as text, for `-v`.

use super::plan::Plan;
use crate::error::mib;
use crate::memory::Needs;

impl Plan {
    /// One line per decision.
    pub fn explain(&self, needs: &Needs) -> Vec<String> {
        let mut lines = vec![
            self.explain_memory(),
            self.explain_ffn(needs),
            self.explain_reads(),
            self.explain_threads(),
            self.explain_token(),
            self.explain_basis(),
        ];
        lines.extend(self.devices.iter().map(|lane| lane.text.clone()));
        lines
    }

    fn explain_memory(&self) -> String {
        let held = (self.memory.ledger.entries().iter()).filter(|&&(_, bytes)| bytes > 0);
        let held: Vec<String> = held
            .map(|&(what, bytes)| format!("{what} {}", mib(bytes)))
            .collect();
        format!(
            "memory: {} in all: {}",
            mib(self.memory.budget()),
            held.join(", ")
        )
    }

    fn explain_ffn(&self, needs: &Needs) -> String {
        if needs.tiles > 0 {
            let streamed = match needs.streamed {
                0 => String::new(),
                bytes => format!(
                    "; projections and output head ({}) are read for every pass",
                    mib(bytes)
                ),
            };
            return format!(
                "FFN: {:.0} % in memory; {} slots for {} tiles, the others are read when they are needed{streamed}",
                100.0 * self.ffn_resident_share,
                self.memory.tile_slots,
                needs.tiles
            );
        }
        let gates = if self.gates_resident {
            "all Gate rows in memory, so only Up and Down of neurons that fire are read".to_owned()
        } else if self.memory.gates_partly() {
            format!(
                "Gate rows of {} of {} layers in memory, where only Up and Down of neurons that fire are \
                 read, the other layers whole",
                self.memory.gate_banks, self.memory.banks
            )
        } else if self.reads_per_bundle == 2 {
            "Gate rows on disk, read before Up and Down".to_owned()
        } else {
            "Gate rows on disk, read together with Up and Down".to_owned()
        };
        format!(
            "FFN: {:.0} % in memory; {gates}; hot region {} of {} clusters, cold region {} of {} neurons",
            100.0 * self.ffn_resident_share,
            self.memory.hot_clusters,
            needs.clusters,
            self.memory.slots,
            needs.neurons
        )
    }

    fn explain_reads(&self) -> String {
        let ahead = match self.prefetch_clusters {
            0 => "nothing is read during attention".to_owned(),
            n => format!("up to {n} missing clusters of the next layers are read during attention"),
        };
        format!(
            "reads: {:.1} KiB per neuron, {:.1} KiB per cluster, {} stream buffers; {ahead}",
            self.random_read_bytes as f64 / 1024.0,
            self.sequential_read_bytes as f64 / 1024.0,
            self.stream_buffers
        )
    }

    fn explain_threads(&self) -> String {
        let core = self.io_core.map_or_else(
            || "on a core chosen by the system".to_owned(),
            |core| format!("on core {core}"),
        );
        format!(
            "computing: {} threads, {} prompt tokens per pass, I/O thread {core}",
            self.compute_threads, self.chunk
        )
    }

    fn explain_token(&self) -> String {
        let decode = &self.decode;
        let experts = self.expert_hit_rate.map_or(String::new(), |rate| {
            format!("{:.0} % of its experts in memory, ", 100.0 * rate)
        });
        format!(
            "forecast per token: {}{:.2} ms, {:.2} of them waiting for {:.0} reads ({:.1} KiB); limit: {}",
            experts,
            decode.ms,
            decode.wait_ms,
            decode.reads,
            decode.bytes_read / 1024.0,
            decode.limit
        )
    }

    fn explain_basis(&self) -> String {
        let basis = &self.basis;
        let measured = |is: bool| if is { "measured" } else { "assumed" };
        let statistics = match (basis.statistics, basis.neurons_assumed) {
            (false, _) => "none",
            (true, true) => "none for the neurons of experts",
            (true, false) => "from the container",
        };
        format!(
            "the forecast rests on: the machine, {}; the disk, {}; activation statistics, {}",
            measured(basis.machine_measured),
            basis.device,
            statistics
        )
    }
}
