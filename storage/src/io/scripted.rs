//! A device for tests. It does what io_uring may do and real disks rarely do: report nothing until
//! someone waits, hold a command until others arrive, break.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, RwLock};

use crate::io::device::{Device, Reaped, Waker};
use crate::io::sys::Command;
use crate::sync::{Condvar, Mutex};

/// Behavior of the device.
#[derive(Debug, Clone, Copy)]
pub struct Script {
    /// Upper bound on the commands in flight.
    pub capacity: u32,
    /// Completes commands only while it holds at least this many; 1 completes each one.
    pub hold: usize,
    /// Fails every `reap`.
    pub broken: bool,
}

impl Script {
    /// Completes each command on a waiting `reap`.
    pub const PLAIN: Self = Self {
        capacity: 8,
        hold: 1,
        broken: false,
    };
}

/// What the device was asked to do and did.
#[derive(Debug, Default)]
pub struct Seen {
    /// File offsets of the commands, in start order.
    pub started: Vec<u64>,
    /// Commands reported.
    pub reported: usize,
    /// Commands still held when it was dropped.
    pub dropped_with: Option<usize>,
}

/// Not part of what the model checker explores, hence the standard lock.
pub type Log = Arc<RwLock<Seen>>;

#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    news: Condvar,
}

pub(crate) struct Scripted {
    script: Script,
    log: Log,
    held: VecDeque<Command>,
    /// Commands finished and not yet reported.
    due: usize,
    bell: Arc<Bell>,
}

impl Scripted {
    pub(crate) fn new(script: Script, log: Log) -> Self {
        Self {
            script,
            log,
            held: VecDeque::new(),
            due: 0,
            bell: Arc::default(),
        }
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.log.write().unwrap_or_else(|e| e.into_inner()));
    }
}

impl Device for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn capacity(&self) -> u32 {
        self.script.capacity
    }

    unsafe fn start(&mut self, command: Command) {
        self.note(|seen| seen.started.push(command.offset));
        self.held.push_back(command);
        if self.held.len() >= self.script.hold {
            self.due = self.held.len();
        }
    }

    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        if self.script.broken {
            return Err(io::Error::other("the device is gone"));
        }
        let mut rung = self.bell.rung.lock().unwrap_or_else(|e| e.into_inner());
        while wait && self.due == 0 && !*rung {
            rung = (self.bell.news.wait(rung)).unwrap_or_else(|e| e.into_inner());
        }
        *rung = false;
        drop(rung);
        // One at a time gives the most interleavings.
        if wait && self.due > 0 {
            self.due -= 1;
            if let Some(command) = self.held.pop_front() {
                self.note(|seen| seen.reported += 1);
                // SAFETY: the contract of `start` holds until this outcome is reported.
                out.push(unsafe { Reaped::by(&command) });
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

impl Drop for Scripted {
    fn drop(&mut self) {
        let held = self.held.len();
        self.note(|seen| seen.dropped_with = Some(held));
    }
}
