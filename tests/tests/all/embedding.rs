//! An embedding whose rows are read from flash: the same bits as from memory, for any behaviour of
//! the device; damage is detected before use.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use emberflow::pack::{PackOptions, pack};
use emberflow_engine::{Engine, Lab, Logits, Model, Options, compute};
use emberflow_kernels::{Activations, DType};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::container::{Container, ROW_CHECKSUM, Writer};
use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
use emberflow_tests::{
    all_logits, bits, case, fixtures, open, packed, roomy, squeeze, table_on_flash,
};

/// More rows than can be in flight at once, with some tokens twice.
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

/// A table whose rows have one scale each changes no activation, unless it is also the head.
#[test]
fn only_rows_that_are_multiplied_decide_how_activations_are_scaled() {
    let dir = tempfile::tempdir().unwrap();
    for (name, role, per_token) in [
        ("mistral", Role::Embed, false),
        ("mistral", Role::Head, true),
        ("gemma2", Role::Embed, true),
    ] {
        let mut how = PackOptions::new(DType::Q8);
        how.mix.insert(TensorId::global(role), DType::Q8c);
        how.force = true;
        let path = dir.path().join("model.ember");
        pack(
            &fixtures().join("models").join(name),
            &path,
            &how,
            &mut |_, _| {},
        )
        .unwrap();
        let model = Model::load(&path).unwrap();
        let on = compute(model.container(), model.text().config(), 1, None);
        let mut quantized = Activations::default();
        on.cpu.quantize_activations(&[1.0; 64], 1, &mut quantized);
        assert_eq!(quantized.all().per_token(), per_token, "{name}, {role:?}");
    }
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
        table_on_flash(&mut engine);
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

/// A container of an earlier version: its tables have no checksums.
fn without_checksums(path: &Path) -> PathBuf {
    let container = Container::open(path).unwrap();
    let (g, mut spec) = (*container.geometry(), container.spec("earlier".into()));
    let stored = spec.tensors.iter_mut().find(|t| t.name == "embed").unwrap();
    stored.len -= stored.dims[0] * ROW_CHECKSUM as u64;
    let len = (stored.len / stored.dims[0]) as usize;
    let output = path.with_extension("earlier");
    let mut writer = Writer::create(&output, spec).unwrap();
    for (i, entry) in container.tensors().iter().enumerate() {
        let mut bytes = vec![0; entry.len as usize];
        container.read_tensor(entry, &mut bytes).unwrap();
        if entry.name == "embed" {
            let rows = bytes.chunks_exact(len + ROW_CHECKSUM);
            bytes = rows.flat_map(|row| &row[..len]).copied().collect();
        }
        writer.write_tensor(i, &bytes).unwrap();
    }
    for (i, bank) in container.banks().iter().enumerate() {
        let mut sink = writer.begin_bank(i).unwrap();
        for n in 0..bank.neurons {
            let mut bundle = vec![0; g.stride as usize];
            let offset = container.neuron_offset(i, n);
            container.file().read_exact_at(&mut bundle, offset).unwrap();
            let (gate, rest) = bundle.split_at(g.gate_span as usize);
            let [gate, rest] = [&gate[..g.gate_len as usize], &rest[..g.rest_len as usize]];
            sink.append_neuron(gate, rest, &[]).unwrap();
        }
        sink.finish().unwrap();
    }
    writer.finish().unwrap();
    output
}

/// The same text, and more memory for checksums.
#[test]
fn tables_of_earlier_containers_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = container(dir.path());
    let earlier = without_checksums(&path);
    let [mut now, mut before] =
        [&path, &earlier].map(|path| open(path, options(IoChoice::Auto, 8)));
    let tokens = tokens(now.config().vocab);
    let expected = bits(&all_logits(&mut now, &tokens, 8));
    assert!(before.needs().fixed > now.needs().fixed);
    for share in [1.0, 0.4] {
        squeeze(&mut before, share);
        assert_eq!(held(&before) > 0, share == 1.0);
        assert_eq!(bits(&all_logits(&mut before, &tokens, 8)), expected);
    }
}

#[test]
fn a_damaged_row_is_found_when_it_is_used() {
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

    // A table in memory is checked as a whole.
    let model = Model::open(Container::open(&path).unwrap()).unwrap();
    let refused = Engine::open(model, roomy(TOKENS))
        .err()
        .unwrap()
        .to_string();
    assert!(refused.contains("tensor embed"), "{refused}");
}

/// A flipped bit in each row of a table on flash: a pass that uses the row fails, for every table.
#[test]
fn damaged_rows_of_every_table_are_found() {
    for (model, table) in [
        ("mistral", "embed"),
        ("gemma4_inputs", "layer_inputs"),
        ("qwen4_exp", "ngram_table.0"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = packed(&case(model), dir.path(), DType::Q8);
        let mut engine = open(&path, options(IoChoice::Auto, 8));
        squeeze(&mut engine, 0.4);
        assert_eq!(held(&engine), 0, "{table}");
        let mut sequence = engine.new_sequence().unwrap();
        let used = engine.forward(&mut sequence, &[3, 4, 5], Logits::Last);
        used.unwrap();

        let container = Container::open(&path).unwrap();
        let entry = container.tensor(table).unwrap();
        let row = entry.len / entry.dims()[0];
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let mut bytes = vec![0; entry.len as usize];
        file.read_exact_at(&mut bytes, entry.offset).unwrap();
        let rows = bytes.chunks_exact_mut(row as usize).enumerate();
        for (n, row) in rows {
            let at = n % row.len();
            row[at] ^= 16;
        }
        file.write_all_at(&bytes, entry.offset).unwrap();
        file.sync_all().unwrap();

        let damaged = engine.forward(&mut sequence, &[6, 7], Logits::Last);
        let damaged = damaged.unwrap_err().to_string();
        assert!(damaged.contains(&format!("{table} (row ")), "{damaged}");
    }
}
