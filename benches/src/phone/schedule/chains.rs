//! Search for the order of a pass in parts.
//!
//! A part is a chain of operations, and what an operation waits for in another part runs on its own processor. So a partial
//! schedule is few numbers: what is placed of each part, when the next operation of each may begin, and when the processors
//! are free. The search keeps the best partial schedules of each length, by a lower bound of the whole, and of those that
//! have placed the same only the ones that are earlier somewhere. Small graphs are searched completely.

use super::part_graph::{PartGraph, PartPlace};

/// Most parts of a pass whose order is searched.
const MOST: usize = 8;

/// Operations of graphs that are searched completely.
const SMALL: usize = 16;

/// Width of the beam: partial schedules of each length that a search of larger graphs goes on from.
const BEAM: usize = 16;

/// An operation, and what follows it in its part.
#[derive(Clone, Copy)]
struct Link {
    operation: usize,
    on: usize,
    seconds: f64,
    /// It waits for the same operation of the part before.
    waits: bool,
    /// Seconds of it and of all that follows it.
    tail: f64,
    /// The same by processor.
    left: [f64; 2],
    /// By processor, seconds from its beginning until the first of these begins.
    until: [f64; 2],
    /// By processor, seconds after the last of these.
    after: [f64; 2],
}

/// What follows the last operation of a part.
const END: Link = Link {
    operation: 0,
    on: 0,
    seconds: 0.0,
    waits: false,
    tail: 0.0,
    left: [0.0; 2],
    until: [f64::INFINITY; 2],
    after: [f64::INFINITY; 2],
};

/// The operations of each part, with [`END`] after the last.
fn chains(graph: &PartGraph) -> Vec<Vec<Link>> {
    let parts = graph.places.iter().map(|place| place.part + 1).max();
    let mut chains = vec![vec![END]; parts.unwrap_or(0)];
    // From the last operation on, so that what follows is known.
    for (number, work) in graph.operations.iter().enumerate().rev() {
        let PartPlace { part, .. } = graph.places[number];
        let elsewhere = |&before: &usize| graph.places[before].part != part;
        let Some(&next) = chains[part].last() else {
            continue;
        };
        let mut link = Link {
            operation: number,
            on: work.on,
            seconds: work.seconds,
            waits: work.after.iter().any(elsewhere),
            tail: next.tail + work.seconds,
            until: next.until.map(|seconds| seconds + work.seconds),
            ..next
        };
        link.left[work.on] += work.seconds;
        link.until[work.on] = 0.0;
        if next.until[work.on].is_infinite() {
            link.after[work.on] = next.tail;
        }
        chains[part].push(link);
    }
    chains.iter_mut().for_each(|chain| chain.reverse());
    chains
}

/// A partial schedule.
#[derive(Clone, Copy)]
struct PlacedParts {
    /// Placed operations of each part.
    placed: [u16; MOST],
    /// When the next one may begin: they have ended, and its processor is free.
    begins: [f64; MOST],
    /// When each processor is free.
    free: [f64; 2],
    /// No schedule that begins like this one is faster.
    bound: f64,
    /// Seconds in which processors wait.
    idle: f64,
    /// Number of its last step.
    step: u32,
}

impl PlacedParts {
    /// With the next operation of a part; `None` if that has to wait for another part, or there is none.
    fn with(&self, chains: &[Vec<Link>], part: usize) -> Option<Self> {
        let at = self.placed[part];
        let chain = &chains[part];
        let link = &chain[usize::from(at)];
        if usize::from(at) + 1 == chain.len() || link.waits && self.placed[part - 1] <= at {
            return None;
        }
        let mut next = *self;
        let end = self.begins[part] + link.seconds;
        next.idle += self.begins[part] - self.free[link.on];
        next.placed[part] += 1;
        next.begins[part] = end;
        next.free[link.on] = end;
        for ((chain, &at), begins) in chains.iter().zip(&next.placed).zip(&mut next.begins) {
            let link = &chain[usize::from(at)];
            if link.tail > 0.0 {
                *begins = begins.max(next.free[link.on]);
            }
        }
        next.bound = next.bound.max(next.least(chains));
        Some(next)
    }

    /// Least seconds of all: by the remaining work of each part, and by that of each processor, which begins when a part
    /// comes to it and is followed by the rest of a part.
    fn least(&self, chains: &[Vec<Link>]) -> f64 {
        let mut least = 0.0f64;
        let mut of = [[0.0, f64::INFINITY, f64::INFINITY]; 2];
        for ((chain, &at), &begins) in chains.iter().zip(&self.placed).zip(&self.begins) {
            let link = &chain[usize::from(at)];
            least = least.max(begins + link.tail);
            for (on, [left, first, after]) in of.iter_mut().enumerate() {
                *left += link.left[on];
                *first = first.min(begins + link.until[on]);
                *after = after.min(link.after[on]);
            }
        }
        for (free, [left, first, after]) in self.free.iter().zip(of) {
            if left > 0.0 {
                least = least.max(free.max(first) + left + after);
            }
        }
        least
    }

    /// Whether another one that has placed the same is nowhere earlier.
    fn covers(&self, other: &Self) -> bool {
        let earlier = |(a, b): (&f64, &f64)| a <= b;
        self.placed == other.placed
            && self.free.iter().zip(&other.free).all(earlier)
            && self.begins.iter().zip(&other.begins).all(earlier)
    }
}

/// An order of all operations that takes less than `known` seconds; `None` if none is found.
pub(super) fn order(graph: &PartGraph, known: f64) -> Option<Vec<usize>> {
    let chains = chains(graph);
    let len = graph.operations.len();
    let short = chains.iter().all(|chain| chain.len() <= u16::MAX.into());
    if chains.len() > MOST || !short {
        return None;
    }
    let width = if len <= SMALL { usize::MAX } else { BEAM };
    let mut beam = vec![PlacedParts {
        placed: [0; MOST],
        begins: [0.0; MOST],
        free: [0.0; 2],
        bound: 0.0,
        idle: 0.0,
        step: 0,
    }];
    // Each step, with the one before it and its operation.
    let mut steps: Vec<[u32; 2]> = vec![[0; 2]];
    let mut found = Vec::new();
    for _ in 0..len {
        found.clear();
        for partial in &beam {
            for (part, chain) in chains.iter().enumerate() {
                let next = partial.with(&chains, part);
                let next = next.filter(|next| next.bound < known * (1.0 - 1e-9));
                let link = &chain[usize::from(partial.placed[part])];
                found.extend(next.map(|next| (next, link.operation)));
            }
        }
        found.sort_by(|(a, _), (b, _)| {
            let [bound, idle] =
                [(a.bound, b.bound), (a.idle, b.idle)].map(|(a, b)| a.total_cmp(&b));
            bound.then(idle)
        });
        beam.clear();
        for &(partial, operation) in &found {
            if beam.len() == width {
                break;
            }
            if !beam.iter().any(|kept: &PlacedParts| kept.covers(&partial)) {
                let step = steps.len() as u32;
                steps.push([partial.step, operation as u32]);
                beam.push(PlacedParts { step, ..partial });
            }
        }
    }
    let mut step = beam.first()?.step;
    let mut order = vec![0; len];
    for place in order.iter_mut().rev() {
        let [before, operation] = steps[step as usize];
        (*place, step) = (operation as usize, before);
    }
    Some(order)
}
