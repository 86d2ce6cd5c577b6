//! Search for a fast schedule: a beam of partial ones, and branch and bound for small graphs.

use std::collections::BTreeSet;

use super::bounds::{Bounds, tails};
use super::graph::{Operation, followers};

/// Largest graphs that are then searched completely, in pieces.
const SMALL: usize = 16;
/// Maximum partial schedules of that search.
const NODES: usize = 50_000;

/// A partial schedule.
#[derive(Clone)]
struct Partial {
    order: Vec<usize>,
    /// End of each piece; negative while it is not placed.
    ends: Vec<f64>,
    /// Unplaced predecessors of each piece.
    waits_for: Vec<usize>,
    /// When each processor is free.
    free: Vec<f64>,
    /// Seconds of the unplaced pieces of each processor.
    left: Vec<f64>,
    ready: BTreeSet<usize>,
    /// No schedule that begins like this one is faster.
    bound: f64,
}

impl Partial {
    fn new(graph: &[Operation], processors: usize) -> Self {
        let waits_for: Vec<usize> = graph.iter().map(|work| work.after.len()).collect();
        let ready = (0..graph.len()).filter(|&i| waits_for[i] == 0).collect();
        Self {
            order: Vec::with_capacity(graph.len()),
            ends: vec![-1.0; graph.len()],
            waits_for,
            free: vec![0.0; processors],
            left: Bounds::of(graph, processors).sums,
            ready,
            bound: 0.0,
        }
    }

    /// Earliest start of a piece whose predecessors are placed.
    fn start(&self, graph: &[Operation], work: usize) -> f64 {
        let after = graph[work].after.iter().map(|&before| self.ends[before]);
        after.fold(self.free[graph[work].on], f64::max)
    }

    /// The lower bound if `work` comes next: the work that follows it and the other ready pieces of its processor,
    /// and the remaining pieces of this processor.
    fn bound_with(&self, graph: &[Operation], tails: &[f64], work: usize) -> f64 {
        let on = graph[work].on;
        let start = self.start(graph, work);
        let end = start + graph[work].seconds;
        let others = self.ready.iter().filter(|&&other| other != work);
        let later = others.filter(|&&other| graph[other].on == on);
        let bound = self
            .bound
            .max(start + tails[work])
            .max(start + self.left[on]);
        later.map(|&other| end + tails[other]).fold(bound, f64::max)
    }

    /// The end of the last placed piece.
    fn end(&self) -> f64 {
        self.ends.iter().copied().fold(0.0, f64::max)
    }

    fn place(&mut self, graph: &[Operation], tails: &[f64], followers: &[Vec<usize>], work: usize) {
        let start = self.start(graph, work);
        self.bound = self.bound_with(graph, tails, work);
        let end = start + graph[work].seconds;
        self.ends[work] = end;
        self.free[graph[work].on] = end;
        self.left[graph[work].on] -= graph[work].seconds;
        self.ready.remove(&work);
        self.order.push(work);
        for &next in &followers[work] {
            self.waits_for[next] -= 1;
            if self.waits_for[next] == 0 {
                self.ready.insert(next);
            }
        }
    }
}

/// A choice of the search: the partial schedule and the piece that comes next.
struct Step {
    from: usize,
    work: usize,
    bound: f64,
    start: f64,
}

/// An order of all pieces by beam search and, if they are few, branch and bound.
pub(super) fn search(graph: &[Operation], processors: usize, width: usize) -> Vec<usize> {
    let tails = tails(graph);
    let followers = followers(graph);
    let mut beam = vec![Partial::new(graph, processors)];
    for _ in 0..graph.len() {
        let mut steps = Vec::new();
        for (from, partial) in beam.iter().enumerate() {
            for &work in &partial.ready {
                steps.push(Step {
                    from,
                    work,
                    bound: partial.bound_with(graph, &tails, work),
                    start: partial.start(graph, work),
                });
            }
        }
        let key = |step: &Step| [step.bound, step.start, -tails[step.work]];
        steps.sort_by(|a, b| {
            key(a)
                .partial_cmp(&key(b))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        let mut seen = BTreeSet::new();
        let mut next = Vec::with_capacity(width);
        for step in steps {
            let mut partial = beam[step.from].clone();
            partial.place(graph, &tails, &followers, step.work);
            // The same pieces with the same times, placed in another order.
            let same: Vec<u64> = partial.ends.iter().map(|end| end.to_bits()).collect();
            if seen.insert(same) {
                next.push(partial);
            }
            if next.len() == width {
                break;
            }
        }
        beam = next;
    }
    let best = beam.into_iter().min_by(|a, b| a.end().total_cmp(&b.end()));
    let Some(best) = best else {
        return Vec::new();
    };
    let mut branches = Branches {
        graph,
        tails: &tails,
        followers: &followers,
        seconds: best.end(),
        best: best.order,
        nodes: if graph.len() <= SMALL { NODES } else { 0 },
    };
    branches.visit(&Partial::new(graph, processors));
    branches.best
}

/// Depth-first search for a faster order than the best one so far.
struct Branches<'a> {
    graph: &'a [Operation],
    tails: &'a [f64],
    followers: &'a [Vec<usize>],
    best: Vec<usize>,
    seconds: f64,
    /// Partial schedules that it may still visit.
    nodes: usize,
}

impl Branches<'_> {
    fn visit(&mut self, partial: &Partial) {
        if partial.ready.is_empty() {
            if partial.end() < self.seconds {
                self.seconds = partial.end();
                self.best.clone_from(&partial.order);
            }
            return;
        }
        let bound = |work: &usize| partial.bound_with(self.graph, self.tails, *work);
        let mut next: Vec<usize> = partial.ready.iter().copied().collect();
        next.sort_by(|a, b| bound(a).total_cmp(&bound(b)));
        for work in next {
            let faster = partial.bound_with(self.graph, self.tails, work) < self.seconds;
            if !faster || self.nodes == 0 {
                return;
            }
            self.nodes -= 1;
            let mut extended = partial.clone();
            extended.place(self.graph, self.tails, self.followers, work);
            self.visit(&extended);
        }
    }
}
