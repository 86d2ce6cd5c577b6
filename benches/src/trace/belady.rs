//! Belady's optimum: evicts the neuron that is needed last.
//!
//! Two variants. *Forced*: every read is cached, as in all caches compared here; no such cache has
//! fewer misses. *Bypass*: a read may be dropped at once if everything else is needed sooner.

use std::collections::BinaryHeap;

use super::Trace;
use super::eviction::Cache;

/// Step of the next use, by access.
pub struct Future {
    next: Vec<u32>,
    /// First access of each step.
    starts: Vec<u32>,
}

/// There is no further use.
const NEVER: u32 = u32::MAX;

impl Future {
    /// Computes the next uses of a trace from its end.
    pub fn of(trace: &Trace) -> Self {
        let mut seen = vec![NEVER; trace.universe()];
        let mut next = vec![NEVER; trace.keys().len()];
        for step in (0..trace.steps()).rev() {
            for i in trace.range(step) {
                let key = trace.keys()[i] as usize;
                next[i] = seen[key];
                seen[key] = step as u32;
            }
        }
        let starts = (0..trace.steps()).map(|s| trace.range(s).start as u32);
        Self {
            next,
            starts: starts.collect(),
        }
    }
}

/// The optimal cache.
pub struct Belady<'a> {
    future: &'a Future,
    capacity: usize,
    bypass: bool,
    /// Step of the next use, by neuron.
    next: Vec<u32>,
    resident: Vec<bool>,
    count: usize,
    /// Residents by next use; outdated entries are dropped when they reach the top.
    order: BinaryHeap<(u32, u32)>,
}

impl<'a> Belady<'a> {
    pub fn new(future: &'a Future, universe: usize, capacity: usize, bypass: bool) -> Self {
        Self {
            future,
            capacity,
            bypass,
            next: vec![NEVER; universe],
            resident: vec![false; universe],
            count: 0,
            order: BinaryHeap::new(),
        }
    }

    /// Drops outdated entries from the top and returns the resident needed last.
    fn last(&mut self) -> Option<(u32, u32)> {
        while let Some(&(next, key)) = self.order.peek() {
            if self.resident[key as usize] && self.next[key as usize] == next {
                return Some((next, key));
            }
            self.order.pop();
        }
        None
    }
}

impl Cache for Belady<'_> {
    fn step(&mut self, step: usize, keys: &[u32], missing: &mut Vec<u32>) {
        let first = self.future.starts[step] as usize;
        for (&key, &next) in keys.iter().zip(&self.future.next[first..]) {
            let k = key as usize;
            if !self.resident[k] {
                missing.push(key);
                if self.count == self.capacity {
                    let Some((last, victim)) = self.last() else {
                        continue;
                    };
                    if self.bypass && next >= last {
                        continue;
                    }
                    self.order.pop();
                    self.resident[victim as usize] = false;
                    self.count -= 1;
                }
                self.resident[k] = true;
                self.count += 1;
            }
            self.next[k] = next;
            self.order.push((next, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::eviction::{Lfu, Lru, S3Fifo};

    fn count(trace: &Trace, cache: &mut dyn Cache) -> usize {
        let mut missing = Vec::new();
        for s in 0..trace.steps() {
            cache.step(s, trace.step(s), &mut missing);
        }
        missing.len()
    }

    fn belady(trace: &Trace, capacity: usize, bypass: bool) -> usize {
        let future = Future::of(trace);
        count(
            trace,
            &mut Belady::new(&future, trace.universe(), capacity, bypass),
        )
    }

    #[test]
    fn the_textbook_case() {
        // Silberschatz: 7 0 1 2 0 3 0 4 2 3 0 3 2 1 2 0 1 7 0 1 with 3 frames: 9 faults
        let pages: Vec<u32> = vec![7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let steps: Vec<&[u32]> = pages.chunks(1).collect();
        let trace = Trace::of(10, &steps);
        assert_eq!(belady(&trace, 3, false), 9);
        assert_eq!(count(&trace, &mut Lru::new(10, 3)), 12);
        assert!(belady(&trace, 3, true) <= 9);
    }

    #[test]
    fn bypass_helps_where_a_scan_passes() {
        // Neurons 1 and 2 are needed repeatedly, the others once.
        let steps: [&[u32]; 8] = [&[1], &[2], &[3], &[1], &[2], &[4], &[1], &[2]];
        let trace = Trace::of(10, &steps);
        assert_eq!(belady(&trace, 2, true), 4);
        assert_eq!(belady(&trace, 2, false), 6);
    }

    /// Exhaustive search over everything a cache could evict.
    fn best(keys: &[u32], resident: &mut Vec<u32>, capacity: usize) -> usize {
        let Some((&key, rest)) = keys.split_first() else {
            return 0;
        };
        if resident.contains(&key) {
            return best(rest, resident, capacity);
        }
        if resident.len() < capacity {
            resident.push(key);
            let n = best(rest, resident, capacity);
            resident.pop();
            return 1 + n;
        }
        (0..capacity)
            .map(|i| {
                let old = std::mem::replace(&mut resident[i], key);
                let n = best(rest, resident, capacity);
                resident[i] = old;
                1 + n
            })
            .min()
            .unwrap_or(0)
    }

    #[test]
    fn no_choice_of_victims_is_better() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..60 {
            let keys: Vec<u32> = (0..11).map(|_| random.u32(..5)).collect();
            let steps: Vec<&[u32]> = keys.chunks(1).collect();
            let trace = Trace::of(5, &steps);
            for capacity in 1..4 {
                let optimum = belady(&trace, capacity, false);
                assert_eq!(optimum, best(&keys, &mut Vec::new(), capacity), "{keys:?}");
                assert!(belady(&trace, capacity, true) <= optimum);
                for cache in [
                    &mut Lru::new(5, capacity) as &mut dyn Cache,
                    &mut Lfu::new(5, capacity),
                    &mut S3Fifo::new(5, capacity),
                ] {
                    assert!(count(&trace, cache) >= optimum);
                }
            }
        }
    }
}
