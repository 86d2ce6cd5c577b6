//! Interrupted packs. A dropped writer leaves exactly what a killed process leaves: the partial
//! file and its journal.

use std::fs;
use std::path::{Path, PathBuf};

use emberflow_storage::Error;
use emberflow_storage::container::{Container, Unit, Writer};

use super::support::{EACH_UNIT, Model, bare, full, random};

fn target() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.ember");
    (dir, path)
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", path.display()))
}

/// Writes `count` units and the beginning of the next one, then stops.
fn interrupt(model: &Model, path: &Path, count: usize) {
    let mut writer = Writer::create_with(path, model.spec.clone(), EACH_UNIT).unwrap();
    let units = model.units();
    for &unit in &units[..count] {
        model.write_unit(&mut writer, unit).unwrap();
    }
    match units.get(count) {
        Some(Unit::Tensor(i)) => {
            writer
                .begin_tensor(*i)
                .unwrap()
                .append(&model.tensor(*i)[1..])
                .unwrap();
        }
        Some(Unit::Bank(i)) => {
            let (gate, rest, scales) = model.neuron(*i, 0);
            writer
                .begin_bank(*i)
                .unwrap()
                .append_neuron(&gate, &rest, &scales)
                .unwrap();
        }
        _ => {}
    }
}

/// Writes the missing units and finishes; returns the units that had to be written.
fn complete(model: &Model, path: &Path) -> Vec<Unit> {
    let mut writer = Writer::create_with(path, model.spec.clone(), EACH_UNIT).unwrap();
    let units = model.units();
    let missing: Vec<Unit> = units.into_iter().filter(|&u| !writer.is_done(u)).collect();
    assert_eq!(writer.resume_from(), missing.first().copied());
    for &unit in &missing {
        model.write_unit(&mut writer, unit).unwrap();
    }
    writer.finish().unwrap();
    missing
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn stopped_after_every_unit() {
    for model in [full(), bare(), random(77)] {
        let expected = model.bytes();
        let units = model.units();
        for count in 0..=units.len() {
            let (dir, path) = target();
            interrupt(&model, &path, count);
            assert_eq!(
                names(dir.path()),
                ["model.ember.partial", "model.ember.partial.journal"]
            );
            assert_eq!(complete(&model, &path), units[count..]);
            assert_eq!(names(dir.path()), ["model.ember"]);
            assert!(
                fs::read(&path).unwrap() == expected,
                "stopped after {count} units"
            );
        }
    }
}

/// Killed repeatedly, after one unit each time.
#[test]
fn stopped_many_times() {
    let (_dir, path) = target();
    let model = full();
    for unit in model.units() {
        let mut writer = Writer::create_with(&path, model.spec.clone(), EACH_UNIT).unwrap();
        assert_eq!(writer.resume_from(), Some(unit));
        model.write_unit(&mut writer, unit).unwrap();
    }
    assert_eq!(complete(&model, &path), []);
    assert_eq!(fs::read(&path).unwrap(), model.bytes());
}

/// Any order of units gives the same bytes.
#[test]
fn units_in_reverse_order() {
    let (_dir, path) = target();
    let model = full();
    let mut writer = Writer::create(&path, model.spec.clone()).unwrap();
    for &unit in model.units().iter().rev() {
        model.write_unit(&mut writer, unit).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), model.bytes());
}

/// A unit whose bytes differ from the journal is written again, the others are not.
#[test]
fn damaged_unit_is_written_again() {
    let model = full();
    let bytes = model.bytes();
    let packed = super::support::Packed::new(&bytes);
    let c = Container::open(&packed.path).unwrap();
    let (tensor, bundle) = (c.tensors()[1].offset, c.neuron_offset(1, 1));
    let scales = c.banks()[2].scales_offset;
    for (at, unit) in [
        (tensor, Unit::Tensor(1)),
        (bundle, Unit::Bank(1)),
        (scales, Unit::Bank(2)),
    ] {
        let (_dir, path) = target();
        interrupt(&model, &path, model.units().len());
        let partial = beside(&path, ".partial");
        let mut damaged = fs::read(&partial).unwrap();
        damaged[at as usize] ^= 1;
        fs::write(&partial, damaged).unwrap();
        assert_eq!(complete(&model, &path), [unit]);
        assert!(fs::read(&path).unwrap() == bytes);
    }
}

/// The journal may be truncated anywhere by a crash, or contain anything: the result is the same.
#[test]
fn damaged_journal() {
    let model = full();
    let bytes = model.bytes();
    let (dir, path) = target();
    interrupt(&model, &path, 4);
    let (journal, partial) = (beside(&path, ".partial.journal"), beside(&path, ".partial"));
    let (good, data) = (fs::read(&journal).unwrap(), fs::read(&partial).unwrap());
    let mut damaged: Vec<Vec<u8>> = (0..good.len())
        .step_by(9)
        .map(|n| good[..n].to_vec())
        .collect();
    damaged.push(b"\xFF\xFEnot a journal at all\n\n".to_vec());
    damaged.extend((0..good.len()).step_by(17).map(|n| {
        let mut flipped = good.clone();
        flipped[n] ^= 1;
        flipped
    }));
    let mut resumed = 0;
    for content in damaged {
        fs::write(&journal, &content).unwrap();
        fs::write(&partial, &data).unwrap();
        resumed += usize::from(complete(&model, &path).len() < model.units().len());
        assert!(fs::read(&path).unwrap() == bytes);
        assert_eq!(names(dir.path()), ["model.ember"]);
    }
    assert!(resumed > 10, "only {resumed} journals were of any use");
}

/// Without the partial file the journal is ignored; also after a crash between the final rename and
/// the journal's deletion.
#[test]
fn journal_without_partial() {
    let (dir, path) = target();
    let model = full();
    interrupt(&model, &path, 5);
    fs::remove_file(beside(&path, ".partial")).unwrap();
    assert_eq!(complete(&model, &path), model.units());
    assert_eq!(fs::read(&path).unwrap(), model.bytes());
    assert_eq!(names(dir.path()), ["model.ember"]);
}

#[test]
fn another_specification_starts_over() {
    let mut others = vec![full(); 5];
    others[0].spec.source = "checkpoint b".into();
    others[1].spec.meta.push(b' ');
    others[2].spec.banks[0].neurons += 1;
    others[3].spec.tensors[0].name.push('x');
    others[4].spec.bundle_dtype += 1;
    for other in others {
        let (_dir, path) = target();
        interrupt(&full(), &path, 5);
        assert_eq!(complete(&other, &path), other.units());
        assert!(fs::read(&path).unwrap() == other.bytes());
    }
}

#[test]
fn one_writer_at_a_time() {
    let (dir, path) = target();
    let model = full();
    let writer = Writer::create(&path, model.spec.clone()).unwrap();
    let error = Writer::create(&path, model.spec.clone()).err().unwrap();
    let expected = format!(
        "{}: process {} is writing this container; wait for it to end, or stop it",
        path.display(),
        std::process::id()
    );
    assert_eq!(error.to_string(), expected);
    // another container in the same folder is independent
    Writer::create(dir.path().join("other.ember"), model.spec.clone()).unwrap();
    drop(writer);
    Writer::create(&path, model.spec).unwrap();
}

/// An existing container stays readable until the new one is complete.
#[test]
fn replaces_only_at_the_end() {
    let (_dir, path) = target();
    let (old, new) = (bare(), full());
    old.write(&path).unwrap();
    interrupt(&new, &path, new.units().len());
    assert_eq!(fs::read(&path).unwrap(), old.bytes());
    complete(&new, &path);
    assert_eq!(fs::read(&path).unwrap(), new.bytes());
}

/// A file that appears while the container is written is not replaced, and nothing of the container is lost.
#[test]
fn what_appeared_meanwhile_stays() {
    let (_dir, path) = target();
    let model = full();
    let mut writer = Writer::create(&path, model.spec.clone()).unwrap();
    for unit in model.units() {
        model.write_unit(&mut writer, unit).unwrap();
    }
    fs::write(&path, "precious").unwrap();
    let error = writer.finish().unwrap_err().to_string();
    assert!(
        error.contains("model.ember: cannot replace it")
            && error.contains("appeared while this command ran"),
        "{error}"
    );
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    fs::remove_file(&path).unwrap();
    let writer = Writer::create(&path, model.spec.clone()).unwrap();
    assert_eq!(writer.resume_from(), None);
    writer.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), model.bytes());
}

#[test]
fn finishing_too_early() {
    let (dir, path) = target();
    let model = full();
    let mut writer = Writer::create(&path, model.spec.clone()).unwrap();
    model.write_unit(&mut writer, Unit::Predictor).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Missing {
                unit: Unit::Tensor(0),
                ..
            }
        ),
        "{error}"
    );
    assert!(!names(dir.path()).contains(&"model.ember".to_owned()));
}

/// A unit dropped midway is not done; restarting it starts over.
#[test]
fn wrong_amounts_are_refused() {
    let (_dir, path) = target();
    let model = full();
    let mut w = Writer::create(&path, model.spec.clone()).unwrap();
    let length = |r: Result<(), Error>| match r.unwrap_err() {
        Error::Length {
            expected, found, ..
        } => (expected, found),
        other => panic!("{other}"),
    };
    assert_eq!(length(w.write_tensor(1, &[0; 27])), (28, 27));
    assert_eq!(length(w.write_tensor(1, &[0; 29])), (28, 29));
    assert!(!w.is_done(Unit::Tensor(1)));
    let mut bank = w.begin_bank(1).unwrap();
    assert_eq!(
        length(bank.append_neuron(&[0; 99], &[0; 200], &[0; 39])),
        (100, 99)
    );
    assert_eq!(
        length(bank.append_neuron(&[0; 100], &[0; 201], &[0; 39])),
        (200, 201)
    );
    assert_eq!(
        length(bank.append_neuron(&[0; 100], &[0; 200], &[])),
        (39, 0)
    );
    bank.append_neuron(&[0; 100], &[0; 200], &[0; 39]).unwrap();
    assert_eq!(length(bank.finish()), (1024, 512));
    let mut bank = w.begin_bank(1).unwrap();
    for _ in 0..2 {
        bank.append_neuron(&[0; 100], &[0; 200], &[0; 39]).unwrap();
    }
    assert_eq!(
        length(bank.append_neuron(&[0; 100], &[0; 200], &[0; 39])),
        (1024, 1536)
    );
    assert!(matches!(
        w.begin_bank(3).err().unwrap(),
        Error::Index { what: "bank", .. }
    ));
    assert!(matches!(
        w.begin_tensor(2).err().unwrap(),
        Error::Index { what: "tensor", .. }
    ));
    for unit in model.units() {
        model.write_unit(&mut w, unit).unwrap();
    }
    w.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), model.bytes());
}

#[test]
fn impossible_specifications_and_places() {
    let (dir, path) = target();
    let mut model = full();
    model.spec.banks.swap(0, 1);
    let error = Writer::create(&path, model.spec).err().unwrap();
    assert!(matches!(error, Error::Layout { .. }), "{error}");
    assert!(
        names(dir.path()).is_empty(),
        "nothing is touched for an impossible specification"
    );
    let error = Writer::create(dir.path().join("no/such/m.ember"), full().spec)
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .contains("no/such/m.ember.partial.journal: cannot create it"),
        "{error}"
    );
    let error = Writer::create("..", full().spec).err().unwrap();
    assert!(error.to_string().contains("names no file"), "{error}");
}
