//! What devices held and computed in a run.

use std::time::Duration;

use emberflow_engine::Engine;
use emberflow_engine::lane::{CLUSTER, LaneReport, MatrixRows, Products, Reported};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{DeviceLane, GroupCounts, GroupLane};
use crate::check::Speed;
use crate::in_use::InUse;
use crate::left_out::LeftOut;
use crate::tiers::RouteCounts;

/// A run's devices, since the engine was opened.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    pub no_products: Option<String>,
    /// Share of the gates of resident Gate rows that the device computes in decode, 0 to 1.
    pub gates_share: f64,
    /// Why the device stores no neurons, if so.
    pub idle: Option<String>,
    /// Passes that run without the devices, because they were measured to be faster so.
    pub left_out: Vec<LeftOut>,
    /// Milliseconds for which the compute threads waited for the device.
    pub wait_ms: f64,
    /// The failure after which the device was not used again.
    pub lost: Option<String>,
}

/// One of a run's devices.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    /// The failure that ended its use; other devices continue.
    pub lost: Option<String>,
}

/// Experts that a device has computed in groups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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

    /// The counts as text.
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Computed {
    /// Rows of the pass.
    pub rows: usize,
    /// Share of the FFN, 0 to 1.
    pub ffn_share: f64,
}

/// Rows of a prompt chunk that a device computes with all neurons.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Streamed {
    /// Rows on the device; 0 if the CPU would have to wait for it.
    pub rows: usize,
    /// Rows of the chunk.
    pub chunk: usize,
    /// Bytes of the stream buffers.
    pub bytes: u64,
}

/// The devices of an engine, since it was opened; `None` without any.
pub fn device_report(engine: &Engine) -> Option<DeviceReport> {
    serde_json::from_value(engine.lane()?.values).ok()
}

impl DeviceLane {
    fn device_work(&self, device: &InUse) -> DeviceWork {
        let (facts, verdict) = (device.facts(), device.verdict);
        let format = &self.banks.format;
        let neuron = (format.gate_len() + format.rest_len()) as f64;
        let rate = |speed: Speed| neuron / speed.neuron / 1e9;
        let [clusters, rows] = device.computed();
        DeviceWork {
            name: facts.name.clone(),
            driver: facts.driver.clone(),
            kernels: facts.kernels(format.dtype).into(),
            deviation: verdict.worst.into(),
            launch_ms: verdict.speed.launch * 1e3,
            gb_per_s: rate(verdict.speed),
            cpu_gb_per_s: rate(verdict.cpu),
            clusters,
            rows,
            lost: device.lost().map(ToString::to_string),
        }
    }

    /// Share of the gates of a token that devices compute from resident rows.
    fn gates_share(&self, of: &Reported<'_>) -> f64 {
        let Some(products) = &self.gates else {
            return 0.0;
        };
        let banks = (0..self.parts.len() as u32).map(|bank| {
            let all = self.banks.neurons(bank);
            let first = self.clusters_for(of.outside, bank, 1) as usize * CLUSTER;
            let shared = (of.gates)(bank);
            let taken = shared.map_or(0.0, |matrix| {
                let rows = MatrixRows {
                    number: matrix.number,
                    rows: first.min(all)..all,
                };
                products.taken(&[rows], self.banks.format.d, 1, true)
            });
            [taken, all as f64]
        });
        let sums = banks.fold([0.0, 0.0], |sum, of| [sum[0] + of[0], sum[1] + of[1]]);
        sums[0] / sums[1].max(1.0)
    }

    /// Clusters of all banks that devices compute in a pass of `rows` rows.
    fn computed_for(&self, of: &Reported<'_>, rows: usize) -> u64 {
        let apart = |bank: &u32| {
            let layer = self.banks.layer_of(*bank);
            !self.groups.as_ref().is_some_and(|groups| groups.has(layer))
        };
        let banks = (0..self.parts.len() as u32).filter(apart);
        let banks = banks.map(|bank| u64::from(self.clusters_for(of.outside, bank, rows)));
        let in_groups = |groups: &GroupLane| groups.clusters_for(rows);
        banks.sum::<u64>() + self.groups.as_ref().map_or(0, in_groups)
    }

    /// The account of a run.
    pub(super) fn account(&self, of: &Reported<'_>) -> LaneReport {
        let report = DeviceReport::of(self, of);
        LaneReport {
            values: json!(report),
            summary: report.summary(),
            numerics: report.numerics,
        }
    }
}

impl DeviceReport {
    fn of(lane: &DeviceLane, of: &Reported<'_>) -> Self {
        let devices = lane.set.devices().iter();
        let devices: Vec<DeviceWork> = devices.map(|of| lane.device_work(of)).collect();
        let joined = |of: fn(&DeviceWork) -> &str| {
            let names: Vec<&str> = devices.iter().map(of).collect();
            names.join(" + ")
        };
        let (name, driver) = (joined(|of| &of.name), joined(|of| &of.driver));
        let same_bits = lane.facts.same_bits;
        let [all_clusters, clusters, cluster_len] = of.clusters;
        let share = |clusters: u64| clusters as f64 / all_clusters.max(1) as f64;
        let computed = of.rows.iter().map(|&rows| Computed {
            rows,
            ffn_share: share(lane.computed_for(of, rows)),
        });
        let [products_share, prompt_share] = of.products;
        let gates_waited = lane.gates.iter().map(|products| products.waited());
        let waited = lane.waited + of.waited + gates_waited.sum::<Duration>();
        let no_products = match same_bits {
            true => "the CPU alone was measured to be faster",
            false => "its results differ from the CPU's, and times must not change a text",
        };
        let idle = match lane.facts.asked {
            true => "neither --device nor the budget leaves room for a cluster",
            false if !same_bits => {
                "its results differ from the CPU's: --device NAME=SIZE gives it a fixed part, so that the text does not \
                 follow times"
            }
            false => "it would save no time, or no cluster is hot",
        };
        Self {
            unified: lane.facts.unified,
            clusters,
            ffn_share: share(clusters),
            computed: computed.collect(),
            streamed: Streamed {
                rows: of.streamed,
                chunk: of.chunk,
                bytes: lane.streamed_clusters() as u64 * cluster_len,
            },
            experts: (lane.groups.as_ref()).map(|groups| ExpertWork::of(groups.counts())),
            bytes: clusters * cluster_len,
            numerics: match same_bits {
                true => "cpu".into(),
                false => format!("{name} {driver}"),
            },
            products_share,
            prompt_share,
            no_products: (products_share <= 0.0 && prompt_share <= 0.0).then(|| no_products.into()),
            gates_share: lane.gates_share(of),
            idle: (clusters == 0).then(|| idle.into()),
            left_out: lane.trials.left_out(),
            wait_ms: waited.as_secs_f64() * 1e3,
            lost: lane.set.lost().map(ToString::to_string),
            name,
            driver,
            devices,
        }
    }

    /// The computed share by rows of a pass.
    fn computed_in_words(&self) -> String {
        let text = |c: &Computed| format!("{:.0} % for {}", 100.0 * c.ffn_share, c.rows);
        let texts: Vec<String> = self.computed.iter().map(text).collect();
        format!("{} rows", texts.join(", "))
    }

    /// What each of several devices has computed.
    fn each(&self) -> String {
        let text = |work: &DeviceWork| {
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
            _ => self.devices.iter().map(text).collect(),
        }
    }

    /// One line for the summary.
    fn summary(&self) -> String {
        let numerics = match self.numerics.as_str() {
            "cpu" => "same bits as the CPU".to_owned(),
            _ => "results differ from the CPU's".to_owned(),
        };
        let held = match (&self.lost, &self.idle) {
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
        let products = match &self.no_products {
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
