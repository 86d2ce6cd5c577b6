//! The products of a prompt on a phone's GPU and NPU, by the solver's partitions (HeteroInfer, from its Table 3).
//!
//! ```text
//! for each product   GPU part | NPU part   then joined: T_sync + T_copy, if the NPU takes part
//! ```

use super::schedule::{Operation, Processors, Rule, Slot, by_rule, makespan};
use emberflow_devices::split::{Curve, Pair, Partition, Product};

use crate::bench::split::snapdragon::{GPU, GRAPHED, PAIR, SLOW_SYNC, SPACE};
use crate::bench::split::{LAYER, LAYERS, decoding, prompt};

use super::draw::{Drawn, Lanes};
use super::figures::{FigureValue, simulated};

const PHONE: Processors = Processors {
    names: &["GPU", "NPU", "join"],
    bandwidth: f64::INFINITY,
};
const ON_GPU: usize = 0;
const ON_NPU: usize = 1;
const JOIN: usize = 2;

/// Lengths just above the size of an existing graph.
const JUST_OVER: [usize; 3] = [129, 257, 513];

/// Parts of GPU and NPU in a partition by weights or by activations.
fn parts(of: Product, Partition { rows, tokens }: Partition) -> [Product; 2] {
    let with = |rows: usize, n: usize| Product { rows, n, ..of };
    let gpu = match rows == of.rows {
        true => with(rows, of.n - tokens),
        false => with(of.rows - rows, of.n),
    };
    [gpu, with(rows, tokens)]
}

/// Appends a product that waits for the last piece.
fn product(graph: &mut Vec<Operation>, pair: &Pair<'_>, of: Product, partition: Partition) {
    let after: Vec<usize> = graph.len().checked_sub(1).into_iter().collect();
    let mut piece = |on: usize, seconds: f64, after: Vec<usize>| {
        graph.push(Operation {
            kind: if on == JOIN { "join" } else { "product" },
            on,
            seconds,
            draws: 0.0,
            after,
        });
        graph.len() - 1
    };
    let [gpu, npu] = parts(of, partition);
    let mut joined = Vec::new();
    if gpu.rows * gpu.n > 0 {
        joined.push(piece(ON_GPU, GPU.seconds(gpu), after.clone()));
    }
    if npu.rows > 0 {
        joined.push(piece(ON_NPU, GRAPHED.seconds(npu), after));
        piece(JOIN, pair.sync, joined);
    }
}

/// The layers of a prompt of `n` tokens.
fn layers(pair: &Pair<'_>, n: usize, layers: usize) -> Vec<Operation> {
    let mut graph = Vec::new();
    for _ in 0..layers {
        for [rows, cols] in LAYER {
            let of = Product { rows, cols, n };
            let chosen = pair.solve(of, SPACE).partition;
            product(&mut graph, pair, of, chosen);
        }
    }
    graph
}

fn slots(graph: &[Operation]) -> Vec<Slot> {
    by_rule(graph, &PHONE, ON_NPU, Rule::InOrder).slots
}

/// Seconds of a prompt of `n` tokens.
pub fn seconds(pair: &Pair<'_>, n: usize) -> f64 {
    makespan(&slots(&layers(pair, n, LAYERS as usize)))
}

/// Fences of a layer: implied by 14.01 tokens per second, 4.01 times as many as with fences (5.5).
fn fences() -> f64 {
    const FAST: f64 = 14.01;
    const TIMES: f64 = 4.01;
    (TIMES - 1.0) / FAST / LAYERS / (SLOW_SYNC - PAIR.sync)
}

/// Simulated figures.
pub fn figures() -> Vec<FigureValue> {
    let at_525 = prompt(&PAIR, 525);
    let ms = 1e3 * seconds(&PAIR, 525);
    let over = |n: usize| prompt(&PAIR, n).padded / (1e3 * seconds(&PAIR, n));
    let just_over = JUST_OVER.map(over).iter().sum::<f64>() / JUST_OVER.len() as f64;
    let fast = seconds(&PAIR, 256);
    let slow = fast + LAYERS * fences() * (SLOW_SYNC - PAIR.sync);
    let decoding = decoding(&PAIR);
    vec![
        simulated("hetero-online", at_525.online / ms),
        simulated("hetero-padding", at_525.padded / ms),
        simulated("hetero-pipe", at_525.in_pieces / ms),
        simulated("hetero-just-over", just_over),
        simulated("hetero-speed", 256.0 / fast),
        simulated("hetero-sync-prompt", 100.0 * (slow / fast - 1.0)),
        simulated("hetero-decode", decoding.gpu_alone / decoding.split),
        simulated("hetero-sync-decode", decoding.slow_sync / decoding.split),
    ]
}

/// Lanes of one layer.
pub fn drawn() -> Drawn {
    let part = |n: usize| {
        let graph = layers(&PAIR, n, 1);
        Lanes::new(&format!("{n} tokens"), &PHONE, &graph, &slots(&graph))
    };
    Drawn {
        title: "HeteroInfer, Llama-8B: the products of one layer, as the solver partitions them"
            .into(),
        parts: vec![part(256), part(525)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The simulated time of the solver's partitions equals the solver's.
    #[test]
    fn a_prompt_takes_what_the_solver_says() {
        for n in [1, 129, 256, 300, 525] {
            let says = prompt(&PAIR, n).split;
            assert!((1e3 * seconds(&PAIR, n) - says).abs() < 1e-6 * says, "{n}");
        }
    }
}
