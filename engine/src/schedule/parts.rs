//! A pass in parts: the mixer and the FFN of each part and layer.
//!
//! ```text
//! mixer(i, j)   on the CPU      after ffn(i, j − 1), and after mixer(i − 1, j), whose keys, values and state it reads
//! ffn(i, j)     on a device     after mixer(i, j)
//! ```
//!
//! i numbers parts and j layers. These are two of llm.npu's six subgraphs of a layer: the projections are the mixer's.

use super::bounds::Bounds;
use super::chains;
use super::graph::{Operation, Scheduler};
use super::rules::{Planned, Rule, by_rule, scheduler};
use super::simulate::{Processors, makespan, simulate};

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

/// Seconds that the search takes for an operation: where it cannot gain as much, there is none.
const SEARCH_SECONDS: f64 = 10e-6;

/// Numbers of rows whose order is kept: those of a full chunk, and of the ends of prompts.
const SHAPES: usize = 4;

/// How the passes of some number of rows run in parts.
#[derive(Debug, Clone, PartialEq)]
pub struct InParts {
    /// Rows of a part, before they are rounded up to a multiple of [`PART_ROWS`].
    pub rows: usize,
    /// It was asked for, whatever is expected.
    pub(crate) asked: bool,
    /// Rows of a pass whose times are known.
    pub(crate) all: usize,
    /// Expected seconds of a layer's mixer and of its FFN then, by part.
    pub(crate) seconds: Vec<[f64; 2]>,
    /// Expected seconds of the pass layer by layer, divided by those in parts.
    pub(crate) gain: f64,
    /// The part of that quotient that is mixers.
    pub(crate) mixing: f64,
    /// The gain from which on it pays.
    pub(crate) least: f64,
}

/// Rows of each part of a pass of `all` rows in parts of up to `rows` rows, in multiples of [`PART_ROWS`]; the last part
/// may have fewer. 0 for fewer than two parts.
pub(crate) fn part_rows(rows: usize, all: usize) -> usize {
    let parts = all.div_ceil(rows.max(1)).max(2);
    let each = all.div_ceil(parts).next_multiple_of(PART_ROWS);
    if each < all { each } else { 0 }
}

impl InParts {
    /// Rows of each part of a pass of `rows` rows, the last of which may have fewer; 0 for fewer than two parts.
    pub(crate) fn rows_of(&self, rows: usize) -> usize {
        part_rows(self.rows, rows)
    }

    /// Whether it pays where devices multiply this share of the projections layer by layer, 0 to 1: they multiply none
    /// in parts.
    pub(crate) fn pays(&self, products: f64) -> bool {
        self.gain - products * self.mixing >= self.least
    }

    /// Expected seconds by part, for a pass of `rows` rows: in proportion to the rows of a part whose times are known.
    pub(crate) fn times(&self, rows: usize) -> Vec<[f64; 2]> {
        let [known, each] = [self.all, rows].map(|rows| self.rows_of(rows).max(1));
        let time = |first: usize| {
            let part = (first / each).min(self.seconds.len().saturating_sub(1));
            let its = each.min(rows - first) as f64;
            let of = known.min(self.all - part * known).max(1) as f64;
            let seconds = self.seconds.get(part).copied().unwrap_or_default();
            seconds.map(|seconds| seconds * (its / of))
        };
        (0..rows).step_by(each).map(time).collect()
    }

    /// Parts of up to `rows` rows of a pass of `all` rows, with these times in each of `layers` layers, of a pass that
    /// takes `[mixers, FFNs]` seconds layer by layer. Before [`InParts::searched`] by the rules that decide at run time.
    pub(crate) fn new(
        [rows, all]: [usize; 2],
        seconds: Vec<[f64; 2]>,
        layers: usize,
        [mixers, ffns]: [f64; 2],
    ) -> Self {
        let time = |layers: usize| {
            let layers = std::iter::repeat_n([true; 2], layers);
            PartGraph::new(0, layers, &seconds).online().seconds
        };
        let (some, more) = (layers.min(SIMULATED), layers.saturating_sub(SIMULATED));
        let half = some / 2;
        let mut best = time(some);
        if more > 0 {
            best += more as f64 * (best - time(half)) / (some - half) as f64;
        }
        let best = best.max(f64::MIN_POSITIVE);
        Self {
            rows,
            asked: false,
            all,
            seconds,
            gain: (mixers + ffns) / best,
            mixing: mixers / best,
            least: 0.0,
        }
    }

    /// With the gain of a searched order, by that of some layers of `layers`.
    pub(crate) fn searched(mut self, layers: usize) -> Self {
        let layers = std::iter::repeat_n([true; 2], layers.min(SIMULATED));
        let graph = PartGraph::new(0, layers, &self.seconds);
        let online = graph.online();
        let seconds = online.seconds;
        let faster = seconds / graph.searched(online).seconds.max(f64::MIN_POSITIVE);
        self.gain *= faster;
        self.mixing *= faster;
        self
    }
}

/// What decides which part comes next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PartOrder {
    pub rule: Rule,
    /// All operations, each after those that it waits for, if that was searched.
    order: Vec<usize>,
    /// Expected seconds of the pass.
    pub seconds: f64,
}

/// The orders of the last shapes of passes, so that each is searched once.
#[derive(Debug, Default)]
pub(crate) struct PartOrders(Vec<OfShape>);

/// An order, and what it depends on.
#[derive(Debug)]
struct OfShape {
    from: usize,
    seconds: Vec<[f64; 2]>,
    order: PartOrder,
}

impl PartOrders {
    /// The order of a graph that begins with layer `from`, by the `seconds` of each part.
    pub fn of(&mut self, graph: &PartGraph, seconds: &[[f64; 2]]) -> &PartOrder {
        let same = |of: &OfShape| of.from == graph.from && of.seconds == seconds;
        match self.0.iter().position(same) {
            Some(known) => self.0[..=known].rotate_right(1),
            None => {
                self.0.truncate(SHAPES - 1);
                let order = graph.fastest();
                tracing::debug!(from = graph.from, rule = ?order.rule, seconds = order.seconds, "order of parts");
                self.0.insert(
                    0,
                    OfShape {
                        from: graph.from,
                        seconds: seconds.to_vec(),
                        order,
                    },
                );
            }
        }
        &self.0[0].order
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

    /// Decides by an order of this graph.
    pub fn scheduler(&self, by: &PartOrder) -> Box<dyn Scheduler> {
        match by.rule {
            Rule::Searched => Box::new(Planned::new(&self.operations, BOTH.names.len(), &by.order)),
            rule => scheduler(&self.operations, BOTH.names.len(), DEVICE, rule),
        }
    }

    /// What is expected to end first: in order, Eq. 5, or a searched order. The first of equally fast ones.
    pub fn fastest(&self) -> PartOrder {
        self.searched(self.online())
    }

    /// The faster one of the rules that decide while operations run.
    fn online(&self) -> PartOrder {
        let by = |rule: Rule| PartOrder {
            rule,
            order: Vec::new(),
            seconds: by_rule(&self.operations, &BOTH, DEVICE, rule).seconds(),
        };
        let [in_order, stalls] = [Rule::InOrder, Rule::Stalls].map(by);
        match stalls.seconds < in_order.seconds {
            true => stalls,
            false => in_order,
        }
    }

    /// A searched order if that is faster than this one, and if it may gain more time than the search takes.
    fn searched(&self, online: PartOrder) -> PartOrder {
        let most = online.seconds - Bounds::of(&self.operations, BOTH.names.len()).largest();
        if most <= SEARCH_SECONDS * self.operations.len() as f64 {
            return online;
        }
        let searched = chains::order(self, online.seconds).map(|order| {
            let mut planned = Planned::new(&self.operations, BOTH.names.len(), &order);
            let seconds = makespan(&simulate(&self.operations, &BOTH, &mut planned));
            PartOrder {
                rule: Rule::Searched,
                order,
                seconds,
            }
        });
        let searched = searched.filter(|searched| searched.seconds < online.seconds);
        searched.unwrap_or(online)
    }

    /// The first layer of which no operation before number `begun` is a part, and its first operation.
    pub fn layer_after(&self, begun: usize) -> (usize, usize) {
        let layer = self.first.partition_point(|&first| first < begun);
        let layer = layer.min(self.first.len() - 1);
        (self.from + layer, self.first[layer])
    }
}
