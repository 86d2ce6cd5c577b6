//! How the threads of a pool meet: the caller opens a run, workers enter and leave it, the
//! caller closes it.
//!
//! What threads meet by comes from `sync`, in whose place the test `tests/gate.rs` puts that
//! of a model checker: it compiles this very file and tries every order of steps.

use std::{
    hint::spin_loop,
    time::{Duration, Instant},
};

use crate::sync::{AtomicU64, Ordering, park, yield_now};

/// How long a waiting thread keeps its core to itself.
const SPIN: Duration = Duration::from_micros(10);

/// How long it waits before it sleeps, offering its core to other threads after [`SPIN`]:
/// longer than nearly all serial steps between two runs of a forward pass, some of which look up
/// and request neurons.
const STAY: Duration = Duration::from_micros(250);

/// The state of a run in one word, so that entering it, leaving it and closing it are
/// single steps.
///
/// ```text
/// bits 63..32  number of the run
/// bit  31      open: workers may enter
/// bits 30..16  workers that have entered
/// bits 15..0   workers that are inside
/// ```
pub(crate) struct Gate {
    word: AtomicU64,
    /// Whether a waiting thread spins at all before it sleeps.
    spin: bool,
}

const OPEN: u64 = 1 << 31;
const ENTERED: u64 = 1 << 16;
const INSIDE: u64 = 1;

/// Most workers that the fields can count.
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
    /// A gate that is closed.
    pub(crate) fn new(spin: bool) -> Gate {
        Gate {
            word: AtomicU64::new(0),
            spin,
        }
    }

    /// Opens the next run; the last one is closed and has been left. What the caller wrote
    /// before is seen by all who enter. Workers that sleep have to be woken afterwards.
    pub(crate) fn open(&self) {
        let next = number(self.word.load(Ordering::Relaxed)).wrapping_add(1);
        self.word.store(next << 32 | OPEN, Ordering::Release);
    }

    /// Waits until a run is open that is not `last`, and enters it unless `stop` holds.
    /// Returns its number. `last` is 0 at first.
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

    /// Leaves the run. What this worker wrote is seen by the caller after
    /// [`close`](Gate::close). If this returns true the caller has to be woken.
    pub(crate) fn leave(&self) -> bool {
        let before = self.word.fetch_sub(INSIDE, Ordering::AcqRel);
        inside(before) == 1
    }

    /// Waits until `wanted` workers have entered, lets no more of them enter, and waits until
    /// all have left.
    pub(crate) fn close(&self, wanted: usize) {
        if wanted > 0 {
            // Nobody wakes the caller for an entry, but for the last one that leaves.
            self.wait_until(|word| entered(word) >= wanted && inside(word) == 0);
        }
        self.word.fetch_and(!OPEN, Ordering::AcqRel);
        self.wait_until(|word| inside(word) == 0);
    }

    /// Returns when `ready` holds for the word. Whoever makes it hold wakes this thread
    /// afterwards.
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
