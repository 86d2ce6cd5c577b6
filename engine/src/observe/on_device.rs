//! Storage and computation of devices.

use serde::Serialize;

use crate::device::InUse;
use crate::device::check::Speed;
use crate::device_trials::LeftOut;
use crate::engine::Engine;
use crate::lanes::{DeviceLane, GroupCounts};
use crate::tiers::RouteCounts;

/// A run's devices, since the engine was opened.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// Name of the device; of several, their names.
    pub name: String,
    /// Version of its driver; of several, their versions.
    pub driver: String,
    /// Each device, in the order of `--device`.
    pub devices: Vec<DeviceWork>,
    /// Whether the devices share the machine's memory, so that their clusters count in the budget.
    pub unified: bool,
    /// Clusters of neurons stored on the device.
    pub clusters: u64,
    /// Share of the FFN stored on the device, 0 to 1.
    pub ffn_share: f64,
    /// Share of the FFN computed by the device, by the rows of a pass: decode of one text, decode
    /// of all texts, a prompt chunk. The CPU computes the rest.
    pub computed: Vec<Computed>,
    /// Rows of a prompt chunk that the device computes with all neurons; neurons it does not store
    /// pass through its buffers.
    pub streamed: Streamed,
    /// Experts that the device computes in groups; `null` if it does not.
    pub experts: Option<ExpertWork>,
    /// Bytes of the neurons on the device.
    pub bytes: u64,
    /// Class of numerics: `cpu` if the sums have the CPU's bits, else device and driver. Texts and
    /// hashes are comparable within a class.
    pub numerics: String,
    /// Share of the weights of projections and head that the device multiplies in decode, 0 to 1.
    pub products_share: f64,
    /// Share of the weights of projections that the device multiplies in a prompt chunk, 0 to 1.
    pub prompt_share: f64,
    /// Why the device multiplies no projections, if so.
    pub no_products: Option<&'static str>,
    /// Share of the gates of resident Gate rows that the device computes in decode, 0 to 1.
    pub gates_share: f64,
    /// Why the device stores no neurons, if so.
    pub idle: Option<&'static str>,
    /// Decoding passes that run without the devices, because they were measured to be faster so.
    pub left_out: Vec<LeftOut>,
    /// Milliseconds for which the compute threads waited for the device.
    pub wait_ms: f64,
    /// The failure after which the device was not used again.
    pub lost: Option<String>,
}

/// One of a run's devices.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceWork {
    /// Name of the device.
    pub name: String,
    /// Version of its driver.
    pub driver: String,
    /// FFN kernels: neuron layout, work per row, work-group size. They do not change any bit.
    pub kernels: String,
    /// Largest deviation from the CPU in the check at the start, relative to the largest sum.
    pub deviation: f64,
    /// Milliseconds per launch of any size, in that check.
    pub launch_ms: f64,
    /// Weights per second of the device in GB/s, without launches; of one CPU thread
    /// (`cpu_gb_per_s`).
    pub gb_per_s: f64,
    /// See `gb_per_s`.
    pub cpu_gb_per_s: f64,
    /// Clusters of neurons that it has computed, each for the rows of a pass.
    pub clusters: u64,
    /// Rows of matrices that it has multiplied, each for the rows of a pass.
    pub rows: u64,
    /// The failure after which it was not used again; others go on.
    pub lost: Option<String>,
}

/// Experts that a device has computed in groups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ExpertWork {
    /// Groups, one piece of work each.
    pub groups: u64,
    /// Runs of graphs for them.
    pub graph_runs: u64,
    /// Tokens of experts, each counted once for each of its experts, by who computed them.
    pub routes: RouteCounts,
    /// Share of the graphs' places for tokens that had none, 0 to 1.
    pub padding_share: f64,
    /// Share of the tokens beyond the capacity of their experts, which the CPU computed, 0 to 1.
    pub overflow_share: f64,
    /// Share of the tokens whose experts the CPU computed as a whole, 0 to 1.
    pub cold_share: f64,
}

impl ExpertWork {
    fn of(counts: GroupCounts) -> Self {
        let routes = counts.routes;
        Self {
            groups: counts.groups,
            graph_runs: counts.graphs.runs,
            routes,
            padding_share: routes.padding_share(),
            overflow_share: routes.overflow_share(),
            cold_share: routes.cold_share(),
        }
    }

    /// The counts in words.
    fn words(&self) -> String {
        let [padding, overflow, cold] =
            [self.padding_share, self.overflow_share, self.cold_share].map(|share| 100.0 * share);
        format!(
            "experts in {} groups by {} runs of graphs, {padding:.1} % of whose tokens are padding; {overflow:.1} % of \
             tokens beyond a capacity and {cold:.1} % of other experts on the CPU; ",
            self.groups, self.graph_runs
        )
    }
}

/// The devices' part of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Computed {
    /// Rows of the pass.
    pub rows: usize,
    /// Share of the FFN, 0 to 1.
    pub ffn_share: f64,
}

/// Rows of a prompt chunk that a device computes with all neurons.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Streamed {
    /// Rows on the device; 0 if the CPU would have to wait for it.
    pub rows: usize,
    /// Rows of the chunk.
    pub chunk: usize,
    /// Bytes of the stream buffers.
    pub bytes: u64,
}

impl Engine {
    /// The devices and their counts since the engine was opened; `None` without a device.
    pub fn device(&self) -> Option<DeviceReport> {
        let lane = self.decoder.ffn.lanes.first()?;
        Some(DeviceReport::of(self, lane))
    }
}

impl DeviceWork {
    fn of(engine: &Engine, device: &InUse) -> Self {
        let (facts, verdict, needs) = (device.facts(), device.verdict, engine.needs());
        let neuron = needs.gate_len + needs.rest_len;
        let rate = |speed: Speed| neuron as f64 / speed.neuron / 1e9;
        let [clusters, rows] = device.computed();
        Self {
            name: facts.name.clone(),
            driver: facts.driver.clone(),
            kernels: {
                let dtype = engine.decoder.ffn.store.layout.format.dtype;
                facts.kernels(dtype).into()
            },
            deviation: verdict.worst.into(),
            launch_ms: verdict.speed.launch * 1e3,
            gb_per_s: rate(verdict.speed),
            cpu_gb_per_s: rate(verdict.cpu),
            clusters,
            rows,
            lost: device.lost().map(ToString::to_string),
        }
    }
}

impl DeviceReport {
    fn of(engine: &Engine, lane: &DeviceLane) -> Self {
        let needs = engine.needs();
        let all = lane.devices().iter();
        let devices: Vec<DeviceWork> = all.map(|device| DeviceWork::of(engine, device)).collect();
        let joined = |of: fn(&DeviceWork) -> &str| {
            let all: Vec<&str> = devices.iter().map(of).collect();
            all.join(" + ")
        };
        let (name, driver) = (joined(|of| &of.name), joined(|of| &of.driver));
        let is = |what: fn(&InUse) -> bool| lane.devices().iter().all(|device| what(device));
        let unified = is(|device| device.facts().unified);
        let same_bits = is(|device| device.verdict.same_bits);
        let (clusters, store) = (needs.device_clusters, &engine.decoder.ffn.store);
        let (products_share, waited) = engine.decoder.weights.on_device();
        let prompt_share = (engine.decoder.weights).prompt_on_device(engine.prompt_chunk());
        let (gates_share, gates_waited) = lane.gates_share(store);
        let cluster = needs.cluster * (needs.gate_len + needs.rest_len);
        let share = |clusters: u64| clusters as f64 / needs.clusters.max(1) as f64;
        let mut rows = vec![1, engine.options().batch, engine.prompt_chunk()];
        rows.dedup();
        let computed = rows.into_iter().map(|rows| Computed {
            rows,
            ffn_share: share(lane.computed_for(&store.outside, rows)),
        });
        Self {
            unified,
            clusters,
            ffn_share: share(clusters),
            computed: computed.collect(),
            streamed: Streamed {
                rows: engine.rows_streamed(),
                chunk: engine.prompt_chunk(),
                bytes: lane.passing_clusters() as u64 * cluster,
            },
            experts: lane.groups().map(|groups| ExpertWork::of(groups.counts())),
            bytes: clusters * cluster,
            numerics: match same_bits {
                true => "cpu".into(),
                false => format!("{name} {driver}"),
            },
            products_share,
            prompt_share,
            no_products: (products_share <= 0.0 && prompt_share <= 0.0).then_some(if same_bits {
                "the CPU alone was measured to be faster"
            } else {
                "its results differ from the CPU's, and times must not change a text"
            }),
            gates_share,
            idle: (clusters == 0).then_some(match engine.options().device_memory {
                Some(_) => "neither --device nor the budget leaves room for a cluster",
                None if !same_bits => {
                    "its results differ from the CPU's: --device NAME=SIZE gives it a fixed part, so that the text does not \
                     follow times"
                }
                None => "it would save no time, or no cluster is hot",
            }),
            left_out: lane.trials.left_out(),
            wait_ms: (lane.waited() + waited + gates_waited).as_secs_f64() * 1e3,
            lost: lane.lost().map(ToString::to_string),
            name,
            driver,
            devices,
        }
    }

    /// The computed share by rows of a pass.
    fn computed_in_words(&self) -> String {
        let of = |c: &Computed| format!("{:.0} % for {}", 100.0 * c.ffn_share, c.rows);
        let all: Vec<String> = self.computed.iter().map(of).collect();
        format!("{} rows", all.join(", "))
    }

    /// What each of several devices has computed.
    fn each(&self) -> String {
        let of = |work: &DeviceWork| {
            let DeviceWork {
                name,
                clusters,
                rows,
                lost,
                ..
            } = work;
            let lost = lost.as_ref().map(|why| format!(", given up: {why}"));
            let lost = lost.unwrap_or_default();
            format!("; {name}: {clusters} clusters, {rows} rows of matrices{lost}")
        };
        match self.devices.len() {
            0 | 1 => String::new(),
            _ => self.devices.iter().map(of).collect(),
        }
    }

    /// One line for the summary.
    pub(super) fn summary(&self) -> String {
        let numerics = match self.numerics.as_str() {
            "cpu" => "same bits as the CPU".to_owned(),
            _ => "results differ from the CPU's".to_owned(),
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
            Some(why) => format!("no projections or head: {why}"),
            None => format!(
                "{:.0} % of projections and head, {:.0} % of projections in prompts",
                100.0 * self.products_share,
                100.0 * self.prompt_share
            ),
        };
        let Streamed { rows, chunk, bytes } = self.streamed;
        let prompts = match rows {
            0 => "streams no rows of prompts: not faster".to_owned(),
            _ => format!(
                "streams {rows} of {chunk} rows of prompts, through {:.1} MiB of buffers",
                bytes as f64 / f64::from(1 << 20)
            ),
        };
        let experts = self.experts.filter(|of| of.groups > 0);
        let experts = experts.map_or(String::new(), |of| of.words());
        let held = format!(
            "{held}; {experts}{prompts}; {products}; {:.0} % of resident gates; waited for {:.1} ms",
            100.0 * self.gates_share,
            self.wait_ms
        );
        let left_out = self.left_out.iter().map(|of| format!("{of}; "));
        let left_out: String = left_out.collect();
        format!("{}: {left_out}{held}; {numerics}{}", self.name, self.each())
    }
}
