//! Prompts in chunks on a phone's CPU and NPU (llm.npu), from its Table 3.
//!
//! ```text
//! NPU   a product = launch + rate · multiplications      both by least squares from Table 3, 64 tokens
//! CPU   half of what the NPU takes for a first chunk (3.4), a third of it attention, which grows with the keys
//! ```

use super::schedule::{Bounds, Operation, Rule, Timetable, busy, by_rule, plan};
use crate::report::csv::Csv;

use super::draw::{Drawn, Lanes};
use super::figures::{FigureValue, simulated};
use super::hot_channels::{OneInput, OutlierSubgraphs, channels, of_token};
use super::subgraphs::{GraphCount, LAYER, NPU, PHONE, count, prompt};

const PRODUCTS: &str = include_str!("curves/llm_npu_products.csv");

/// Tokens of a chunk (3.2).
const CHUNK: usize = 256;
/// Seconds to build and to optimise the graphs of Gemma-2B (2.3).
const BUILD: f64 = 0.36 + 11.54;
/// Products by groups over products by tensors: the middle of 8.1 and 10.7 (2.3).
const BY_GROUPS: f64 = 9.4;
/// Seconds of a fence (HeteroInfer 3.1); one before and one after the CPU's part of a product.
const FENCE: f64 = 400e-6;
/// Products of a layer: Q, K, V, output, Gate, Up, Down.
const PRODUCTS_OF_LAYER: usize = 7;

/// A model's sizes.
struct Sizes {
    layers: usize,
    width: usize,
    /// Rows of Q, K and V.
    qkv: usize,
    neurons: usize,
}

const QWEN: Sizes = Sizes {
    layers: 24,
    width: 2048,
    qkv: 3 * 2048,
    neurons: 5504,
};

const GEMMA: Sizes = Sizes {
    layers: 18,
    width: 2048,
    qkv: 2048 + 2 * 256,
    neurons: 16384,
};

/// Seconds of a product on a processor.
struct Line {
    launch: f64,
    /// Seconds per multiplication.
    rate: f64,
}

/// The NPU's column of Table 3.
const OF_NPU: &str = "npu_int8_ms";
/// The CPU's.
const OF_CPU: &str = "cpu_int8_ms";

impl Line {
    /// Least squares of a column of Table 3's rows with 64 tokens.
    fn fitted(column: &str) -> Self {
        let table = Csv::parse(PRODUCTS);
        let rows = table.rows().filter(|row| row.or_zero("tokens") == 64.0);
        let points: Vec<[f64; 2]> = rows
            .map(|row| {
                let sizes = ["rows", "cols", "tokens"].map(|size| row.or_zero(size));
                [sizes.iter().product(), row.or_zero(column) / 1e3]
            })
            .collect();
        let n = points.len().max(1) as f64;
        let [x, y] = [0, 1].map(|i| points.iter().map(|p| p[i]).sum::<f64>() / n);
        let both: f64 = points.iter().map(|p| (p[0] - x) * (p[1] - y)).sum();
        let squares: f64 = points.iter().map(|p| (p[0] - x).powi(2)).sum();
        let rate = both / squares;
        Self {
            launch: y - rate * x,
            rate,
        }
    }

    fn products(&self, multiplications: f64) -> f64 {
        self.launch + self.rate * multiplications
    }

    fn seconds(&self, rows: usize, cols: usize) -> f64 {
        self.products((rows * cols * CHUNK) as f64)
    }

    /// Seconds of a subgraph of [`LAYER`] on the NPU.
    fn subgraph(&self, of: &Sizes, name: &str) -> f64 {
        match name {
            "qkv" => self.seconds(of.qkv, of.width),
            "output" => self.seconds(of.width, of.width),
            _ => self.seconds(2 * of.neurons, of.width) + self.seconds(of.width, of.neurons),
        }
    }

    /// Seconds of a chunk on the NPU.
    fn chunk(&self, of: &Sizes) -> f64 {
        let npu = LAYER.iter().filter(|subgraph| subgraph.on == NPU);
        let layer: f64 = npu.map(|subgraph| self.subgraph(of, subgraph.name)).sum();
        of.layers as f64 * layer
    }
}

/// Multiplications of the CPU per second, by Table 3.
pub fn cpu_products() -> f64 {
    1.0 / Line::fitted(OF_CPU).rate
}

/// Subgraphs of a prompt; products take `slower` times as long, plus `added` seconds in each subgraph.
fn graph(line: &Line, of: &Sizes, chunks: usize, slower: f64, added: f64) -> Vec<Operation> {
    let npu_parts = LAYER.iter().filter(|subgraph| subgraph.on == NPU).count();
    let cpu_parts = LAYER.len() - npu_parts;
    let of_part = line.chunk(of) / 2.0 / (of.layers * cpu_parts) as f64;
    prompt(chunks, of.layers, &|chunk, at| match LAYER[at] {
        subgraph if subgraph.on == NPU => {
            line.subgraph(of, subgraph.name) * slower + added / npu_parts as f64
        }
        subgraph if subgraph.of_place => of_part * (chunk + 1) as f64,
        _ => of_part,
    })
}

/// In order, and by the fastest plan.
pub struct Orders {
    graph: Vec<Operation>,
    in_order: Timetable,
    /// By Eq. 5 only.
    by_stalls: Timetable,
    best: Timetable,
}

impl Orders {
    /// Of Qwen1.5-1.8B and a prompt of `chunks` chunks.
    pub fn of(chunks: usize) -> Self {
        let graph = graph(&Line::fitted(OF_NPU), &QWEN, chunks, 1.0, 0.0);
        let rule = |rule| by_rule(&graph, &PHONE, NPU, rule);
        Self {
            in_order: rule(Rule::InOrder),
            by_stalls: rule(Rule::Stalls),
            best: plan(&graph, &PHONE, NPU),
            graph,
        }
    }

    /// Share of the time that a plan saves.
    fn saved(&self, plan: &Timetable) -> f64 {
        1.0 - plan.seconds() / self.in_order.seconds()
    }

    /// Share of the time in order in which the NPU is idle.
    fn bubbles(&self) -> f64 {
        1.0 - busy(&self.graph, &self.in_order.slots, NPU) / self.in_order.seconds()
    }

    /// Lanes of both.
    pub fn drawn(&self) -> Drawn {
        let part = |name, plan: &Timetable| Lanes::new(name, &PHONE, &self.graph, &plan.slots);
        Drawn {
            title: format!(
                "llm.npu, Qwen1.5-1.8B, 512 tokens: in order {:.0} ms, out of order {:.0} ms",
                1e3 * self.in_order.seconds(),
                1e3 * self.best.seconds()
            ),
            parts: vec![
                part("in order", &self.in_order),
                part("out of order", &self.best),
            ],
        }
    }

    /// Savings of Eq. 5 alone and of the search, as text.
    pub fn note(&self) -> String {
        format!(
            "llm.npu, Eq. 5 alone saves {:.1} %, the plan taken ({}) {:.1} %; no order can save more than {:.1} %",
            100.0 * self.saved(&self.by_stalls),
            match self.best.rule {
                Rule::InOrder => "in order",
                Rule::Stalls => "by Eq. 5",
                Rule::Searched => "searched",
            },
            100.0 * self.saved(&self.best),
            100.0 * (1.0 - Bounds::of(&self.graph, 2).largest() / self.in_order.seconds()),
        )
    }
}

/// Graphs of four chunks with weights in 16 bits.
fn graphs() -> GraphCount {
    let bytes = LAYER.map(|subgraph| {
        let weights = match subgraph.name {
            "qkv" => QWEN.qkv * QWEN.width,
            "output" => QWEN.width * QWEN.width,
            "ffn" => 3 * QWEN.neurons * QWEN.width,
            _ => 0,
        };
        2 * weights as u64
    });
    count(4, QWEN.layers, bytes)
}

/// The inputs of a subgraph's products.
fn inputs(of: &Sizes, name: &str) -> Vec<OneInput> {
    let one = |channels: usize, rows: usize| OneInput { channels, rows };
    match name {
        "qkv" => vec![one(of.width, of.qkv)],
        "output" => vec![one(of.width, of.width)],
        _ => vec![one(of.width, 2 * of.neurons), one(of.neurons, of.width)],
    }
}

/// Seconds of fences in a subgraph of the NPU: two for each of a layer's products.
fn fences() -> f64 {
    let npu_parts = LAYER.iter().filter(|subgraph| subgraph.on == NPU).count();
    2.0 * PRODUCTS_OF_LAYER as f64 * FENCE / npu_parts as f64
}

/// How many times as long a prompt of 512 takes with the outliers of all layers: with [fences alone, reads too, and the
/// CPU's products as well].
fn unpruned(orders: &Orders) -> [f64; 3] {
    let cpu = Line::fitted(OF_CPU);
    let weights = QWEN.layers * (QWEN.qkv + QWEN.width + 3 * QWEN.neurons) * QWEN.width;
    let seconds = |read: bool, computed: bool| {
        let inputs = |name: &str| match read || computed {
            true => inputs(&QWEN, name),
            false => Vec::new(),
        };
        let on_cpu = |products: f64| match computed {
            true => cpu.products(products),
            false => 0.0,
        };
        let outliers = OutlierSubgraphs {
            tokens: CHUNK,
            inputs: &inputs,
            on_cpu: &on_cpu,
            fences: fences(),
            bytes: 4.0 * weights as f64,
        };
        outliers.prompt(&orders.graph) / orders.in_order.seconds()
    };
    [
        seconds(false, false),
        seconds(true, false),
        seconds(true, true),
    ]
}

/// What of it each part adds, as text.
pub fn unpruned_note(orders: &Orders) -> String {
    let [fences, read, all] = unpruned(orders);
    let [hot, cold] = channels(CHUNK);
    format!(
        "llm.npu, outliers of all layers: {fences:.2} times as long by fences, {read:.2} with reads of cold channels' \
         weights, {all:.2} with the CPU's products; a token has outliers in {:.2} % of the channels, a chunk in {:.1} % hot \
         and {:.1} % cold ones",
        100.0 * of_token(),
        100.0 * hot,
        100.0 * cold
    )
}

/// Simulated figures.
pub fn figures(orders: &Orders) -> Vec<FigureValue> {
    let line = Line::fitted(OF_NPU);
    let in_order = |graph: &[Operation]| by_rule(graph, &PHONE, NPU, Rule::InOrder).seconds();
    let groups = |of: &Sizes| in_order(&graph(&line, of, 2, BY_GROUPS, 0.0));
    let plain = orders.in_order.seconds();
    let added = 2.0 * PRODUCTS_OF_LAYER as f64 * FENCE;
    let joined = in_order(&graph(&line, &QWEN, 2, 1.0, added));
    let [.., all_outliers] = unpruned(orders);
    // Outliers stay in 15 % of the layers (3.3).
    let pruned = plain + 0.15 * (joined - plain);
    let counted = graphs();
    let saved = counted.separate_bytes - counted.bytes;
    vec![
        simulated("npu-chunk", 1e3 * line.chunk(&QWEN)),
        simulated("shared-graphs", counted.shared as f64),
        simulated(
            "graph-memory",
            100.0 * saved as f64 / counted.separate_bytes as f64,
        ),
        simulated("graph-bytes", saved as f64 / 1e9),
        simulated("bubbles", 100.0 * orders.bubbles()),
        simulated("out-of-order", 100.0 * orders.saved(&orders.best)),
        simulated("chunk-gain", (BUILD + groups(&GEMMA)) / groups(&GEMMA)),
        simulated("outlier-gain", groups(&QWEN) / pruned),
        simulated("outlier-sync", 100.0 * (joined / plain - 1.0)),
        simulated("unpruned", all_outliers),
    ]
}
