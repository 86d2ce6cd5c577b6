//! The `sim` device: a real file behind a device model, with a seed and injected faults.
//!
//! Bytes come from the file through the page cache. The model decides when they arrive, in which
//! order, and whether at all. The device has one command queue: each command occupies it for its
//! service time, while latencies overlap.
#![allow(unsafe_code)]

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::device::{Device, Reaped, Waker};
use super::profile::{Core, Profile};
use super::source::FileSource;
use super::sys::{self, Command, Piece};
use crate::random::Random;

/// Fault rates, in thousandths of all commands unless noted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Short reads.
    pub short: u16,
    /// Interrupted, or not possible right now (EINTR, EAGAIN).
    pub again: u16,
    /// Transient device failure (EIO).
    pub eio: u16,
    /// One bit of the data is flipped.
    pub flip: u16,
    /// Takes 2 to 50 times the latency.
    pub delay: u16,
    /// Completes in random order.
    pub shuffle: bool,
    /// File range, from and to, that always fails with EIO.
    pub bad: Option<(u64, u64)>,
}

/// Clock of the simulation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SimClock {
    /// Commands take as long as on the device.
    #[default]
    Real,
    /// The clock jumps to the next event: the same events without waiting, for tests.
    Skip,
}

/// Options of the simulated device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimOptions {
    /// The device.
    pub profile: Profile,
    /// Seed of all randomness.
    pub seed: u64,
    /// Injected faults.
    pub faults: Faults,
    /// Real or skipping time.
    pub clock: SimClock,
    /// The submitting core.
    pub core: Core,
    /// Threads that submit at the same time.
    pub submitters: u32,
}

impl SimOptions {
    /// A fault-free device in real time, with one submitter on a big core.
    #[must_use]
    pub fn new(profile: Profile, seed: u64) -> Self {
        Self {
            profile,
            seed,
            faults: Faults::default(),
            clock: SimClock::Real,
            core: Core::Big,
            submitters: 1,
        }
    }

    /// Adds faults and skips waiting.
    #[must_use]
    pub fn faulty(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self.clock = SimClock::Skip;
        self
    }
}

/// Recent commands that the address range is computed over.
const RANGE_WINDOW: usize = 64;

struct Scheduled {
    command: Command,
    due_ns: u64,
}

#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    news: Condvar,
}

pub(crate) struct Sim {
    options: SimOptions,
    /// The source's descriptors.
    files: Vec<i32>,
    random: Random,
    capacity: u32,
    pending: Vec<Scheduled>,
    /// Model time at which the command queue is free again.
    free_ns: u64,
    /// Model time under [`SimClock::Skip`].
    now_ns: u64,
    began: Instant,
    recent: [u64; RANGE_WINDOW],
    seen: usize,
    last_end: u64,
    bell: Arc<Bell>,
}

impl Sim {
    pub(crate) fn new(source: &FileSource, options: SimOptions, depth: u32) -> Self {
        if options.clock == SimClock::Real {
            sys::precise_sleeps();
        }
        Self {
            options,
            files: source.descriptors(),
            random: Random(options.seed),
            capacity: depth.max(1),
            pending: Vec::with_capacity(depth as usize),
            free_ns: 0,
            now_ns: 0,
            began: Instant::now(),
            recent: [0; RANGE_WINDOW],
            seen: 0,
            last_end: u64::MAX,
            bell: Arc::default(),
        }
    }

    fn happens(&mut self, thousandths: u16) -> bool {
        thousandths > 0 && self.random.below(1000) < u64::from(thousandths)
    }

    fn now(&self) -> u64 {
        match self.options.clock {
            SimClock::Real => self.began.elapsed().as_nanos() as u64,
            SimClock::Skip => self.now_ns,
        }
    }

    /// Span of the recent offsets.
    fn range(&mut self, offset: u64) -> u64 {
        self.recent[self.seen % RANGE_WINDOW] = offset;
        self.seen += 1;
        let known = &self.recent[..self.seen.min(RANGE_WINDOW)];
        let (low, high) = known
            .iter()
            .fold((u64::MAX, 0), |(l, h), &o| (l.min(o), h.max(o)));
        high - low
    }

    /// Executes a command and injects faults.
    fn perform(&mut self, command: &Command, pieces: &[Piece]) -> i32 {
        let faults = self.options.faults;
        let total: usize = pieces.iter().map(Piece::len).sum();
        if self.happens(faults.again) {
            let errors = [libc::EINTR, libc::EAGAIN];
            return -errors[self.random.below(2) as usize];
        }
        let end = command.offset.saturating_add(total as u64);
        let bad = faults
            .bad
            .is_some_and(|(from, to)| command.offset < to && end > from);
        if bad || self.happens(faults.eio) {
            return -libc::EIO;
        }
        let len = if total > 1 && self.happens(faults.short) {
            1 + self.random.below(total as u64 - 1) as usize
        } else {
            total
        };
        // Of the file's two the buffered one, as lengths are arbitrary.
        let fd = self.files[command.file as usize | 1];
        // SAFETY: the contract of `start` holds until this outcome is reported.
        let n = unsafe { sys::read_front(fd, command.offset, pieces, len) };
        if n > 0 && self.happens(faults.flip) {
            let bit = self.random.below(n as u64 * 8);
            // SAFETY: as above; the bit is inside what was just read.
            unsafe { sys::flip_bit(pieces, bit) };
        }
        n
    }

    /// Index of the command to report next, if one is due at `now`.
    fn pick(&mut self, now: u64) -> Option<usize> {
        let due = |s: &Scheduled| s.due_ns <= now;
        if self.options.faults.shuffle {
            let n = self.pending.iter().filter(|s| due(s)).count() as u64;
            let which = self.random.below(n) as usize;
            let mut all = self.pending.iter().enumerate().filter(|(_, s)| due(s));
            return all.nth(which).map(|(i, _)| i);
        }
        let first = self
            .pending
            .iter()
            .enumerate()
            .min_by_key(|(_, s)| s.due_ns);
        first.filter(|(_, s)| due(s)).map(|(i, _)| i)
    }

    /// Lets model time pass until the next command is due or the waker is called.
    fn sleep(&mut self) {
        let Some(next) = self.pending.iter().map(|s| s.due_ns).min() else {
            return;
        };
        if self.options.clock == SimClock::Skip {
            // When shuffling, any command in flight may come first.
            let late = self.pending.iter().map(|s| s.due_ns).max().unwrap_or(next);
            let until = if self.options.faults.shuffle {
                late
            } else {
                next
            };
            self.now_ns = self.now_ns.max(until);
            return;
        }
        let mut rung = self.bell.rung.lock().unwrap_or_else(|e| e.into_inner());
        while !*rung {
            let left = next.saturating_sub(self.began.elapsed().as_nanos() as u64);
            if left == 0 {
                break;
            }
            let wait = Duration::from_nanos(left);
            rung = match self.bell.news.wait_timeout(rung, wait) {
                Ok((guard, _)) => guard,
                Err(e) => e.into_inner().0,
            };
        }
        *rung = false;
    }
}

impl Device for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }

    unsafe fn start(&mut self, command: Command) {
        // SAFETY: the pieces are valid by the contract of `start`.
        let pieces = unsafe { command.pieces() };
        let len: u64 = pieces.iter().map(|p| p.len() as u64).sum();
        let sequential = command.offset == self.last_end;
        self.last_end = command.offset.saturating_add(len);
        let range = self.range(command.offset);
        let model = self.options.profile.model();
        let (core, submitters) = (self.options.core, self.options.submitters);
        let service = model.service_ns(len, sequential, range, core, submitters);
        self.free_ns = self.free_ns.max(self.now()) + service;
        let mut due_ns = self.free_ns + model.latency_ns;
        if self.happens(self.options.faults.delay) {
            due_ns += model.latency_ns * (1 + self.random.below(49));
        }
        self.pending.push(Scheduled { command, due_ns });
    }

    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        if wait && out.is_empty() && self.pick(self.now()).is_none() {
            self.sleep();
        }
        let now = self.now();
        while let Some(index) = self.pick(now) {
            let command = self.pending.swap_remove(index).command;
            // SAFETY: the pieces are valid by the contract of `start`, until reported below.
            let pieces = unsafe { command.pieces() };
            let result = self.perform(&command, pieces);
            out.push(Reaped {
                id: command.id,
                result,
            });
            // With a skipping clock, one at a time gives the most interleavings.
            if self.options.clock == SimClock::Skip {
                break;
            }
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        let bell = Arc::clone(&self.bell);
        Arc::new(move || {
            *bell.rung.lock().unwrap_or_else(|e| e.into_inner()) = true;
            bell.news.notify_one();
        })
    }
}
