//! The same bits whatever the chunks of a prompt, the threads, the memory and the instruction set, for every kind
//! of state and of layer, in texts longer than windows, pools and chunks.

use std::fmt::Write as _;
use std::process::Command;

use emberflow_engine::{Engine, Lab, Model, Options};
use emberflow_kernels::{Cpu, DType};
use emberflow_tests::kinds::{KINDS, Kind, fixture};
use emberflow_tests::{all_logits, bits, give, roomy};
use xxhash_rust::xxh3::xxh3_64;

/// Tokens of a prompt.
const PROMPT: usize = 150;

/// The file for [`hashes`], in a process with another instruction set.
const FILE: &str = "EMBERFLOW_TEST_HASHES";

/// Formats of the weights; the models take turns.
const FORMATS: [DType; 7] = [
    DType::Q8,
    DType::Q4c,
    DType::F32,
    DType::Q4k,
    DType::Q8c,
    DType::F16,
    DType::Q4,
];

/// Fixtures beside the kinds: predicted streams and cutoffs of gates, an indexer, sinks and experts in MXFP4.
const OTHERS: [&str; 3] = ["gemma3n", "deepseek_v32", "gpt_oss"];

/// A model to compare.
#[derive(Debug, Clone, Copy)]
enum Subject {
    Kind(Kind),
    Fixture(&'static str),
}

impl Subject {
    fn model(self, quant: DType) -> Model {
        match self {
            Self::Kind(kind) => kind.model_in(quant),
            Self::Fixture(name) => fixture(name, quant),
        }
    }

    fn prompt(self) -> Vec<u32> {
        match self {
            Self::Kind(kind) => kind.prompt(1, PROMPT),
            Self::Fixture(_) => Kind::Latent.prompt(1, PROMPT),
        }
    }
}

fn subjects() -> impl Iterator<Item = Subject> {
    let kinds = KINDS.into_iter().map(Subject::Kind);
    kinds.chain(OTHERS.into_iter().map(Subject::Fixture))
}

fn engine(subject: Subject, quant: DType, threads: usize, chunk: usize) -> Engine {
    let options = Options {
        threads,
        lab: Lab {
            chunk,
            ..Lab::default()
        },
        ..roomy(PROMPT)
    };
    Engine::open(subject.model(quant), options).unwrap()
}

#[test]
fn chunks_change_no_bit() {
    for subject in subjects() {
        let prompt = subject.prompt();
        let in_chunks = |chunk| {
            let mut engine = engine(subject, DType::Q8, 2, chunk);
            assert_eq!(engine.chunk(), chunk);
            bits(&all_logits(&mut engine, &prompt, chunk))
        };
        let expected = in_chunks(PROMPT);
        for chunk in [1, 7, 64] {
            assert!(
                in_chunks(chunk) == expected,
                "{subject:?}: chunks of {chunk}"
            );
        }
    }
}

/// A line for each model with a hash of its logits, which are equal for several numbers of threads, with all in memory
/// and with a part of the FFN on disk.
fn hashes() -> String {
    let mut lines = String::new();
    for (subject, quant) in subjects().zip(FORMATS.into_iter().cycle()) {
        let prompt = subject.prompt();
        let mut found = Vec::new();
        for (threads, chunk) in [(1, 64), (2, 16), (4, PROMPT)] {
            let mut engine = engine(subject, quant, threads, chunk);
            for share in [1.0, 0.1] {
                give(&mut engine, share);
                let before = engine.counters();
                let logits = all_logits(&mut engine, &prompt, chunk);
                let read = engine.counters().since(before).misses > 0;
                assert_eq!(read, share < 1.0, "{subject:?}: {share}");
                let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
                found.push(xxh3_64(&bytes));
            }
        }
        found.dedup();
        let name = Cpu::detect().name();
        assert_eq!(
            found.len(),
            1,
            "{subject:?} in {quant:?} with {name}: {found:?}"
        );
        writeln!(lines, "{subject:?} in {quant:?}: {}", found[0]).unwrap();
    }
    lines
}

/// Writes [`hashes`] if this test's program was started again, and otherwise does nothing.
#[test]
fn the_part_of_another_instruction_set() {
    if let Ok(file) = std::env::var(FILE) {
        assert_eq!(Cpu::ignored_override(), None);
        std::fs::write(file, hashes()).unwrap();
    }
}

#[test]
fn threads_memory_and_instruction_sets_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let expected = hashes();
    for cpu in Cpu::all() {
        if cpu == Cpu::detect() {
            continue;
        }
        let (name, file) = (cpu.name(), dir.path().join(cpu.name()));
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "same_bits::the_part_of_another_instruction_set"])
            .env(FILE, &file)
            .env("EMBERFLOW_ISA", name)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: {said}");
        assert_eq!(std::fs::read_to_string(file).unwrap(), expected, "{name}");
    }
}
