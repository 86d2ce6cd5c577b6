//! The I/O thread from outside: waves of reads, the latch, back-pressure, idling, dropping.

use std::sync::Arc;

use crate::io_common::{arena, expect_bytes, expect_stopped, patterned, source};
use emberflow_storage::arena::Arena;
use emberflow_storage::io::{
    Completion, FileSource, IoChoice, IoError, IoOptions, IoThread, Profile, Read, SimOptions,
};
use emberflow_storage::limits::Limits;
use emberflow_storage::trace::Trace;
use fastrand::Rng;

const FILE: u64 = 1 << 20;

fn choices() -> Vec<IoChoice> {
    let probe = patterned(4096);
    match spawn(source(&probe), IoChoice::Uring, Limits::TINY) {
        Ok(_) => vec![IoChoice::Pread, IoChoice::Uring],
        Err(reason) => {
            eprintln!("SKIPPED for uring: {reason}");
            vec![IoChoice::Pread]
        }
    }
}

fn spawn(source: FileSource, choice: IoChoice, limits: Limits) -> Result<IoThread, IoError> {
    let options = IoOptions {
        core: Some(0),
        limits,
        ..IoOptions::default()
    };
    IoThread::spawn(source, choice, options)
}

fn random_read(rng: &mut Rng, arena: &mut Arena) -> Read {
    let offset = 4096 * rng.u64(..FILE / 4096);
    Read::new(offset, offset, 4096, arena.take().unwrap())
}

fn check(done: Completion, arena: &mut Arena) {
    done.result.unwrap();
    expect_bytes(done.slot.as_slice(), done.tag);
    arena.put(done.slot);
}

#[test]
fn waves_of_reads_arrive_whole() {
    let file = patterned(FILE);
    for choice in choices() {
        for limits in [Limits::TINY, Limits::PRODUCTION] {
            let io = spawn(source(&file), choice, limits).unwrap();
            let mut arena = arena(32, 4096);
            let (mut batch, mut out) = (Vec::new(), Vec::new());
            let mut rng = Rng::with_seed(7);
            for _ in 0..50 {
                batch.extend((0..32).map(|_| random_read(&mut rng, &mut arena)));
                io.submit(&mut batch).unwrap();
                assert!(batch.is_empty() && batch.capacity() >= 32);
                assert!(io.wait(&mut out, 1).unwrap() >= 1);
                let left = 32 - out.len();
                io.wait(&mut out, left).unwrap();
                assert_eq!((out.len(), io.outstanding()), (32, 0));
                out.drain(..).for_each(|c| check(c, &mut arena));
            }
            let stats = io.stats();
            assert_eq!((stats.reads, stats.bytes), (1600, 1600 * 4096));
            assert_eq!(stats.batches, 50);
            assert!(stats.busy_ns > 0 && stats.wait_ns > 0, "{stats:?}");
            assert_eq!(io.first_error().map(|e| e.to_string()), None);
        }
    }
}

#[test]
fn waiting_for_more_than_is_outstanding_returns() {
    let file = patterned(8192);
    let io = spawn(source(&file), IoChoice::Auto, Limits::TINY).unwrap();
    let mut out = Vec::new();
    assert_eq!(io.wait(&mut out, 5).unwrap(), 0);
    let slot = arena(1, 4096).take().unwrap();
    io.submit(&mut vec![Read::new(1, 0, 4096, slot)]).unwrap();
    assert_eq!(io.wait(&mut out, 5).unwrap(), 1);
    assert_eq!(io.try_drain(&mut out).unwrap(), 0);
}

#[test]
fn a_caller_that_never_drains_gets_everything_in_the_end() {
    let file = patterned(FILE);
    for choice in choices() {
        let io = spawn(source(&file), choice, Limits::TINY).unwrap();
        let mut arena = arena(250, 4096);
        let mut rng = Rng::with_seed(3);
        for _ in 0..50 {
            let mut batch: Vec<_> = (0..5).map(|_| random_read(&mut rng, &mut arena)).collect();
            io.submit(&mut batch).unwrap();
        }
        let mut out = Vec::new();
        assert_eq!(io.wait(&mut out, usize::MAX).unwrap(), 250);
        out.drain(..).for_each(|c| check(c, &mut arena));
    }
}

#[test]
fn several_threads_may_submit() {
    let file = patterned(FILE);
    for choice in choices() {
        let io = spawn(source(&file), choice, Limits::TINY).unwrap();
        std::thread::scope(|scope| {
            for t in 0..3 {
                let io = &io;
                scope.spawn(move || {
                    let mut arena = arena(100, 4096);
                    let mut rng = Rng::with_seed(t);
                    for _ in 0..100 {
                        let mut batch = vec![random_read(&mut rng, &mut arena)];
                        io.submit(&mut batch).unwrap();
                    }
                });
            }
            let (mut got, mut out) = (0, Vec::new());
            while got < 300 {
                // Nothing may be outstanding yet, which is not an end here.
                io.wait(&mut out, 1).unwrap();
                for done in out.drain(..) {
                    done.result.unwrap();
                    expect_bytes(done.slot.as_slice(), done.tag);
                    got += 1;
                }
                std::thread::yield_now();
            }
        });
    }
}

#[test]
fn the_first_failure_stops_everything_and_every_slot_comes_back() {
    let file = patterned(64 << 10);
    for choice in choices() {
        let io = spawn(source(&file), choice, Limits::TINY).unwrap();
        let mut arena = arena(40, 4096);
        let mut out = Vec::new();
        let mut read = |tag, offset| Read::new(tag, offset, 4096, arena.take().unwrap());
        io.submit(&mut vec![read(0, 0), read(1, 60 << 10)]).unwrap();
        io.wait(&mut out, 2).unwrap();
        assert!(out.iter().all(|c| c.result.is_ok()));
        out.clear();
        io.submit(&mut vec![read(2, 80 << 10)]).unwrap();
        io.wait(&mut out, 1).unwrap();
        let error = out.pop().unwrap().result.unwrap_err();
        assert!(
            matches!(error, IoError::Eof { offset: 81920, .. }),
            "{error}"
        );
        for _ in 0..6 {
            io.submit(&mut (0..6).map(|i| read(i, 4096 * i)).collect())
                .unwrap();
        }
        assert_eq!(io.wait(&mut out, 36).unwrap(), 36);
        expect_stopped(&out, 81920);
        let first = io.first_error().unwrap().to_string();
        assert!(first.contains("81920"), "{first}");
    }
}

/// Drops a thread midway through `batch`; then it and its device's threads are gone.
fn drop_with(source: FileSource, choice: IoChoice, limits: Limits, mut batch: Vec<Read>) -> Trace {
    let trace = Arc::new(Trace::new(1, 0, 8192));
    let options = IoOptions {
        limits,
        trace: Arc::clone(&trace).into(),
        ..IoOptions::default()
    };
    let io = IoThread::spawn(source, choice, options).unwrap();
    io.submit(&mut batch).unwrap();
    drop(io);
    Arc::into_inner(trace).expect("the thread goes on")
}

#[test]
fn dropping_with_reads_in_flight_is_safe() {
    let file = patterned(FILE);
    for choice in choices() {
        for _ in 0..20 {
            let mut rng = Rng::with_seed(9);
            let mut arena = arena(2000, 4096);
            let batch = (0..2000).map(|_| random_read(&mut rng, &mut arena));
            drop_with(source(&file), choice, Limits::PRODUCTION, batch.collect());
        }
    }
}

#[test]
fn dropping_does_not_wait_for_the_queue() {
    let file = patterned(FILE);
    let slow = IoChoice::Sim(SimOptions::new(Profile::Emmc, 1));
    // Cut into 5,120 commands, which take the device 0.8 s.
    let mut arena = arena(40, FILE as usize);
    let batch = (0..40).map(|i| Read::new(i, 0, FILE as u32, arena.take().unwrap()));
    let limits = Limits {
        queued: 40,
        ..Limits::TINY
    };
    let trace = drop_with(source(&file), slow, limits, batch.collect());
    let read = trace.lanes()[trace.device_lane()].spans.len();
    assert!(read < 2500, "{read} commands for reads that nobody wants");
}

#[test]
fn prefetches_that_have_not_started_can_be_cancelled() {
    let file = patterned(FILE);
    // eMMC at depth 3 needs 50 ms for all of them, far longer than the cancellation.
    let slow = IoChoice::Sim(SimOptions::new(Profile::Emmc, 1));
    let io = spawn(
        source(&file),
        slow,
        Limits {
            queued: 600,
            ..Limits::TINY
        },
    )
    .unwrap();
    let mut arena = arena(501, 512);
    let far = |i: u64| i * 2048;
    let mut batch: Vec<_> = (0..500)
        .map(|i| Read::new(i, far(i), 512, arena.take().unwrap()).prefetch())
        .collect();
    io.submit(&mut batch).unwrap();
    io.submit(&mut vec![Read::new(500, 1024, 512, arena.take().unwrap())])
        .unwrap();
    io.cancel_prefetches().unwrap();
    let mut out = Vec::new();
    assert_eq!(io.wait(&mut out, 501).unwrap(), 501);
    let mut cancelled = 0;
    for done in out {
        match done.result {
            Ok(()) if done.tag == 500 => expect_bytes(done.slot.as_slice(), 1024),
            Ok(()) => expect_bytes(done.slot.as_slice(), far(done.tag)),
            Err(IoError::Cancelled) => cancelled += 1,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(cancelled > 0);
    assert!(io.first_error().is_none(), "cancelling is no failure");
}

#[test]
fn wide_reads_cannot_keep_urgent_ones_waiting() {
    // A read of 1 MiB is split into 128 commands; the urgent one goes between them.
    let file = patterned(FILE);
    let slow = IoChoice::Sim(SimOptions::new(Profile::Emmc, 1));
    let io = spawn(source(&file), slow, Limits::TINY).unwrap();
    let (mut wide, mut small) = (arena(1, FILE as usize), arena(1, 4096));
    let big = Read::new(0, 0, FILE as u32, wide.take().unwrap()).prefetch();
    io.submit(&mut vec![big]).unwrap();
    io.submit(&mut vec![Read::new(1, 4096, 4096, small.take().unwrap())])
        .unwrap();
    let mut out = Vec::new();
    io.wait(&mut out, 1).unwrap();
    assert_eq!(out[0].tag, 1, "the urgent read waited for the wide one");
    io.wait(&mut out, 1).unwrap();
    expect_bytes(out[1].slot.as_slice(), 0);
}

/// A trace contains every command of the device, and the thread's part in it.
#[test]
fn what_is_read_can_be_traced() {
    let file = patterned(FILE);
    let trace = Arc::new(Trace::new(1, 0, 256));
    let options = IoOptions {
        trace: Arc::clone(&trace).into(),
        ..IoOptions::default()
    };
    let io = IoThread::spawn(source(&file), IoChoice::Pread, options).unwrap();
    let mut arena = arena(8, 4096);
    let mut reads: Vec<Read> = (0..8)
        .map(|i| Read::new(i, i * 65536, 4096, arena.take().unwrap()))
        .collect();
    io.submit(&mut reads).unwrap();
    let mut done = Vec::new();
    io.wait(&mut done, 8).unwrap();
    let lanes = trace.lanes();
    let read: u64 = lanes[2].spans.iter().map(|span| span.values[1]).sum();
    assert_eq!(read, 8 * 4096, "{:?}", lanes[2]);
    for span in &lanes[2].spans {
        assert!(span.start < span.end, "{span:?}");
    }
    let names: Vec<&str> = lanes[1].spans.iter().map(|span| span.kind.name).collect();
    for name in ["queue", "start", "deliver"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
}
