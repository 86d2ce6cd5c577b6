//! Bamboo-7B on a phone with UFS 4.0, half of its FFN on flash (PowerInfer-2).
//!
//! ```text
//! in memory   attention by heads on CPU and NPU | hot neurons on the NPU, active cold ones on the CPU
//! prompts     a layer is read while the one before is computed; others read, then compute
//! Fig. 14     reads of active neurons that miss, before computing or during it
//! ```

use super::schedule::{Operation, Processors, Rule, Slot, busy, by_rule, makespan};
use crate::report::csv::Csv;

use super::draw::{Drawn, Lanes};
use super::figures::{FigureValue, simulated};

const PHONE_TABLE: &str = include_str!("curves/powerinfer_2.csv");

/// Bamboo-7B.
const LAYERS: usize = 32;
const WIDTH: f64 = 4096.0;
/// Rows of Q, K, V and output together.
const ATTENTION: f64 = 4096.0 + 2.0 * 1024.0 + 4096.0;
const NEURONS: f64 = 14336.0;
const VOCAB: f64 = 32000.0;
/// Matrices of an FFN.
const MATRICES: f64 = 3.0;
/// Weights of an FFN.
const FFN: f64 = MATRICES * NEURONS * WIDTH;

const CPU: usize = 0;
const NPU: usize = 1;
const FLASH: usize = 2;
const PROCESSORS: &[&str] = &["CPU", "NPU", "flash"];

/// Published values by key.
pub struct Facts(Csv);

impl Facts {
    /// All of them.
    pub fn new() -> Self {
        Self(Csv::parse(PHONE_TABLE))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> f64 {
        let row = self.0.find(&[("key", key)]);
        row.map_or(f64::NAN, |row| row.or_zero("value"))
    }

    fn phone(&self) -> Processors {
        Processors {
            names: PROCESSORS,
            bandwidth: self.get("both_gbs"),
        }
    }

    /// Reading weights from memory on a processor.
    fn weights(&self, kind: &'static str, on: usize, count: f64, after: Vec<usize>) -> Operation {
        let draws = self.get(if on == NPU { "npu_gbs" } else { "cpu_gbs" });
        Operation {
            kind,
            on,
            seconds: count * self.get("bytes_per_weight") / draws / 1e9,
            draws,
            after,
        }
    }
}

/// Weights of the model outside FFNs, head included.
fn dense() -> f64 {
    LAYERS as f64 * ATTENTION * WIDTH + VOCAB * WIDTH
}

/// Seconds of the NPU for a weight and a token of a prompt.
pub fn seconds_of_weight() -> f64 {
    let weights = dense() + LAYERS as f64 * FFN;
    1.0 / Facts::new().get("npu_prompt") / weights
}

/// A token with everything in memory.
fn in_memory(facts: &Facts) -> Vec<Operation> {
    let [cpu, npu] = ["cpu_gbs", "npu_gbs"].map(|key| facts.get(key));
    let shares = [cpu / (cpu + npu), npu / (cpu + npu)];
    let hot = facts.get("hot_share");
    // as if neurons fired evenly over hot and cold ones: an upper bound for cold ones
    let cold = (1.0 - hot) * facts.get("active_share");
    let mut graph = Vec::new();
    for layer in 0..=LAYERS {
        let after: Vec<usize> = (graph.len() - graph.len().min(2)..graph.len()).collect();
        let weights = if layer < LAYERS { ATTENTION } else { VOCAB } * WIDTH;
        for (on, share) in shares.into_iter().enumerate() {
            graph.push(facts.weights("attention", on, weights * share, after.clone()));
        }
        if layer < LAYERS {
            let after = vec![graph.len() - 2, graph.len() - 1];
            for (on, share) in [cold, hot].into_iter().enumerate() {
                graph.push(facts.weights("ffn", on, FFN * share, after.clone()));
            }
        }
    }
    graph
}

/// How a system runs a prompt with half of the FFN on flash (Fig. 8).
#[derive(Debug, Clone, Copy)]
struct PromptSystem {
    /// Its processor.
    on: usize,
    /// Key of the processor's tokens per second with everything in memory.
    speed: &'static str,
    /// Key of the bytes of a weight.
    bytes: &'static str,
    /// Key of the GB/s of its reads.
    reads: &'static str,
    /// Weights of a layer that it reads.
    weights: f64,
    /// Whether the next layer is read meanwhile.
    ahead: bool,
}

/// Whole layers by sequential reads, one ahead (7.2.2).
const POWERINFER: PromptSystem = PromptSystem {
    on: NPU,
    speed: "npu_prompt",
    bytes: "bytes_per_weight",
    reads: "sequential_gbs",
    weights: ATTENTION * WIDTH + FFN,
    ahead: true,
};

/// The same layers in its format, read before they are computed (7.3: the others do not overlap both).
const QNN: PromptSystem = PromptSystem {
    bytes: "qnn_bytes_per_weight",
    ahead: false,
    ..POWERINFER
};

/// Page faults of a mapped file for the half that is not in memory.
const LLAMA: PromptSystem = PromptSystem {
    on: CPU,
    speed: "cpu_prompt",
    bytes: "llama_bytes_per_weight",
    reads: "fault_gbs",
    weights: FFN / 2.0,
    ahead: false,
};

/// Built on llama.cpp (7.1), reads of neurons; a prompt's tokens together need all of them.
const LLM_FLASH: PromptSystem = PromptSystem {
    reads: "random_gbs",
    ..LLAMA
};

impl PromptSystem {
    /// A prompt: each layer is read and computed. With reads ahead there are two buffers.
    fn graph(self, facts: &Facts, tokens: usize) -> Vec<Operation> {
        let read = self.weights * facts.get(self.bytes) / facts.get(self.reads) / 1e9;
        let compute = tokens as f64 / facts.get(self.speed) / LAYERS as f64;
        let piece = |kind, on, seconds, after| Operation {
            kind,
            on,
            seconds,
            draws: 0.0,
            after,
        };
        let behind = if self.ahead { 2 } else { 1 };
        let mut graph = Vec::new();
        for layer in 0..LAYERS {
            // The buffer is free once the layer that was in it is computed.
            let free = (layer >= behind).then(|| 2 * (layer - behind) + 1);
            graph.push(piece("read", FLASH, read, free.into_iter().collect()));
            let before = (layer > 0).then(|| 2 * layer - 1);
            let after = before.into_iter().chain([2 * layer]).collect();
            graph.push(piece("ffn", self.on, compute, after));
        }
        graph
    }

    /// Tokens per second of a prompt.
    fn speed(self, facts: &Facts, tokens: usize) -> f64 {
        let graph = self.graph(facts, tokens);
        tokens as f64 / by_rule(&graph, &facts.phone(), NPU, Rule::Stalls).seconds()
    }
}

/// Fig. 8: PowerInfer-2's tokens per second for 512 tokens, and how many times those of the others; only the ratios are in
/// the paper's text.
fn prompts(facts: &Facts) -> [FigureValue; 5] {
    let of = |tokens: usize| POWERINFER.speed(facts, tokens);
    let over = |other: PromptSystem, tokens: usize| of(tokens) / other.speed(facts, tokens);
    [
        simulated("bamboo-prompt", of(512)),
        simulated("bamboo-prompt-flash", over(LLM_FLASH, 512)),
        simulated("bamboo-prompt-llama", over(LLAMA, 512)),
        simulated("bamboo-prompt-qnn", over(QNN, 512)),
        simulated("bamboo-prompt-128", over(LLM_FLASH, 128)),
    ]
}

/// Simulated tokens per second of Fig. 8, as text.
pub fn note() -> String {
    let facts = Facts::new();
    let systems = [
        ("PowerInfer-2", POWERINFER),
        ("QNN", QNN),
        ("llama.cpp", LLAMA),
        ("LLMFlash", LLM_FLASH),
    ];
    let words = systems.map(|(name, system)| {
        let [few, many] = [128, 512].map(|tokens| system.speed(&facts, tokens));
        format!("{name} {few:.1} and {many:.1}")
    });
    format!(
        "PowerInfer-2, Fig. 8, prompts of 128 and 512 in tokens/s: {}",
        words.join(", ")
    )
}

/// A step of Fig. 14.
#[derive(Debug, Clone, Copy)]
struct Ladder {
    /// Reads of a missing neuron.
    reads: f64,
    /// Share of the active neurons that are not in memory.
    misses: f64,
    /// Whether computation overlaps with reads.
    pipeline: bool,
    /// Milliseconds of computation.
    compute: f64,
    /// Seconds of a read.
    read: f64,
}

impl Ladder {
    /// A token: attention, then clusters of in-memory neurons, reads, and the read clusters.
    fn graph(&self, facts: &Facts) -> Vec<Operation> {
        let attention = ATTENTION * WIDTH / (ATTENTION * WIDTH + FFN * facts.get("active_share"));
        let layer = self.compute / 1e3 / LAYERS as f64;
        let neurons = NEURONS * facts.get("active_share") * self.misses;
        let late = (1.0 - attention) * layer * self.misses;
        let mut graph: Vec<Operation> = Vec::new();
        let mut piece = |kind, on, seconds, after: &[usize]| {
            graph.push(Operation {
                kind,
                on,
                seconds,
                draws: 0.0,
                after: after.to_vec(),
            });
            graph.len() - 1
        };
        let mut last: Vec<usize> = Vec::new();
        for _ in 0..LAYERS {
            let mixed = piece("attention", CPU, attention * layer, &last);
            let read = piece("read", FLASH, neurons * self.reads * self.read, &[mixed]);
            let waits = if self.pipeline { mixed } else { read };
            let here = piece("ffn", CPU, (1.0 - attention) * layer - late, &[waits]);
            last = vec![piece("ffn", CPU, late, &[here, read])];
        }
        graph
    }

    fn slots(&self, facts: &Facts) -> Vec<Slot> {
        by_rule(&self.graph(facts), &facts.phone(), NPU, Rule::InOrder).slots
    }

    fn seconds(&self, facts: &Facts) -> f64 {
        makespan(&self.slots(facts))
    }
}

/// The steps of Fig. 14 after the first, which gives the time of a read.
fn ladder(facts: &Facts) -> [Ladder; 4] {
    let with_npu = facts.get("token_ms") * facts.get("compute_share");
    let compute = with_npu * facts.get("npu_gain");
    let missing = LAYERS as f64 * NEURONS * facts.get("active_share") * 0.5;
    let read = (1.0 / facts.get("baseline") - compute / 1e3) / (missing * MATRICES);
    let bundles = Ladder {
        reads: 1.0,
        misses: 0.5,
        pipeline: false,
        compute,
        read,
    };
    let cache = Ladder {
        misses: 1.0 - facts.get("hit_share"),
        ..bundles
    };
    // The I/O thread keeps the queue full: Gate first, then the rest of firing neurons.
    let pipeline = Ladder {
        pipeline: true,
        reads: 1.0 + facts.get("both_fire"),
        read: 4096.0 / facts.get("random_gbs") / 1e9,
        ..cache
    };
    let npu = Ladder {
        compute: with_npu,
        ..pipeline
    };
    [bundles, cache, pipeline, npu]
}

/// Simulated figures.
pub fn figures() -> Vec<FigureValue> {
    let facts = Facts::new();
    let phone = facts.phone();
    let token = makespan(&by_rule(&in_memory(&facts), &phone, NPU, Rule::InOrder).slots);
    let weights = dense() + LAYERS as f64 * FFN;
    let alone = |bytes: &str, gbs: &str| weights * facts.get(bytes) / facts.get(gbs) / 1e9;
    let [bundles, cache, pipeline, npu] = ladder(&facts);
    let speed = |step: &Ladder| 1.0 / step.seconds(&facts);
    let slots = npu.slots(&facts);
    let computing = busy(&npu.graph(&facts), &slots, CPU);
    let rest = [
        simulated(
            "bamboo-llama",
            alone("llama_bytes_per_weight", "cpu_gbs") / token,
        ),
        simulated(
            "bamboo-mlc",
            alone("llama_bytes_per_weight", "gpu_gbs") / token,
        ),
        simulated(
            "bamboo-qnn",
            alone("qnn_bytes_per_weight", "npu_gbs") / token,
        ),
        simulated("ladder-bundles", speed(&bundles)),
        simulated("ladder-cache", speed(&cache)),
        simulated("ladder-pipeline", speed(&pipeline)),
        simulated("ladder-npu", speed(&npu)),
        simulated(
            "ladder-waiting",
            100.0 * (1.0 - computing / makespan(&slots)),
        ),
    ];
    prompts(&facts).into_iter().chain(rest).collect()
}

/// Lanes of a token with everything in memory, and of Fig. 14's pipeline.
pub fn drawn() -> Drawn {
    let facts = Facts::new();
    let [_, cache, pipeline, _] = ladder(&facts);
    let step = |name: &str, step: &Ladder| {
        Lanes::new(
            name,
            &facts.phone(),
            &step.graph(&facts),
            &step.slots(&facts),
        )
    };
    let whole = in_memory(&facts);
    let slots = by_rule(&whole, &facts.phone(), NPU, Rule::InOrder).slots;
    Drawn {
        title: "PowerInfer-2, Bamboo-7B: a token in memory, and with half of the FFN on flash"
            .into(),
        parts: vec![
            Lanes::new("in memory", &facts.phone(), &whole, &slots),
            step("neuron cache", &cache),
            step("pipeline", &pipeline),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads and computing overlap in one system and add up in the others.
    #[test]
    fn a_prompt_takes_the_longer_of_reads_and_computing_or_their_sum() {
        let facts = Facts::new();
        for tokens in [128, 512] {
            let parts = |of: PromptSystem| {
                let read = of.weights * facts.get(of.bytes) / facts.get(of.reads) / 1e9;
                [LAYERS as f64 * read, tokens as f64 / facts.get(of.speed)]
            };
            for system in [QNN, LLAMA, LLM_FLASH] {
                let [read, compute] = parts(system);
                let found = tokens as f64 / system.speed(&facts, tokens);
                assert!((found - read - compute).abs() < 1e-9, "{found}");
            }
            let [read, compute] = parts(POWERINFER);
            let found = tokens as f64 / POWERINFER.speed(&facts, tokens);
            // The first layer is read before, or the last one computed after.
            let last = read.min(compute) / LAYERS as f64;
            assert!((found - read.max(compute) - last).abs() < 1e-9, "{found}");
        }
    }
}
