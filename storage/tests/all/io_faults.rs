//! 100,000 simulated reads with every kind of fault, over many seeds. A failure prints the seed;
//! `SEED=n cargo test -p emberflow-storage --test all io_faults::` runs only that one.

use std::collections::HashMap;

use crate::io_common::{arena, byte_at, patterned, source};
use emberflow_storage::arena::Arena;
use emberflow_storage::io::{
    Completion, Faults, FileSource, IoChoice, IoEngine, IoError, IoOptions, IoThread, Profile,
    Read, SimOptions,
};
use emberflow_storage::limits::Limits;
use fastrand::Rng;

const FILE: u64 = 1 << 20;
const UNIT: u64 = 512;

fn seeds(n: u64) -> Vec<u64> {
    match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().expect("SEED must be a number")],
        Err(_) => (0..n).collect(),
    }
}

/// Runs `body` for every seed and names the seed of a failure.
fn each_seed(n: u64, body: impl Fn(u64) + std::panic::RefUnwindSafe) {
    for seed in seeds(n) {
        if let Err(panic) = std::panic::catch_unwind(|| body(seed)) {
            eprintln!("failed with SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn random_limits(rng: &mut Rng) -> Limits {
    Limits {
        depth: 1 + rng.u32(..20),
        block: (1 + rng.u32(..8)) * 4096,
        pieces: 1 + rng.usize(..6),
        gap: rng.u32(..3) * 2048,
        retries: 50,
        ..Limits::TINY
    }
}

fn random_faults(rng: &mut Rng) -> Faults {
    let mut some = |most: u64| {
        if rng.u64(..2) == 0 {
            0
        } else {
            rng.u64(..most) as u16
        }
    };
    Faults {
        short: some(500),
        again: some(300),
        eio: some(30),
        flip: some(30),
        delay: some(300),
        shuffle: some(10) > 0,
        bad: None,
    }
}

/// Range of a read, stored with its tag.
type Asked = HashMap<u64, (u64, u32, u32)>;

fn random_reads(rng: &mut Rng, arena: &mut Arena, asked: &mut Asked, n: u64) -> Vec<Read> {
    let mut follow = 0;
    (0..n)
        .map_while(|_| {
            let slot = arena.take()?;
            let units = slot.len() as u64 / UNIT;
            let len = UNIT * (1 + rng.u64(..units));
            // often directly after the previous one, so that reads are merged
            let offset = if rng.u64(..2) == 0 && follow + len <= FILE {
                follow
            } else {
                UNIT * rng.u64(..(FILE - len) / UNIT + 1)
            };
            follow = offset + len;
            let at = UNIT * rng.u64(..units - len / UNIT + 1);
            let tag = asked.len() as u64;
            asked.insert(tag, (offset, len as u32, at as u32));
            let read = Read::new(tag, offset, len as u32, slot).at(at as u32);
            let later = rng.u64(..4) == 0;
            Some(if later { read.prefetch() } else { read })
        })
        .collect()
}

/// Whether the bytes of a successful read are right.
fn is_right(done: &Completion, &(offset, len, at): &(u64, u32, u32)) -> bool {
    let got = &done.slot.as_slice()[at as usize..(at + len) as usize];
    (offset..).zip(got).all(|(at, &b)| b == byte_at(at))
}

fn open(file: &tempfile::NamedTempFile, options: SimOptions, limits: Limits) -> IoEngine {
    let source: FileSource = source(file);
    IoEngine::open(source, IoChoice::Sim(options), limits).unwrap()
}

#[test]
fn no_hang_no_loss_no_wrong_byte() {
    let file = patterned(FILE);
    let path = file.path().display().to_string();
    let totals = std::sync::Mutex::new((0u64, 0u64, 0u64));
    let totals_ref = std::panic::AssertUnwindSafe(&totals);
    let file_ref = std::panic::AssertUnwindSafe(&file);
    each_seed(250, |seed| {
        let rng = &mut Rng::with_seed(seed);
        let (limits, faults) = (random_limits(rng), random_faults(rng));
        let profile = Profile::ALL[rng.usize(..4)];
        let options = SimOptions::new(profile, seed).faulty(faults);
        let mut engine = open(&file_ref, options, limits);
        let mut arena = arena(24, 16 << 10);
        let (mut asked, mut out) = (Asked::new(), Vec::new());
        let (mut good, mut bad, mut wrong) = (0, 0, 0);
        while good + bad < 400 {
            let n = 1 + rng.u64(..24);
            engine.submit(&mut random_reads(rng, &mut arena, &mut asked, n));
            let wait = rng.u64(..4) > 0;
            engine.wait(&mut out, wait).unwrap();
            if rng.u64(..8) == 0 {
                while !engine.is_idle() {
                    engine.wait(&mut out, true).unwrap();
                }
            }
            for done in out.drain(..) {
                let range = asked[&done.tag];
                match &done.result {
                    Ok(()) => {
                        good += 1;
                        if !is_right(&done, &range) {
                            assert!(faults.flip > 0, "wrong bytes, {range:?}, {faults:?}");
                            wrong += 1;
                        }
                    }
                    Err(IoError::Os {
                        file,
                        offset,
                        len,
                        errno,
                    }) => {
                        bad += 1;
                        assert_eq!(**file, *path);
                        assert!(*errno == libc::EIO && faults.eio > 0, "{range:?} {errno}");
                        let inside =
                            *offset >= range.0 && offset + len <= range.0 + u64::from(range.1);
                        assert!(inside, "{range:?} failed at {offset}+{len}");
                    }
                    Err(other) => panic!("{range:?}: {other}"),
                }
                arena.put(done.slot);
            }
        }
        while !engine.is_idle() {
            engine.wait(&mut out, true).unwrap();
        }
        out.drain(..).for_each(|done| arena.put(done.slot));
        assert_eq!(arena.free(), 24, "a slot was lost");
        let mut t = totals_ref.lock().unwrap();
        *t = (t.0 + good, t.1 + bad, t.2 + wrong);
    });
    let (good, bad, wrong) = *totals.lock().unwrap();
    eprintln!("{good} reads delivered, {bad} failed, {wrong} with an injected bit flip");
    if std::env::var("SEED").is_err() {
        assert!(good + bad >= 100_000 && bad > 100 && wrong > 100);
    }
}

#[test]
fn exactly_the_reads_over_a_bad_range_fail_and_each_once() {
    let file = patterned(FILE);
    let file_ref = std::panic::AssertUnwindSafe(&file);
    each_seed(60, |seed| {
        let rng = &mut Rng::with_seed(seed);
        let limits = random_limits(rng);
        let from = UNIT * rng.u64(..FILE / UNIT - 200);
        let to = from + UNIT * (1 + rng.u64(..200));
        let faults = Faults {
            eio: 0,
            flip: 0,
            bad: Some((from, to)),
            ..random_faults(rng)
        };
        let options = SimOptions::new(Profile::Ufs4, seed).faulty(faults);
        let mut engine = open(&file_ref, options, limits);
        let mut arena = arena(24, 16 << 10);
        let (mut asked, mut out) = (Asked::new(), Vec::new());
        let mut answers = HashMap::new();
        for _ in 0..10 {
            engine.submit(&mut random_reads(rng, &mut arena, &mut asked, 24));
            while !engine.is_idle() {
                engine.wait(&mut out, true).unwrap();
            }
            for done in out.drain(..) {
                let twice = answers.insert(done.tag, done.result.is_ok());
                assert!(twice.is_none(), "read {} came back twice", done.tag);
                assert!(done.result.is_err() || is_right(&done, &asked[&done.tag]));
                arena.put(done.slot);
            }
        }
        assert_eq!(answers.len(), asked.len());
        for (tag, &(offset, len, _)) in &asked {
            let over = offset < to && offset + u64::from(len) > from;
            assert_eq!(
                answers[tag], !over,
                "read at {offset}+{len}, bad {from}..{to}"
            );
        }
    });
}

#[test]
fn the_thread_survives_faults_and_stops_once() {
    let file = patterned(FILE);
    let file_ref = std::panic::AssertUnwindSafe(&file);
    each_seed(100, |seed| {
        let rng = &mut Rng::with_seed(seed);
        let limits = random_limits(rng);
        let faults = Faults {
            flip: 0,
            ..random_faults(rng)
        };
        let sim = SimOptions::new(Profile::Nvme, seed).faulty(faults);
        let options = IoOptions {
            limits,
            ..IoOptions::default()
        };
        let io = IoThread::spawn(source(&file_ref), IoChoice::Sim(sim), options).unwrap();
        let mut arena = arena(24, 16 << 10);
        let (mut asked, mut out) = (Asked::new(), Vec::new());
        let mut failures = 0;
        for _ in 0..30 {
            let n = 1 + rng.u64(..24);
            let mut batch = random_reads(rng, &mut arena, &mut asked, n);
            io.submit(&mut batch).unwrap();
            if rng.u64(..4) == 0 {
                io.cancel_prefetches().unwrap();
            }
            let min = rng.usize(..24);
            io.wait(&mut out, min).unwrap();
            for done in out.drain(..) {
                match &done.result {
                    Ok(()) => assert!(is_right(&done, &asked[&done.tag])),
                    Err(e) => failures += u64::from(e.is_fatal()),
                }
                arena.put(done.slot);
            }
        }
        io.wait(&mut out, usize::MAX).unwrap();
        assert_eq!(io.outstanding(), 0);
        failures += out
            .iter()
            .filter_map(|c| c.result.as_ref().err())
            .filter(|e| e.is_fatal())
            .count() as u64;
        out.drain(..).for_each(|done| arena.put(done.slot));
        assert_eq!(arena.free(), 24);
        assert_eq!(io.first_error().is_some(), failures > 0);
        if faults.eio == 0 {
            assert_eq!(failures, 0);
        }
    });
}
