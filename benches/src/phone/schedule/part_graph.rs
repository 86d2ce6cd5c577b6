//! A pass in parts: the mixer and the FFN of each part and layer.
//!
//! ```text
//! project(i, j)   on a device     after feed(i, j − 1)
//! mix(i, j)       on the CPU      after project(i, j), and after mix(i − 1, j), whose keys, values and state it reads
//! feed(i, j)      on a device     after mix(i, j)
//! ```
//!
//! i numbers parts and j layers. Where a device multiplies the projections, these are llm.npu's subgraphs of a layer: what
//! multiplies the mixer's input, attention, and the output projection with the FFN. Otherwise all of a mixer is on the CPU,
//! and the FFN alone is fed.

use super::graph::Operation;

/// What is computed of a part in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartStep {
    /// What multiplies the mixer's input.
    Project,
    /// The mixer, or what is left of it.
    Mix,
    /// Its output projection if there is a [`PartStep::Project`], and the FFN.
    Feed,
}

impl PartStep {
    const ALL: [Self; 3] = [Self::Project, Self::Mix, Self::Feed];

    fn on(self) -> usize {
        match self {
            Self::Mix => CPU,
            Self::Project | Self::Feed => DEVICE,
        }
    }

    /// Its kind in charts.
    fn name(self) -> &'static str {
        match self {
            Self::Project => "qkv",
            Self::Mix => "attention",
            Self::Feed => "ffn",
        }
    }
}

/// Index of the compute threads.
pub const CPU: usize = 0;
/// Index of the devices.
pub const DEVICE: usize = 1;

/// An operation's place in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartPlace {
    /// Number of the layer.
    pub layer: usize,
    /// Number of the part.
    pub part: usize,
    /// What is computed.
    pub step: PartStep,
}

/// The operations of a pass in parts, layer by layer, and part by part in a layer.
pub struct PartGraph {
    /// The operations.
    pub operations: Vec<Operation>,
    /// Where each of them is.
    pub places: Vec<PartPlace>,
}

/// Rows of a part are a multiple of these, as devices have graphs and kernels for them.
const PART_ROWS: usize = 32;

/// Rows of each part of a pass of `all` rows in parts of up to `rows` rows, in multiples of 32; the last part may have
/// fewer. 0 for fewer than two parts.
pub fn part_rows(rows: usize, all: usize) -> usize {
    let parts = all.div_ceil(rows.max(1)).max(2);
    let each = all.div_ceil(parts).next_multiple_of(PART_ROWS);
    if each < all { each } else { 0 }
}

impl PartGraph {
    /// Of layers that have some of the steps each, by the `seconds` of these for each part.
    pub fn new(layers: impl Iterator<Item = [bool; 3]>, seconds: &[[f64; 3]]) -> Self {
        let mut graph = Self {
            operations: Vec::new(),
            places: Vec::new(),
        };
        let mut last: Vec<Option<usize>> = vec![None; seconds.len()];
        for (layer, has) in layers.enumerate() {
            let mut mixer = None;
            for (part, seconds) in seconds.iter().enumerate() {
                let steps = PartStep::ALL.into_iter().zip(has).zip(seconds);
                for ((step, _), &seconds) in steps.filter(|((_, has), _)| *has) {
                    let earlier = mixer.filter(|_| step == PartStep::Mix);
                    let after = [last[part], earlier].into_iter().flatten().collect();
                    last[part] = Some(graph.operations.len());
                    if step == PartStep::Mix {
                        mixer = last[part];
                    }
                    graph.operations.push(Operation {
                        kind: step.name(),
                        on: step.on(),
                        seconds,
                        draws: 0.0,
                        after,
                    });
                    graph.places.push(PartPlace { layer, part, step });
                }
            }
        }
        graph
    }
}
