//! Damage: whatever happens to a file is found, and never makes the reader panic.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use emberflow_storage::Error;
use emberflow_storage::container::Container;
use fastrand::Rng;

use crate::forger::Forger;
use crate::support::{Packed, bare, full, random, read_all};

/// Number of problems; a refusal to open counts as one.
fn problems(path: &std::path::Path) -> u64 {
    match Container::open(path) {
        Err(_) => 1,
        Ok(c) => c.verify(&mut |_, _| {}).unwrap().problem_count,
    }
}

/// One flipped bit anywhere is found: every byte that carries data, and every seventh of the
/// rest (superblock reserve and alignment gaps).
#[test]
fn every_flipped_byte_is_found() {
    for model in [full(), bare()] {
        let bytes = model.bytes();
        let packed = Packed::new(&bytes);
        assert_eq!(problems(&packed.path), 0);
        let file = OpenOptions::new().write(true).open(&packed.path).unwrap();
        for (i, &byte) in bytes.iter().enumerate() {
            if byte == 0 && i % 7 != 0 {
                continue;
            }
            file.write_all_at(&[byte ^ (1 << (i % 8))], i as u64)
                .unwrap();
            assert_eq!(
                problems(&packed.path),
                1,
                "bit flip at offset {i} of {}",
                bytes.len()
            );
            file.write_all_at(&[byte], i as u64).unwrap();
        }
    }
}

/// Several damaged places are all counted, each with its offset.
#[test]
fn each_problem_is_named() {
    let model = full();
    let mut bytes = model.bytes();
    let packed = Packed::new(&bytes);
    let c = Container::open(&packed.path).unwrap();
    let places = [
        c.layout().sections[6].offset,
        c.tensors()[1].offset,
        c.neuron_offset(0, 1),
        c.neuron_offset(1, 1) + 100,
    ];
    for &at in &places {
        bytes[at as usize] ^= 1;
    }
    bytes[c.file_len() as usize - 1] = 1;
    fs::write(&packed.path, &bytes).unwrap();
    let report = Container::open(&packed.path)
        .unwrap()
        .verify(&mut |_, _| {})
        .unwrap();
    assert_eq!(report.problem_count, 5);
    let found: Vec<u64> = report.problems.iter().map(|p| p.offset).collect();
    assert_eq!(found[..4], places);
    assert_eq!(found[4], c.file_len() - 1);
    let what: Vec<&str> = report.problems.iter().map(|p| p.what.as_str()).collect();
    assert!(what[0].starts_with("predictor at offset"), "{what:?}");
    assert!(what[1].starts_with("tensor norm"), "{what:?}");
    assert!(
        what[2].starts_with("gate part of layer 0 expert 0 neuron 1"),
        "{what:?}"
    );
    assert!(
        what[3].starts_with("up/down part of layer 1 expert 0 neuron 1"),
        "{what:?}"
    );
}

/// A file that changes after it was opened.
#[test]
fn changes_behind_our_back_are_found() {
    let packed = Packed::new(&full().bytes());
    let c = Container::open(&packed.path).unwrap();
    let len = c.file_len();
    let file = OpenOptions::new().write(true).open(&packed.path).unwrap();
    file.set_len(len + 1).unwrap();
    let report = c.verify(&mut |_, _| {}).unwrap();
    assert_eq!((report.problem_count, report.problems[0].offset), (1, len));
    file.set_len(len - 4096).unwrap();
    let report = c.verify(&mut |_, _| {}).unwrap();
    assert!(
        report.problems.iter().any(|p| p.what.contains("truncated")),
        "{report:?}"
    );
    assert!(
        report
            .problems
            .iter()
            .any(|p| p.what.contains("cannot read")),
        "{report:?}"
    );
    assert!(matches!(read_all(&c), Ok(()) | Err(Error::Read { .. })));
}

/// Thousands of random mutations and truncations, half of them with repaired checksums so that
/// they get past the first door: opening, verifying and reading never panic. What was not
/// repaired is always found.
#[test]
fn mutations_never_panic() {
    let originals = [full().bytes(), bare().bytes(), random(5).bytes()];
    let packed = Packed::new(&[]);
    let file = OpenOptions::new().write(true).open(&packed.path).unwrap();
    let mut opened = 0;
    for seed in 0..4000 {
        let mut rng = Rng::with_seed(seed);
        let original = &originals[rng.usize(..3)];
        let mut f = Forger::new(original.clone());
        for _ in 0..1 + rng.u64(..4) {
            mutate(&mut f, &mut rng);
        }
        let sealed = rng.u64(..2) == 0 && f.bytes.len() >= 4096;
        if sealed {
            f.seal();
        }
        file.write_all_at(&f.bytes, 0).unwrap();
        file.set_len(f.bytes.len() as u64).unwrap();
        let Ok(c) = Container::open(&packed.path) else {
            continue;
        };
        opened += 1;
        let report = c.verify(&mut |_, _| {}).unwrap();
        let _ = read_all(&c);
        let changed = f.bytes != *original;
        assert!(
            sealed || !changed || !report.is_clean(),
            "seed {seed} went unnoticed"
        );
    }
    assert!(
        opened > 400,
        "only {opened} mutants were opened: the test lost its edge"
    );
}

fn mutate(f: &mut Forger, rng: &mut Rng) {
    let len = f.bytes.len() as u64;
    if len < 4096 {
        return;
    }
    // Tables sit in the first pages; most mutations go there.
    let reach = if rng.u64(..4) == 0 {
        len
    } else {
        len.min(20_000)
    };
    let at = rng.u64(..reach - 8) as usize;
    let nasty = [
        0,
        1,
        63,
        64,
        4095,
        4096,
        len,
        len - 1,
        1 << 31,
        1 << 32,
        1 << 63,
        u64::MAX,
    ];
    let value = nasty[rng.u64(..nasty.len() as u64) as usize];
    match rng.u64(..8) {
        0 => f.bytes[at] ^= 1 << rng.u64(..8),
        1 => f.put64(at & !7, value),
        2 => f.put32(at & !3, value as u32),
        // A field of the superblock.
        3 => f.put64(16 + 4 * rng.usize(..64), value),
        4 => f.put32(16 + 4 * rng.usize(..64), value as u32),
        // Near the true value.
        5 => {
            let at = 56 + 8 * rng.usize(..27);
            f.put64(at, f.u64_at(at).wrapping_add(rng.u64(..3)).wrapping_sub(1));
        }
        6 => f.bytes.truncate(rng.u64(..len) as usize),
        _ => {
            let from = rng.u64(..reach - 8) as usize;
            let size = rng.u64(..64).min(len - from.max(at) as u64) as usize;
            f.bytes.copy_within(from..from + size, at);
        }
    }
}
