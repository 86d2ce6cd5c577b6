//! What a device held and did.

use std::time::Duration;

use serde::Serialize;

use crate::attention::on_device::{OnDevice, Rows};
use crate::device::check::Speed;
use crate::device::{Device, Verdict};
use crate::engine::Engine;
use crate::trial::{NextTokens, Trial};

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
    /// The attention of whole layers as one piece of work.
    pub attention: AttentionReport,
    /// Passes all of whose layers it has computed one after the other, so that it was waited for once.
    pub whole_passes: u64,
    /// What next tokens take with it and without it, where that was tried.
    pub next_tokens: Vec<NextTokens>,
    /// Why it holds nothing, if it does not.
    pub idle: Option<&'static str>,
    /// Milliseconds that the compute threads waited for it.
    pub wait_ms: f64,
    /// Why it was given up, if it was.
    pub lost: Option<String>,
}

/// Attention of whole layers on a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AttentionReport {
    /// Layers that it has computed, those of the check at the start not counted.
    pub layers: u64,
    /// What it computes by the rows of a pass, each the next token of a text, and why: empty where it knows no
    /// attention.
    pub by_rows: Vec<AttentionByRows>,
    /// The same for a chunk of a prompt, whose rows see so many positions on average.
    pub prompt: Option<AttentionByRows>,
    /// Why it computes none, if it does not.
    pub none: Option<String>,
}

/// Attention on a device for some rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AttentionByRows {
    /// Rows of the pass.
    pub rows: usize,
    /// From how many positions on it is used; `null` for never.
    pub from_positions: Option<usize>,
    /// Microseconds of a layer with one position and with all that the context has room for: the
    /// processor's, with the products that the device takes from it. 0 where nothing was measured.
    pub cpu_us: [f64; 2],
    /// The device's alone.
    pub device_us: [f64; 2],
}

impl AttentionByRows {
    /// Of rows that see up to `of.positions`.
    fn of(device: &OnDevice, of: Rows) -> Self {
        let at = |positions| match &device.times {
            Some(times) => Rows { positions, ..of }.seconds(times).map(|s| s * 1e6),
            None => [0.0; 2],
        };
        let [first, last] = [at(1), at(of.positions)];
        Self {
            rows: of.rows,
            from_positions: device.from(of),
            cpu_us: [first[0], last[0]],
            device_us: [first[1], last[1]],
        }
    }
}

impl AttentionReport {
    fn of(engine: &Engine) -> Self {
        let placed = &engine.decoder.placed;
        let Some(device) = &placed.device else {
            return Self {
                layers: 0,
                by_rows: Vec::new(),
                prompt: None,
                none: placed.why.clone(),
            };
        };
        let options = engine.options();
        let mut texts = vec![1, options.batch];
        texts.dedup();
        let of = |rows, prompts| {
            let positions = options.context;
            AttentionByRows::of(
                device,
                Rows {
                    rows,
                    positions,
                    prompts,
                },
            )
        };
        let by_rows: Vec<_> = texts.into_iter().map(|texts| of(texts, false)).collect();
        let prompt = (options.chunk > 1).then(|| of(options.chunk, true));
        let all = by_rows.iter().chain(&prompt);
        let never = all.clone().all(|of| of.from_positions.is_none());
        Self {
            layers: device.done(),
            by_rows,
            prompt,
            none: never.then(|| "by measurement the processor is faster".to_owned()),
        }
    }

    /// In words.
    fn words(&self) -> String {
        let of = |what: &str, of: &AttentionByRows| {
            let times = format!(
                "{:.0} to {:.0} us a layer, the processor's {:.0} to {:.0}",
                of.device_us[0], of.device_us[1], of.cpu_us[0], of.cpu_us[1]
            );
            let from = match of.from_positions {
                None => "never".to_owned(),
                Some(1) => "always".to_owned(),
                Some(from) => format!("from {from} positions on"),
            };
            format!("for {} {what} {from} ({times})", of.rows)
        };
        match (&self.none, self.by_rows.is_empty()) {
            (Some(why), true) => format!("attention stays on the processor: {why}"),
            (None, true) => "attention stays on the processor".to_owned(),
            _ => {
                let next = self.by_rows.iter().map(|rows| of("next tokens", rows));
                let prompt = self
                    .prompt
                    .iter()
                    .map(|rows| of("tokens of a prompt", rows));
                let all: Vec<String> = next.chain(prompt).collect();
                format!("attention of whole layers {}", all.join(", "))
            }
        }
    }
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
        let (gates_share, gates_waited) = store.gates_on_device();
        let attended = engine.decoder.placed.device.as_ref();
        let waited = waited + attended.map_or(Duration::ZERO, OnDevice::waited);
        let neuron = needs.gate_len + needs.rest_len;
        let cluster = needs.cluster * neuron;
        let rate = |speed: Speed| neuron as f64 / speed.neuron / 1e9;
        let share = |clusters: u64| clusters as f64 / needs.clusters.max(1) as f64;
        let mut rows = vec![1, engine.options().batch, engine.prompt_chunk()];
        rows.dedup();
        let computed = rows.into_iter().map(|rows| Computed {
            rows,
            ffn_share: share(store.computed_on_device(rows)),
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
                bytes: store.stream_clusters() as u64 * cluster,
            },
            bytes: clusters * cluster,
            numerics: match verdict.same_bits {
                true => "cpu".into(),
                false => format!("{} {}", facts.name, facts.driver),
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
            attention: AttentionReport::of(engine),
            whole_passes: (engine.decoder.layers.as_ref()).map_or(0, |layers| layers.passes),
            next_tokens: (engine.decoder.trial.as_ref()).map_or_else(Vec::new, Trial::found),
            idle: (clusters == 0).then_some(match engine.options().device_memory {
                Some(_) => "--device-memory or the budget leaves no room for a cluster",
                None => "by the check it would save nothing, or nothing is hot",
            }),
            wait_ms: (store.waited_for_device() + waited + gates_waited).as_secs_f64() * 1e3,
            lost: store.lost_device().map(ToString::to_string),
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
        let rests = self.next_tokens.iter().filter(|of| !of.used).map(|of| {
            format!(
                "; not used for {} next tokens: {:.2} ms with it, {:.2} without",
                of.rows, of.with_ms, of.without_ms
            )
        });
        let rests: String = rests.collect();
        let held = format!(
            "{held}{rests}; {prompts}; {products}; {:.0} % of resident gates; {}; {} whole passes; waited for {:.1} ms",
            100.0 * self.gates_share,
            self.attention.words(),
            self.whole_passes,
            self.wait_ms
        );
        format!("{}: {held}; {numerics}", self.name)
    }
}
