//! The order in which the parts of a pass run: one of the rules that decide while operations run, or a searched one.

use super::bounds::Bounds;
use super::chains;
use super::graph::Scheduler;
use super::part_graph::{DEVICE, PartGraph};
use super::rules::{Planned, Rule, by_rule, scheduler};
use super::simulate::{Processors, makespan, simulate};

/// Both.
const BOTH: Processors = Processors {
    names: &["CPU", "device"],
    bandwidth: f64::INFINITY,
};

/// Seconds that the search takes for an operation: where it cannot gain as much, there is none.
const SEARCH_SECONDS: f64 = 10e-6;

/// Numbers of rows whose order is kept: those of a full chunk, and of the ends of prompts.
const SHAPES: usize = 4;

/// What decides which part comes next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PartOrder {
    pub rule: Rule,
    /// All operations, each after those that it waits for, if that was searched.
    order: Vec<usize>,
    /// Expected seconds of the pass.
    pub seconds: f64,
}

impl PartOrder {
    /// What is expected to end first: in order, Eq. 5, or a searched order. The first of equally fast ones.
    pub fn fastest(graph: &PartGraph) -> Self {
        Self::online(graph).or_searched(graph)
    }

    /// The faster one of the rules that decide while operations run.
    pub fn online(graph: &PartGraph) -> Self {
        let by = |rule: Rule| Self {
            rule,
            order: Vec::new(),
            seconds: by_rule(&graph.operations, &BOTH, DEVICE, rule).seconds(),
        };
        let [in_order, stalls] = [Rule::InOrder, Rule::Stalls].map(by);
        match stalls.seconds < in_order.seconds {
            true => stalls,
            false => in_order,
        }
    }

    /// A searched order if that is faster, and if it may gain more time than the search takes.
    pub fn or_searched(self, graph: &PartGraph) -> Self {
        let most = self.seconds - Bounds::of(&graph.operations, BOTH.names.len()).largest();
        if most <= SEARCH_SECONDS * graph.operations.len() as f64 {
            return self;
        }
        let searched = chains::order(graph, self.seconds).map(|order| {
            let mut planned = Planned::new(&graph.operations, BOTH.names.len(), &order);
            let seconds = makespan(&simulate(&graph.operations, &BOTH, &mut planned));
            Self {
                rule: Rule::Searched,
                order,
                seconds,
            }
        });
        let searched = searched.filter(|searched| searched.seconds < self.seconds);
        searched.unwrap_or(self)
    }

    /// Decides by it.
    pub fn scheduler(&self, graph: &PartGraph) -> Box<dyn Scheduler> {
        let (operations, processors) = (&graph.operations, BOTH.names.len());
        match self.rule {
            Rule::Searched => Box::new(Planned::new(operations, processors, &self.order)),
            rule => scheduler(operations, processors, DEVICE, rule),
        }
    }
}

/// The orders of the last shapes of passes, so that each is searched once.
#[derive(Debug, Default)]
pub(crate) struct PartOrders(Vec<OfShape>);

/// An order, and what it depends on.
#[derive(Debug)]
struct OfShape {
    from: usize,
    seconds: Vec<[f64; 3]>,
    order: PartOrder,
}

impl PartOrders {
    /// The order of a graph that begins with layer `from`, by the `seconds` of each part.
    pub fn of(&mut self, graph: &PartGraph, seconds: &[[f64; 3]]) -> &PartOrder {
        let same = |of: &OfShape| of.from == graph.from && of.seconds == seconds;
        match self.0.iter().position(same) {
            Some(known) => self.0[..=known].rotate_right(1),
            None => {
                self.0.truncate(SHAPES - 1);
                let order = PartOrder::fastest(graph);
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
