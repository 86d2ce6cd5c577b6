//! Reading from the caller's thread gives the same results as a separate thread.

use crate::io_common::{arena, expect_bytes, expect_stopped, patterned, source};
use emberflow_storage::arena::Arena;
use emberflow_storage::io::{CallerIo, FileSource, IoChoice, IoError, Profile, Read, SimOptions};
use emberflow_storage::limits::Limits;
use emberflow_storage::trace::Tracer;
use fastrand::Rng;

const FILE: u64 = 1 << 20;

fn open(source: FileSource, choice: IoChoice, limits: Limits) -> Result<CallerIo, IoError> {
    CallerIo::open(source, choice, limits, Tracer::default())
}

fn choices() -> Vec<IoChoice> {
    let probe = patterned(4096);
    match open(source(&probe), IoChoice::Uring, Limits::TINY) {
        Ok(_) => vec![IoChoice::Pread, IoChoice::Uring],
        Err(reason) => {
            eprintln!("SKIPPED for uring: {reason}");
            vec![IoChoice::Pread]
        }
    }
}

fn random_read(rng: &mut Rng, arena: &mut Arena) -> Read {
    let offset = 4096 * rng.u64(..FILE / 4096);
    Read::new(offset, offset, 4096, arena.take().unwrap())
}

/// From any thread, one after the other.
#[test]
fn waves_of_reads_arrive_whole_on_any_thread() {
    let file = patterned(FILE);
    for choice in choices() {
        for limits in [Limits::TINY, Limits::PRODUCTION] {
            let mut io = open(source(&file), choice, limits).unwrap();
            let mut arena = arena(32, 4096);
            let mut rng = Rng::with_seed(7);
            for wave in 0..20 {
                let mut work = || {
                    let (mut batch, mut out) = (Vec::new(), Vec::new());
                    batch.extend((0..32).map(|_| random_read(&mut rng, &mut arena)));
                    io.submit(&mut batch).unwrap();
                    assert!(batch.is_empty() && io.outstanding() == 32);
                    io.wait(&mut out, 1).unwrap();
                    assert!(!out.is_empty() && io.outstanding() + out.len() == 32);
                    io.wait(&mut out, 32).unwrap();
                    assert_eq!((out.len(), io.outstanding()), (32, 0));
                    for done in out {
                        done.result.unwrap();
                        expect_bytes(done.slot.as_slice(), done.tag);
                        arena.put(done.slot);
                    }
                };
                match wave % 2 {
                    0 => work(),
                    _ => std::thread::scope(|scope| scope.spawn(&mut work).join().unwrap()),
                }
            }
            let stats = io.stats();
            assert_eq!((stats.reads, stats.bytes), (640, 640 * 4096));
            assert_eq!(stats.batches, 20);
            assert!(stats.busy_ns > 0, "{stats:?}");
        }
    }
}

#[test]
fn the_first_failure_stops_everything_and_every_slot_comes_back() {
    let file = patterned(64 << 10);
    for choice in choices() {
        let mut io = open(source(&file), choice, Limits::TINY).unwrap();
        let mut arena = arena(40, 4096);
        let mut out = Vec::new();
        let mut read = |tag, offset| Read::new(tag, offset, 4096, arena.take().unwrap());
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
        io.wait(&mut out, 36).unwrap();
        assert_eq!((out.len(), io.outstanding()), (36, 0));
        expect_stopped(&out, 81920);
    }
}

#[test]
fn prefetches_that_have_not_started_can_be_cancelled() {
    let file = patterned(FILE);
    let slow = IoChoice::Sim(SimOptions::new(Profile::Emmc, 1));
    let mut io = open(source(&file), slow, Limits::TINY).unwrap();
    let mut arena = arena(100, 512);
    let far = |i: u64| i * 2048;
    let mut batch: Vec<_> = (0..100)
        .map(|i| Read::new(i, far(i), 512, arena.take().unwrap()).prefetch())
        .collect();
    io.submit(&mut batch).unwrap();
    io.cancel_prefetches();
    let mut out = Vec::new();
    io.wait(&mut out, 100).unwrap();
    assert_eq!(out.len(), 100);
    let mut cancelled = 0;
    for done in out {
        match done.result {
            Ok(()) => expect_bytes(done.slot.as_slice(), far(done.tag)),
            Err(IoError::Cancelled) => cancelled += 1,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(cancelled > 0 && cancelled < 100, "{cancelled}");
}
