//! Synchronisation of a thread pool: the caller opens a run, workers enter and leave it, the caller
//! closes it.
//!
//! The primitives come from `sync`. The test `tests/gate.rs` compiles this file with those of a
//! model checker instead and explores all interleavings.

use std::{
    hint::spin_loop,
    time::{Duration, Instant},
};

use crate::sync::{AtomicU64, Ordering, park, yield_now};

/// How long a waiting thread spins without yielding its core.
const SPIN: Duration = Duration::from_micros(10);

/// How long it waits before it sleeps, yielding its core after [`SPIN`]: longer than nearly all
/// serial steps between two runs of a forward pass, some of which look up and request neurons.
const STAY: Duration = Duration::from_micros(250);

/// The state of a run in one word, so that entering, leaving and closing it are single atomic
/// operations.
///
/// ```text
/// bits 63..32  number of the run
/// bit  31      open: workers may enter
/// bits 30..16  workers that have entered
/// bits 15..0   workers that are inside
/// ```
pub(crate) struct Gate {
    word: AtomicU64,
    /// Whether a waiting thread spins before it sleeps.
    spin: bool,
}

const OPEN: u64 = 1 << 31;
const ENTERED: u64 = 1 << 16;
const INSIDE: u64 = 1;

/// Limit of the worker counts.
pub(crate) const MAX_WORKERS: usize = (1 << 15) - 1;

fn number(word: u64) -> u64 {
    word >> 32
}

fn entered(word: u64) -> usize {
    (word >> 16) as usize & MAX_WORKERS
}

fn inside(word: u64) -> usize {
    word as usize & 0xffff
}

impl Gate {
    /// A closed gate.
    pub(crate) fn new(spin: bool) -> Gate {
        Gate {
            word: AtomicU64::new(0),
            spin,
        }
    }

    /// Opens the next run; the previous one must be closed and left. Every worker that enters sees
    /// the caller's earlier writes. Wake sleeping workers afterwards.
    pub(crate) fn open(&self) {
        let next = number(self.word.load(Ordering::Relaxed)).wrapping_add(1);
        self.word.store(next << 32 | OPEN, Ordering::Release);
    }

    /// Waits until a run other than `last` is open, and enters it unless `stop` holds. Returns its
    /// number. `last` is initially 0.
    pub(crate) fn enter(&self, last: u64, stop: impl Fn() -> bool) -> Option<u64> {
        loop {
            let mut run = 0;
            self.wait_until(|word| {
                run = number(word);
                word & OPEN != 0 && run != last
            });
            if stop() {
                return None;
            }
            let step = |word: u64| (word >> 31 == run << 1 | 1).then(|| word + ENTERED + INSIDE);
            let (success, failure) = (Ordering::Acquire, Ordering::Relaxed);
            if self.word.fetch_update(success, failure, step).is_ok() {
                return Some(run);
            }
        }
    }

    /// Leaves the run. The caller sees this worker's writes after [`close`](Gate::close). If this
    /// returns true, wake the caller.
    pub(crate) fn leave(&self) -> bool {
        let before = self.word.fetch_sub(INSIDE, Ordering::AcqRel);
        inside(before) == 1
    }

    /// Waits until `wanted` workers have entered, closes the run to others, and waits until all
    /// have left.
    pub(crate) fn close(&self, wanted: usize) {
        if wanted > 0 {
            // Entering does not wake the caller, but the last worker to leave does.
            self.wait_until(|word| entered(word) >= wanted && inside(word) == 0);
        }
        self.word.fetch_and(!OPEN, Ordering::AcqRel);
        self.wait_until(|word| inside(word) == 0);
    }

    /// Returns when `ready` holds for the word. The thread that makes it hold must wake this one.
    fn wait_until(&self, mut ready: impl FnMut(u64) -> bool) {
        let mut ready = || ready(self.word.load(Ordering::Acquire));
        if ready() {
            return;
        }
        if self.spin {
            let start = Instant::now();
            loop {
                for _ in 0..16 {
                    if ready() {
                        return;
                    }
                    spin_loop();
                }
                let waited = start.elapsed();
                if waited >= STAY {
                    break;
                }
                if waited >= SPIN {
                    yield_now();
                }
            }
        }
        while !ready() {
            park();
        }
    }
}
