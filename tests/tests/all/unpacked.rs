//! Checkpoints that run as they lie: against transformers, and against the same weights packed.

use std::path::{Path, PathBuf};

use emberflow_engine::{Budget, Engine, Lab, Model, Options};
use emberflow_tests::{Golden, all_logits, bits, fixtures, roomy};

/// Largest difference allowed to the reference, at every position.
const TOLERANCE: f32 = 1e-3;

/// Largest mean difference of a model in blocks, as a share of the largest logit: products of blocks read activations of 8
/// bits, and where experts nearly tie, a row may choose another one, which changes its logits much more.
const BLOCKS: f32 = 0.03;

/// Models that need `pack`: their table of n-grams is stored in parts.
const LEFT_OUT: [&str; 4] = [
    "qwen4_exp",
    "qwen4_exp_fp8",
    "qwen4_exp_plain",
    "qwen4_exp_streams",
];

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
fn every_family_runs_as_it_lies() {
    let (mut seen, mut failed) = (0, Vec::new());
    for case in cases() {
        for (name, golden) in FILES {
            let checkpoint = case.join(name);
            if !checkpoint.exists() {
                continue;
            }
            if let Err(error) = Model::of_checkpoint(&checkpoint) {
                let text = error.to_string();
                assert!(text.contains("emberflow pack"), "{checkpoint:?}: {text}");
                let known = LEFT_OUT.iter().any(|name| case.ends_with(name));
                assert!(known, "{checkpoint:?}: {text}");
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
