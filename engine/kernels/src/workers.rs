//! A thread pool that divides the items of a job.
//!
//! A forward pass starts thousands of runs per second, so a run allocates nothing, and idle threads
//! spin for some microseconds before they sleep. A sleeping pool uses no CPU.
//!
//! Items go to whichever thread is free. A run does not wait for a late thread, which the system
//! has put to sleep or preempted: the others do its share and close the run. It waits only for
//! items that a thread has started.

#![allow(unsafe_code)]

mod lanes;

pub use lanes::{Lane, Lanes};

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle, Thread},
};

use crate::{
    columns::Columns,
    cut::{Cut, Shareable},
    gate::{Gate, MAX_WORKERS},
};

/// Kernels need little stack, and the budget counts every thread's.
const STACK_BYTES: usize = 512 * 1024;

type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// The task of one run, as published to the workers.
struct Task {
    // Lifetime erased: valid while a worker is inside the run.
    job: *const Job<'static>,
    caller: Thread,
}

struct Shared {
    gate: Gate,
    /// Written by the caller before it opens the gate, read by workers inside.
    task: UnsafeCell<Option<Task>>,
    stop: AtomicBool,
    /// The first panic of the current run.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    pinned: AtomicUsize,
}

// SAFETY: `task` is the only field that is not `Sync` by itself. The caller writes it only while
// the gate is closed and no worker is inside, and publishes it by the release that opens the gate.
// The job behind the pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is used only while the caller keeps the job alive.
unsafe impl Send for Shared {}

thread_local! {
    /// The pool whose run this thread is in, to reject a nested run, which would wait for itself.
    static INSIDE: Cell<*const Shared> = const { Cell::new(ptr::null()) };
}

/// A fixed set of threads, including the caller's.
///
/// The assignment of work to threads, and how many take part, is not determined; callers must write
/// their results so that it does not matter.
pub struct Workers {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Held during a run, so that runs of several callers are serialised.
    turn: Mutex<()>,
    /// See [`Workers::observe`].
    observer: OnceLock<Box<Observer>>,
}

/// Runs a thread's part of a run.
type Observer = dyn Fn(usize, &dyn Fn()) + Send + Sync;

/// Blocks of columns for [`Workers::for_each_block_of`].
#[derive(Debug, Clone, Copy)]
pub struct BlockList<'a> {
    /// Numbers of blocks, ascending.
    pub numbers: &'a [u32],
    /// Consecutive blocks n with the same n / `group` may be passed as one.
    pub group: usize,
}

impl Workers {
    /// A pool of `threads` threads, counting the one that calls [`run`](Workers::run): starts
    /// `threads − 1`, or none if `threads` is 0 or 1.
    ///
    /// With `cores`, thread `i` is pinned to core `cores[i % cores.len()]`. Thread 0 is the
    /// caller's and is not pinned. Pinning is best effort, see [`pinned`](Workers::pinned). If the
    /// system refuses a thread, the pool is smaller, see [`threads`](Workers::threads).
    pub fn new(threads: usize, cores: Option<&[usize]>) -> Workers {
        let available = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            // With more threads than cores, a spinning thread would block a working one.
            gate: Gate::new(threads <= available),
            task: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            pinned: AtomicUsize::new(0),
        });
        // Only cores this process may use: the affinity call does not check its argument.
        let usable = core_affinity::get_core_ids().unwrap_or_default();
        let mut handles = Vec::new();
        for index in 1..threads.min(MAX_WORKERS + 1) {
            let wanted = cores.and_then(|cores| cores.get(index % cores.len().max(1)));
            let core = wanted
                .and_then(|&id| usable.iter().find(|core| core.id == id))
                .copied();
            let shared = Arc::clone(&shared);
            let spawned = thread::Builder::new()
                .name(format!("ember-worker-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    if core.is_some_and(core_affinity::set_for_current) {
                        shared.pinned.fetch_add(1, Ordering::Relaxed);
                    }
                    work(&shared, index);
                });
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(_) => break,
            }
        }
        let workers = Workers {
            shared,
            handles,
            turn: Mutex::new(()),
            observer: OnceLock::new(),
        };
        // After an empty run every thread has started and tried to pin itself.
        workers.run(&|_| {});
        workers
    }

    /// Number of threads in a run, including the caller's.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// How many of the started threads were pinned to their core.
    pub fn pinned(&self) -> usize {
        self.shared.pinned.load(Ordering::Relaxed)
    }

    /// From now on, wraps every thread's part of a run in `around(thread, part)`, which calls
    /// `part` once and may measure it. The first call counts, later ones do nothing.
    pub fn observe(&self, around: impl Fn(usize, &dyn Fn()) + Send + Sync + 'static) {
        let _ = self.observer.set(Box::new(around));
    }

    /// Calls `f(i)` once for every thread `i` in `0..threads()`, `f(0)` on the calling thread, and
    /// returns when all calls have returned. Allocates nothing. Concurrent calls are serialised.
    ///
    /// # Panics
    /// If `f` panics on any thread: with the first payload, after all threads have finished; the
    /// pool stays usable. Also if called from inside a run of the same pool (through a second pool
    /// in between it would deadlock instead).
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        self.observed(f, &|f| self.run_with(self.handles.len(), f));
    }

    /// Calls `run` with `f`, wrapped in the observer if there is one.
    fn observed(&self, f: &Job<'_>, run: &dyn Fn(&Job<'_>)) {
        match self.observer.get() {
            None => run(f),
            Some(around) => run(&|thread| around(thread, &|| f(thread))),
        }
    }

    /// [`run`](Workers::run) for the caller and the workers that arrive before it is done, at least
    /// `wanted` of them.
    fn run_with(&self, wanted: usize, f: &Job<'_>) {
        let outer = self.enter();
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.start(f);
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        self.finish(wanted);
        INSIDE.set(outer);
        let theirs = self
            .shared
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(turn);
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Runs `f` on the calling thread only.
    fn run_alone(&self, f: &Job<'_>) {
        let outer = self.enter();
        let own = catch_unwind(AssertUnwindSafe(|| f(0)));
        INSIDE.set(outer);
        if let Err(payload) = own {
            resume_unwind(payload);
        }
    }

    /// Marks this thread as inside a run, and returns the run it was in before.
    fn enter(&self) -> *const Shared {
        let (outer, this) = (INSIDE.get(), Arc::as_ptr(&self.shared));
        assert!(
            !ptr::eq(outer, this),
            "a worker pool was asked to run from inside its own run"
        );
        INSIDE.replace(this)
    }

    /// Publishes `f` to the workers. [`finish`](Workers::finish) must follow before `f` ends.
    fn start(&self, f: &Job<'_>) {
        if self.handles.is_empty() {
            return;
        }
        // SAFETY: only the lifetime changes. `run_with` does not return or unwind before
        // `finish` has seen every worker that entered leave.
        let job = unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(f) };
        let task = Task {
            job,
            caller: thread::current(),
        };
        // SAFETY: the caller holds `turn`, the gate is closed and no worker is inside, so no one
        // else uses it.
        unsafe { *self.shared.task.get() = Some(task) };
        self.wake();
    }

    fn wake(&self) {
        self.shared.gate.open();
        for handle in &self.handles {
            // One atomic swap unless the thread sleeps.
            handle.thread().unpark();
        }
    }

    /// Waits until `wanted` workers have entered, closes the run, and waits until all have
    /// left.
    fn finish(&self, wanted: usize) {
        if self.handles.is_empty() {
            return;
        }
        self.shared.gate.close(wanted);
    }

    /// Runs `f`, which processes items until none is left, on the calling thread and on the workers
    /// that arrive in time to help with `items` items.
    fn share(&self, items: usize, f: &Job<'_>) {
        self.observed(f, &|f| {
            if items > 1 {
                self.run_with(0, f);
            } else {
                self.run_alone(f);
            }
        });
    }

    /// Calls `f(thread, item)` once for every item in `0..items`. Items are handed out in
    /// order to whichever thread is free.
    ///
    /// # Panics
    /// As [`run`](Workers::run). After a panic that thread processes no more items, so some may be
    /// left undone.
    pub fn for_each_chunk(&self, items: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let next = AtomicUsize::new(0);
        self.share(items, &|thread| {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                f(thread, item);
            }
        });
    }

    /// Calls `f(thread, index, chunk)` once for every chunk of `data`; chunk `index` starts
    /// at `index * chunk_len`, and the last one may be shorter.
    ///
    /// # Panics
    /// As [`for_each_chunk`](Workers::for_each_chunk), and if `chunk_len` is 0.
    pub fn for_each_chunk_mut<T: Send>(
        &self,
        data: &mut [T],
        chunk_len: usize,
        f: &(dyn Fn(usize, usize, &mut [T]) + Sync),
    ) {
        assert!(
            chunk_len > 0,
            "a slice cannot be cut into chunks of no elements"
        );
        let (chunks, data) = (data.len().div_ceil(chunk_len), Cut::new(data));
        self.for_each_chunk(chunks, &|thread, index| {
            let start = index * chunk_len;
            // SAFETY: each index is handed out once, so no two chunks overlap.
            f(thread, index, unsafe {
                data.get_mut(start..start + chunk_len)
            });
        });
    }

    /// Calls `f(index, chunk, other)` once for every chunk of both slices, which have as many: as
    /// [`for_each_chunk_mut`](Workers::for_each_chunk_mut) for each.
    ///
    /// # Panics
    /// As [`for_each_chunk_mut`](Workers::for_each_chunk_mut), and if one has more chunks.
    pub fn for_each_chunk_pair_mut<T: Send>(
        &self,
        data: [&mut [T]; 2],
        chunk_len: [usize; 2],
        f: impl Fn(usize, &mut [T], &mut [T]) + Sync,
    ) {
        let chunks = [0, 1].map(|k| data[k].len().div_ceil(chunk_len[k]));
        assert_eq!(chunks[0], chunks[1], "chunks of the two slices");
        let data = data.map(Cut::new);
        self.for_each_chunk(chunks[0], &|_, index| {
            let [one, other] = [0, 1].map(|k| {
                let start = index * chunk_len[k];
                // SAFETY: each index is handed out once, so no two chunks of a slice overlap.
                unsafe { data[k].get_mut(start..start + chunk_len[k]) }
            });
            f(index, one, other);
        });
    }

    /// Calls `f(thread, first, part)` for consecutive parts of `data`; `first` is the number of a
    /// part's first unit of `unit` elements. Parts are long at first, so that a thread works on
    /// contiguous memory, and one unit at the end, so that all threads finish together.
    ///
    /// # Panics
    /// As [`for_each_chunk`](Workers::for_each_chunk), and if `unit` is 0.
    pub fn for_each_part_mut<T: Send>(
        &self,
        data: &mut [T],
        unit: usize,
        f: &(dyn Fn(usize, usize, &mut [T]) + Sync),
    ) {
        assert!(unit > 0, "a slice cannot be cut into parts of no elements");
        let (units, pieces) = (data.len().div_ceil(unit), 2 * self.threads());
        let data = Cut::new(data);
        let next = AtomicUsize::new(0);
        let take = |first: usize| {
            let part = ((units - first.min(units)) / pieces).max(1);
            (first < units).then_some(first + part)
        };
        self.share(units, &|thread| {
            while let Ok(first) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                let end = take(first).unwrap_or(units);
                // SAFETY: `next` moved from `first` to the end of this part at once, so no two
                // parts overlap.
                let part = unsafe { data.get_mut(first * unit..end * unit) };
                f(thread, first, part);
            }
        });
    }

    /// Calls `f(state, item)` once for every item in `0..items`, with `states[i]` for thread `i`,
    /// such as scratch memory or a partial sum.
    ///
    /// # Panics
    /// As [`for_each_chunk`](Workers::for_each_chunk), and if there are fewer states than
    /// threads.
    pub fn for_each_chunk_with<S: Send>(
        &self,
        states: &mut [S],
        items: usize,
        f: &(dyn Fn(&mut S, usize) + Sync),
    ) {
        let threads = self.threads();
        assert!(
            states.len() >= threads,
            "{} states for {threads} threads",
            states.len()
        );
        let (next, base) = (AtomicUsize::new(0), Shareable(states.as_mut_ptr()));
        self.share(items, &|thread| {
            // SAFETY: `thread < threads <= states.len()`, and each thread number is used
            // by one call of this closure. `states` is borrowed until the run is over.
            let state = unsafe { &mut *base.get().add(thread) };
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                f(state, item);
            }
        });
    }

    /// Divides a matrix into blocks of `width` columns and calls `f(state, first, block)` once for
    /// every block; `first` is its first column. `states[i]` goes to thread `i`.
    ///
    /// This divides the rows of a weight matrix among threads when several tokens are computed at
    /// once: every thread writes its outputs of all tokens.
    ///
    /// # Panics
    /// As [`for_each_chunk_with`](Workers::for_each_chunk_with), and if `width` is 0.
    pub fn for_each_column_block<T: Send, S: Send>(
        &self,
        matrix: Columns<'_, T>,
        width: usize,
        states: &mut [S],
        f: &(dyn Fn(&mut S, usize, Columns<'_, T>) + Sync),
    ) {
        assert!(
            width > 0,
            "a matrix cannot be cut into blocks of no columns"
        );
        let columns = matrix.width();
        self.for_each_chunk_with(states, columns.div_ceil(width), &|state, index| {
            let first = index * width;
            // SAFETY: each index is handed out once, so no two blocks share a column.
            // `matrix` outlives the run.
            let block = unsafe { matrix.block(first, width.min(columns - first)) };
            f(state, first, block);
        });
    }

    /// As [`for_each_column_block`](Workers::for_each_column_block), for the listed blocks only. Threads take long runs of
    /// blocks first and single blocks last, as in [`for_each_part_mut`](Workers::for_each_part_mut).
    ///
    /// # Panics
    /// As [`for_each_column_block`](Workers::for_each_column_block), and if the list is not ascending, names a block beyond
    /// the matrix, or has a `group` of 0.
    pub fn for_each_block_of<T: Send, S: Send>(
        &self,
        blocks: BlockList<'_>,
        matrix: Columns<'_, T>,
        width: usize,
        states: &mut [S],
        f: &(dyn Fn(&mut S, usize, Columns<'_, T>) + Sync),
    ) {
        let BlockList {
            numbers: blocks,
            group,
        } = blocks;
        assert!(
            blocks.is_sorted_by(|a, b| a < b),
            "blocks must be in ascending order, each once"
        );
        assert!(
            width > 0 && group > 0,
            "a matrix cannot be cut into blocks of no columns"
        );
        let all = matrix.width().div_ceil(width);
        assert!(
            blocks.last().is_none_or(|&last| (last as usize) < all),
            "a block beyond the matrix"
        );
        let threads = self.threads();
        assert!(
            states.len() >= threads,
            "{} states for {threads} threads",
            states.len()
        );
        let (columns, states) = (matrix.width(), Shareable(states.as_mut_ptr()));
        let (count, pieces) = (blocks.len(), 2 * threads);
        let next = AtomicUsize::new(0);
        let take = |first: usize| {
            let part = ((count - first.min(count)) / pieces).max(1);
            (first < count).then_some(first + part)
        };
        let follows = |a: &u32, b: &u32| {
            let group_of = |block: u32| block as usize / group;
            a + 1 == *b && group_of(*a) == group_of(*b)
        };
        self.share(count, &|thread| {
            // SAFETY: `thread < threads <= states.len()`, and each thread number is used
            // by one call of this closure. `states` is borrowed until the run is over.
            let state = unsafe { &mut *states.get().add(thread) };
            while let Ok(first) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                let end = take(first).unwrap_or(count);
                for run in blocks[first..end].chunk_by(follows) {
                    let first = run[0] as usize * width;
                    let width = (run.len() * width).min(columns - first);
                    // SAFETY: `next` moved from `first` to the end of this part at once and blocks differ, so no two
                    // runs share a column. `matrix` outlives the run and has all blocks.
                    let block = unsafe { matrix.block(first, width) };
                    f(state, first, block);
                }
            }
        });
    }
}

impl Workers {
    /// Divides a matrix into tiles of `rows × width` and calls `f(row, column, tile)` once for
    /// every tile, with its first row and column. Column-major order: vertically adjacent tiles are
    /// consecutive.
    ///
    /// # Panics
    /// As [`for_each_chunk`](Workers::for_each_chunk), and if `rows` or `width` is 0.
    pub fn for_each_tile<T: Send>(
        &self,
        matrix: Columns<'_, T>,
        rows: usize,
        width: usize,
        f: &(dyn Fn(usize, usize, Columns<'_, T>) + Sync),
    ) {
        assert!(
            rows > 0 && width > 0,
            "a matrix cannot be cut into tiles of no elements"
        );
        let (height, columns) = (matrix.rows(), matrix.width());
        let below = height.div_ceil(rows);
        self.for_each_chunk(below * columns.div_ceil(width), &|_, index| {
            let (row, column) = (index % below * rows, index / below * width);
            let range = row..height.min(row + rows);
            // SAFETY: each index is handed out once, so no two tiles share an element.
            // `matrix` outlives the run.
            let tile = unsafe { matrix.tile(range, column, width.min(columns - column)) };
            f(row, column, tile);
        });
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        for handle in self.handles.drain(..) {
            // A worker catches the panics of its jobs and has none of its own.
            let _ = handle.join();
        }
    }
}

/// Body of a worker thread.
fn work(shared: &Shared, index: usize) {
    INSIDE.set(shared);
    let mut last = 0;
    let stop = || shared.stop.load(Ordering::Relaxed);
    while let Some(run) = shared.gate.enter(last, stop) {
        last = run;
        // SAFETY: entering made the caller's write of the task visible, and the caller
        // leaves it alone while anyone is inside.
        let Some(task) = (unsafe { &*shared.task.get() }) else {
            shared.gate.leave();
            continue;
        };
        // Cloned while the task is still ours; after leaving it is not.
        let caller = task.caller.clone();
        // SAFETY: the caller keeps the job alive while anyone is inside.
        let job = unsafe { &*task.job };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(index))) {
            let mut first = shared.panic.lock().unwrap_or_else(PoisonError::into_inner);
            if first.is_none() {
                *first = Some(payload);
            } else {
                // Dropping a foreign payload may panic again; leaking it cannot.
                std::mem::forget(payload);
            }
        }
        if shared.gate.leave() {
            caller.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observer_sees_every_part_of_a_run() {
        let workers = Workers::new(3, None);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&seen);
        workers.observe(move |thread, part| {
            part();
            record.lock().unwrap().push(thread);
        });
        let done = AtomicUsize::new(0);
        workers.run(&|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        let mut threads = std::mem::take(&mut *seen.lock().unwrap());
        threads.sort_unstable();
        assert_eq!((threads, done.into_inner()), (vec![0, 1, 2], 3));
        let sum = AtomicUsize::new(0);
        workers.for_each_chunk(10, &|_, i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
        assert!(!seen.lock().unwrap().is_empty());
    }

    // Not in `gate.rs`, which a model checker also compiles.
    #[test]
    fn the_gate_counts_as_many_workers_as_it_says() {
        let gate = Gate::new(false);
        gate.open();
        for _ in 0..MAX_WORKERS {
            assert_eq!(gate.enter(0, || false), Some(1));
        }
        for left in (0..MAX_WORKERS).rev() {
            assert_eq!(gate.leave(), left == 0);
        }
        gate.close(MAX_WORKERS);
        gate.open();
        assert_eq!(gate.enter(1, || false), Some(2));
        assert_eq!(gate.enter(1, || true), None);
    }
}
