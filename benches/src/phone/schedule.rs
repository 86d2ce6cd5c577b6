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

use std::collections::{BTreeSet, VecDeque};

use super::sim::{Order, Phone, Progress, Slot, Work, followers, makespan, simulate};

/// Partial schedules in the beam.
const BEAM: usize = 32;
/// Largest graphs that are then searched completely, in pieces.
const SMALL: usize = 16;
/// Maximum partial schedules of that search.
const NODES: usize = 50_000;

/// Issues pieces in their order: none begins before all earlier ones have begun.
#[derive(Debug, Default)]
pub struct InOrder {
    next: usize,
}

impl Order for InOrder {
    fn next(&mut self, seen: &Progress<'_>, processor: usize) -> Option<usize> {
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
    fn gain(&self, seen: &Progress<'_>, work: usize) -> f64 {
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

impl Order for ByStalls {
    fn next(&mut self, seen: &Progress<'_>, processor: usize) -> Option<usize> {
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
    pub fn new(graph: &[Work], processors: usize, order: &[usize]) -> Self {
        let mut queues = vec![VecDeque::new(); processors];
        for &work in order {
            queues[graph[work].on].push_back(work);
        }
        Self { queues }
    }
}

impl Order for Planned {
    fn next(&mut self, seen: &Progress<'_>, processor: usize) -> Option<usize> {
        let queue = &mut self.queues[processor];
        let ready = queue
            .front()
            .is_some_and(|&work| seen.is_ready(work, processor));
        ready.then(|| queue.pop_front()).flatten()
    }
}

/// Lower bounds of any schedule's time.
#[derive(Debug, Clone, PartialEq)]
pub struct Bounds {
    /// Seconds of each processor's pieces.
    pub sums: Vec<f64>,
    /// Seconds of the longest path.
    pub path: f64,
}

impl Bounds {
    /// The bounds of a graph.
    pub fn of(graph: &[Work], processors: usize) -> Self {
        let mut sums = vec![0.0; processors];
        graph.iter().for_each(|work| sums[work.on] += work.seconds);
        let path = tails(graph).into_iter().fold(0.0, f64::max);
        Self { sums, path }
    }

    /// The largest of them.
    pub fn largest(&self) -> f64 {
        self.sums.iter().copied().fold(self.path, f64::max)
    }
}

/// Seconds of the longest path from the beginning of each piece.
fn tails(graph: &[Work]) -> Vec<f64> {
    let followers = followers(graph);
    let mut tails = vec![0.0f64; graph.len()];
    for i in (0..graph.len()).rev() {
        let after = followers[i].iter().map(|&next| tails[next]);
        tails[i] = graph[i].seconds + after.fold(0.0, f64::max);
    }
    tails
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
pub struct Plan {
    /// How it was found.
    pub rule: Rule,
    /// When each piece runs.
    pub slots: Vec<Slot>,
}

impl Plan {
    /// Seconds until the last piece has ended.
    pub fn seconds(&self) -> f64 {
        makespan(&self.slots)
    }
}

/// The plan of one rule.
pub fn by_rule(graph: &[Work], phone: &Phone, npu: usize, rule: Rule) -> Plan {
    let mut order: Box<dyn Order> = match rule {
        Rule::InOrder => Box::<InOrder>::default(),
        Rule::Stalls => Box::new(ByStalls { npu }),
        Rule::Searched => {
            let found = search(graph, phone.processors.len(), BEAM);
            Box::new(Planned::new(graph, phone.processors.len(), &found))
        }
    };
    let slots = simulate(graph, phone, &mut *order);
    Plan { rule, slots }
}

/// The fastest plan of all rules; the simpler one of two that are as fast.
pub fn plan(graph: &[Work], phone: &Phone, npu: usize) -> Plan {
    let mut best = by_rule(graph, phone, npu, Rule::InOrder);
    for rule in [Rule::Stalls, Rule::Searched] {
        let other = by_rule(graph, phone, npu, rule);
        if other.seconds() < best.seconds() {
            best = other;
        }
    }
    best
}

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
    fn new(graph: &[Work], processors: usize) -> Self {
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
    fn start(&self, graph: &[Work], work: usize) -> f64 {
        let after = graph[work].after.iter().map(|&before| self.ends[before]);
        after.fold(self.free[graph[work].on], f64::max)
    }

    /// The lower bound if `work` comes next: the work that follows it and the other ready pieces of its processor,
    /// and the remaining pieces of this processor.
    fn bound_with(&self, graph: &[Work], tails: &[f64], work: usize) -> f64 {
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

    fn place(&mut self, graph: &[Work], tails: &[f64], followers: &[Vec<usize>], work: usize) {
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
fn search(graph: &[Work], processors: usize, width: usize) -> Vec<usize> {
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
    graph: &'a [Work],
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
