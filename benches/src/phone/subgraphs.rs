//! The subgraphs of a prompt in chunks (llm.npu, §3.2, §3.4).
//!
//! ```text
//! G(i, j) <- G(0, j-1) .. G(i, j-1)    if G(i, j) is attention    (Eq. 2)
//! G(i, j) <- G(i, j-1)                 otherwise                  (Eq. 3)
//! ```
//!
//! i numbers chunks and j subgraphs, six in a layer. Only attention depends on the position of its chunk, so
//! one graph of each other subgraph serves all chunks.

use super::schedule::{Operation, Processors};

/// Index of the CPU.
pub const CPU: usize = 0;
/// Index of the NPU.
pub const NPU: usize = 1;

/// CPU and NPU, without a memory bandwidth limit.
pub const PHONE: Processors = Processors {
    names: &["CPU", "NPU"],
    bandwidth: f64::INFINITY,
};

/// A subgraph of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subgraph {
    /// Its name.
    pub name: &'static str,
    /// Index of its processor: integer products on the NPU, the rest on the CPU.
    pub on: usize,
    /// Whether it depends on the position of its chunk.
    pub of_place: bool,
}

const fn of_cpu(name: &'static str) -> Subgraph {
    Subgraph {
        name,
        on: CPU,
        of_place: false,
    }
}

const fn of_npu(name: &'static str) -> Subgraph {
    Subgraph {
        name,
        on: NPU,
        of_place: false,
    }
}

/// The subgraphs of a layer.
pub const LAYER: [Subgraph; 6] = [
    of_cpu("norm"),
    of_npu("qkv"),
    Subgraph {
        name: "attention",
        on: CPU,
        of_place: true,
    },
    of_npu("output"),
    of_cpu("norm"),
    of_npu("ffn"),
];

/// Subgraphs of `chunks` chunks and `layers` layers, chunk by chunk. `seconds` of a chunk and a subgraph of
/// [`LAYER`].
pub fn prompt(
    chunks: usize,
    layers: usize,
    seconds: &dyn Fn(usize, usize) -> f64,
) -> Vec<Operation> {
    let of_chunk = layers * LAYER.len();
    let mut out: Vec<Operation> = Vec::with_capacity(chunks * of_chunk);
    for place in 0..chunks * of_chunk {
        let (chunk, at) = (place / of_chunk, place % of_chunk);
        let subgraph = LAYER[at % LAYER.len()];
        let first = if subgraph.of_place { 0 } else { chunk };
        let before = (first..=chunk).map(|chunk| chunk * of_chunk + at);
        out.push(Operation {
            kind: subgraph.name,
            on: subgraph.on,
            seconds: seconds(chunk, at % LAYER.len()),
            draws: 0.0,
            after: before.filter(|_| at > 0).map(|next| next - 1).collect(),
        });
    }
    out
}

/// Graphs of a prompt of several chunks, and their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphCount {
    /// Graphs of one chunk.
    pub of_chunk: usize,
    /// Those that serve every chunk.
    pub shared: usize,
    /// Bytes if each chunk had its own graphs.
    pub separate_bytes: u64,
    /// Bytes with shared graphs.
    pub bytes: u64,
}

/// Counts graphs; `bytes` of each subgraph of a layer.
pub fn count(chunks: usize, layers: usize, bytes: [u64; LAYER.len()]) -> GraphCount {
    let times = |own: bool| {
        let of = LAYER.iter().zip(bytes).map(|(subgraph, bytes)| {
            let copies = if own || subgraph.of_place { chunks } else { 1 };
            copies as u64 * bytes
        });
        layers as u64 * of.sum::<u64>()
    };
    let shared = LAYER.iter().filter(|subgraph| !subgraph.of_place).count();
    GraphCount {
        of_chunk: layers * LAYER.len(),
        shared: layers * shared,
        separate_bytes: times(true),
        bytes: times(false),
    }
}
