//! Dropping an engine with reads in flight, on a scripted device.

use std::fs::File;

use super::scripted::{Log, Script, Scripted};
use super::{FileSource, IoEngine, Read};
use crate::arena::{Arena, ArenaOptions};
use crate::limits::Limits;

fn engine(broken: bool) -> (IoEngine, Log) {
    let log = Log::default();
    let script = Script {
        broken,
        ..Script::PLAIN
    };
    let device = Scripted::new(script, Log::clone(&log));
    let file = File::open("/proc/self/exe").unwrap();
    let source = FileSource::buffered_only(file, "self", 0);
    let limits = Limits {
        depth: 8,
        ..Limits::TINY
    };
    (IoEngine::new(source, Box::new(device), limits), log)
}

/// Starts five scattered reads and returns the address of one slot.
fn fill(engine: &mut IoEngine) -> usize {
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
    let (mut engine, log) = engine(false);
    fill(&mut engine);
    assert_eq!(log.read().unwrap().started.len(), 5);
    drop(engine);
    let seen = log.read().unwrap();
    assert_eq!((seen.reported, seen.dropped_with), (5, Some(0)));
}

#[test]
fn memory_that_a_broken_device_may_still_write_to_stays_mapped() {
    let (mut engine, log) = engine(true);
    let at = fill(&mut engine);
    assert!(is_mapped(at));
    drop(engine);
    assert_eq!(log.read().unwrap().dropped_with, Some(5));
    assert!(
        is_mapped(at),
        "the slots were unmapped under a device that may write to them"
    );
}
