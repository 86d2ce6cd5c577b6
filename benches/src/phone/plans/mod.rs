//! Real plans on a phone: the engine's planner gets the phone's curves (Snapdragon 8 Gen 3) and a real model's sizes, and
//! what it plans is simulated piece by piece.
//!
//! ```text
//! curves + model + budget ─▶ Planner ─▶ division: regions, widths, chunk ─▶ operations ─▶ simulated time
//!                               └─▶ forecast                                beside it ◀─┘
//! ```
//!
//! The forecast has means; the simulation draws which neurons fire, runs the engine's cache on them and waits for each
//! piece. Processors share the memory's bandwidth, which the forecast does not know. A chunk of which nothing is read is
//! also simulated in parts (llm.npu, §3.4), which the engine does not run.

mod costs;
mod misses;
mod prompt;
#[cfg(test)]
mod tests;
mod token;

use std::io::Write as _;

use emberflow::Failure;
use emberflow::pack::{PackOptions, described};
use emberflow_devices::{DeviceNumbers, RowTimes};
use emberflow_engine::planner::machine::{MachineNumbers, on_machine, with_frequencies};
use emberflow_engine::planner::rates::{KernelRates, Rates, ThreadRates, Throughput};
use emberflow_engine::planner::{Division, Planner};
use emberflow_engine::{Lab, Model, Options};
use emberflow_kernels::{DType, Isa};
use emberflow_models::demo::Demo;
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_storage::profile::ReadCost;
use serde::Serialize;

use super::draw::{Drawn, Lanes};
use super::schedule::{Processors, Rule};
use super::{llm_npu, powerinfer};
use crate::bench::split::snapdragon::SYNC;
use crate::synth::firing::{Firing, Skew, Targets};

use self::costs::{Costs, NAMES};
use self::prompt::Chunk;
use self::token::{Fired, Regions, Token, draw};

/// Positions of the text.
const CONTEXT: usize = 1024;
/// Tokens that warm the cache, and those that are simulated.
const WARM: usize = 16;
const TOKENS: usize = 12;
/// Threads of the CPU: one fast core and five middle ones (PowerInfer-2, 2.3.1).
const THREADS: usize = 6;
const CORES: u32 = 8;
/// Clusters in a buffer of the NPU.
const AT_ONCE: usize = 8;
/// Probability that a firing neuron fires again: as in synthetic models.
const PERSISTENCE: f64 = 0.83;
/// Shares of the FFN in memory.
const SHARES: [f64; 4] = [0.25, 0.5, 0.75, 1.0];
/// The configuration of Bamboo-7B.
const BAMBOO: &str = include_str!("../curves/bamboo-7b.json");

/// Milliseconds of a pass. JSON keys are a contract.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Compared {
    /// Rows of the pass.
    pub rows: usize,
    /// By the planner.
    pub forecast_ms: f64,
    /// Simulated, with processors that share the memory's bandwidth.
    pub simulated_ms: f64,
    /// Simulated, if each processor had its own bandwidth, as the forecast assumes.
    pub apart_ms: f64,
    /// The longest path, or a processor's work, whichever is longer.
    pub bound_ms: f64,
}

/// Milliseconds of a pass in parts. JSON keys are a contract.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct InParts {
    /// Rows of a part.
    pub part: usize,
    /// What decides which part comes next.
    pub order: Rule,
    /// Simulated, with processors that share the memory's bandwidth.
    pub simulated_ms: f64,
    /// Simulated, if each processor had its own bandwidth.
    pub apart_ms: f64,
    /// The longest path, or a processor's work, whichever is longer.
    pub bound_ms: f64,
}

/// A plan, and its passes. JSON keys are a contract.
#[derive(Debug, Clone, Serialize)]
pub struct PhonePlan {
    /// The model.
    pub model: String,
    /// Whether the phone's NPU is used.
    pub npu: bool,
    /// Bytes of the budget.
    pub budget_bytes: u64,
    /// Share of the FFN in memory.
    pub resident_share: f64,
    /// Layers with resident Gate rows.
    pub gate_layers: u64,
    /// Clusters of the hot region, and of the NPU.
    pub hot_clusters: u64,
    /// See `hot_clusters`.
    pub npu_clusters: u64,
    /// Neurons in the cold region.
    pub slots: u64,
    /// Clusters that the NPU computes of a layer for one row, mean.
    pub npu_clusters_of_token: f64,
    /// Rows of a chunk that the NPU computes with all clusters.
    pub streamed: usize,
    /// A token.
    pub decode: Compared,
    /// A chunk of a prompt.
    pub prompt: Compared,
    /// The same chunk in parts; `null` without the NPU, or if something is read.
    pub in_parts: Option<InParts>,
}

/// A model on the phone.
struct OnPhone {
    name: &'static str,
    planner: Planner,
    machine: MachineNumbers,
    npu: Option<DeviceNumbers>,
    gbs: [f64; 2],
    shared: f64,
    tokens: Vec<Fired>,
}

/// The phone for a model of this planner.
fn phone(planner: &Planner) -> (MachineNumbers, DeviceNumbers, [f64; 2], f64) {
    let facts = powerinfer::Facts::new();
    let of = |key: &str| facts.get(key);
    let [cpu, npu] = ["cpu_gbs", "npu_gbs"].map(of);
    let flat = |gbs: f64| Throughput {
        row_ns: 0.0,
        gb_per_s: vec![(1, gbs)],
    };
    let assumed = Rates::assumed(CORES, Isa::NeonI8mm);
    // 10^9 multiplications per second of the CPU by llm.npu's Table 3.
    let products = llm_npu::cpu_products() / 1e9;
    let kernel = |dtype: DType| KernelRates {
        dtype: dtype.name().to_owned(),
        dot: flat(cpu),
        neuron: flat(cpu),
        gemm: vec![(4, products), (512, products)],
    };
    let shape = &planner.shape;
    let threads = ThreadRates {
        threads: THREADS as u32,
        section_ns: 3000.0,
        layer_ns: 0.0,
        read: flat(cpu),
        kernels: vec![kernel(shape.ffn)],
    };
    let neuron = shape.gate_len + shape.rest_len;
    let weights = neuron / shape.ffn.row_bytes(shape.d) as f64 * shape.d as f64;
    let row = |rows: usize| RowTimes {
        rows,
        launch: SYNC,
        neuron: (neuron / npu / 1e9).max(rows as f64 * weights * powerinfer::seconds_of_weight()),
    };
    let bytes = planner.needs().neurons * neuron as u64;
    let storage =
        |depth: u32| ReadCost::simulated(&SimOptions::new(Profile::Ufs4, 0), depth, bytes);
    let numbers = DeviceNumbers {
        name: "NPU".into(),
        times: [1, 32, 64, 128, 256, 512].map(row).to_vec(),
        at_once: AT_ONCE,
    };
    let machine = MachineNumbers {
        rates: Rates {
            threads: vec![threads],
            ..assumed
        },
        threads: THREADS,
        storage: storage(32),
        stream: storage(4),
        lane: Some(numbers.facts()),
    };
    (machine, numbers, [cpu, npu], of("both_gbs"))
}

fn options() -> Options {
    Options {
        threads: THREADS,
        context: CONTEXT,
        lab: Lab {
            io: IoChoice::Sim(SimOptions::new(Profile::Ufs4, 0)),
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

/// Bamboo-7B without weights: its configuration, a tenth of the neurons active with the skew of its curve.
fn bamboo() -> Result<Planner, Failure> {
    let folder = tempfile::tempdir().map_err(Failure::file(&std::env::temp_dir()))?;
    let path = folder.path().join("config.json");
    let file = std::fs::File::create(&path).and_then(|mut file| file.write_all(BAMBOO.as_bytes()));
    file.map_err(Failure::file(&path))?;
    let container = described(&path, &PackOptions::new(DType::Q4))?;
    let planner = Planner::open(Model::open(container)?, options())?;
    let targets = Targets {
        active: powerinfer::Facts::new().get("active_share"),
        hot_share: "bamboo".parse::<Skew>().map_err(Failure::usage)?.0,
        persistence: PERSISTENCE,
        routing: None,
    };
    let often = Firing::solve(&targets, true)?.frequencies(planner.shape.neurons);
    let layers = vec![often; planner.shape.layers];
    Ok(with_frequencies(planner, &layers, PERSISTENCE))
}

/// The bundled model, with its own statistics.
fn demo() -> Result<Planner, Failure> {
    Ok(Planner::open(Model::demo()?, options())?)
}

impl OnPhone {
    /// The forecast gets the miss curve of other tokens with the same statistics, as a container has that of a text.
    fn new(name: &'static str, mut planner: Planner) -> Result<Self, Failure> {
        let (machine, npu, gbs, shared) = phone(&planner);
        let misses = misses::curve(&planner.firing)?;
        planner.firing = planner.firing.with_misses(misses);
        let tokens = draw(&planner.firing, WARM + TOKENS, 1);
        Ok(Self {
            name,
            planner: on_machine(planner, &machine),
            machine,
            npu: Some(npu),
            gbs,
            shared,
            tokens,
        })
    }

    fn all() -> Result<[Self; 2], Failure> {
        let demo = Self::new(Demo::Dense.name(), demo()?)?;
        Ok([Self::new("Bamboo-7B", bamboo()?)?, demo])
    }

    /// The same phone without its NPU.
    fn without_npu(self) -> Self {
        let machine = MachineNumbers {
            lane: None,
            ..self.machine
        };
        Self {
            planner: on_machine(self.planner, &machine),
            machine,
            npu: None,
            ..self
        }
    }

    fn costs(&self) -> Costs<'_> {
        Costs {
            shape: &self.planner.shape,
            machine: &self.machine,
            npu: self.npu.as_ref(),
            gbs: self.gbs,
        }
    }

    fn budget(&self, share: f64) -> u64 {
        match share >= 1.0 {
            true => self.planner.full_budget(),
            false => self.planner.needs().budget_for_share(share),
        }
    }

    /// The tokens after the warm-up: milliseconds of each on average.
    fn decode(&self, division: &Division, forecast_ms: f64) -> Result<Compared, Failure> {
        let (costs, regions) = (self.costs(), Regions::of(&self.planner, division));
        let token = Token {
            costs: &costs,
            regions: &regions,
            division,
            before: CONTEXT / 2,
        };
        let mut cold = regions.cold(&self.planner.firing, costs.shape.neurons)?;
        let mut sums = [0.0; 3];
        for (number, fired) in self.tokens.iter().enumerate() {
            let graph = token.graph(fired, &mut cold);
            if number >= WARM {
                let found = [
                    graph.seconds(self.shared),
                    graph.seconds(f64::INFINITY),
                    graph.bound(),
                ];
                sums.iter_mut()
                    .zip(found)
                    .for_each(|(sum, found)| *sum += found);
            }
        }
        let [simulated_ms, apart_ms, bound_ms] = sums.map(|sum| 1e3 * sum / TOKENS as f64);
        Ok(Compared {
            rows: 1,
            forecast_ms,
            simulated_ms,
            apart_ms,
            bound_ms,
        })
    }

    /// One chunk in the middle of a prompt as long as the longest.
    fn chunk<'a>(
        &'a self,
        costs: &'a Costs<'a>,
        regions: &'a Regions,
        of: &'a Division,
    ) -> Chunk<'a> {
        Chunk {
            costs,
            regions,
            division: of,
            firing: &self.planner.firing,
            rows: of.chunk,
            before: CONTEXT.min(512).saturating_sub(of.chunk) / 2,
        }
    }

    /// The plan of a budget, simulated.
    fn plan(&self, budget: u64) -> Result<PhonePlan, Failure> {
        let division = self.planner.divide(budget)?;
        let plan = self.planner.forecast(&division, THREADS)?;
        let decode = self.decode(&division, plan.decode.ms)?;
        let (costs, regions) = (self.costs(), Regions::of(&self.planner, &division));
        let chunk = self.chunk(&costs, &regions, &division);
        let graph = chunk.graph();
        let ms = |bandwidth: f64| 1e3 * graph.seconds(bandwidth);
        let in_parts = chunk.in_parts(self.shared).map(|of| InParts {
            part: of.rows,
            order: of.order.rule,
            simulated_ms: 1e3 * of.seconds(self.shared),
            apart_ms: 1e3 * of.seconds(f64::INFINITY),
            bound_ms: 1e3 * of.graph.bound(),
        });
        let layers = self.planner.shape.layers;
        let of_token = |layer: usize| {
            let wanted = division.widths.clusters(layer, 1);
            let held = regions.held[layer];
            wanted.map_or(held, |wanted| held.min(wanted as usize))
        };
        Ok(PhonePlan {
            model: self.name.into(),
            npu: self.npu.is_some(),
            budget_bytes: budget,
            resident_share: plan.ffn_resident_share,
            gate_layers: division.memory.gate_banks,
            hot_clusters: division.memory.hot_clusters,
            npu_clusters: division.needs.lane_clusters,
            slots: division.memory.slots,
            npu_clusters_of_token: (0..layers).map(of_token).sum::<usize>() as f64 / layers as f64,
            streamed: division.widths.streamed(division.chunk),
            decode,
            prompt: Compared {
                rows: division.chunk,
                forecast_ms: plan.prefill.ms,
                simulated_ms: ms(self.shared),
                apart_ms: ms(f64::INFINITY),
                bound_ms: 1e3 * graph.bound(),
            },
            in_parts,
        })
    }

    /// Lanes of a token and of a chunk, with half of the FFN in memory.
    fn drawn(&self) -> Result<Drawn, Failure> {
        let division = self.planner.divide(self.budget(0.5))?;
        let (costs, regions) = (self.costs(), Regions::of(&self.planner, &division));
        let token = Token {
            costs: &costs,
            regions: &regions,
            division: &division,
            before: CONTEXT / 2,
        };
        let mut cold = regions.cold(&self.planner.firing, costs.shape.neurons)?;
        let graphs = self
            .tokens
            .iter()
            .map(|fired| token.graph(fired, &mut cold));
        let one = graphs.last().unwrap_or_default();
        let chunk = self.chunk(&costs, &regions, &division);
        let many = chunk.graph();
        let lanes = |name: &str, graph: &costs::Graph, slots: &[_]| {
            let processors = Processors {
                names: NAMES,
                bandwidth: self.shared,
            };
            Lanes::new(name, &processors, &graph.operations, slots)
        };
        Ok(Drawn {
            title: format!(
                "{}, half of the FFN in memory: a token, and a chunk",
                self.name
            ),
            parts: vec![
                lanes("token", &one, &one.slots(self.shared)),
                lanes("chunk", &many, &many.slots(self.shared)),
            ],
        })
    }
}

/// Each model with each share of its FFN in memory, without and with the NPU.
pub fn plans() -> Result<Vec<PhonePlan>, Failure> {
    let mut all = Vec::new();
    for model in OnPhone::all()? {
        let plan = |model: &OnPhone| SHARES.map(|share| model.plan(model.budget(share)));
        let with = plan(&model);
        let without = plan(&model.without_npu());
        for plan in without.into_iter().chain(with) {
            all.push(plan?);
        }
    }
    Ok(all)
}

/// Bamboo-7B's plan as lanes.
pub fn drawn() -> Result<Drawn, Failure> {
    OnPhone::new("Bamboo-7B", bamboo()?)?.drawn()
}

/// As text.
pub fn text(plans: &[PhonePlan]) -> String {
    let mut out = String::from(
        "plans on Snapdragon 8 Gen 3, forecast and simulated, in brackets without shared bandwidth\n\
         | model | in memory | Gate rows, hot, NPU, cold | token, ms | chunk | prompt, ms |\n|---|---|---|---|---|---|\n",
    );
    let pair = |of: &Compared| {
        format!(
            "{:.1}, {:.1} ({:.1})",
            of.forecast_ms, of.simulated_ms, of.apart_ms
        )
    };
    for plan in plans {
        let how = match plan.streamed {
            0 if plan.npu => ", NPU".into(),
            0 => String::new(),
            streamed => format!(", {streamed} on the NPU"),
        };
        let in_parts = plan.in_parts.map_or(String::new(), |of| {
            let InParts {
                part,
                simulated_ms,
                apart_ms,
                ..
            } = of;
            format!("; in parts of {part}: {simulated_ms:.1} ({apart_ms:.1})")
        });
        out += &format!(
            "| {} | {:.0} %, {} MiB | {} layers, {}, {} clusters, {} neurons | {} | {} rows{how} | {}{in_parts} |\n",
            plan.model,
            100.0 * plan.resident_share,
            plan.budget_bytes >> 20,
            plan.gate_layers,
            plan.hot_clusters,
            plan.npu_clusters,
            plan.slots,
            pair(&plan.decode),
            plan.prompt.rows,
            pair(&plan.prompt),
        );
    }
    out
}
