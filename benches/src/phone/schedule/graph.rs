//! Operations, what they wait for, and which of them run.

/// An operation of a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Its kind, for charts.
    pub kind: &'static str,
    /// Index of its processor in [`super::Processors::names`].
    pub on: usize,
    /// Seconds if nothing else uses the memory.
    pub seconds: f64,
    /// Its memory traffic then, in GB/s; 0 for work that is not bound by memory.
    pub draws: f64,
    /// Operations that must have ended; all have smaller indices.
    pub after: Vec<usize>,
}

/// State when a processor is idle.
pub struct GraphState<'a> {
    /// All operations.
    pub graph: &'a [Operation],
    /// Operations that must end before each operation.
    pub waits_for: &'a [usize],
    /// Whether each operation has begun.
    pub begun: &'a [bool],
    /// For each operation, its successors.
    pub followers: &'a [Vec<usize>],
}

impl GraphState<'_> {
    /// Whether an operation may begin on `processor`.
    pub fn is_ready(&self, work: usize, processor: usize) -> bool {
        !self.begun[work] && self.waits_for[work] == 0 && self.graph[work].on == processor
    }
}

/// Decides which operation an idle processor begins.
pub trait Scheduler {
    /// An operation that is ready on `processor`, or `None` to leave it idle until another operation ends or begins.
    fn next(&mut self, seen: &GraphState<'_>, processor: usize) -> Option<usize>;
}

/// The successors of each operation.
pub fn followers(graph: &[Operation]) -> Vec<Vec<usize>> {
    let mut out = vec![Vec::new(); graph.len()];
    for (i, work) in graph.iter().enumerate() {
        for &before in &work.after {
            out[before].push(i);
        }
    }
    out
}

/// A graph that is being executed.
pub struct Execution<'a> {
    graph: &'a [Operation],
    followers: Vec<Vec<usize>>,
    waits_for: Vec<usize>,
    begun: Vec<bool>,
    scheduler: &'a mut dyn Scheduler,
}

impl<'a> Execution<'a> {
    /// Nothing has begun.
    pub fn new(graph: &'a [Operation], scheduler: &'a mut dyn Scheduler) -> Self {
        Self {
            followers: followers(graph),
            waits_for: graph.iter().map(|of| of.after.len()).collect(),
            begun: vec![false; graph.len()],
            graph,
            scheduler,
        }
    }

    /// The operation that an idle processor begins now; `None` to leave it idle until another operation begins or
    /// ends.
    pub fn begin(&mut self, processor: usize) -> Option<usize> {
        let seen = GraphState {
            graph: self.graph,
            waits_for: &self.waits_for,
            begun: &self.begun,
            followers: &self.followers,
        };
        let next = self.scheduler.next(&seen, processor)?;
        debug_assert!(seen.is_ready(next, processor));
        self.begun[next] = true;
        Some(next)
    }

    /// Records that an operation has ended.
    pub fn end(&mut self, operation: usize) {
        for &next in &self.followers[operation] {
            self.waits_for[next] -= 1;
        }
    }
}
