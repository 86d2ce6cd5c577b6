//! FFNs of unpacked checkpoints, read in tiles under a budget: the text does not depend on what is in memory, in which
//! order reads complete, or how matrices are cut.

use std::path::{Path, PathBuf};

use emberflow_engine::{Engine, Lab, Logits, Model, Options, Span};
use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
use emberflow_tests::{Golden, all_logits, bits, case, roomy, squeeze};
use fastrand::Rng;

/// A dense model, one in two files, mixtures with and without shared experts, with dense layers, with experts of another
/// width, with experts beside a dense FFN, and biases.
const MODELS: [(&str, &str); 9] = [
    ("qwen3", ""),
    ("qwen3", "model.gguf"),
    ("llama_linear", ""),
    ("qwen3_moe", "model-q4_0.gguf"),
    ("deepseek_v3", "stacked.safetensors"),
    ("gemma4_moe", ""),
    ("gpt_oss", "model.gguf"),
    ("nemotron_h_latent", ""),
    ("jamba", ""),
];

fn models() -> Vec<(PathBuf, Vec<u32>)> {
    let models = MODELS.iter().map(|(name, file)| {
        let case = case(name);
        (case.join(file), Golden::load(&case, "golden.json").tokens)
    });
    let found = models.filter(|(path, _)| path.exists());
    found.collect()
}

/// Options with tiles of some rows.
fn options(context: usize, io: IoChoice, tile: usize) -> Options {
    let roomy = roomy(context);
    Options {
        lab: Lab {
            io,
            tile,
            ..roomy.lab.clone()
        },
        batch: 3,
        ..roomy
    }
}

fn open(path: &Path, options: Options) -> Engine {
    Engine::open(Model::of_checkpoint(path).unwrap(), options).unwrap()
}

/// The three texts at once, each token of each.
fn together(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    let mut sequences: Vec<_> = (0..3).map(|_| engine.new_sequence().unwrap()).collect();
    let mut found = Vec::new();
    for token in tokens {
        let spans = sequences.iter_mut().zip(0..);
        let spans = spans.map(|(sequence, _)| Span {
            sequence,
            tokens: std::slice::from_ref(token),
        });
        let mut spans: Vec<_> = spans.collect();
        let mut of_last = |row: usize, logits: &[f32]| {
            if row == 2 {
                found.extend(bits(logits));
            }
        };
        (engine.forward_batch(&mut spans, Logits::Each(&mut of_last))).unwrap();
    }
    found
}

#[test]
fn reads_change_no_bit() {
    let faults = Faults {
        short: 200,
        again: 200,
        delay: 300,
        shuffle: true,
        ..Faults::default()
    };
    let faulty = SimOptions::new(Profile::Ufs31, 7).faulty(faults);
    let mut random = Rng::with_seed(11);
    let models = models();
    assert!(models.len() >= 7, "{}", models.len());
    for (path, tokens) in &models {
        let mut resident = open(path, roomy(tokens.len()));
        let expected = bits(&all_logits(&mut resident, tokens, 16));
        for io in [IoChoice::Auto, IoChoice::Pread, IoChoice::Sim(faulty)] {
            let mut engine = open(path, options(tokens.len(), io, 1));
            for share in [0.7, 0.0, 0.3, 1.0, 0.1] {
                squeeze(&mut engine, share);
                let chunk = random.usize(1..=16);
                let before = engine.counters();
                let found = bits(&all_logits(&mut engine, tokens, chunk));
                assert!(
                    found == expected,
                    "{path:?} with {share} of the tiles, {chunk} rows"
                );
                if share < 0.5 {
                    let read = engine.counters().since(before);
                    assert!(read.reads > 0 && read.misses > 0, "{path:?}: {read:?}");
                }
                assert!(together(&mut engine, tokens) == expected, "{path:?}");
            }
        }
    }
}

/// What every token visits is scanned: a share of the memory saves that share of the reads, as no recency would.
#[test]
fn a_share_of_a_scan_stays() {
    let path = case("qwen3").join("model.gguf");
    let tokens = Golden::load(&case("qwen3"), "golden.json").tokens;
    let mut engine = open(&path, options(tokens.len(), IoChoice::Auto, 1));
    let mut hits = Vec::new();
    for share in [0.2, 0.5, 0.8, 1.0] {
        squeeze(&mut engine, share);
        // fills the memory
        all_logits(&mut engine, &tokens[..2], 1);
        let before = engine.counters();
        all_logits(&mut engine, &tokens, 1);
        let found = engine.counters().since(before);
        hits.push(found.hits as f64 / found.looked_up as f64);
    }
    // The ring is a large part of these few tiles.
    let least = [0.0, 0.25, 0.55, 1.0];
    assert!(
        hits.iter().zip(least).all(|(hit, least)| *hit >= least),
        "{hits:?}"
    );
}

/// A failed read ends the pass with an error that names the file, and every later one.
#[test]
fn a_failed_read_is_an_error() {
    let path = case("qwen3").join("model.gguf");
    let tokens = Golden::load(&case("qwen3"), "golden.json").tokens;
    let len = std::fs::metadata(&path).unwrap().len();
    let faults = Faults {
        bad: Some((len / 2, len)),
        ..Faults::default()
    };
    let faulty = SimOptions::new(Profile::Nvme, 5).faulty(faults);
    let mut engine = open(&path, options(tokens.len(), IoChoice::Sim(faulty), 1));
    let mut sequence = engine.new_sequence().unwrap();
    for _ in 0..3 {
        let result = engine.forward(&mut sequence, &tokens[..1], Logits::Last);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("model.gguf"), "{error}");
    }
}
