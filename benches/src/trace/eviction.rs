//! Caches of neurons for comparison: LRU, LFU, S3-FIFO. Each caches what it reads.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use emberflow_storage::cache::Rings;

/// A cache that serves one layer after another.
pub trait Cache {
    /// Serves the needed neurons `keys` of step `step`; appends the missing ones.
    fn step(&mut self, step: usize, keys: &[u32], missing: &mut Vec<u32>);
}

/// Least recently used.
pub struct Lru {
    capacity: u32,
    resident: Vec<bool>,
    count: u32,
    rings: Rings,
}

impl Lru {
    pub fn new(universe: usize, capacity: usize) -> Self {
        Self {
            capacity: capacity as u32,
            resident: vec![false; universe],
            count: 0,
            rings: Rings::new(1, universe as u32),
        }
    }
}

impl Cache for Lru {
    fn step(&mut self, _: usize, keys: &[u32], missing: &mut Vec<u32>) {
        for &key in keys {
            if self.resident[key as usize] {
                self.rings.remove(key);
            } else {
                missing.push(key);
                if self.count == self.capacity
                    && let Some(old) = self.rings.oldest(0)
                {
                    self.rings.remove(old);
                    self.resident[old as usize] = false;
                } else {
                    self.count += 1;
                }
                self.resident[key as usize] = true;
            }
            self.rings.push(0, key);
        }
    }
}

/// Least frequently used, by all uses so far, including those before an eviction.
pub struct Lfu {
    capacity: usize,
    uses: Vec<u32>,
    resident: Vec<bool>,
    /// Residents by number of uses, which may have grown since.
    order: BinaryHeap<Reverse<(u32, u32)>>,
}

impl Lfu {
    pub fn new(universe: usize, capacity: usize) -> Self {
        Self {
            capacity,
            uses: vec![0; universe],
            resident: vec![false; universe],
            order: BinaryHeap::new(),
        }
    }

    fn evict(&mut self) {
        while let Some(Reverse((uses, key))) = self.order.pop() {
            let now = self.uses[key as usize];
            if now == uses {
                self.resident[key as usize] = false;
                return;
            }
            self.order.push(Reverse((now, key)));
        }
    }
}

impl Cache for Lfu {
    fn step(&mut self, _: usize, keys: &[u32], missing: &mut Vec<u32>) {
        for &key in keys {
            self.uses[key as usize] += 1;
            if !self.resident[key as usize] {
                missing.push(key);
                if self.order.len() == self.capacity {
                    self.evict();
                }
                self.resident[key as usize] = true;
                self.order.push(Reverse((self.uses[key as usize], key)));
            }
        }
    }
}

/// The queue of a neuron in S3-FIFO.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
}

/// S3-FIFO (Yang et al., SOSP 2023): new neurons enter a small queue and move to the main queue if
/// they are used again; a ghost queue remembers those that were not.
pub struct S3Fifo {
    small_size: usize,
    capacity: usize,
    place: Vec<Place>,
    /// Uses since it was read or last spared, at most 3.
    uses: Vec<u8>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Neurons evicted from the small queue and when; only the latest time of each counts.
    ghost: VecDeque<(u32, u32)>,
    ghost_time: Vec<u32>,
    clock: u32,
}

impl S3Fifo {
    pub fn new(universe: usize, capacity: usize) -> Self {
        Self {
            small_size: (capacity / 10).max(1),
            capacity,
            place: vec![Place::Nowhere; universe],
            uses: vec![0; universe],
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: VecDeque::new(),
            ghost_time: vec![0; universe],
            clock: 0,
        }
    }

    fn evict(&mut self) {
        if self.small.len() >= self.small_size || self.main.is_empty() {
            while let Some(key) = self.small.pop_front() {
                if self.uses[key as usize] > 1 {
                    self.uses[key as usize] = 0;
                    self.place[key as usize] = Place::Main;
                    self.main.push_back(key);
                    continue;
                }
                self.place[key as usize] = Place::Nowhere;
                self.clock += 1;
                self.ghost_time[key as usize] = self.clock;
                self.ghost.push_back((key, self.clock));
                if self.ghost.len() > self.capacity - self.small_size
                    && let Some((old, time)) = self.ghost.pop_front()
                    && self.ghost_time[old as usize] == time
                {
                    self.ghost_time[old as usize] = 0;
                }
                return;
            }
        }
        while let Some(key) = self.main.pop_front() {
            let uses = &mut self.uses[key as usize];
            if *uses == 0 {
                self.place[key as usize] = Place::Nowhere;
                return;
            }
            *uses -= 1;
            self.main.push_back(key);
        }
    }

    #[cfg(test)]
    fn queues(&self) -> (Vec<u32>, Vec<u32>) {
        (
            self.small.iter().copied().collect(),
            self.main.iter().copied().collect(),
        )
    }
}

impl Cache for S3Fifo {
    fn step(&mut self, _: usize, keys: &[u32], missing: &mut Vec<u32>) {
        for &key in keys {
            let k = key as usize;
            if self.place[k] != Place::Nowhere {
                self.uses[k] = (self.uses[k] + 1).min(3);
                continue;
            }
            missing.push(key);
            if self.small.len() + self.main.len() == self.capacity {
                self.evict();
            }
            self.uses[k] = 0;
            if std::mem::take(&mut self.ghost_time[k]) > 0 {
                self.place[k] = Place::Main;
                self.main.push_back(key);
            } else {
                self.place[k] = Place::Small;
                self.small.push_back(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    /// Missing keys, step by step.
    pub fn misses(cache: &mut dyn Cache, steps: &[&[u32]]) -> Vec<Vec<u32>> {
        let trace = Trace::of(100, steps);
        let run = |s: usize| {
            let mut missing = Vec::new();
            cache.step(s, trace.step(s), &mut missing);
            missing
        };
        (0..trace.steps()).map(run).collect()
    }

    #[test]
    fn lru_by_hand() {
        let m = misses(
            &mut Lru::new(10, 2),
            &[&[1], &[2], &[1], &[3], &[2], &[1], &[1]],
        );
        // 3 replaces 2, 2 replaces 1, 1 replaces 3.
        assert_eq!(m.concat(), [1, 2, 3, 2, 1]);
    }

    #[test]
    fn lfu_by_hand() {
        let m = misses(
            &mut Lfu::new(10, 2),
            &[&[1], &[1], &[1], &[2], &[3], &[2], &[3], &[1]],
        );
        // 1 stays; 2 and 3 replace each other.
        assert_eq!(m.concat(), [1, 2, 3, 2, 3]);
    }

    #[test]
    fn s3_fifo_by_hand() {
        // Capacity 4: one small, three main.
        let mut c = S3Fifo::new(20, 4);
        let m = misses(&mut c, &[&[1, 2, 3, 4], &[2, 2], &[5]]);
        // Full: 1 was used only once and leaves for the ghost queue.
        assert_eq!(m.concat(), [1, 2, 3, 4, 5]);
        assert_eq!(c.queues(), (vec![2, 3, 4, 5], vec![]));
        // 2 was used twice since and moves to main; 3 leaves.
        assert_eq!(misses(&mut c, &[&[6]]).concat(), [6]);
        assert_eq!(c.queues(), (vec![4, 5, 6], vec![2]));
        // 1 is remembered and enters main at once; 4 leaves.
        assert_eq!(misses(&mut c, &[&[1]]).concat(), [1]);
        assert_eq!(c.queues(), (vec![5, 6], vec![2, 1]));
        // Three new neurons: the ghost queue holds three (4, 5, 6), so 3 is forgotten.
        assert_eq!(misses(&mut c, &[&[7, 8, 3]]).concat(), [7, 8, 3]);
        assert_eq!(c.queues(), (vec![8, 3], vec![2, 1]));
    }
}
