//! The `pread` device: a few threads, each with one blocking read. Works everywhere, including in
//! Android applications.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::device::{Device, Reaped, Waker};
use super::sys::Command;
use crate::sync::{Builder, Condvar, JoinHandle, Mutex, MutexGuard};

/// One lane: reads on the I/O thread itself. A device with a single command queue and a slow
/// submission path gains nothing from a handover to another thread.
pub(crate) struct Inline {
    queue: VecDeque<Command>,
    capacity: u32,
}

impl Inline {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            queue: VecDeque::with_capacity(capacity as usize),
            capacity,
        }
    }
}

impl Device for Inline {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    unsafe fn start(&mut self, command: Command) {
        self.queue.push_back(command);
    }

    fn reap(&mut self, _wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        // One at a time, so new requests are seen between reads.
        if let Some(command) = self.queue.pop_front() {
            // SAFETY: the contract of `start` holds until this outcome is reported.
            out.push(unsafe { Reaped::by(&command) });
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        // `reap` waits for nothing but its own read.
        Arc::new(|| ())
    }
}

/// Several lanes: a pool of threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    lanes: Vec<JoinHandle<()>>,
}

/// State shared by the lanes and the I/O thread. Uses a lock and two condition variables, not
/// channels, because these never allocate, even when they first block.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// For lanes: work is available, or the pool is closed.
    work: Condvar,
    /// For the I/O thread: a read is done, or it was woken.
    news: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Command>,
    done: Vec<Reaped>,
    /// Lanes waiting for work. If there are none, a new job needs no signal: a lane checks for the
    /// next job before it sleeps. This saves a system call per read.
    idle: u32,
    /// The I/O thread is waiting for news.
    waiting: bool,
    woken: bool,
    closed: bool,
}

impl Shared {
    /// No invariant spans the lock, so ignore poison.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn wake(&self) {
        self.lock().woken = true;
        self.news.notify_one();
    }

    fn run_lane(&self) {
        let mut state = self.lock();
        let mut tell = false;
        while !state.closed {
            let Some(command) = state.jobs.pop_front() else {
                if std::mem::take(&mut tell) {
                    self.news.notify_one();
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(|e| e.into_inner());
                state.idle -= 1;
                continue;
            };
            drop(state);
            if std::mem::take(&mut tell) {
                self.news.notify_one();
            }
            // SAFETY: the contract of `Device::start` holds until the outcome is reported.
            let done = unsafe { Reaped::by(&command) };
            state = self.lock();
            state.done.push(done);
            // woken after the next job was taken, and once for all finished ones until it looks
            tell |= std::mem::take(&mut state.waiting);
        }
        if tell {
            self.news.notify_one();
        }
    }
}

impl Pool {
    pub(crate) fn new(lanes: u32) -> io::Result<Self> {
        let mut pool = Self {
            shared: Arc::default(),
            lanes: Vec::with_capacity(lanes as usize),
        };
        for i in 0..lanes.max(1) {
            let shared = Arc::clone(&pool.shared);
            let lane = Builder::new()
                .name(format!("ember-read-{i}"))
                .spawn(move || shared.run_lane())?;
            pool.lanes.push(lane);
        }
        {
            let mut state = pool.shared.lock();
            state.jobs.reserve(pool.capacity() as usize);
            state.done.reserve(pool.capacity() as usize);
        }
        Ok(pool)
    }
}

impl Device for Pool {
    fn name(&self) -> &'static str {
        "pread"
    }

    /// One running job and one queued job per lane, so that lanes do not sleep between reads.
    fn capacity(&self) -> u32 {
        self.lanes.len().saturating_mul(2) as u32
    }

    unsafe fn start(&mut self, command: Command) {
        let mut state = self.shared.lock();
        state.jobs.push_back(command);
        let somebody = state.idle > 0;
        drop(state);
        if somebody {
            self.shared.work.notify_one();
        }
    }

    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        let mut state = self.shared.lock();
        while wait && out.is_empty() && state.done.is_empty() && !state.woken {
            state.waiting = true;
            state = (self.shared.news)
                .wait(state)
                .unwrap_or_else(|e| e.into_inner());
        }
        state.waiting = false;
        state.woken = false;
        out.append(&mut state.done);
        Ok(())
    }

    fn waker(&self) -> Waker {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || shared.wake())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // The engine has drained its commands; tell the lanes to stop.
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for lane in self.lanes.drain(..) {
            if lane.join().is_err() {
                tracing::error!("a read thread panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool has the requested lanes and two commands for each; no lane outlives it.
    #[test]
    fn a_dropped_pool_has_no_lanes() {
        for lanes in [1, 3, 8].repeat(20) {
            let pool = Pool::new(lanes).unwrap();
            assert_eq!(
                (pool.lanes.len() as u32, pool.capacity()),
                (lanes, 2 * lanes)
            );
            let shared = Arc::downgrade(&pool.shared);
            drop(pool);
            assert!(shared.upgrade().is_none(), "a lane is still running");
        }
    }
}
