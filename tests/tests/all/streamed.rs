//! Projections and output heads that are read for every pass: no bit depends on it.

use std::ops::ControlFlow;
use std::path::Path;

use emberflow_engine::{Engine, Lab, Model, Options, Request, Sampling, Speculation};
use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
use emberflow_tests::{Golden, all_logits, bits, case, one_per_family, roomy, squeeze};

/// Options with matrices in many tiles.
fn streams(context: usize, io: IoChoice) -> Options {
    let roomy = roomy(context);
    Options {
        lab: Lab {
            io,
            tile: 1 << 9,
            streams: true,
            ..roomy.lab.clone()
        },
        ..roomy
    }
}

fn open(path: &Path, options: Options) -> Engine {
    Engine::open(Model::of_checkpoint(path).unwrap(), options).unwrap()
}

fn prompt(engine: &Engine, len: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(3);
    let vocab = engine.config().vocab;
    (0..len).map(|_| random.u32(..vocab)).collect()
}

/// Whatever the order in which reads complete.
#[test]
fn no_bit_depends_on_it_in_any_family() {
    const LEN: usize = 24;
    let faults = Faults {
        short: 200,
        again: 200,
        delay: 300,
        shuffle: true,
        ..Faults::default()
    };
    let faulty = IoChoice::Sim(SimOptions::new(Profile::Ufs31, 7).faulty(faults));
    let ios = [IoChoice::Auto, IoChoice::Pread, faulty];
    let (mut families, mut tied) = (0, 0);
    let others = [
        "qwen3/model.gguf",
        "gpt_oss/model.gguf",
        "deepseek_v3/stacked.safetensors",
    ];
    let others = others.map(case);
    for (path, io) in one_per_family()
        .iter()
        .chain(&others)
        .zip(ios.iter().cycle())
    {
        let mut resident = open(path, roomy(LEN));
        let tokens = prompt(&resident, LEN);
        let expected = bits(&all_logits(&mut resident, &tokens, 16));
        let mut engine = open(path, streams(LEN, *io));
        if engine.needs().streamed == 0 {
            continue;
        }
        for (share, chunk) in [(1.0, 16), (0.0, 1), (0.4, 5)] {
            squeeze(&mut engine, share);
            let before = engine.counters();
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{path:?}: {share}, {chunk} rows");
            let read = engine.counters().since(before);
            assert!(
                read.bytes_read >= engine.needs().streamed,
                "{path:?}: {read:?}"
            );
        }
        families += 1;
        tied += usize::from(engine.config().tied_head);
    }
    assert!(families > 60 && tied > 10, "{families} {tied}");
}

/// Passes of several rows, and no drafts from memory, which would read.
#[test]
fn drafts_change_no_bit() {
    const LEN: usize = 40;
    for name in ["qwen3", "qwen3_next", "gemma3"] {
        let path = case(name);
        let generate = |engine: &mut Engine| {
            let prompt = prompt(engine, 9);
            let mut sequence = engine.new_sequence().unwrap();
            let request = Request {
                max_tokens: LEN,
                ignore_eos: true,
                sampling: Sampling {
                    temperature: 0.0,
                    ..Sampling::default()
                },
                ..Request::default()
            };
            let mut on = |_| ControlFlow::Continue(());
            let made = engine.generate(&mut sequence, &prompt, &request, &mut on);
            let made = made.unwrap();
            assert_eq!(made.drafts.memory.proposed, 0);
            made.logits_hash
        };
        let expected = generate(&mut open(&path, roomy(LEN + 32)));
        let mut engine = open(
            &path,
            Options {
                speculation: Speculation {
                    depth: Some(3),
                    ..Speculation::AUTO
                },
                ..streams(LEN + 32, IoChoice::Auto)
            },
        );
        squeeze(&mut engine, 0.5);
        assert_eq!(generate(&mut engine), expected, "{name}");
        assert_eq!(generate(&mut engine), expected, "{name}, again");
    }
}

/// A failed read ends the pass with an error, and every later one; a file that was written or cut does, too.
#[test]
fn failures_are_errors() {
    let path = case("qwen3").join("model.gguf");
    let tokens = Golden::load(&case("qwen3"), "golden.json").tokens;
    let faults = Faults {
        bad: Some((0, 1 << 40)),
        ..Faults::default()
    };
    let broken = IoChoice::Sim(SimOptions::new(Profile::Ufs31, 7).faulty(faults));
    let mut engine = open(&path, streams(tokens.len(), broken));
    let mut sequence = engine.new_sequence().unwrap();
    for _ in 0..2 {
        let outcome = engine.forward(&mut sequence, &tokens[..4], emberflow_engine::Logits::Last);
        assert!(outcome.is_err());
        assert_eq!(sequence.len(), 0);
    }
    let dir = tempfile::tempdir().unwrap();
    for cut in [true, false] {
        let file = dir.path().join("model.gguf");
        std::fs::copy(&path, &file).unwrap();
        let mut engine = open(&file, streams(tokens.len(), IoChoice::Auto));
        let mut sequence = engine.new_sequence().unwrap();
        let mut pass = |engine: &mut Engine, tokens: &[u32]| {
            engine.forward(&mut sequence, tokens, emberflow_engine::Logits::Last)
        };
        pass(&mut engine, &tokens[..2]).unwrap();
        let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        let len = std::fs::metadata(&file).unwrap().len();
        open.set_len(if cut { len / 2 } else { len + 1 }).unwrap();
        let error = pass(&mut engine, &tokens[2..3]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("model.gguf"), "{text}");
    }
}
