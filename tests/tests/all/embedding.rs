//! An embedding whose rows are read from flash: the same bits as from memory, whatever the device
//! does, and damage that is found before it is computed with.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use emberflow_engine::memory::Needs;
use emberflow_engine::{Engine, Lab, Logits, Options};
use emberflow_kernels::DType;
use emberflow_storage::container::Container;
use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
use emberflow_tests::{all_logits, bits, fixtures, open, packed, roomy, squeeze};

/// Longer than rows can be under way at once, with some tokens twice.
const TOKENS: usize = 80;

fn tokens(vocab: u32) -> Vec<u32> {
    (0..TOKENS as u32).map(|i| i * i * 7 % vocab).collect()
}

fn container(dir: &Path) -> PathBuf {
    packed(&fixtures().join("models/mistral"), dir, DType::Q8)
}

fn options(io: IoChoice, chunk: usize) -> Options {
    Options {
        lab: Lab {
            io,
            chunk,
            ..Lab::default()
        },
        ..roomy(TOKENS)
    }
}

fn held(engine: &Engine) -> u64 {
    engine.memory().ledger.held("embedding")
}

#[test]
fn rows_from_flash_are_those_from_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = container(dir.path());
    let mut resident = open(&path, options(IoChoice::Auto, 80));
    let tokens = tokens(resident.config().vocab);
    assert!(held(&resident) > 0);
    let before = resident.counters();
    let expected = bits(&all_logits(&mut resident, &tokens, 80));
    assert_eq!(resident.counters().since(before).reads, 0);
    let faults = Faults {
        short: 300,
        again: 300,
        delay: 300,
        shuffle: true,
        ..Faults::default()
    };
    let faulty = SimOptions::new(Profile::Ufs31, 7).faulty(faults);
    for (io, chunk) in [
        (IoChoice::Auto, 80),
        (IoChoice::Pread, 33),
        (IoChoice::Sim(faulty), 80),
        (IoChoice::Sim(faulty), 1),
    ] {
        let mut engine = open(&path, options(io, chunk));
        // Too little for the table, enough for all neurons.
        let needs = Needs {
            process_peak: 0,
            ..*engine.needs()
        };
        let all = needs.plan(needs.full_budget()).unwrap();
        let less = all.ledger.used() - needs.embedding / 2;
        engine.set_budget(less).unwrap();
        assert_eq!(
            (held(&engine), engine.memory().hot_clusters),
            (0, engine.needs().clusters)
        );
        let before = engine.counters();
        assert_eq!(bits(&all_logits(&mut engine, &tokens, chunk)), expected);
        let read = engine.counters().since(before);
        assert_eq!((read.reads, read.misses), (TOKENS as u64, 0));
        for share in [0.4, 1.0] {
            squeeze(&mut engine, share);
            assert_eq!(held(&engine) > 0, share == 1.0);
            assert_eq!(bits(&all_logits(&mut engine, &tokens, chunk)), expected);
        }
    }
}

#[test]
fn a_row_damaged_since_it_was_checked_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = container(dir.path());
    let mut engine = open(&path, options(IoChoice::Pread, 8));
    squeeze(&mut engine, 0.5);
    let mut sequence = engine.new_sequence().unwrap();
    engine
        .forward(&mut sequence, &[3, 4, 5], Logits::Last)
        .unwrap();
    let logits = bits(engine.logits());

    let entry = Container::open(&path)
        .unwrap()
        .tensor("embed")
        .unwrap()
        .clone();
    let row = entry.len / u64::from(engine.config().vocab);
    let at = entry.offset + 9 * row;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    file.sync_all().unwrap();

    let damaged = engine
        .forward(&mut sequence, &[8, 9, 10], Logits::Last)
        .unwrap_err()
        .to_string();
    for part in [
        path.to_str().unwrap(),
        "embed (row 9)",
        &format!("offset {at}"),
    ] {
        assert!(damaged.contains(part), "{damaged}: no {part}");
    }
    assert_eq!((sequence.len(), bits(engine.logits())), (3, logits));
    let again = engine
        .forward(&mut sequence, &[8], Logits::Last)
        .unwrap_err()
        .to_string();
    assert!(again.contains("row 9"), "{again}");

    // Opening checks the whole table.
    let model = emberflow_engine::Model::open(Container::open(&path).unwrap()).unwrap();
    let refused = Engine::open(model, roomy(TOKENS))
        .err()
        .unwrap()
        .to_string();
    assert!(refused.contains("tensor embed"), "{refused}");
}
