//! Projections and output heads that are read for every pass: no bit depends on it.

use std::ops::ControlFlow;
use std::path::Path;

use emberflow_engine::{
    Engine, Error, Lab, Logits, Model, Options, PlannedHead, Request, Sampling, Speculation,
    open_with_heads,
};
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
use emberflow_tests::{Golden, all_logits, bits, case, one_per_family, roomy, squeeze};

/// Options with matrices in many tiles.
fn streams(context: usize, io: IoChoice) -> Options {
    let roomy = roomy(context);
    Options {
        lab: Lab {
            io,
            tile: 6 << 10,
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
    let (mut families, mut tied, mut alone) = (0, 0, 0);
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
        for (share, chunk) in [(1.0, 16), (1.0, LEN), (0.0, 1), (0.4, 5)] {
            squeeze(&mut engine, share);
            let before = engine.counters();
            let found = bits(&all_logits(&mut engine, &tokens, chunk));
            assert!(found == expected, "{path:?}: {share}, {chunk} rows");
            let read = engine.counters().since(before);
            if chunk == LEN && read.misses == 0 {
                // All else is in memory.
                let streamed = engine.needs().streamed;
                assert!(read.bytes_read >= streamed, "{path:?}: {read:?}");
                alone += 1;
            }
        }
        families += 1;
        tied += usize::from(engine.config().tied_head);
    }
    let enough = families > 60 && tied > 10 && alone > 50;
    assert!(enough, "{families} {tied} {alone}");
}

/// Passes of several rows, and no drafts from memory, which would read.
#[test]
fn drafts_change_no_bit() {
    const LEN: usize = 40;
    let mut proposed = 0;
    for name in ["qwen3", "qwen3_next", "gemma3"] {
        let path = case(name);
        let generate = |engine: &mut Engine| {
            let prompt = prompt(engine, 9).repeat(2);
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
            (made.logits_hash, made.drafts.lookup.proposed)
        };
        let (expected, _) = generate(&mut open(&path, roomy(LEN + 32)));
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
        for _ in 0..2 {
            let (hash, drafts) = generate(&mut engine);
            assert_eq!(hash, expected, "{name}");
            proposed += drafts;
        }
    }
    assert!(proposed > 0);
}

/// The places of projections and of the output head in the file of a model that has an embedding of its own.
fn places(path: &Path) -> Vec<(Role, u64, u64)> {
    let model = Model::of_checkpoint(path).unwrap();
    assert!(!model.text().config().tied_head);
    let tensors = model.container().tensors().iter();
    let of = tensors.filter_map(|tensor| {
        let role = tensor.name().parse::<TensorId>().ok()?.role;
        let streams = role.is_projection() || role == Role::Head;
        streams.then_some((role, tensor.offset, tensor.len))
    });
    of.collect()
}

/// A failed read of a projection or of the output head ends the pass with an error, and every later one.
#[test]
fn a_failed_read_is_an_error() {
    let path = case("gpt_oss").join("model.gguf");
    let tokens = Golden::load(&case("gpt_oss"), "golden.json").tokens;
    let places = places(&path);
    let head = places.iter().find(|of| of.0 == Role::Head).unwrap();
    let projection = places.iter().rfind(|of| of.0 != Role::Head).unwrap();
    for (role, offset, len) in [head, projection] {
        let faults = Faults {
            bad: Some((offset + len / 2, offset + len / 2 + 1)),
            ..Faults::default()
        };
        let broken = IoChoice::Sim(SimOptions::new(Profile::Ufs31, 7).faulty(faults));
        let mut engine = open(&path, streams(tokens.len(), broken));
        let mut sequence = engine.new_sequence().unwrap();
        for _ in 0..2 {
            let outcome = engine.forward(&mut sequence, &tokens[..4], Logits::Last);
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("model.gguf"), "{role:?}: {error}");
            assert_eq!(sequence.len(), 0, "{role:?}");
        }
    }
}

/// Nothing else is read when the file is cut or written.
#[test]
fn a_file_that_changes_is_an_error() {
    let path = case("gpt_oss").join("model.gguf");
    let tokens = Golden::load(&case("gpt_oss"), "golden.json").tokens;
    let dir = tempfile::tempdir().unwrap();
    for cut in [true, false] {
        let file = dir.path().join("model.gguf");
        std::fs::copy(&path, &file).unwrap();
        let mut engine = open(&file, streams(3 * tokens.len(), IoChoice::Auto));
        let mut sequence = engine.new_sequence().unwrap();
        for _ in 0..2 {
            // The second pass reads no expert.
            sequence.clear();
            let before = engine.counters();
            engine
                .forward(&mut sequence, &tokens, Logits::Last)
                .unwrap();
            let read = engine.counters().since(before);
            assert!(read.misses == 0 || before.misses == 0, "{read:?}");
        }
        let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        let len = std::fs::metadata(&file).unwrap().len();
        open.set_len(if cut { len / 2 } else { len + 1 }).unwrap();
        sequence.clear();
        let error = engine
            .forward(&mut sequence, &tokens, Logits::Last)
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("model.gguf"), "{text}");
        assert_eq!(sequence.len(), 0);
    }
}

/// Drafts of a head would read the output head.
#[test]
fn heads_need_the_output_head_in_memory() {
    let path = emberflow_tests::fixtures().join("heads/qwen3_5");
    let engine = open(&path, streams(32, IoChoice::Auto));
    assert!(engine.needs().streamed > 0);
    let head = PlannedHead::of(&path, engine.text(), engine.options())
        .unwrap()
        .unwrap();
    assert!(matches!(head.open(&engine), Err(Error::HeadOnDisk)));
    // It takes no memory either.
    let held = |heads: bool| {
        let options = Options {
            speculation: Speculation {
                heads,
                lookup: true,
                ..Speculation::OFF
            },
            ..streams(64, IoChoice::Auto)
        };
        let model = Model::of_checkpoint(&path).unwrap();
        let engine = open_with_heads(model, options, |_| Ok::<_, Error>(())).unwrap();
        engine.needs().scratch
    };
    assert_eq!(held(true), held(false));
}
