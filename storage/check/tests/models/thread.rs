//! The I/O thread: nothing is lost between a caller and a device that sleeps.

use std::sync::Arc;

use emberflow_storage_check::cache::{Key, SlotCache};
use emberflow_storage_check::io::{
    Completion, IoChoice, IoError, IoOptions, IoThread, Priority, Read,
};
use emberflow_storage_check::limits::Limits;
use emberflow_storage_check::{Log, Script, scripted, source};
use loom::thread;

use super::{LEN, arena, check, file, is_page, page};

const LIMITS: Limits = Limits {
    depth: 2,
    pieces: 1,
    ..Limits::TINY
};

fn spawn(limits: Limits, script: Script) -> (IoThread, Log) {
    let log = Log::default();
    (scripted(file(), limits, script, &log).unwrap(), log)
}

/// Reads of these pages, tagged with them.
fn reads(pages: &[u8]) -> Vec<Read> {
    let mut arena = arena(pages.len() as u32);
    let mut slots = std::iter::from_fn(|| arena.take());
    let read = |&n: &u8| Read::new(n.into(), page(n), LEN as u32, slots.next().unwrap());
    pages.iter().map(read).collect()
}

/// Tags of the completions, in order; their bytes must be right.
fn tags(done: Vec<Completion>) -> Vec<u64> {
    let mut tags: Vec<u64> = done
        .into_iter()
        .map(|c| {
            c.result.unwrap();
            assert!(is_page(c.slot.as_slice(), c.tag as u8), "page {}", c.tag);
            c.tag
        })
        .collect();
    tags.sort_unstable();
    tags
}

fn nothing_is_held(log: &Log) {
    let seen = log.read().unwrap();
    assert_eq!(seen.dropped_with, Some(0));
    assert_eq!(seen.reported, seen.started.len());
}

/// The device holds the first read until the second has arrived, so the second must reach a thread
/// that sleeps, or is about to sleep, in the device.
#[test]
fn a_sleeping_device_is_woken_for_new_reads() {
    check(3, || {
        let (io, log) = spawn(
            LIMITS,
            Script {
                hold: 2,
                ..Script::PLAIN
            },
        );
        io.submit(&mut reads(&[5])).unwrap();
        io.submit(&mut reads(&[3])).unwrap();
        let mut done = Vec::new();
        assert_eq!(io.wait(&mut done, 2).unwrap(), 2);
        assert_eq!(tags(done), [3, 5]);
        assert_eq!(io.outstanding(), 0);
        drop(io);
        nothing_is_held(&log);
    });
}

/// Dropping while reads are in the channel, queued, or on the device: those on the device are
/// awaited, the others never start, and the thread ends.
#[test]
fn dropping_drains_what_was_started() {
    check(3, || {
        let (io, log) = spawn(LIMITS, Script::PLAIN);
        io.submit(&mut reads(&[1, 9])).unwrap();
        io.submit(&mut reads(&[4])).unwrap();
        drop(io);
        nothing_is_held(&log);
    });
}

/// A prefetch that is cancelled ends once: done if it had been started, else as cancelled.
#[test]
fn cancelling_ends_each_prefetch_once() {
    check(3, || {
        let (io, log) = spawn(Limits { depth: 1, ..LIMITS }, Script::PLAIN);
        let prefetch = reads(&[2, 6]).into_iter().map(Read::prefetch);
        io.submit(&mut prefetch.collect()).unwrap();
        io.cancel_prefetches().unwrap();
        let mut done = Vec::new();
        assert_eq!(io.wait(&mut done, 2).unwrap(), 2);
        let (done, cancelled): (Vec<_>, Vec<_>) = done.into_iter().partition(|c| c.result.is_ok());
        assert!((cancelled.iter()).all(|c| matches!(c.result, Err(IoError::Cancelled))));
        assert_eq!(log.read().unwrap().started.len(), done.len());
        assert_eq!(tags(done).len() + cancelled.len(), 2);
        drop(io);
        nothing_is_held(&log);
    });
}

/// Urgent reads go first, regardless of what the thread was doing when they arrived.
#[test]
fn urgent_reads_go_before_prefetches() {
    check(3, || {
        let (io, log) = spawn(Limits { depth: 1, ..LIMITS }, Script::PLAIN);
        let mut batch = reads(&[1, 2]);
        batch[0].priority = Priority::Prefetch;
        io.submit(&mut batch).unwrap();
        let mut done = Vec::new();
        io.wait(&mut done, 2).unwrap();
        assert_eq!(log.read().unwrap().started, [page(2), page(1)]);
        assert_eq!(tags(done), [1, 2]);
    });
}

/// More batches than the channel holds: the submitter waits for the thread, but not forever.
#[test]
fn a_full_channel_empties() {
    check(3, || {
        let tight = Limits {
            depth: 1,
            queued: 1,
            batches: 1,
            ..LIMITS
        };
        let (io, _) = spawn(tight, Script::PLAIN);
        for n in [8, 7, 6] {
            io.submit(&mut reads(&[n])).unwrap();
        }
        let mut done = Vec::new();
        assert_eq!(io.wait(&mut done, 3).unwrap(), 3);
        assert_eq!(tags(done), [6, 7, 8]);
    });
}

/// Two threads submit and wait. Each may get the other's completions; both return.
#[test]
fn two_callers_both_return() {
    check(2, || {
        let (io, log) = spawn(LIMITS, Script::PLAIN);
        let io = Arc::new(io);
        let caller = |io: &IoThread, n: u8| {
            io.submit(&mut reads(&[n])).unwrap();
            let mut done = Vec::new();
            io.wait(&mut done, 1).unwrap();
            tags(done)
        };
        let theirs = Arc::clone(&io);
        let other = thread::spawn(move || caller(&theirs, 3));
        let mut all = caller(&io, 4);
        all.extend(other.join().unwrap());
        // A thread that came while the other took both found nothing outstanding.
        all.sort_unstable();
        assert_eq!(all, [3, 4]);
        drop(io);
        nothing_is_held(&log);
    });
}

/// A device that breaks ends the thread: no caller waits forever, and the first error is reported.
#[test]
fn a_broken_device_leaves_nobody_waiting() {
    check(3, || {
        let (io, log) = spawn(
            LIMITS,
            Script {
                broken: true,
                ..Script::PLAIN
            },
        );
        let first = io.submit(&mut reads(&[1]));
        let second = io.submit(&mut reads(&[2]));
        let mut done = Vec::new();
        let waited = io.wait(&mut done, 2);
        for error in [first.err(), second.err(), waited.err()]
            .into_iter()
            .flatten()
        {
            assert!(error.to_string().contains("the device is gone"), "{error}");
        }
        assert!(done.iter().all(|c| c.result.is_err()));
        assert!(io.first_error().is_some());
        drop(io);
        assert!(log.read().unwrap().dropped_with.is_some());
    });
}

/// The engine's pattern: reads go into slots of the cache, workers compute on arrived data, and
/// between two sections slots are evicted and read into again.
#[test]
fn slots_pass_between_cache_thread_and_workers() {
    check(2, || {
        let (io, log) = spawn(LIMITS, Script::PLAIN);
        let mut cache = SlotCache::new(arena(2), &[8]).unwrap();
        let mut done = Vec::new();
        for neuron in [1, 2, 3] {
            let key = Key::new(0, neuron);
            let slot = cache.reserve(key).unwrap();
            let read = Read::new(neuron.into(), page(neuron as u8), LEN as u32, slot);
            io.submit(&mut vec![read]).unwrap();
            io.wait(&mut done, 1).unwrap();
            let c = done.pop().unwrap();
            c.result.unwrap();
            let id = cache.admit(key, c.slot);
            // A section: other threads read the cache until all are done.
            let shared = Arc::new(cache);
            let seen = Arc::clone(&shared);
            let compute = move || assert!(is_page(seen.bytes(id), neuron as u8));
            let worker = thread::spawn(compute);
            assert!(is_page(shared.bytes(id), neuron as u8));
            worker.join().unwrap();
            cache = Arc::try_unwrap(shared).unwrap();
            cache.unpin(key);
            cache.check_invariants();
        }
        drop(io);
        nothing_is_held(&log);
    });
}

/// The same thread over the real pool of readers.
#[test]
fn a_pool_under_the_thread_delivers_and_ends() {
    check(1, || {
        let options = IoOptions {
            limits: LIMITS,
            ..IoOptions::default()
        };
        let io = IoThread::spawn(source(file()).unwrap(), IoChoice::Pread, options).unwrap();
        io.submit(&mut reads(&[2, 7])).unwrap();
        let mut done = Vec::new();
        assert_eq!(io.wait(&mut done, 1).unwrap() + io.outstanding(), 2);
        drop(io);
        tags(done);
    });
}
