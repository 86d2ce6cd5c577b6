//! Order in which two processors run the subgraphs of a prompt (llm.npu, §3.4).
//!
//! ```text
//! C(g) = + sum of T(s) over the subgraphs s that g makes ready on the NPU    g on the CPU
//!        - sum of T(s) over those that it makes ready elsewhere              g on the NPU    (Eq. 5)
//! ```
//!
//! An idle processor takes the ready subgraph with the largest C. That rule is online and takes microseconds, but
//! it is no better than in order on some graphs. So [`plan`] also searches: a beam of partial schedules, each
//! extended by every subgraph whose predecessors are placed, judged by a lower bound of the whole; for small graphs
//! branch and bound from the best of these. It returns the fastest of the three.

use std::collections::VecDeque;

use super::graph::{GraphState, Operation, Scheduler};
use super::search::search;
use super::simulate::{Processors, Slot, makespan, simulate};

/// Partial schedules in the beam.
const BEAM: usize = 32;
/// Issues pieces in their order: none begins before all earlier ones have begun.
#[derive(Debug, Default)]
pub struct InOrder {
    next: usize,
}

impl Scheduler for InOrder {
    fn next(&mut self, seen: &GraphState<'_>, processor: usize) -> Option<usize> {
        let next = self.next;
        let ready = next < seen.graph.len() && seen.is_ready(next, processor);
        ready.then(|| {
            self.next += 1;
            next
        })
    }
}

/// Takes the ready piece that keeps the NPU busy (Eq. 5); the first of equal ones.
#[derive(Debug)]
pub struct ByStalls {
    /// Index of the NPU.
    pub npu: usize,
}

impl ByStalls {
    /// `C` of a ready piece.
    fn gain(&self, seen: &GraphState<'_>, work: usize) -> f64 {
        let of_npu = seen.graph[work].on == self.npu;
        let freed = seen.followers[work]
            .iter()
            .filter(|&&next| seen.waits_for[next] == 1)
            .map(|&next| &seen.graph[next]);
        let times = freed.filter(|next| (next.on == self.npu) != of_npu);
        let sum: f64 = times.map(|next| next.seconds).sum();
        if of_npu { -sum } else { sum }
    }
}

impl Scheduler for ByStalls {
    fn next(&mut self, seen: &GraphState<'_>, processor: usize) -> Option<usize> {
        let mut best: Option<(f64, usize)> = None;
        for work in (0..seen.graph.len()).filter(|&work| seen.is_ready(work, processor)) {
            let gain = self.gain(seen, work);
            if best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, work));
            }
        }
        best.map(|(_, work)| work)
    }
}

/// Runs the pieces of each processor in a given order.
#[derive(Debug)]
pub struct Planned {
    queues: Vec<VecDeque<usize>>,
}

impl Planned {
    /// From an order of all pieces in which each comes after its predecessors.
    pub fn new(graph: &[Operation], processors: usize, order: &[usize]) -> Self {
        let mut queues = vec![VecDeque::new(); processors];
        for &work in order {
            queues[graph[work].on].push_back(work);
        }
        Self { queues }
    }
}

impl Scheduler for Planned {
    fn next(&mut self, seen: &GraphState<'_>, processor: usize) -> Option<usize> {
        let queue = &mut self.queues[processor];
        let ready = queue
            .front()
            .is_some_and(|&work| seen.is_ready(work, processor));
        ready.then(|| queue.pop_front()).flatten()
    }
}

/// How a plan was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// [`InOrder`].
    InOrder,
    /// [`ByStalls`].
    Stalls,
    /// By search.
    Searched,
}

/// A schedule of all pieces.
#[derive(Debug, Clone, PartialEq)]
pub struct Timetable {
    /// How it was found.
    pub rule: Rule,
    /// When each piece runs.
    pub slots: Vec<Slot>,
}

impl Timetable {
    /// Seconds until the last piece has ended.
    pub fn seconds(&self) -> f64 {
        makespan(&self.slots)
    }
}

/// Decides by a rule.
pub fn scheduler(
    graph: &[Operation],
    processors: usize,
    npu: usize,
    rule: Rule,
) -> Box<dyn Scheduler> {
    match rule {
        Rule::InOrder => Box::<InOrder>::default(),
        Rule::Stalls => Box::new(ByStalls { npu }),
        Rule::Searched => {
            let found = search(graph, processors, BEAM);
            Box::new(Planned::new(graph, processors, &found))
        }
    }
}

/// The plan of one rule.
pub fn by_rule(graph: &[Operation], processors: &Processors, npu: usize, rule: Rule) -> Timetable {
    let mut scheduler = scheduler(graph, processors.names.len(), npu, rule);
    let slots = simulate(graph, processors, &mut *scheduler);
    Timetable { rule, slots }
}

/// The fastest plan of all rules; the simpler one of two that are as fast.
pub fn plan(graph: &[Operation], processors: &Processors, npu: usize) -> Timetable {
    let mut best = by_rule(graph, processors, npu, Rule::InOrder);
    for rule in [Rule::Stalls, Rule::Searched] {
        let other = by_rule(graph, processors, npu, rule);
        if other.seconds() < best.seconds() {
            best = other;
        }
    }
    best
}
