//! Logits against Hugging Face transformers, for every family and format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use emberflow::perplexity::measure;
use emberflow_engine::{
    Admission, Engine, Event, Lab, Options, Request, Sampling, Sparsity, Stepped, Stepper,
};
use emberflow_kernels::DType;
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze};
use std::ops::ControlFlow;

/// Largest difference allowed to the reference, at every position.
const TOLERANCE: f32 = 1e-3;

/// Largest difference allowed of the mean negative log likelihood.
const MEAN_TOLERANCE: f64 = 1e-4;

fn cases() -> Vec<PathBuf> {
    let mut cases: Vec<PathBuf> = std::fs::read_dir(fixtures().join("models"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    cases.sort();
    assert!(cases.len() >= 11, "fixtures are missing: {cases:?}");
    cases
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// The mean negative log likelihood of the tokens after the first, as `perplexity` measures it.
fn mean_nll(engine: &mut Engine, tokens: &[u32]) -> f64 {
    // windows begin with these
    let lead = engine.text().start_tokens();
    let mut rest = tokens.strip_prefix(lead).unwrap().to_vec();
    let mut next = |most: usize| {
        let later = rest.split_off(rest.len().min(most));
        Ok(std::mem::replace(&mut rest, later))
    };
    let measured = measure(engine, &mut next, tokens.len(), None).unwrap();
    assert_eq!(measured.tokens as usize, tokens.len() - 1);
    measured.perplexity.ln()
}

/// Packs `checkpoint` in f32 and compares prefill, single steps and perplexity with the golden ones.
/// Returns the prefill's logits.
fn compare(checkpoint: &Path, case: &Path, golden: &str, dir: &Path) -> Vec<f32> {
    let golden = Golden::load(case, golden);
    let expected = golden.logits(case);
    let container = packed(checkpoint, dir, DType::F32);
    let mut engine = open(&container, roomy(golden.tokens.len() + golden.greedy.len()));
    let prefill = all_logits(&mut engine, &golden.tokens, 16);
    let steps = all_logits(&mut engine, &golden.tokens, 1);
    assert!(
        bits(&prefill) == bits(&steps),
        "{checkpoint:?}: prefill differs from decode"
    );
    let difference = largest_difference(&prefill, &expected);
    assert!(
        difference <= TOLERANCE,
        "{checkpoint:?}: logits differ by {difference}"
    );
    let nll = mean_nll(&mut engine, &golden.tokens);
    let reference = golden.nll.unwrap();
    assert!(
        (nll - reference).abs() <= MEAN_TOLERANCE,
        "{checkpoint:?}: the tokens have {nll} nats each, in the reference {reference}"
    );

    let mut sequence = engine.new_sequence().unwrap();
    let request = Request {
        max_tokens: golden.greedy.len(),
        sampling: Sampling::default(),
        ignore_eos: true,
        ..Request::default()
    };
    let generation = engine
        .generate(&mut sequence, &golden.tokens, &request, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(
        generation.tokens, golden.greedy,
        "{checkpoint:?}: greedy continuation"
    );
    prefill
}

#[test]
fn every_family_agrees_with_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for case in cases() {
        let from_safetensors = compare(&case, &case, "golden.json", dir.path());
        let sub = dir.path().join(case.file_name().unwrap());
        std::fs::create_dir(&sub).unwrap();
        // the same weights as stored by llama.cpp, and with all experts of a layer in one tensor
        for other in ["model.gguf", "stacked.safetensors"].map(|name| case.join(name)) {
            if other.exists() {
                let logits = compare(&other, &case, "golden.json", &sub);
                let difference = largest_difference(&from_safetensors, &logits);
                // GGUF stores value heads of DeltaNets in another order, so sums over them have another
                // order; their decay is computed by another exp. The reference deviates as much from its
                // results in f64.
                let most = match case.file_name().and_then(|name| name.to_str()) {
                    Some("qwen3_5" | "qwen3_5_moe" | "qwen4_exp") => 1e-4,
                    Some("qwen3_5_whole" | "qwen3_next_plain") => 3e-5,
                    _ => 1e-5,
                };
                assert!(
                    difference <= most,
                    "{other:?}: differs from model.safetensors by {difference}"
                );
            }
        }
    }
}

/// Texts longer than the chunks in which transformers computes recurrences, and than several pools.
#[test]
fn long_texts_agree_with_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for case in cases() {
        if !case.join("golden-long.json").exists() {
            continue;
        }
        seen += 1;
        let golden = Golden::load(&case, "golden-long.json");
        let (expected, vocab) = (golden.logits(&case), golden.shape[1]);
        let container = packed(&case, dir.path(), DType::F32);
        let mut engine = open(&container, roomy(golden.tokens.len()));
        let logits = all_logits(&mut engine, &golden.tokens, 16);
        assert_eq!(golden.positions.len(), golden.shape[0]);
        for (&position, expected) in golden.positions.iter().zip(expected.chunks(vocab)) {
            let difference = largest_difference(&logits[position * vocab..][..vocab], expected);
            assert!(
                difference <= TOLERANCE,
                "{case:?}: logits of position {position} differ by {difference}"
            );
        }
    }
    assert!(seen >= 10, "only {seen} long texts");
}

#[test]
fn quantised_gguf_agrees_with_transformers_on_the_same_values() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for case in cases() {
        for kind in ["q8_0", "q4_0", "converted"] {
            let gguf = case.join(format!("model-{kind}.gguf"));
            if gguf.exists() {
                seen += 1;
                compare(&gguf, &case, &format!("golden-{kind}.json"), dir.path());
            }
        }
    }
    assert!(seen >= 2, "quantised fixtures are missing");
}

/// The mean of a prompt's last hidden states, as from transformers' `AutoModel`, in chunks of `chunk`.
fn mean_hidden(container: &Path, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let options = Options {
        lab: Lab {
            chunk,
            ..Lab::default()
        },
        ..roomy(tokens.len())
    };
    let mut engine = open(container, options);
    let mut stepper = Stepper::new(&mut engine);
    let request = Request {
        max_tokens: 0,
        mean_hidden: true,
        ..Request::default()
    };
    let sequence = stepper.engine().new_sequence().unwrap();
    let id = stepper
        .admit(Admission {
            sequence,
            prompt: tokens.to_vec(),
            request,
            samples: 1,
            bias: Vec::new(),
            constraint: None,
        })
        .unwrap();
    while let Stepped::Passed { events, .. } = stepper.step().unwrap() {
        let event = events.drain(..).next();
        if let Some(Event::Hidden { mean, .. }) = event {
            assert!(stepper.take(id).is_some(), "the text has ended");
            return mean;
        }
    }
    panic!("no mean");
}

#[test]
fn means_of_hidden_states_agree_with_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let means = std::fs::read_to_string(fixtures().join("means.json")).unwrap();
    let means: BTreeMap<String, Vec<f32>> = serde_json::from_str(&means).unwrap();
    assert!(means.len() >= 7);
    for (name, expected) in means {
        let case = fixtures().join("models").join(&name);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let container = packed(&case, dir.path(), DType::F32);
        let found = mean_hidden(&container, &tokens, 64);
        let difference = largest_difference(&found, &expected);
        assert!(difference <= 1e-4, "{name}: {difference}");
        for chunk in [1, 7] {
            let again = mean_hidden(&container, &tokens, chunk);
            assert!(bits(&again) == bits(&found), "{name} in chunks of {chunk}");
        }
    }
}

#[test]
fn half_precision_keys_and_values_stay_close() {
    let dir = tempfile::tempdir().unwrap();
    for case in cases() {
        let golden = Golden::load(&case, "golden.json");
        let expected = golden.logits(&case);
        let container = packed(&case, dir.path(), DType::F32);
        let options = Options {
            kv: DType::F16,
            ..roomy(golden.tokens.len())
        };
        let logits = all_logits(&mut open(&container, options), &golden.tokens, 7);
        let spread = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        // unscaled scores and cutoffs of gates amplify small differences
        let part = if case.display().to_string().contains("gemma3n") {
            0.05
        } else {
            0.01
        };
        let difference = largest_difference(&logits, &expected);
        assert!(
            difference <= part * spread,
            "{case:?}: {difference} of {spread}"
        );
    }
}

/// Checks the engine's central guarantee for every family: sparsity mode, memory budget, thread
/// count and chunk length change no bit.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn nothing_but_the_weights_decides_a_bit() {
    let mut offloaded = 0;
    let dir = tempfile::tempdir().unwrap();
    for case in cases() {
        let golden = Golden::load(&case, "golden.json");
        for quant in [DType::F32, DType::Q8, DType::Q4, DType::Q4k] {
            let container = packed(&case, dir.path(), quant);
            let context = golden.tokens.len();
            let dense = Options {
                sparsity: Sparsity::Dense,
                ..roomy(context)
            };
            let expected = bits(&all_logits(
                &mut open(&container, dense.clone()),
                &golden.tokens,
                16,
            ));
            let sparse = open(&container, roomy(context)).sparsity() == Sparsity::Exact;
            let modes: &[Sparsity] = if sparse {
                &[Sparsity::Dense, Sparsity::Exact]
            } else {
                &[Sparsity::Dense]
            };
            for (&sparsity, share, threads, chunk) in modes
                .iter()
                .flat_map(|m| [0.0, 0.4, 1.0].map(|share| (m, share)))
                .zip([(1, 16), (2, 5), (4, 1), (3, 64)].into_iter().cycle())
                .map(|((m, share), (threads, chunk))| (m, share, threads, chunk))
            {
                let options = Options {
                    sparsity,
                    threads,
                    lab: Lab {
                        chunk,
                        ..Lab::default()
                    },
                    ..roomy(context)
                };
                let mut engine = open(&container, options);
                squeeze(&mut engine, share);
                let before = engine.counters();
                let logits = all_logits(&mut engine, &golden.tokens, chunk);
                offloaded += usize::from(engine.counters().since(before).misses > 0);
                assert!(
                    bits(&logits) == expected,
                    "{case:?} {quant:?}: {sparsity:?}, {share} resident, {threads} threads, chunks of {chunk}"
                );
            }
        }
    }
    // two thirds of the runs have less than all in memory; the smallest fixtures fit anyway
    assert!(offloaded > 60, "only {offloaded} runs read anything");
}
