//! The gate of the worker pool under a model checker, in every order of steps.
//!
//! `src/gate.rs` is compiled here once more, with the atomics and threads of loom.

use std::sync::atomic::AtomicUsize as Plain;

use loom::{
    cell::UnsafeCell,
    model::Builder,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread::{self, Thread},
};

mod sync {
    pub(crate) use loom::{
        sync::atomic::{AtomicU64, Ordering},
        thread::{park, yield_now},
    };
}

#[allow(dead_code)]
#[path = "../src/gate.rs"]
mod gate;

use gate::Gate;

/// A number in plain memory: the checker fails when two threads access it, one of them to
/// write, without an order between them.
#[derive(Default)]
struct Memory {
    access: UnsafeCell<()>,
    value: Plain,
}

impl Memory {
    fn read(&self) -> usize {
        self.access.with(|_| self.value.load(Ordering::Relaxed))
    }

    fn write(&self, value: usize) {
        let store = |_| self.value.store(value, Ordering::Relaxed);
        self.access.with_mut(store);
    }
}

/// What the caller and its workers share, as in `src/workers.rs`.
struct Pool {
    gate: Gate,
    stop: AtomicBool,
    /// The task: the number of the run. Written by the caller between runs, read by workers
    /// inside.
    task: Memory,
    caller: Thread,
    next: AtomicUsize,
    /// Results of items, each written by whoever takes the item.
    items: [Memory; 2],
    entries: Plain,
}

impl Pool {
    /// Takes items until there are none.
    fn share(&self) {
        let task = self.task.read();
        loop {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = self.items.get(item) else {
                return;
            };
            item.write(task);
        }
    }

    fn work(&self) {
        let mut last = 0;
        while let Some(run) = self.gate.enter(last, || self.stop.load(Ordering::Relaxed)) {
            assert_ne!(run, last, "a run is entered once");
            last = run;
            self.entries.fetch_add(1, Ordering::Relaxed);
            let caller = self.caller.clone();
            self.share();
            if self.gate.leave() {
                caller.unpark();
            }
        }
    }
}

/// Runs the pool `runs` times; each run waits for `wanted` of the workers.
fn check(workers: usize, runs: usize, wanted: usize, preemptions: usize) {
    let mut model = Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let pool = Arc::new(Pool {
            gate: Gate::new(false),
            stop: AtomicBool::new(false),
            task: Memory::default(),
            caller: thread::current(),
            next: AtomicUsize::new(0),
            items: Default::default(),
            entries: Plain::new(0),
        });
        let handles: Vec<_> = (0..workers)
            .map(|_| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || pool.work())
            })
            .collect();
        let wake = || handles.iter().for_each(|handle| handle.thread().unpark());
        for run in 1..=runs {
            pool.task.write(run);
            pool.next.store(0, Ordering::Relaxed);
            pool.gate.open();
            // A step at which the checker may let a worker enter that was not woken: to be
            // woken orders memory too.
            pool.next.load(Ordering::Relaxed);
            wake();
            pool.share();
            pool.gate.close(wanted);
            for item in &pool.items {
                assert_eq!(item.read(), run, "an item of this run");
            }
            let entries = pool.entries.swap(0, Ordering::Relaxed);
            assert!((wanted..=workers).contains(&entries), "{entries} entries");
        }
        pool.stop.store(true, Ordering::Relaxed);
        pool.gate.open();
        wake();
        for handle in handles {
            handle.join().unwrap();
        }
    });
}

#[test]
fn late_workers_are_not_waited_for_and_do_no_harm() {
    check(1, 2, 0, 3);
    check(2, 1, 0, 2);
}

#[test]
fn workers_that_are_wanted_are_waited_for() {
    check(1, 2, 1, 3);
    check(2, 1, 2, 2);
}
