//! A pass in parts: the mixer and the FFN of each part and layer.
//!
//! ```text
//! mixer(i, j)   on the CPU      after ffn(i, j − 1), and after mixer(i − 1, j), whose keys, values and state it reads
//! ffn(i, j)     on a device     after mixer(i, j)
//! ```
//!
//! i numbers parts and j layers. These are two of llm.npu's six subgraphs of a layer: the projections are the mixer's.

use super::graph::{Operation, Scheduler};
use super::rules::{Rule, by_rule, scheduler};
use super::simulate::Processors;

/// Index of the compute threads.
pub(crate) const CPU: usize = 0;
/// Index of the devices.
pub(crate) const DEVICE: usize = 1;

/// Both.
const BOTH: Processors = Processors {
    names: &["CPU", "device"],
    bandwidth: f64::INFINITY,
};

/// Layers of the graphs that are simulated; each other layer takes as long as one of the second half of them.
const SIMULATED: usize = 8;

/// Rows of a part are a multiple of these, as devices have graphs and kernels for them.
pub(crate) const PART_ROWS: usize = 32;

/// The rules that decide while operations run; the first of equally fast ones is taken.
const RULES: [Rule; 2] = [Rule::InOrder, Rule::Stalls];

/// How the passes of some number of rows run in parts.
#[derive(Debug, Clone, PartialEq)]
pub struct InParts {
    /// Rows of a part.
    pub rows: usize,
    /// What decides which part comes next; `None` for what is expected to be faster.
    pub rule: Option<Rule>,
    /// Expected seconds of a layer's mixer and of its FFN, by part.
    pub(crate) seconds: Vec<[f64; 2]>,
    /// Expected seconds of the pass layer by layer, divided by those in parts.
    pub(crate) gain: f64,
    /// The part of that quotient that is mixers.
    pub(crate) mixing: f64,
    /// The gain from which on it pays.
    pub(crate) least: f64,
}

impl InParts {
    /// Rows of each part of a pass of `rows` rows, the last of which may have fewer; 0 for fewer than two parts.
    pub fn rows_of(&self, rows: usize) -> usize {
        let parts = rows.div_ceil(self.rows.max(1)).max(2);
        let each = rows.div_ceil(parts).next_multiple_of(PART_ROWS);
        if each < rows { each } else { 0 }
    }

    /// Whether it pays where devices multiply this share of the projections layer by layer, 0 to 1: they multiply none
    /// in parts.
    pub(crate) fn pays(&self, products: f64) -> bool {
        self.gain - products * self.mixing >= self.least
    }

    /// Expected seconds by part, for so many parts.
    pub(crate) fn times(&self, parts: usize) -> Vec<[f64; 2]> {
        let last = self.seconds.last().copied().unwrap_or_default();
        let all = self.seconds.iter().copied().chain(std::iter::repeat(last));
        all.take(parts).collect()
    }

    /// Parts of `rows` rows with these times in each of `layers` layers, of a pass that takes `[mixers, FFNs]` seconds
    /// layer by layer.
    pub(crate) fn new(
        rows: usize,
        seconds: Vec<[f64; 2]>,
        layers: usize,
        [mixers, ffns]: [f64; 2],
    ) -> Self {
        let all = |layers: usize| std::iter::repeat_n([true; 2], layers);
        let time = |rule: Rule| {
            let of = |layers: usize| {
                let graph = PartGraph::new(0, all(layers), &seconds);
                by_rule(&graph.operations, &BOTH, DEVICE, rule).seconds()
            };
            let (some, more) = (layers.min(SIMULATED), layers.saturating_sub(SIMULATED));
            let half = some / 2;
            let [all, first] = [some, half].map(of);
            all + more as f64 * (all - first) / (some - half).max(1) as f64
        };
        let best = RULES.map(time).into_iter().fold(f64::INFINITY, f64::min);
        let best = best.max(f64::MIN_POSITIVE);
        Self {
            rows,
            rule: None,
            seconds,
            gain: (mixers + ffns) / best,
            mixing: mixers / best,
            least: 0.0,
        }
    }
}

/// An operation's place in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartPlace {
    /// Number of the layer.
    pub layer: usize,
    /// Number of the part.
    pub part: usize,
}

/// The operations of a pass in parts, layer by layer, and part by part in a layer.
pub(crate) struct PartGraph {
    /// The operations: on the CPU a mixer, on the device an FFN.
    pub operations: Vec<Operation>,
    /// Where each of them is.
    pub places: Vec<PartPlace>,
    /// Number of the first operation of each layer, and of all.
    first: Vec<usize>,
    /// Number of the first layer.
    from: usize,
}

impl PartGraph {
    /// Of layers from number `from` on, each with or without a mixer and an FFN, by the `seconds` of both for each part.
    pub fn new(from: usize, layers: impl Iterator<Item = [bool; 2]>, seconds: &[[f64; 2]]) -> Self {
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
                for on in [CPU, DEVICE].into_iter().filter(|&on| has[on]) {
                    let earlier = mixer.filter(|_| on == CPU);
                    let mut after: Vec<usize> =
                        [last[part], earlier].into_iter().flatten().collect();
                    after.dedup();
                    last[part] = Some(graph.operations.len());
                    if on == CPU {
                        mixer = last[part];
                    }
                    graph.operations.push(Operation {
                        kind: if on == CPU { "mixer" } else { "ffn" },
                        on,
                        seconds: seconds[on],
                        draws: 0.0,
                        after,
                    });
                    graph.places.push(PartPlace { layer, part });
                }
            }
        }
        graph.first.push(graph.operations.len());
        graph
    }

    /// Decides by a rule, or by the faster one.
    pub fn scheduler(&self, rule: Option<Rule>) -> Box<dyn Scheduler> {
        let rule = rule.unwrap_or_else(|| self.faster_rule());
        scheduler(&self.operations, BOTH.names.len(), DEVICE, rule)
    }

    /// The rule by which it is expected to end first: never later than in order.
    pub fn faster_rule(&self) -> Rule {
        let seconds = |rule: Rule| by_rule(&self.operations, &BOTH, DEVICE, rule).seconds();
        let [in_order, stalls] = RULES.map(seconds);
        match stalls < in_order {
            true => Rule::Stalls,
            false => Rule::InOrder,
        }
    }

    /// The first layer of which no operation before number `begun` is a part, and its first operation.
    pub fn layer_after(&self, begun: usize) -> (usize, usize) {
        let layer = self.first.partition_point(|&first| first < begun);
        let layer = layer.min(self.first.len() - 1);
        (self.from + layer, self.first[layer])
    }
}
