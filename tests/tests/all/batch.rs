//! Several sequences in one pass: each gives the same bits as alone.

use std::path::PathBuf;

use std::ops::ControlFlow;

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::{Budget, Engine, Lab, Logits, Options, Request, Sampling, Sequence, Span};
use emberflow_kernels::DType;
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze};

fn cases() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(fixtures().join("models")).unwrap();
    let mut cases: Vec<_> = folders.map(|e| e.unwrap().path()).collect();
    cases.retain(|path| path.is_dir());
    cases.sort();
    assert!(cases.len() >= 11, "fixtures are missing: {cases:?}");
    cases
}

/// Runs texts together, `steps[i]` tokens of text `i` in each pass, until each ends. Returns the
/// logits of every token of each.
fn together(engine: &mut Engine, texts: &[Vec<u32>], steps: &[usize]) -> Vec<Vec<f32>> {
    let mut sequences: Vec<Sequence> = texts
        .iter()
        .map(|_| engine.new_sequence().unwrap())
        .collect();
    let mut out = vec![Vec::new(); texts.len()];
    loop {
        let mut owners = Vec::new();
        let mut spans = Vec::new();
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let rest = &texts[i][sequence.len()..];
            let tokens = &rest[..steps[i].min(rest.len())];
            if !tokens.is_empty() {
                owners.extend(tokens.iter().map(|_| i));
                spans.push(Span { sequence, tokens });
            }
        }
        if spans.is_empty() {
            return out;
        }
        let mut sink = |row: usize, logits: &[f32]| out[owners[row]].extend_from_slice(logits);
        engine
            .forward_batch(&mut spans, Logits::Each(&mut sink))
            .unwrap();
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_sequence_of_a_batch_is_what_it_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut offloaded = 0;
    for case in cases() {
        let golden = Golden::load(&case, "golden.json");
        let first = golden.tokens.clone();
        let texts = [
            first[2..].to_vec(),
            first.iter().rev().copied().collect(),
            first.clone(),
        ];
        for quant in [DType::F32, DType::Q4] {
            let container = packed(&case, dir.path(), quant);
            let options = roomy(first.len());
            let mut alone = open(&container, options.clone());
            let expected: Vec<_> = (texts.iter())
                .map(|text| bits(&all_logits(&mut alone, text, 1)))
                .collect();
            let ways = [
                (1.0, 2, [1, 1, 1]),
                (0.4, 1, [1, 1, 1]),
                (0.0, 4, [1, 1, 1]),
                (0.4, 2, [3, 1, 2]),
            ];
            for (share, threads, steps) in ways {
                let batch = Options {
                    threads,
                    batch: 3,
                    lab: Lab {
                        chunk: 6,
                        ..Lab::default()
                    },
                    ..options.clone()
                };
                let mut engine = open(&container, batch);
                squeeze(&mut engine, share);
                let before = engine.counters();
                let found = together(&mut engine, &texts, &steps);
                offloaded += usize::from(engine.counters().since(before).misses > 0);
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(
                        bits(found) == *expected,
                        "{case:?} {quant:?}: text {i}, {share} resident, {threads} threads, {steps:?}"
                    );
                }
            }
        }
    }
    assert!(offloaded > 30, "only {offloaded} runs read anything");
}

/// Contexts of several blocks of attention, where a long and a short sequence share a pass.
#[test]
fn long_and_short_sequences_share_a_pass() {
    let engine = |batch| {
        let model = open_model(&ModelArg { model: None }).unwrap();
        let options = Options {
            budget: Budget::FfnShare(0.6),
            threads: 2,
            batch,
            context: 400,
            ..Options::default()
        };
        Engine::open(model, options).unwrap()
    };
    let mut alone = engine(1);
    let prompt: Vec<u32> = (0..300).map(|i| 40 + i * 7 % 900).collect();
    let long = alone.text().encode("A slice").unwrap();
    let mut text = prompt.clone();
    text.extend(&long);
    let expected = all_logits(&mut alone, &text, 16);
    let short = all_logits(&mut alone, &long, 16);
    let vocab = alone.config().vocab as usize;

    let mut engine = engine(3);
    let mut first = engine.new_sequence().unwrap();
    for chunk in prompt.chunks(engine.chunk()) {
        engine.forward(&mut first, chunk, Logits::Last).unwrap();
    }
    // A fork continues from the other's position, and does not affect it.
    let mut fork = first.fork().unwrap();
    let mut other = engine.new_sequence().unwrap();
    for (i, &token) in long.iter().enumerate() {
        let tokens = [token];
        let mut spans = [&mut fork, &mut other].map(|sequence| Span {
            sequence,
            tokens: &tokens,
        });
        let mut rows = Vec::new();
        let mut sink = |_: usize, logits: &[f32]| rows.push(bits(logits));
        engine
            .forward_batch(&mut spans, Logits::Each(&mut sink))
            .unwrap();
        let at = |all: &[f32], i: usize| bits(&all[i * vocab..(i + 1) * vocab]);
        assert!(rows[0] == at(&expected, 300 + i), "token {i} of the fork");
        assert!(rows[1] == at(&short, i), "token {i} of the short one");
    }
    assert_eq!((first.len(), fork.len()), (300, 300 + long.len()));
    let refused = engine.forward_batch(&mut [], Logits::Last);
    assert!(refused.is_err(), "a pass without tokens");
}

/// The border between the regions follows the number of sequences, one step per pass: the call
/// itself reads nothing, and no result changes.
#[test]
fn the_border_follows_the_batch_without_reads() {
    let model = open_model(&ModelArg { model: None }).unwrap();
    let options = Options {
        budget: Budget::FfnShare(0.75),
        threads: 2,
        batch: 8,
        context: 128,
        ..Options::default()
    };
    let mut engine = Engine::open(model, options).unwrap();
    squeeze(&mut engine, 0.75);
    let text = engine.text().encode("A vector of strings").unwrap();
    let expected = bits(&all_logits(&mut engine, &text, 4));
    let mut hot = Vec::new();
    for sequences in [1, 2, 4, 8, 3, 1, 8] {
        let before = engine.counters();
        engine.set_batch(sequences).unwrap();
        let after = engine.counters();
        assert_eq!(
            (before.reads, before.bytes_read),
            (after.reads, after.bytes_read)
        );
        assert!(engine.memory().ledger.used() <= engine.memory().budget());
        hot.push(engine.memory().hot_clusters);
        for chunk in [4, 1] {
            let found = bits(&all_logits(&mut engine, &text, chunk));
            assert!(found == expected, "{sequences} sequences");
        }
    }
    assert!(hot[0] < hot[1] && hot[1] < hot[2], "{hot:?}");
    assert_eq!((hot[0], hot[3]), (hot[5], hot[6]), "{hot:?}");
}

/// The model's output alone determines the score of each text, and the best one.
#[test]
fn the_best_text_is_the_likeliest_of_those_that_were_drawn() {
    let model = open_model(&ModelArg { model: None }).unwrap();
    let options = Options {
        threads: 2,
        batch: 4,
        ..roomy(64)
    };
    let mut engine = Engine::open(model, options).unwrap();
    let prompt = engine.text().encode("A trait object").unwrap();
    let vocab = engine.config().vocab as usize;
    let mut places = Vec::new();
    for seed in 0..5 {
        let request = Request {
            max_tokens: 12,
            sampling: Sampling {
                temperature: 0.9,
                seed,
                ..Sampling::default()
            },
            ignore_eos: true,
            ..Request::default()
        };
        let sequence = engine.new_sequence().unwrap();
        let batch = engine
            .generate_batch(sequence, &prompt, &request, 4, &mut || {
                ControlFlow::Continue(())
            })
            .unwrap();
        let mut scores = Vec::new();
        for (i, sample) in (0..).zip(&batch.samples) {
            assert_eq!((sample.seed, sample.tokens.len()), (seed + i, 12));
            let text = [&prompt[..], &sample.tokens].concat();
            let logits = all_logits(&mut engine, &text, 16);
            let rows = logits.chunks(vocab).skip(prompt.len() - 1);
            let mut sum = 0.0;
            for (row, &token) in rows.zip(&sample.tokens) {
                let all: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
                sum += f64::from(row[token as usize]) - all.ln();
            }
            let score = sum / 12.0;
            assert!((score - sample.score()).abs() < 1e-5, "{score} {sample:?}");
            scores.push(score);
        }
        let best = scores.iter().copied().fold(f64::MIN, f64::max);
        assert_eq!(scores[batch.best()], best, "{scores:?}");
        places.push(batch.best());
    }
    places.sort_unstable();
    places.dedup();
    assert!(places.len() > 1, "always the same place: {places:?}");
}
