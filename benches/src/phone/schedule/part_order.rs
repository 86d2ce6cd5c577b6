//! The order in which the parts of a pass run: one of the rules that decide while operations run, or a searched one.

use super::chains;
use super::graph::{Operation, Scheduler};
use super::part_graph::{DEVICE, PartGraph};
use super::rules::{Planned, Rule, by_rule, scheduler};
use super::simulate::{Processors, makespan, simulate};

/// Both, each with its own memory.
const BOTH: Processors = Processors {
    names: &["CPU", "device"],
    bandwidth: f64::INFINITY,
};

/// What decides which part comes next.
#[derive(Debug, Clone, PartialEq)]
pub struct PartOrder {
    /// The rule.
    pub rule: Rule,
    /// All operations, each after those that it waits for, if that was searched.
    order: Vec<usize>,
    /// Seconds of the pass.
    pub seconds: f64,
}

impl PartOrder {
    /// What ends first: in order, Eq. 5, or a searched order. The first of equally fast ones.
    pub fn fastest(graph: &PartGraph) -> Self {
        let by = |rule: Rule| Self {
            rule,
            order: Vec::new(),
            seconds: by_rule(&graph.operations, &BOTH, DEVICE, rule).seconds(),
        };
        let [in_order, stalls] = [Rule::InOrder, Rule::Stalls].map(by);
        let best = match stalls.seconds < in_order.seconds {
            true => stalls,
            false => in_order,
        };
        let searched = chains::order(graph, best.seconds).map(|order| Self {
            seconds: {
                let mut planned = Planned::new(&graph.operations, BOTH.names.len(), &order);
                makespan(&simulate(&graph.operations, &BOTH, &mut planned))
            },
            rule: Rule::Searched,
            order,
        });
        let searched = searched.filter(|searched| searched.seconds < best.seconds);
        searched.unwrap_or(best)
    }

    /// Decides by it for so many processors. Operations after those of the parts run in their order.
    pub fn scheduler(&self, operations: &[Operation], processors: usize) -> Box<dyn Scheduler> {
        match self.rule {
            Rule::Searched => {
                let after = self.order.len()..operations.len();
                let all: Vec<usize> = self.order.iter().copied().chain(after).collect();
                Box::new(Planned::new(operations, processors, &all))
            }
            rule => scheduler(operations, processors, DEVICE, rule),
        }
    }
}
