//! Times short pieces of work.

use std::time::{Duration, Instant};

/// One neuron in this many is active.
pub(super) const SCATTER: usize = 5;

/// Nanoseconds of `f`: the fastest of as many runs as fit in `time`, at least one.
pub(super) fn best(time: Duration, mut f: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed() < time || best == f64::INFINITY {
        let one = Instant::now();
        f();
        best = best.min(one.elapsed().as_nanos() as f64);
    }
    best
}
