//! Checkpoints that run without packing, beside transformers.

use std::io::Write;
use std::path::{Path, PathBuf};

use emberflow_engine::{Budget, Engine, Lab, Logits, Model, Options};
use emberflow_kernels::{Cpu, Row};
use emberflow_models::Bands;
use emberflow_models::names::Role;
use emberflow_tests::{Golden, all_logits, bits, fixtures, roomy, squeeze, table_on_flash};

/// Largest difference allowed to the reference, at every position.
const TOLERANCE: f32 = 1e-3;

/// Largest mean difference of a model in blocks, as a share of the largest logit: products of blocks read activations of 8
/// bits, and where experts nearly tie, a row may choose another one, which changes its logits much more.
const BLOCKS: f32 = 0.03;

/// Files of a fixture, and their references.
const FILES: [(&str, &str); 6] = [
    ("", "golden.json"),
    ("model.gguf", "golden.json"),
    ("stacked.safetensors", "golden.json"),
    ("model-q8_0.gguf", "golden-q8_0.json"),
    ("model-q4_0.gguf", "golden-q4_0.json"),
    ("model-converted.gguf", "golden-converted.json"),
];

fn cases() -> Vec<PathBuf> {
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let mut cases: Vec<PathBuf> = models.map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    cases
}

fn open(checkpoint: &Path, options: Options) -> Engine {
    let model = Model::of_checkpoint(checkpoint).unwrap();
    Engine::open(model, options).unwrap()
}

/// Difference to the reference beyond what the formats explain; 0 if there is none.
fn difference(checkpoint: &Path, case: &Path, golden: &str) -> f32 {
    let golden = Golden::load(case, golden);
    let mut engine = open(checkpoint, roomy(golden.tokens.len()));
    let together = all_logits(&mut engine, &golden.tokens, 16);
    let single = all_logits(&mut engine, &golden.tokens, 1);
    assert!(bits(&together) == bits(&single), "{checkpoint:?}");
    for share in [0.5, 0.0] {
        squeeze(&mut engine, share);
        for chunk in [1, 16] {
            let squeezed = all_logits(&mut engine, &golden.tokens, chunk);
            assert!(
                bits(&squeezed) == bits(&together),
                "{checkpoint:?} at {share}"
            );
        }
    }
    let expected = golden.logits(case);
    assert_eq!(together.len(), expected.len());
    let differences = together.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let most = differences.clone().fold(0.0, f32::max);
    let mean = differences.sum::<f32>() / expected.len() as f32;
    assert!(together.iter().all(|x| x.is_finite()), "{checkpoint:?}");
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let quant = &engine.text().meta().quant;
    let formats = [&quant.ffn, &quant.attention, &quant.embedding];
    let blocks = formats.iter().any(|name| name.starts_with(['Q', 'M']));
    let (found, allowed) = match blocks {
        true => (mean, BLOCKS * largest),
        false => (most, TOLERANCE),
    };
    if found <= allowed { 0.0 } else { found }
}

/// The folders' floats, and the same weights as stored by llama.cpp, agree with transformers.
#[test]
fn every_family_runs_unpacked() {
    let (mut seen, mut failed) = (0, Vec::new());
    for case in cases() {
        for (name, golden) in FILES {
            let checkpoint = case.join(name);
            if !checkpoint.exists() {
                continue;
            }
            let found = difference(&checkpoint, &case, golden);
            if found > 0.0 {
                failed.push((checkpoint, found));
            }
            seen += 1;
        }
    }
    assert!(failed.is_empty() && seen > 200, "of {seen}: {failed:?}");
}

/// Threads, chunks and budgets change no bit.
#[test]
fn only_the_weights_decide_a_bit() {
    for name in ["qwen3", "qwen3_moe"] {
        let Some(case) = cases().into_iter().find(|case| case.ends_with(name)) else {
            panic!("no fixture {name}");
        };
        let golden = Golden::load(&case, "golden.json");
        let run = |threads, chunk, budget| {
            let options = Options {
                threads,
                budget,
                lab: Lab {
                    chunk,
                    profiles: false,
                    ..Lab::default()
                },
                ..roomy(golden.tokens.len())
            };
            bits(&all_logits(
                &mut open(&case, options),
                &golden.tokens,
                chunk,
            ))
        };
        let expected = run(1, 16, Budget::Bytes(1 << 40));
        for (threads, chunk) in [(2, 1), (3, 5), (4, 64)] {
            assert!(run(threads, chunk, Budget::Auto) == expected, "{name}");
        }
    }
}

/// What products read are the numbers that `pack` reads, whatever the file's format and layout.
#[test]
fn converted_rows_are_those_of_the_checkpoint() {
    let (cpu, mut converted) = (Cpu::detect(), 0);
    for case in cases() {
        for (name, _) in FILES {
            let path = case.join(name);
            if !path.exists() {
                continue;
            }
            let checkpoint = emberflow_models::open(&path).unwrap();
            let stored = emberflow_models::open(&path)
                .unwrap()
                .into_stored(Bands::Small);
            let stored = stored.unwrap();
            for (number, of) in stored.tensors().iter().enumerate() {
                let row_bytes = of.dtype.row_bytes(of.cols);
                let mut bytes = vec![0; of.rows * row_bytes];
                stored.read(number, 0, &mut bytes).unwrap();
                // some rows alone
                let some = of.rows / 3..of.rows / 3 + of.rows.div_ceil(2);
                let mut part = vec![0; some.len() * row_bytes];
                stored.read(number, some.start, &mut part).unwrap();
                assert!(part == bytes[some.start * row_bytes..some.end * row_bytes]);
                let mut found = vec![0.0; of.rows * of.cols];
                let rows = bytes.chunks_exact(row_bytes);
                for (row, out) in rows.zip(found.chunks_exact_mut(of.cols)) {
                    cpu.dequantize(Row::inline(of.dtype, of.cols, row), out);
                }
                let mut expected = vec![0.0; found.len()];
                let down = of.id.role == Role::Down;
                let rows = if down { of.cols } else { of.rows };
                (checkpoint.read_rows(of.id, 0, rows, &mut expected)).unwrap();
                let same = (0..found.len()).all(|at| {
                    let (row, col) = (at / of.cols, at % of.cols);
                    let of_row = if down { col * of.rows + row } else { at };
                    found[at] == expected[of_row]
                });
                assert!(same, "{path:?}: {}", of.id);
                converted += usize::from(!of.verbatim && !of.id.role.is_vector());
            }
        }
    }
    assert!(converted > 300, "{converted}");
}

/// A copy of a fixture's GGUF whose embedding is a table, in a folder of its own.
fn copied() -> (tempfile::TempDir, PathBuf, Vec<u32>) {
    let case = fixtures().join("models/relu");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::copy(case.join("model.gguf"), &path).unwrap();
    (dir, path, Golden::load(&case, "golden.json").tokens)
}

fn append(path: &Path) {
    let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(b"more").unwrap();
}

#[test]
fn a_file_that_is_written_while_it_loads_is_an_error() {
    let (_dir, path, tokens) = copied();
    let model = Model::of_checkpoint(&path).unwrap();
    append(&path);
    let error = Engine::open(model, roomy(tokens.len())).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("has changed since it was opened"), "{text}");
}

#[test]
fn a_file_that_is_written_while_it_runs_is_an_error() {
    let (_dir, path, tokens) = copied();
    let mut engine = open(&path, roomy(tokens.len()));
    table_on_flash(&mut engine);
    let mut sequence = engine.new_sequence().unwrap();
    let next = |engine: &mut Engine, sequence: &mut _, token| {
        engine.forward(sequence, &[token], Logits::Last)
    };
    next(&mut engine, &mut sequence, tokens[0]).unwrap();
    append(&path);
    let error = next(&mut engine, &mut sequence, tokens[1]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("has changed since it was opened"), "{text}");
}

/// Matrices that cannot be read in parts are resident; an error of a too small budget says what to do about them.
#[test]
fn a_too_small_budget_names_pack_where_it_helps() {
    for (name, helps) in [("gpt_oss", true), ("qwen3", false)] {
        let model = Model::of_checkpoint(fixtures().join("models").join(name)).unwrap();
        let options = Options {
            budget: Budget::Bytes(1 << 20),
            ..roomy(8)
        };
        let error = Engine::open(model, options).err().unwrap().to_string();
        assert!(error.contains("the smallest that works"), "{error}");
        assert_eq!(error.contains("emberflow pack"), helps, "{error}");
    }
}

#[test]
fn a_file_that_is_replaced_stays_in_use() {
    let (dir, path, tokens) = copied();
    let expected = all_logits(&mut open(&path, roomy(tokens.len())), &tokens, 4);
    let model = Model::of_checkpoint(&path).unwrap();
    let other = dir.path().join("other");
    std::fs::write(&other, b"another file").unwrap();
    std::fs::rename(&other, &path).unwrap();
    let mut engine = Engine::open(model, roomy(tokens.len())).unwrap();
    table_on_flash(&mut engine);
    assert!(bits(&all_logits(&mut engine, &tokens, 4)) == bits(&expected));
}
