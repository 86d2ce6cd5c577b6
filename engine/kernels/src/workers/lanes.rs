//! Runs with up to three results for each item, whose completed parts are handed over meanwhile.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use super::Workers;
use crate::cut::Cut;

/// A slice divided into units of equal length.
pub struct Lane<'a, T> {
    data: &'a mut [T],
    unit: usize,
}

impl<'a, T> Lane<'a, T> {
    /// Units of `unit` elements; the last one may be shorter.
    pub fn new(data: &'a mut [T], unit: usize) -> Self {
        Self { data, unit }
    }

    /// An empty lane for every unit.
    pub fn none() -> Self {
        Self::new(&mut [], 0)
    }
}

/// Up to three results of each of `units` work items, each in its own slice. If a lane ends early,
/// the remaining units have nothing in it.
pub struct Lanes<'a, T, U, V> {
    /// Number of work items.
    pub units: usize,
    /// Their results.
    pub first: Lane<'a, T>,
    /// See `first`.
    pub second: Lane<'a, U>,
    /// See `first`.
    pub third: Lane<'a, V>,
}

/// Computes a part of the lanes, starting at the given unit.
pub type Part<'a, T, U, V> = dyn Fn(usize, &mut [T], &mut [U], &mut [V]) + Sync + 'a;

/// Receives completed parts of the lanes, starting at the given unit.
pub type Then<'a, T, U, V> = dyn FnMut(usize, &[T], &[U], &[V]) + Send + 'a;

impl Workers {
    /// Computes the units of `lanes` in at most 64 parts of equal length, with at least
    /// `units_per_part` units each. Between its own parts, the calling thread passes completed
    /// units to `then(first, …)`, in consecutive stretches that start at unit `first`. This
    /// overlaps single-threaded work with that of the other threads.
    ///
    /// # Panics
    /// As [`for_each_chunk`](Workers::for_each_chunk), and if `then` panics.
    pub fn for_each_part_then<T: Send + Sync, U: Send + Sync, V: Send + Sync>(
        &self,
        lanes: Lanes<'_, T, U, V>,
        units_per_part: usize,
        f: &Part<'_, T, U, V>,
        then: &mut Then<'_, T, U, V>,
    ) {
        let units = lanes.units;
        let part = units_per_part.max(1).max(units.div_ceil(64));
        let parts = units.div_ceil(part);
        let lens = [lanes.first.unit, lanes.second.unit, lanes.third.unit].map(|unit| part * unit);
        let first = Cut::new(lanes.first.data);
        let second = Cut::new(lanes.second.data);
        let third = Cut::new(lanes.third.data);
        let (next, complete) = (AtomicUsize::new(0), AtomicU64::new(0));
        let then = Mutex::new((0, then));
        let hand_over = || {
            let mut guard = then.lock().unwrap_or_else(PoisonError::into_inner);
            let (handed, then) = &mut *guard;
            // Acquire pairs with the release below: the writes to these parts are visible.
            let end = complete.load(Ordering::Acquire).trailing_ones() as usize;
            if end > *handed {
                let [a, b, c] = lens.map(|len| *handed * len..end * len);
                // SAFETY: all parts in these ranges are complete, so no one writes to them any
                // more.
                let (a, b, c) = unsafe { (first.get(a), second.get(b), third.get(c)) };
                then(*handed * part, a, b, c);
                *handed = end;
            }
        };
        self.share(parts, &|thread| {
            loop {
                let p = next.fetch_add(1, Ordering::Relaxed);
                if p >= parts {
                    break;
                }
                let [a, b, c] = lens.map(|len| p * len..(p + 1) * len);
                // SAFETY: each number is handed out once, and parts do not overlap; they are
                // not read before they are marked as complete.
                let (a, b, c) = unsafe { (first.get_mut(a), second.get_mut(b), third.get_mut(c)) };
                f(p * part, a, b, c);
                complete.fetch_or(1 << p, Ordering::Release);
                if thread == 0 {
                    hand_over();
                }
            }
        });
        hand_over();
    }
}
