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
pub(crate) enum PartStep {
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

    fn name(self) -> &'static str {
        match self {
            Self::Project => "project",
            Self::Mix => "mix",
            Self::Feed => "feed",
        }
    }
}

/// Index of the compute threads.
pub(crate) const CPU: usize = 0;
/// Index of the devices.
pub(crate) const DEVICE: usize = 1;

/// An operation's place in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartPlace {
    /// Number of the layer.
    pub layer: usize,
    /// Number of the part.
    pub part: usize,
    /// What is computed.
    pub step: PartStep,
}

/// The operations of a pass in parts, layer by layer, and part by part in a layer.
pub(crate) struct PartGraph {
    /// The operations.
    pub operations: Vec<Operation>,
    /// Where each of them is.
    pub places: Vec<PartPlace>,
    /// Number of the first operation of each layer, and of all.
    first: Vec<usize>,
    /// Number of the first layer.
    pub from: usize,
}

impl PartGraph {
    /// Of layers from number `from` on, each with some of the steps, by the `seconds` of these for each part.
    pub fn new(from: usize, layers: impl Iterator<Item = [bool; 3]>, seconds: &[[f64; 3]]) -> Self {
        let mut graph = Self {
            operations: Vec::new(),
            places: Vec::new(),
            first: Vec::new(),
            from,
        };
        let mut last: Vec<Option<usize>> = vec![None; seconds.len()];
        for (layer, has) in (from..).zip(layers) {
            graph.first.push(graph.operations.len());
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
        graph.first.push(graph.operations.len());
        graph
    }

    /// The first layer of which no operation before number `begun` is a part, and its first operation.
    pub fn layer_after(&self, begun: usize) -> (usize, usize) {
        let layer = self.first.partition_point(|&first| first < begun);
        let layer = layer.min(self.first.len() - 1);
        (self.from + layer, self.first[layer])
    }
}
