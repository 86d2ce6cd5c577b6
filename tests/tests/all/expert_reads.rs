//! When experts are read, and how often: once for each chunk of a prompt, before attention if tokens choose them, and
//! not again after the prompt of another text.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use emberflow_engine::{
    AttentionSeen, Engine, FfnSeen, Lab, Logits, Options, Sequence, Span, StreamRows,
};
use emberflow_kernels::DType;
use emberflow_storage::container::{BankEntry, Container};
use emberflow_storage::trace;
use emberflow_tests::{case, open, packed, roomy, squeeze};

/// Experts of every form of attention and state, beside dense layers and shared experts.
const CASES: [&str; 9] = [
    "bailing_hybrid",
    "deepseek_v32",
    "deepseek_v4",
    "glm4_moe_lite",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "qwen3_next",
    "qwen4_exp",
];

/// Bytes of the banks of each layer with an FFN.
fn banks(path: &Path) -> Vec<Vec<Range<u64>>> {
    let container = Container::open(path).unwrap();
    let bytes = |bank: &BankEntry| bank.offset..bank.offset + bank.len;
    let layers = container.banks().chunk_by(|a, b| a.layer == b.layer);
    layers
        .map(|banks| banks.iter().map(bytes).collect())
        .collect()
}

/// An engine with a share of its FFN in memory, which records its reads.
fn engine(path: &Path, share: f64, chunk: usize, context: usize) -> Engine {
    let options = Options {
        batch: 2,
        lab: Lab {
            chunk,
            trace: 1 << 14,
            ..Lab::default()
        },
        ..roomy(context)
    };
    let mut engine = open(path, options);
    squeeze(&mut engine, share);
    engine
}

/// The recorded reads.
fn reads(engine: &Engine) -> Vec<trace::Span> {
    let lanes = engine.trace().unwrap().lanes();
    assert!(lanes.iter().all(|lane| lane.lost == 0));
    let spans = lanes.into_iter().flat_map(|lane| lane.spans);
    spans.filter(|span| *span.kind == trace::READ).collect()
}

/// The part of a read that is in `bytes`.
fn part(read: &trace::Span, bytes: &Range<u64>) -> u64 {
    let [offset, len] = read.values;
    let end = (offset + len).min(bytes.end);
    end.saturating_sub(offset.max(bytes.start))
}

/// Runs a chunk. Returns the experts that its rows visit by layer, with the shared one.
fn run(
    engine: &mut Engine,
    sequence: &mut Sequence,
    chunk: &[u32],
    layers: &[Vec<Range<u64>>],
) -> Vec<BTreeSet<usize>> {
    let experts = engine.config().experts as usize;
    let mut visited = vec![BTreeSet::new(); layers.len()];
    let mut see = |seen: &FfnSeen<'_>| {
        let chosen = seen.choices.iter().map(|choice| choice.expert as usize);
        visited[seen.layer].extend(chosen.chain(experts..layers[seen.layer].len()));
    };
    engine
        .forward_observed(sequence, chunk, Logits::Last, &mut see)
        .unwrap();
    visited
}

/// A chunk reads each expert that its rows visit once and no other one, so that two chunks read none more than twice.
#[test]
fn a_chunk_reads_each_visited_expert_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut paths = CASES
        .map(|name| packed(&case(name), dir.path(), DType::F32))
        .to_vec();
    paths.push(synthetic(dir.path()));
    let prompt: Vec<u32> = (0..24).map(|i| 40 + i * 31 % 260).collect();
    for path in paths {
        let layers = banks(&path);
        for chunk in [24, 12] {
            let mut engine = engine(&path, 0.0, chunk, prompt.len());
            assert_eq!(engine.memory().hot_clusters, 0, "{path:?}");
            let mut sequence = engine.new_sequence().unwrap();
            for tokens in prompt.chunks(chunk) {
                engine.trace().unwrap().clear();
                let visited = run(&mut engine, &mut sequence, tokens, &layers);
                let reads = reads(&engine);
                let experts = layers.iter().zip(&visited).enumerate();
                for (layer, (banks, visited)) in experts.filter(|(_, of)| of.0.len() > 1) {
                    let read = |bytes| reads.iter().map(|read| part(read, bytes)).sum();
                    let found: Vec<u64> = banks.iter().map(read).collect();
                    let once = |(expert, bytes): (_, &Range<u64>)| {
                        u64::from(visited.contains(&expert)) * (bytes.end - bytes.start)
                    };
                    let expected: Vec<u64> = banks.iter().enumerate().map(once).collect();
                    assert_eq!(
                        found, expected,
                        "{path:?}: chunks of {chunk}, layer {layer}"
                    );
                }
            }
        }
    }
}

/// A model with 8 layers of 16 experts of two clusters, of which a token visits 4.
fn synthetic(dir: &Path) -> PathBuf {
    let path = dir.join("synthetic.gguf");
    let line = format!(
        "synth --shape tiny-moe --layers 8 --popular 0.6 --reuse 0.7 --measure 0 -o {}",
        path.display()
    );
    let words: Vec<&str> = line.split(' ').collect();
    emberflow_benches::call(&words).unwrap();
    packed(&path, dir, DType::Q4)
}

/// Decodes `tokens`. Returns the neurons read per token.
fn decode(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> f64 {
    let before = engine.counters();
    for token in tokens {
        engine.forward(sequence, &[*token], Logits::Last).unwrap();
    }
    engine.counters().since(before).misses as f64 / tokens.len() as f64
}

/// Decodes a text before and after the prompt of another one, which comes in passes of its own or beside tokens of
/// the text. Returns the neurons read per token before, and by the next tokens.
fn around_a_prompt(path: &Path, text: &[u32], beside: bool, tokens: usize) -> [f64; 2] {
    const CHUNK: usize = 64;
    let mut engine = engine(path, 0.5, CHUNK + 1, 256);
    let mut own = engine.new_sequence().unwrap();
    decode(&mut engine, &mut own, &text[..96]);
    let before = decode(&mut engine, &mut own, &text[96..128]);
    let mut other = engine.new_sequence().unwrap();
    let prompt: Vec<u32> = (0..256).map(|i| 40 + (i * 31 + 1777) % 3000).collect();
    for part in prompt.chunks(CHUNK) {
        let at = own.len();
        let mut spans = vec![Span {
            sequence: &mut other,
            tokens: part,
        }];
        if beside {
            spans.push(Span {
                sequence: &mut own,
                tokens: &text[at..=at],
            });
        }
        engine.forward_batch(&mut spans, Logits::None).unwrap();
    }
    let next = own.len()..own.len() + tokens;
    [before, decode(&mut engine, &mut own, &text[next])]
}

/// A chunk is one pass for the cache, and only the experts of its last two tokens count as used. So a prompt in 4
/// chunks costs another text what 8 tokens would: a text that needs all experts half as much again for the next few
/// tokens, and one that repeats two tokens, whose experts all fit in memory, less than three of them. (Token by
/// token, the prompt costs that text 17.)
#[test]
fn a_prompt_of_another_text_leaves_what_decoding_needs() {
    const EXPERT: f64 = 256.0;
    let dir = tempfile::tempdir().unwrap();
    let path = synthetic(dir.path());
    let [varied, repeated]: [Vec<u32>; 2] =
        [256, 2].map(|cycle| (0..256).map(|i| 40 + (i % cycle) * 31 % 3000).collect());
    for beside in [false, true] {
        let [before, after] = around_a_prompt(&path, &varied, beside, 4);
        let few = before > 0.0 && after <= 1.5 * before;
        assert!(few, "{beside}: {before} before, {after} after");
        let [before, after] = around_a_prompt(&path, &repeated, beside, 3);
        let few = before == 0.0 && 3.0 * after < 3.0 * EXPERT;
        assert!(few, "{beside}: {before} before, {after} after");
    }
}

/// DeepSeek-V4's first layers choose experts by token, so they are requested when the layer begins. Those of the other
/// layers, without guesses, are requested after attention.
#[test]
fn experts_by_token_are_read_while_attention_runs() {
    let dir = tempfile::tempdir().unwrap();
    let path = packed(&case("deepseek_v4"), dir.path(), DType::F32);
    let layers = banks(&path);
    let lab = Lab {
        trace: 4096,
        read_ahead: false,
        ..Lab::default()
    };
    let mut engine = open(&path, Options { lab, ..roomy(16) });
    squeeze(&mut engine, 0.0);
    let mixture = engine.config().mixture.clone().unwrap();
    let by_token: Vec<bool> = (0..5).map(|layer| mixture.is_by_token(layer)).collect();
    assert_eq!(by_token, [true, true, false, false, false]);
    let trace = engine.trace().unwrap().clone();
    let mut sequence = engine.new_sequence().unwrap();
    for tokens in [&[50][..], &[61], &[72], &[53, 64, 75]] {
        trace.clear();
        let (mut ends, mut visited) = ([0; 5], vec![Vec::new(); 5]);
        let mut attention = |seen: &AttentionSeen<'_>| {
            // the I/O thread has time to begin
            std::thread::sleep(Duration::from_millis(10));
            ends[seen.layer] = trace.now();
        };
        let mut ffn = |seen: &FfnSeen<'_>| {
            visited[seen.layer].extend(seen.choices.iter().map(|choice| choice.expert as usize));
        };
        let rows = StreamRows {
            tokens,
            x: &mut Vec::new(),
            stored: None,
        };
        engine
            .forward_residual(&mut sequence, rows, &mut attention, &mut ffn)
            .unwrap();
        let reads = reads(&engine);
        for (layer, chosen) in visited.iter().enumerate() {
            assert_eq!(chosen.len(), 2 * tokens.len());
            let early = |bytes: &Range<u64>| {
                let mut of = reads.iter().filter(|read| part(read, bytes) > 0);
                of.next().unwrap().start < ends[layer]
            };
            let early = chosen
                .iter()
                .filter(|&&of| early(&layers[layer][of]))
                .count();
            // With several rows as far as buffers reach.
            let expected = if by_token[layer] {
                2..=early.max(2)
            } else {
                0..=0
            };
            assert!(
                expected.contains(&early),
                "{tokens:?} in layer {layer}: {early}"
            );
        }
    }
}
