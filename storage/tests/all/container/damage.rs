//! Damage: any change of a file is detected, and never makes the reader panic.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use emberflow_storage::Error;
use emberflow_storage::container::{Container, MappedBundles};

use super::support::{Packed, bare, full, read_all};

/// Number of problems; a refusal to open counts as one.
fn problems(path: &std::path::Path) -> u64 {
    match Container::open(path) {
        Err(_) => 1,
        Ok(c) => c.verify(&mut |_, _| {}).unwrap().problem_count,
    }
}

/// A flipped bit anywhere is detected: every byte of data, and every seventh of the rest
/// (superblock reserve and alignment gaps).
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

/// Mapped bundles are checked at their first use: each once, and damage is named.
#[test]
fn mapped_bundles_are_checked_at_their_first_use() {
    let mut bytes = full().bytes();
    let packed = Packed::new(&bytes);
    let c = Container::open(&packed.path).unwrap();
    let damaged = c.neuron_offset(1, 1) as usize;
    bytes[damaged + 3] ^= 1;
    let file = OpenOptions::new().write(true).open(&packed.path).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    let mapped = MappedBundles::new(&c).unwrap();
    let stride = c.geometry().stride as usize;
    for _ in 0..2 {
        for (bank, entry) in c.banks().iter().enumerate() {
            for n in 0..entry.neurons {
                let found = mapped.bundle(&c, bank, n);
                if (bank, n) == (1, 1) {
                    assert!(
                        matches!(found, Err(Error::BundleChecksum { neuron: 1, .. })),
                        "{found:?}"
                    );
                } else {
                    let at = c.neuron_offset(bank, n) as usize;
                    assert_eq!(found.unwrap(), &bytes[at..at + stride], "{bank} {n}");
                }
            }
            assert!(mapped.bundle(&c, bank, entry.neurons).is_err());
        }
    }
    // not checked again: the first check counts
    bytes[c.neuron_offset(0, 0) as usize] ^= 1;
    file.write_all_at(&bytes, 0).unwrap();
    assert!(mapped.bundle(&c, 0, 0).is_ok());
    assert!(mapped.still_whole().is_ok());
    file.set_len(c.file_len() - 1).unwrap();
    let error = mapped.still_whole().unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
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
