//! One suite for all engines: the caller sees the same behaviour from each.

use crate::io_common::{arena, byte_at, expect_bytes, patterned, source};
use emberflow_storage::arena::Arena;
use emberflow_storage::io::{
    Completion, Faults, FileSource, IoChoice, IoEngine, IoError, Profile, Read, SimOptions,
};
use emberflow_storage::limits::Limits;
use fastrand::Rng;

const FILE: u64 = 1 << 20;

/// Runs a test body for every engine and several sets of limits.
fn each_engine(body: impl Fn(&dyn Fn(FileSource) -> IoEngine)) {
    let one_lane = Limits {
        lanes: 1,
        ..Limits::TINY
    };
    let healthy = SimOptions::new(Profile::Nvme, 1);
    let recoverable = healthy.faulty(Faults {
        short: 300,
        again: 200,
        delay: 100,
        shuffle: true,
        ..Faults::default()
    });
    let patient = Limits {
        retries: 100,
        ..Limits::TINY
    };
    let mut choices = vec![
        (IoChoice::Sim(healthy), Limits::PRODUCTION),
        (IoChoice::Sim(recoverable), patient),
        (IoChoice::Sim(recoverable), Limits::PRODUCTION),
        (IoChoice::Pread, Limits::TINY),
        (IoChoice::Pread, one_lane),
        (IoChoice::Pread, Limits::PRODUCTION),
    ];
    let probe = patterned(4096);
    match IoEngine::open(source(&probe), IoChoice::Uring, Limits::TINY) {
        Ok(_) => {
            choices.push((IoChoice::Uring, Limits::TINY));
            choices.push((IoChoice::Uring, Limits::PRODUCTION));
        }
        Err(reason) => eprintln!("SKIPPED for uring: {reason}"),
    }
    for (choice, limits) in choices {
        eprintln!("{choice:?}, depth {}, lanes {}", limits.depth, limits.lanes);
        body(&|source| IoEngine::open(source, choice, limits).unwrap());
    }
}

fn run(engine: &mut IoEngine, reads: Vec<Read>) -> Vec<Completion> {
    let (mut reads, mut out) = (reads, Vec::new());
    let n = reads.len();
    engine.submit(&mut reads);
    assert!(reads.is_empty() && reads.capacity() >= n);
    while out.len() < n {
        engine.wait(&mut out, true).unwrap();
    }
    assert!(engine.is_idle());
    out
}

#[test]
fn every_byte_lands_where_it_was_asked_for() {
    let file = patterned(FILE);
    each_engine(|open| {
        let mut engine = open(source(&file));
        let mut arena = arena(40, 16 << 10);
        let mut rng = Rng::with_seed(1);
        for _ in 0..20 {
            let reads: Vec<_> = (0..40)
                .map(|_| {
                    let len = 512 * (1 + rng.u64(..16));
                    let offset = 512 * rng.u64(..(FILE - len) / 512 + 1);
                    let slot_offset = 512 * rng.u64(..((16 << 10) - len) / 512 + 1);
                    Read::new(offset, offset, len as u32, arena.take().unwrap())
                        .at(slot_offset as u32)
                })
                .map(|mut r| {
                    r.tag =
                        r.offset << 32 | u64::from(r.slot_offset) << 16 | u64::from(r.len / 512);
                    r
                })
                .collect();
            for done in run(&mut engine, reads) {
                done.result.unwrap();
                let (offset, at) = (done.tag >> 32, (done.tag >> 16 & 0xffff) as usize);
                let len = (done.tag & 0xffff) as usize * 512;
                expect_bytes(&done.slot.as_slice()[at..at + len], offset);
                arena.put(done.slot);
            }
        }
    });
}

#[test]
fn neighbours_are_merged_and_long_reads_are_cut() {
    let file = patterned(FILE);
    let limits = Limits {
        block: 16 << 10,
        pieces: 4,
        ..Limits::TINY
    };
    let mut engine = IoEngine::open(source(&file), IoChoice::Pread, limits).unwrap();
    let mut small = arena(8, 4096);
    // Shuffled neighbours: sorted and merged into two commands of four pieces.
    let order = [3u64, 0, 7, 5, 1, 6, 2, 4];
    let reads = order.map(|i| Read::new(i, i * 4096, 4096, small.take().unwrap()));
    for done in run(&mut engine, reads.into()) {
        done.result.unwrap();
        expect_bytes(done.slot.as_slice(), done.tag * 4096);
        small.put(done.slot);
    }
    assert_eq!(engine.stats().commands, 2);
    // One read of five blocks and a bit: six commands, one completion.
    let len = (80 << 10) + 512;
    let mut big = arena(1, 128 << 10);
    let done = run(
        &mut engine,
        vec![Read::new(0, 1024, len, big.take().unwrap())],
    );
    expect_bytes(&done[0].slot.as_slice()[..len as usize], 1024);
    assert_eq!(engine.stats().commands, 2 + 6);
}

/// Reads four units of 4096 bytes and checks them.
fn read_units(engine: &mut IoEngine, arena: &mut Arena, units: [u64; 4]) {
    let reads = units.map(|i| Read::new(i, i * 4096, 4096, arena.take().unwrap()));
    for done in run(engine, reads.into()) {
        done.result.unwrap();
        expect_bytes(done.slot.as_slice(), done.tag * 4096);
    }
}

#[test]
fn reads_with_a_small_gap_between_them_become_one_command() {
    let file = patterned(FILE);
    let limits = Limits {
        block: 64 << 10,
        pieces: 8,
        gap: 4096,
        ..Limits::TINY
    };
    for choice in [IoChoice::Pread, IoChoice::Auto] {
        let mut engine = IoEngine::open(source(&file), choice, limits).unwrap();
        let mut arena = arena(4, 4096);
        // Gaps of 1, 1 and 2 units: only the last one is too wide.
        read_units(&mut engine, &mut arena, [0, 2, 4, 7]);
        let stats = engine.stats();
        assert_eq!((stats.commands, stats.gap_bytes), (2, 8192));
    }
}

#[test]
fn unaligned_reads_work_through_the_page_cache() {
    let file = patterned(FILE);
    each_engine(|open| {
        let mut engine = open(source(&file));
        let mut arena = arena(3, 8192);
        let reads = [(1u64, 1u32, 0u32), (4095, 3000, 7), (777, 8000, 100)].map(|(o, l, at)| {
            Read::new(o << 32 | u64::from(l), o, l, arena.take().unwrap()).at(at)
        });
        let at = [(1, 0usize), (4095, 7), (777, 100)];
        for done in run(&mut engine, reads.into()) {
            done.result.unwrap();
            let (offset, len) = (done.tag >> 32, (done.tag & 0xffff_ffff) as usize);
            let at = at.iter().find(|(o, _)| *o == offset).unwrap().1;
            expect_bytes(&done.slot.as_slice()[at..at + len], offset);
        }
    });
}

#[test]
fn a_file_without_direct_io_reads_the_same() {
    let file = patterned(FILE);
    each_engine(|open| {
        let handle = file.reopen().unwrap();
        let source = FileSource::buffered_only(handle, "buffered", 0);
        assert_eq!(source.dio_align(), None);
        let mut engine = open(source);
        let mut arena = arena(4, 4096);
        read_units(&mut engine, &mut arena, [5, 1, 9, 2]);
        let stats = engine.stats();
        assert_eq!(stats.buffered, stats.commands);
    });
}

#[test]
fn the_base_of_a_source_is_added() {
    let file = patterned(FILE);
    for base in [4096, 100] {
        each_engine(|open| {
            let mut engine = open(FileSource::open(file.path(), base).unwrap());
            let slot = arena(1, 4096).take().unwrap();
            let done = run(&mut engine, vec![Read::new(0, 8192, 4096, slot)]);
            done[0].result.as_ref().unwrap();
            expect_bytes(done[0].slot.as_slice(), base + 8192);
        });
    }
}

#[test]
fn the_ragged_end_of_a_file_is_read_and_beyond_it_is_an_error() {
    let file = patterned(10_000);
    each_engine(|open| {
        let mut engine = open(source(&file));
        let mut arena = arena(2, 8192);
        let whole = Read::new(1, 8192, 1808, arena.take().unwrap());
        let beyond = Read::new(2, 8192, 4096, arena.take().unwrap());
        for done in run(&mut engine, vec![whole, beyond]) {
            if done.tag == 1 {
                done.result.unwrap();
                expect_bytes(&done.slot.as_slice()[..1808], 8192);
            } else {
                let error = done.result.unwrap_err();
                assert!(
                    matches!(
                        error,
                        IoError::Eof {
                            offset: 8192,
                            len: 4096,
                            end: 10_000,
                            ..
                        }
                    ),
                    "{error}"
                );
                assert!(error.to_string().contains(file.path().to_str().unwrap()));
            }
        }
    });
}

#[test]
fn one_bad_read_does_not_spoil_its_merged_neighbours() {
    // Three neighbours in one command, the last one beyond the end of the file.
    let file = patterned(8192);
    each_engine(|open| {
        let mut engine = open(source(&file));
        let mut arena = arena(3, 4096);
        let reads = [0u64, 1, 2].map(|i| Read::new(i, i * 4096, 4096, arena.take().unwrap()));
        for done in run(&mut engine, reads.into()) {
            match done.tag {
                2 => assert!(matches!(
                    done.result,
                    Err(IoError::Eof {
                        offset: 8192,
                        len: 4096,
                        end: 8192,
                        ..
                    })
                )),
                i => {
                    done.result.unwrap();
                    expect_bytes(done.slot.as_slice(), i * 4096);
                }
            }
        }
    });
}

#[test]
fn senseless_requests_come_back_with_their_slot() {
    let file = patterned(8192);
    each_engine(|open| {
        let mut engine = open(source(&file));
        let mut arena = arena(4, 4096);
        let mut take = || arena.take().unwrap();
        let reads = vec![
            Read::new(0, 0, 4097, take()),
            Read::new(1, 0, 4096, take()).at(1),
            Read::new(2, u64::MAX, 1, take()),
            Read::new(3, 8192, 0, take()),
        ];
        for done in run(&mut engine, reads) {
            match done.tag {
                3 => assert!(done.result.is_ok()),
                _ => assert!(matches!(done.result, Err(IoError::BadRequest { .. }))),
            }
        }
    });
}

#[test]
fn dropping_with_reads_in_flight_waits_for_them() {
    let file = patterned(FILE);
    each_engine(|open| {
        for n in [1u64, 5, 60] {
            let mut engine = open(source(&file));
            let mut arena = arena(60, 4096);
            let mut reads = (0..n)
                .map(|i| Read::new(i, i * 8192, 4096, arena.take().unwrap()))
                .collect();
            engine.submit(&mut reads);
            engine.wait(&mut Vec::new(), false).unwrap();
            drop(engine);
            // If the engine had not waited, newly mapped memory could be written to.
            drop(arena);
        }
    });
}

#[test]
fn urgent_reads_go_first_and_prefetches_can_be_cancelled() {
    let file = patterned(FILE);
    let limits = Limits {
        lanes: 1,
        ..Limits::TINY
    };
    let mut engine = IoEngine::open(source(&file), IoChoice::Pread, limits).unwrap();
    let mut arena = arena(6, 4096);
    let mut read = |i: u64| Read::new(i, i * 8192, 4096, arena.take().unwrap());
    engine.submit(&mut vec![read(4).prefetch(), read(3), read(5)]);
    engine.submit(&mut vec![read(0), read(1).prefetch()]);
    let mut out = Vec::new();
    while !engine.is_idle() {
        engine.wait(&mut out, true).unwrap();
    }
    let order: Vec<_> = out.iter().map(|c| c.tag).collect();
    assert_eq!(order, [3, 5, 0, 4, 1]);
    assert_eq!(out[0].slot.as_slice()[0], byte_at(3 * 8192));
}

#[test]
fn an_urgent_read_passes_the_prefetches_that_leave_room_for_it() {
    let file = patterned(FILE);
    let limits = Limits {
        lanes: 1,
        depth: 4,
        ahead: 2,
        ..Limits::TINY
    };
    let mut engine = IoEngine::open(source(&file), IoChoice::Pread, limits).unwrap();
    let mut arena = arena(6, 4096);
    let mut read = |i: u64| Read::new(i, i * 8192, 4096, arena.take().unwrap());
    engine.submit(&mut (0..4).map(|i| read(i).prefetch()).collect());
    let mut out = Vec::new();
    engine.wait(&mut out, false).unwrap();
    assert!(engine.in_flight() <= 2);
    engine.submit(&mut vec![read(5)]);
    while !engine.is_idle() {
        engine.wait(&mut out, true).unwrap();
    }
    let order: Vec<_> = out.iter().map(|c| c.tag).collect();
    assert_eq!(order, [0, 1, 5, 2, 3]);
}
