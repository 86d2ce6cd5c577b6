//! A public pretrained model, compared with transformers: SmolLM2-135M-Instruct as GGUF in Q4_1.
//!
//! The file is not in this repository. `.ci/real` fetches it and sets `EMBERFLOW_SMOLLM2` to its path;
//! without it the test says SKIPPED. `tests/fixtures/make_real.py` wrote the numbers.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::common::{emberflow, json, succeed, words};
use emberflow_engine::{Budget, Engine, Logits, Model, Options};
use emberflow_kernels::DType;
use serde_json::Value;

/// Largest difference of a logit to the reference if the weights are the same floats.
const LOGIT: f64 = 2e-3;
/// Largest ratio of perplexities if the weights are the same floats.
const SAME: f64 = 1.0005;
/// The same in the file's own blocks, whose products read activations of 8 bits.
const UNPACKED: f64 = 1.006;
/// The same in the format that `pack` chooses: never fewer bits than the file.
const DEFAULT: f64 = 1.02;

/// The file, if there is one.
fn gguf() -> Option<PathBuf> {
    let path = std::env::var_os("EMBERFLOW_SMOLLM2").map(PathBuf::from);
    if path.is_none() {
        println!(
            "SKIPPED: EMBERFLOW_SMOLLM2 does not name a SmolLM2-135M-Instruct.Q4_1.gguf (see .ci/real)"
        );
    }
    path
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn golden() -> Value {
    let path = repository().join("tests/fixtures/real/smollm2.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

fn pack(gguf: &Path, output: &Path, options: &[&str]) -> String {
    succeed(
        emberflow()
            .arg("pack")
            .arg(gguf)
            .arg("-o")
            .arg(output)
            .args(options),
    );
    output.display().to_string()
}

/// Tokens, log-probabilities of the prompt and the highest logits of the last position of one text.
fn compare_logits(engine: &mut Engine, case: &Value) {
    let text = case["text"].as_str().unwrap();
    let tokens = ids(&case["tokens"]);
    assert_eq!(engine.text().encode(text).unwrap(), tokens, "{text:?}");
    let mut rows: Vec<Vec<f32>> = Vec::new();
    let mut sequence = engine.new_sequence().unwrap();
    let mut sink = |_: usize, logits: &[f32]| rows.push(logits.to_vec());
    engine
        .forward(&mut sequence, &tokens, Logits::Each(&mut sink))
        .unwrap();
    for (at, expected) in case["log_probs"].as_array().unwrap().iter().enumerate() {
        let row = &rows[at];
        let sum: f64 = row.iter().map(|&v| f64::from(v).exp()).sum();
        let found = f64::from(row[tokens[at + 1] as usize]) - sum.ln();
        let expected = expected.as_f64().unwrap();
        assert!(
            (found - expected).abs() <= LOGIT,
            "{text:?}, token {at}: {found} instead of {expected}"
        );
    }
    for pair in case["top"].as_array().unwrap() {
        let found = f64::from(rows.last().unwrap()[pair[0].as_u64().unwrap() as usize]);
        let expected = pair[1].as_f64().unwrap();
        assert!(
            (found - expected).abs() <= LOGIT,
            "{text:?}, token {}: logit {found} instead of {expected}",
            pair[0]
        );
    }
}

/// Greedy text under a budget for a part of the FFN; returns the hash.
fn compare_greedy(model: &str, case: &Value, share: &str) -> String {
    let (text, greedy) = (case["text"].as_str().unwrap(), ids(&case["greedy"]));
    let count = greedy.len().to_string();
    let done = json(&[
        "run",
        model,
        "-p",
        text,
        "-n",
        &count,
        "--temp",
        "0",
        "--repeat-penalty",
        "1",
        "--ffn-resident",
        share,
        "--json",
    ]);
    // An end-of-text token ends a text and is not one of its tokens.
    let found = ids(&done["tokens"]);
    assert_eq!(found, greedy[..found.len()], "{text:?}: {}", done["text"]);
    assert!(
        found.len() + 1 >= greedy.len(),
        "{text:?}: {}",
        done["text"]
    );
    done["logits_hash"].as_str().unwrap().to_owned()
}

fn perplexity(model: &str, golden: &Value) -> f64 {
    let number = |key: &str| golden["held_out"][key].to_string();
    let text = repository().join("models/demo/heldout.txt");
    let done = json(&[
        "perplexity",
        model,
        "-f",
        &text.display().to_string(),
        "--window",
        &number("window"),
        "--limit",
        &number("limit"),
        "--json",
    ]);
    assert_eq!(done["tokens"], golden["held_out"]["scored"]);
    done["perplexity"].as_f64().unwrap() / golden["held_out"]["perplexity"].as_f64().unwrap()
}

#[test]
fn smollm2_is_what_transformers_computes() {
    let Some(gguf) = gguf() else { return };
    let golden = golden();
    let dir = tempfile::tempdir().unwrap();
    let exact = pack(&gguf, &dir.path().join("f32.ember"), &["--quant", "f32"]);
    let mut options = Options::new(Budget::Bytes(1 << 40));
    options.context = 256;
    options.kv = DType::F32;
    let mut engine = Engine::open(Model::load(&exact).unwrap(), options).unwrap();
    let texts = golden["texts"].as_array().unwrap().iter();
    for case in texts.clone().chain([&golden["chat"]]) {
        compare_logits(&mut engine, case);
    }
    drop(engine);
    for case in texts.chain([&golden["chat"]]) {
        let whole = compare_greedy(&exact, case, "1");
        assert_eq!(whole, compare_greedy(&exact, case, "0.3"));
    }
    let ratio = perplexity(&exact, &golden);
    assert!(
        (1.0 / SAME..=SAME).contains(&ratio),
        "perplexity: {ratio} of the reference"
    );
    std::fs::remove_file(&exact).unwrap();

    let default = pack(&gguf, &dir.path().join("default.ember"), &[]);
    let ratio = perplexity(&default, &golden);
    assert!(
        ratio <= DEFAULT,
        "packed by default: perplexity {ratio} of the reference"
    );
    // Its chat's first two tokens are 0.08 apart, so their order in 8 bits is undefined.
    let text = golden["texts"][0]["text"].as_str().unwrap();
    let done = json(&[
        "run", &default, "-p", text, "-n", "8", "--temp", "0", "--json",
    ]);
    let answer = done["text"].as_str().unwrap();
    assert!(answer.contains("Paris"), "{answer}");
}

/// The unpacked file: the same perplexity as in floats, up to activations of 8 bits.
#[test]
fn smollm2_runs_unpacked() {
    let Some(gguf) = gguf() else { return };
    let golden = golden();
    let model = gguf.display().to_string();
    let ratio = perplexity(&model, &golden);
    assert!(
        (1.0 / UNPACKED..=UNPACKED).contains(&ratio),
        "perplexity: {ratio} of the reference"
    );
    let text = golden["texts"][0]["text"].as_str().unwrap();
    let plan = json(&["plan", &model, "--context", "256", "--json"]);
    let smallest = plan["smallest_bytes"].as_u64().unwrap();
    let run = |threads, memory: &str| {
        let done = json(&[
            "run",
            &model,
            "-p",
            text,
            "-n",
            "8",
            "--temp",
            "0",
            "--context",
            "256",
            "--threads",
            threads,
            "--memory",
            memory,
            "--json",
        ]);
        let answer = done["text"].as_str().unwrap().to_owned();
        assert!(answer.contains("Paris"), "{answer}");
        done
    };
    let whole = run("1", "1GiB");
    assert_eq!(whole["logits_hash"], run("2", "1GiB")["logits_hash"]);
    // Attention and output head are read for every token.
    let least = run("2", &smallest.to_string());
    assert_eq!(whole["logits_hash"], least["logits_hash"]);
    let held = |done: &Value| done["memory"]["fixed"].as_u64().unwrap();
    assert!(held(&least) < held(&whole) / 2, "{least}");
    let peak = least["memory"]["peak_rss_bytes"].as_u64().unwrap();
    assert!(peak <= smallest, "{peak} of {smallest}");
}

/// The README's commands for this model, in a folder with the file.
#[test]
fn the_readmes_commands_work() {
    let Some(gguf) = gguf() else { return };
    let readme = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let mut blocks = readme.split("```bash\n").skip(1);
    let block = blocks
        .find(|block| block.starts_with("pip download"))
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(&gguf, dir.path().join("SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap();
    let lines = block.split("```").next().unwrap().lines();
    let commands: Vec<&str> = lines
        .filter_map(|line| line.strip_prefix("emberflow "))
        .collect();
    assert_eq!(commands.len(), 2, "{block}");
    for line in commands {
        let mut child = (emberflow().args(words(line)).current_dir(dir.path()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let question = b"What is gravity?\n";
        child.stdin.take().unwrap().write_all(question).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{line}: {text}");
        assert!(!text.trim().is_empty(), "{line}");
    }
}
