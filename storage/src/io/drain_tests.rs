//! What an engine does with reads in flight when it is dropped, told by a device that plays dead.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::device::{Device, Reaped, Waker};
use super::sys::Command;
use super::{Engine, FileSource, Read};
use crate::arena::{Arena, ArenaOptions};
use crate::limits::Limits;

#[derive(Default)]
struct Seen {
    started: AtomicU32,
    reported: AtomicU32,
    dropped_with: AtomicU32,
}

/// Reports nothing until it is waited for, then one command at a time; or fails for ever.
struct Fake {
    seen: Arc<Seen>,
    held: Vec<u32>,
    broken: bool,
}

impl Device for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn capacity(&self) -> u32 {
        8
    }

    unsafe fn start(&mut self, command: Command) {
        self.seen.started.fetch_add(1, Ordering::Relaxed);
        self.held.push(command.id);
    }

    fn reap(&mut self, wait: bool, out: &mut Vec<Reaped>) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::other("the device is gone"));
        }
        if wait && let Some(id) = self.held.pop() {
            self.seen.reported.fetch_add(1, Ordering::Relaxed);
            out.push(Reaped { id, result: 512 });
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        Arc::new(|| ())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let held = self.held.len() as u32;
        self.seen.dropped_with.store(held, Ordering::Relaxed);
    }
}

fn engine(broken: bool) -> (Engine, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let fake = Fake {
        seen: Arc::clone(&seen),
        held: Vec::new(),
        broken,
    };
    let file = File::open("/proc/self/exe").unwrap();
    let source = FileSource::buffered_only(file, "self", 0);
    let limits = Limits {
        depth: 8,
        ..Limits::TINY
    };
    (Engine::new(source, Box::new(fake), limits), seen)
}

/// Starts five scattered reads and returns the address of one slot.
fn fill(engine: &mut Engine) -> usize {
    let mut arena = Arena::new(5, 512, 512, ArenaOptions::default()).unwrap();
    let mut reads: Vec<_> = (0..5)
        .map(|i| Read::new(i, i * 4096, 512, arena.take().unwrap()))
        .collect();
    let at = reads[4].slot.as_slice().as_ptr() as usize;
    engine.submit(&mut reads);
    let _ = engine.wait(&mut Vec::new(), false);
    at
}

/// Whether `at` lies in a mapping of this process.
fn is_mapped(at: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let hex = |s| usize::from_str_radix(s, 16).unwrap();
        range.is_some_and(|(from, to)| (hex(from)..hex(to)).contains(&at))
    })
}

#[test]
fn dropping_awaits_every_command_in_flight() {
    let (mut engine, seen) = engine(false);
    fill(&mut engine);
    assert_eq!(seen.started.load(Ordering::Relaxed), 5);
    drop(engine);
    assert_eq!(seen.reported.load(Ordering::Relaxed), 5);
    assert_eq!(seen.dropped_with.load(Ordering::Relaxed), 0);
}

#[test]
fn memory_that_a_broken_device_may_still_write_to_stays_mapped() {
    let (mut engine, seen) = engine(true);
    let at = fill(&mut engine);
    assert!(is_mapped(at));
    drop(engine);
    assert_eq!(seen.dropped_with.load(Ordering::Relaxed), 5);
    assert!(
        is_mapped(at),
        "the slots were unmapped under a device that may write to them"
    );
}
