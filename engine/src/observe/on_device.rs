//! What a device held and did.

use serde::Serialize;

use crate::device::check::Speed;
use crate::device::{Device, Verdict};
use crate::engine::Engine;

/// The device of a run, since the engine was opened.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Version of its driver.
    pub driver: String,
    /// Whether its memory is the machine's, so that what it holds counts in the budget.
    pub unified: bool,
    /// Clusters of neurons that it holds.
    pub clusters: u64,
    /// Their share of the FFN, 0 to 1.
    pub ffn_share: f64,
    /// The share of the FFN that it computes, by the rows of a pass: one text's next token, those of all
    /// texts at once, a chunk of a prompt. The processor computes the rest of what it holds.
    pub computed: Vec<Computed>,
    /// Of a prompt's chunk: the rows that it computes with all neurons, of which those that it does not hold pass
    /// through its buffers.
    pub streamed: Streamed,
    /// Bytes of what it holds.
    pub bytes: u64,
    /// Class of its numerics: `cpu` where its sums have the CPU's bits, else the device and driver.
    /// Texts and hashes can be compared within a class.
    pub numerics: String,
    /// Its kernels for the FFN: how neurons lie, who computes a row, items of work groups. No bit depends on them.
    pub kernels: String,
    /// Largest deviation from the CPU in the check at the start, as a share of the largest sum.
    pub deviation: f64,
    /// Milliseconds for a piece of work of any size, in that check.
    pub launch_ms: f64,
    /// GB/s of weights that it computed with besides, and one thread of the CPU.
    pub gb_per_s: f64,
    /// See `gb_per_s`.
    pub cpu_gb_per_s: f64,
    /// Share of the weights of projections and head that it multiplies for one token, 0 to 1.
    pub products_share: f64,
    /// Share of the weights of projections that it multiplies for a whole chunk of a prompt, 0 to 1.
    pub prompt_share: f64,
    /// Why it multiplies nothing, if it does not.
    pub no_products: Option<&'static str>,
    /// Share of the gates that it computes for one token from resident Gate rows, 0 to 1.
    pub gates_share: f64,
    /// Why it holds nothing, if it does not.
    pub idle: Option<&'static str>,
    /// Milliseconds that the compute threads waited for it.
    pub wait_ms: f64,
    /// Why it was given up, if it was.
    pub lost: Option<String>,
}

/// What a device computes in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Computed {
    /// Rows of the pass.
    pub rows: usize,
    /// Share of the FFN, 0 to 1.
    pub ffn_share: f64,
}

/// Rows of a prompt's chunk on a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Streamed {
    /// Rows that it computes; 0 where the processor would have to wait for it.
    pub rows: usize,
    /// Of so many.
    pub chunk: usize,
    /// Bytes of the buffers.
    pub bytes: u64,
}

impl Engine {
    /// The device, and what it has done since the engine was opened; `None` without one.
    pub fn device(&self) -> Option<DeviceReport> {
        let device = self.options().device.as_ref()?;
        Some(DeviceReport::of(self, device, self.verdict?))
    }
}

impl DeviceReport {
    fn of(engine: &Engine, device: &Device, verdict: Verdict) -> Self {
        let (facts, needs) = (device.facts(), engine.needs());
        let (clusters, store) = (needs.device_clusters, &engine.decoder.ffn.store);
        let (products_share, waited) = engine.decoder.weights.on_device();
        let prompt_share = engine
            .decoder
            .weights
            .prompt_on_device(engine.prompt_chunk());
        let (gates_share, gates_waited) = store.device.gates_share();
        let neuron = needs.gate_len + needs.rest_len;
        let cluster = needs.cluster * neuron;
        let rate = |speed: Speed| neuron as f64 / speed.neuron / 1e9;
        let share = |clusters: u64| clusters as f64 / needs.clusters.max(1) as f64;
        let mut rows = vec![1, engine.options().batch, engine.prompt_chunk()];
        rows.dedup();
        let computed = rows.into_iter().map(|rows| Computed {
            rows,
            ffn_share: share(store.device.computed_for(rows)),
        });
        Self {
            name: facts.name.clone(),
            driver: facts.driver.clone(),
            unified: facts.unified,
            clusters,
            ffn_share: share(clusters),
            computed: computed.collect(),
            streamed: Streamed {
                rows: engine.rows_streamed(),
                chunk: engine.prompt_chunk(),
                bytes: store.device.stream_clusters() as u64 * cluster,
            },
            bytes: clusters * cluster,
            numerics: if verdict.same_bits {
                "cpu".into()
            } else {
                format!("{} {}", facts.name, facts.driver)
            },
            kernels: verdict.kernels.to_string(),
            deviation: verdict.worst.into(),
            launch_ms: verdict.speed.launch * 1e3,
            gb_per_s: rate(verdict.speed),
            cpu_gb_per_s: rate(verdict.cpu),
            products_share,
            prompt_share,
            no_products: match verdict.same_bits {
                _ if products_share > 0.0 || prompt_share > 0.0 => None,
                true => Some("by measurement the processor alone is faster"),
                false => {
                    Some("its bits are not the processor's, and times must not decide on a text")
                }
            },
            gates_share,
            idle: (clusters == 0).then_some(match engine.options().device_memory {
                Some(_) => "what --device gives it or the budget leaves no room for a cluster",
                None => "by the check it would save nothing, or nothing is hot",
            }),
            wait_ms: (store.device.waited() + waited + gates_waited).as_secs_f64() * 1e3,
            lost: store.device.lost().map(ToString::to_string),
        }
    }

    /// What it computes by the rows of a pass.
    fn computed_in_words(&self) -> String {
        let of = |c: &Computed| format!("{:.0} % for {}", 100.0 * c.ffn_share, c.rows);
        let all: Vec<String> = self.computed.iter().map(of).collect();
        format!("{} rows", all.join(", "))
    }

    /// A line for people.
    pub(super) fn summary(&self) -> String {
        let numerics = match self.numerics.as_str() {
            "cpu" => "same bits as the CPU".to_owned(),
            _ => "numerics of its own".to_owned(),
        };
        let held = match (&self.lost, self.idle) {
            (Some(why), _) => format!("given up: {why}"),
            (None, Some(why)) => format!("holds no neurons: {why}"),
            (None, None) => format!(
                "holds {:.0} % of the FFN ({:.1} MiB{}), computes {}",
                100.0 * self.ffn_share,
                self.bytes as f64 / f64::from(1 << 20),
                if self.unified { " of the budget" } else { "" },
                self.computed_in_words(),
            ),
        };
        let products = match self.no_products {
            Some(why) => format!("no projections and head: {why}"),
            None => format!(
                "{:.0} % of projections and head, {:.0} % of projections in prompts",
                100.0 * self.products_share,
                100.0 * self.prompt_share
            ),
        };
        let Streamed { rows, chunk, bytes } = self.streamed;
        let prompts = match rows {
            0 => "of prompts no rows with all neurons: by its times that is not faster".to_owned(),
            _ => format!(
                "of prompts {rows} of {chunk} rows with all neurons, through {:.1} MiB of buffers",
                bytes as f64 / f64::from(1 << 20)
            ),
        };
        let held = format!(
            "{held}; {prompts}; {products}; {:.0} % of resident gates; waited for {:.1} ms",
            100.0 * self.gates_share,
            self.wait_ms
        );
        format!("{}: {held}; {numerics}", self.name)
    }
}
