//! Logits hashes of many commands, compared with recorded ones.
//!
//! `hashes.txt` has a line for each command: the hash of every text that it samples, then its
//! arguments. A change of a line means that the output of users' models changes, so it must be
//! intentional. `EMBERFLOW_RECORD=1 cargo test --release -p emberflow --test all hashes::` writes
//! the file again.

use crate::common;
use std::path::Path;

const RECORDED: &str = "tests/all/hashes.txt";

/// Models of the commands, created in this order.
const MODELS: &[&str] = &[
    "export -o demo-hf",
    "pack demo-hf -o f32.ember --quant f32",
    "pack demo-hf -o f16.ember --quant f16",
    "pack demo-hf -o q8.ember --quant q8",
    "pack demo-hf -o q4.ember --quant q4",
    "pack demo-hf -o ordered.ember --quant q4 --stats STATS",
    "train-predictor q8.ember -f HELDOUT --tokens 2048 -o named.ember",
    "synth --shape tiny --seed 3 -o relu-hf",
    "pack relu-hf -o relu.ember --quant q4",
    "synth --shape tiny --act silu --seed 3 -o silu-hf",
    "pack silu-hf -o silu.ember --quant q4",
    "synth --shape tiny --act drelu --seed 3 -o drelu-hf",
    "pack drelu-hf -o drelu.ember --quant q8",
    "synth --shape tiny --act relu2 --seed 3 --quant q4_0 -o relu2.gguf",
    "pack relu2.gguf -o relu2.ember --quant q4",
];

/// A prompt of more tokens than the shortest chunk.
const PROMPT: &str = "A vector is a growable array of values that lie next to each other on the \
    heap. It has a length, the number of its values, and a capacity, the number of values that \
    it has room for before it must be moved. When its length exceeds its capacity, its capacity \
    is made larger and its values are moved, which can be slow.";

/// Commands on the bundled model with experts.
const EXPERTS: &[&str] = &[
    "--temp 0",
    "--temp 0 --ffn-resident 0.5 --threads 1",
    "--temp 0 --ffn-resident 0.1 --chunk 16 --read-ahead on",
    "--temp 0 --sparsity dense --ffn-resident 0.5 --read-ahead on",
    "--temp 0.8 --best-of 4 --ffn-resident 0.25",
];

/// Arguments of `point`, equal to those of `run`; the prompt and a length are added.
fn commands() -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |models: &[&str], variants: &[&str]| {
        for model in models {
            all.extend(variants.iter().map(|v| format!("{model} {v}")));
        }
    };
    add(
        &["", "q4.ember", "ordered.ember", "relu.ember"],
        &[
            "--temp 0",
            "--temp 0 --ffn-resident 0.75 --threads 1",
            "--temp 0 --ffn-resident 0.45 --chunk 16",
            "--temp 0 --ffn-resident 0.25 --io pread",
            "--temp 0 --ffn-resident 0 --chunk 64",
            "--temp 0 --sparsity dense --ffn-resident 0.5",
            "--temp 0.8 --seed 7 --top-k 20 --kv f32",
            "--temp 0.8 --best-of 4 --ffn-resident 0.5",
        ],
    );
    add(
        &[
            "f32.ember",
            "f16.ember",
            "q8.ember",
            "drelu.ember",
            "relu2.ember",
        ],
        &[
            "--temp 0 --ffn-resident 0.4",
            "--temp 0.9 --top-p 0.9 --best-of 3 --threads 2 --chunk 7",
        ],
    );
    add(
        &["named.ember"],
        &[
            "--temp 0 --sparsity predicted",
            "--temp 0 --sparsity predicted --ffn-resident 0.5",
            "--temp 0 --sparsity predicted --ffn-resident 0.3 --threads 1 --chunk 5",
            "--temp 0 --sparsity exact --ffn-resident 0.5",
            "--temp 0.8 --best-of 5 --sparsity predicted --ffn-resident 0.5",
        ],
    );
    add(
        &["silu.ember"],
        &[
            "--temp 0",
            "--temp 0 --ffn-resident 0.5 --threads 1",
            "--temp 0 --ffn-resident 0 --chunk 64",
            "--temp 0.7 --best-of 2 --ffn-resident 0.4",
        ],
    );
    let policies = emberflow_engine::Ablation::ALL.map(|p| p.name());
    add(
        &["", "relu.ember"],
        &policies
            .map(|p| format!("--temp 0 --ffn-resident 0.5 --ablation {p}"))
            .each_ref()
            .map(|s| s.as_str()),
    );
    add(&["demo-moe"], EXPERTS);
    all
}

/// The hashes of all texts that a command samples.
fn hashes(dir: &Path, command: &str) -> String {
    let mut run = common::emberflow();
    run.current_dir(dir)
        .arg("point")
        .args(command.split_whitespace());
    run.args(["-p", PROMPT, "-n", "12", "--ignore-eos", "--json"]);
    let output = common::succeed(&mut run);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |v: &serde_json::Value| v["logits_hash"].as_str().unwrap().to_owned();
    match json["best_of"]["samples"].as_array() {
        Some(samples) => samples.iter().map(text).collect::<Vec<_>>().join(","),
        None => text(&json),
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_answer_is_the_recorded_one() {
    let dir = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let demo = here.join("../models/demo");
    for made in MODELS {
        let made = made
            .replace(
                "STATS",
                &demo.join("activation_stats.json").to_string_lossy(),
            )
            .replace("HELDOUT", &demo.join("heldout.txt").to_string_lossy());
        let mut words: Vec<&str> = made.split_whitespace().collect();
        if words[0] == "synth" {
            let output = dir.path().join(words.pop().unwrap());
            let output = output.display().to_string();
            words.push(&output);
            emberflow_benches::call(&words).unwrap();
            continue;
        }
        let mut command = common::emberflow();
        common::succeed(command.current_dir(dir.path()).args(words));
    }
    let found: String = (commands().iter())
        .map(|command| format!("{} {}\n", hashes(dir.path(), command), command.trim()))
        .collect();
    let file = here.join(RECORDED);
    if std::env::var_os("EMBERFLOW_RECORD").is_some() {
        std::fs::write(&file, &found).unwrap();
    }
    let recorded = std::fs::read_to_string(&file).unwrap();
    assert!(recorded.lines().count() >= 40, "the list lost commands");
    for (found, recorded) in found.lines().zip(recorded.lines()) {
        assert_eq!(found, recorded);
    }
    assert_eq!(found.lines().count(), recorded.lines().count());
}
