//! Mixtures of experts under a budget: reads, residency, refusals.

use std::path::PathBuf;

use emberflow::pack::{PackOptions, pack};
use emberflow::packed::Packed;
use emberflow::verify::compare;
use emberflow_engine::memory::Needs;
use emberflow_engine::{Engine, Error, Lab, Logits, Model, Options, Sparsity};
use emberflow_kernels::DType;
use emberflow_storage::container::Container;
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze, visited};

/// The families with experts.
const CASES: [&str; 60] = [
    "afmoe",
    "flex_olmo",
    "jamba",
    "glm4_moe",
    "glm4_moe_air",
    "dots1",
    "dots1_window",
    "ernie4_5_moe",
    "exaone_moe",
    "hy_v3",
    "minimax_m2",
    "solar_open",
    "mixtral",
    "mixtral_relu",
    "qwen2_moe",
    "qwen2_moe_dense",
    "qwen3_moe",
    "olmoe",
    "turbosparse_mixtral",
    "smallthinker",
    "smallthinker_softmax",
    "gpt_oss",
    "gpt_oss_odd",
    "phimoe",
    "phimoe_long",
    "lfm2_moe",
    "lfm2_moe_plain",
    "qwen3_next",
    "qwen3_next_plain",
    "qwen3_5_moe",
    "qwen4_exp",
    "qwen4_exp_fp8",
    "qwen4_exp_plain",
    "qwen4_exp_streams",
    "deepseek_v3",
    "deepseek_v2",
    "deepseek_v2_lite",
    "glm4_moe_lite",
    "mistral4",
    "deepseek_v3_fp8",
    "kimi_k25",
    "deepseek_v32",
    "glm_moe_dsa",
    "deepseek_v4",
    "deepseek_v4_release",
    "deepseek_v4_window",
    "kimi_linear",
    "kimi_linear_groups",
    "bailing_hybrid",
    "bailing_hybrid_unbounded",
    "hunyuan_v1_moe",
    "granitemoehybrid",
    "gemma4_moe",
    "granitemoe",
    "granitemoeshared",
    "llama4",
    "llama4_text",
    "nemotron_h_moe",
    "nemotron_h_both",
    "nemotron_h_latent",
];

/// The families whose experts have exact zeros.
const SPARSE: [&str; 7] = [
    "nemotron_h_latent",
    "nemotron_h_moe",
    "nemotron_h_both",
    "mixtral_relu",
    "turbosparse_mixtral",
    "smallthinker",
    "smallthinker_softmax",
];

fn case(name: &str) -> PathBuf {
    fixtures().join("models").join(name)
}

#[test]
fn only_visited_experts_are_read() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES.into_iter().filter(|name| !SPARSE.contains(name)) {
        let case = case(name);
        let golden = Golden::load(&case, "golden.json");
        let container = packed(&case, dir.path(), DType::F32);
        let mut engine = open(&container, roomy(golden.tokens.len()));
        squeeze(&mut engine, 0.0);
        let each = visited(&engine);
        let mut sequence = engine.new_sequence().unwrap();
        for token in &golden.tokens {
            let before = engine.counters();
            engine
                .forward(&mut sequence, &[*token], Logits::Last)
                .unwrap();
            let spent = engine.counters().since(before);
            assert_eq!(spent.possible, each, "{name}");
            assert_eq!(spent.misses + spent.hot_hits, each, "{name}");
        }
    }
}

/// Experts whose reads start before the parallel dense FFN are not read again after it.
#[test]
fn experts_in_parallel_with_a_dense_ffn_are_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let case = case("gemma4_moe");
    let golden = Golden::load(&case, "golden.json");
    let container = packed(&case, dir.path(), DType::F32);
    let bundle = u64::from(Container::open(&container).unwrap().geometry().stride);
    let mut engine = open(&container, roomy(golden.tokens.len()));
    squeeze(&mut engine, 0.0);
    let most = visited(&engine) * bundle;
    let mut sequence = engine.new_sequence().unwrap();
    for token in &golden.tokens {
        let before = engine.counters();
        engine
            .forward(&mut sequence, &[*token], Logits::Last)
            .unwrap();
        let read = engine.counters().since(before).bytes_read;
        // whole blocks of the device, and an expert of the next layer that was guessed wrong
        assert!(read as f64 <= 1.25 * most as f64, "{read} of {most}");
    }
}

/// Tokens with resident experts read nothing, and experts stay while memory suffices.
#[test]
fn resident_experts_are_hits() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES {
        let case = case(name);
        let golden = Golden::load(&case, "golden.json");
        let container = packed(&case, dir.path(), DType::Q8);
        let mut engine = open(&container, roomy(golden.tokens.len()));
        let before = engine.counters();
        all_logits(&mut engine, &golden.tokens, 8);
        let spent = engine.counters().since(before);
        assert_eq!((spent.misses, spent.reads), (0, 0), "{name}");

        if SPARSE.contains(&name) {
            continue;
        }
        // the same token again, with memory for some of the experts
        let needs = Needs {
            process_peak: 0,
            ..*engine.needs()
        };
        let [least, most] = [needs.smallest_budget(), needs.full_budget()];
        engine.set_budget(least + (most - least) * 8 / 10).unwrap();
        assert!(engine.memory().hot_clusters < needs.clusters, "{name}");
        let mut again = |token: u32| {
            let mut sequence = engine.new_sequence().unwrap();
            let before = engine.counters();
            engine
                .forward(&mut sequence, &[token], Logits::Last)
                .unwrap();
            engine.counters().since(before).misses
        };
        again(golden.tokens[0]);
        assert_eq!(again(golden.tokens[0]), 0, "{name}");
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn budgets_from_the_smallest_up_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES {
        let case = case(name);
        let golden = Golden::load(&case, "golden.json");
        for quant in [DType::F16, DType::Q4, DType::Q4k] {
            let container = packed(&case, dir.path(), quant);
            let options = Options {
                batch: 2,
                ..roomy(golden.tokens.len())
            };
            let mut engine = open(&container, options.clone());
            let expected = bits(&all_logits(&mut engine, &golden.tokens, 16));
            for (step, share) in [0.0, 0.2, 0.5, 0.8, 0.3, 0.0].into_iter().enumerate() {
                squeeze(&mut engine, share);
                let chunk = [1, 7, 16][step % 3];
                let found = bits(&all_logits(&mut engine, &golden.tokens, chunk));
                assert!(
                    found == expected,
                    "{name} {quant:?}: {share}, chunks of {chunk}"
                );
            }
            let threads = Options {
                threads: 3,
                lab: Lab {
                    chunk: 5,
                    ..Lab::default()
                },
                ..options
            };
            let found = bits(&all_logits(
                &mut open(&container, threads),
                &golden.tokens,
                5,
            ));
            assert!(found == expected, "{name} {quant:?}: three threads");
        }
    }
}

/// Guesses of the next layer's experts change no bit, right or wrong.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn reading_ahead_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES {
        let case = case(name);
        let golden = Golden::load(&case, "golden.json");
        let container = packed(&case, dir.path(), DType::Q8);
        let [off, on] = [false, true].map(|read_ahead| {
            let options = Options {
                lab: Lab {
                    read_ahead,
                    ..Lab::default()
                },
                ..roomy(golden.tokens.len())
            };
            let mut engine = open(&container, options);
            squeeze(&mut engine, 0.3);
            let mut found = Vec::new();
            for _ in 0..3 {
                found = bits(&all_logits(&mut engine, &golden.tokens, 1));
            }
            (found, engine.foreseen().unwrap())
        });
        assert!(off.0 == on.0, "{name}");
        assert_eq!((off.1.guessed, off.1.clusters), (0, 0), "{name}");
        assert!(
            on.1.right <= on.1.guessed && on.1.used <= on.1.clusters,
            "{name}"
        );
        assert!((1..=on.1.passes).contains(&on.1.ahead), "{name}");
        if ["mixtral", "qwen3_moe", "olmoe"].contains(&name) {
            assert!(on.1.right > 0 && on.1.used > 0, "{name}: {:?}", on.1);
        }
    }
}

/// Two sequences in one pass give the same results as each alone.
#[test]
fn a_batch_routes_each_row_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES {
        let case = case(name);
        let golden = Golden::load(&case, "golden.json");
        let container = packed(&case, dir.path(), DType::Q8);
        let options = Options {
            batch: 2,
            ..roomy(golden.tokens.len())
        };
        let mut engine = open(&container, options);
        let backwards: Vec<u32> = golden.tokens.iter().rev().copied().collect();
        let texts = [&golden.tokens[..12], &backwards[..12]];
        let alone = texts.map(|text| bits(&all_logits(&mut engine, text, 1)));
        let [mut first, mut second] = [(); 2].map(|()| engine.new_sequence().unwrap());
        for at in 0..12 {
            let mut found = Vec::new();
            let mut sink = |_: usize, logits: &[f32]| found.push(bits(logits));
            let mut spans = [
                emberflow_engine::Span {
                    sequence: &mut first,
                    tokens: &texts[0][at..=at],
                },
                emberflow_engine::Span {
                    sequence: &mut second,
                    tokens: &texts[1][at..=at],
                },
            ];
            engine
                .forward_batch(&mut spans, Logits::Each(&mut sink))
                .unwrap();
            for (found, alone) in found.iter().zip(&alone) {
                let vocab = found.len();
                assert!(*found == alone[at * vocab..][..vocab], "{name} at {at}");
            }
        }
    }
}

#[test]
fn what_does_not_work_yet_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let container = packed(&case("qwen3_moe"), dir.path(), DType::Q8);
    let model = || Model::open(Container::open(&container).unwrap()).unwrap();
    let observed = Options {
        lab: Lab {
            observe: true,
            ..Lab::default()
        },
        ..roomy(64)
    };
    let error = Engine::open(model(), observed).err().unwrap();
    assert!(matches!(error, Error::Experts), "{error}");
    let exact = Options {
        sparsity: Sparsity::Exact,
        ..roomy(64)
    };
    assert!(matches!(
        Engine::open(model(), exact).err(),
        Some(Error::NotSparse { .. })
    ));
    let tight = Options {
        budget: emberflow_engine::Budget::Bytes(1 << 20),
        ..roomy(64)
    };
    let error = Engine::open(model(), tight).err().unwrap();
    let Error::BudgetTooSmall { smallest, full, .. } = error else {
        panic!("{error}");
    };
    assert!(smallest > 1 << 20 && smallest <= full);
}

/// gpt-oss's experts stay in mxfp4: the numbers of the source. Its logits differ by the error of
/// activations in 8 bits; with the same numbers in f16, whose activations are floats, they are equal.
#[test]
fn mxfp4_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let case = case("gpt_oss");
    let golden = Golden::load(&case, "golden.json");
    let expected = golden.logits(&case);
    let options = |ffn| PackOptions {
        attention: DType::F32,
        embedding: DType::F32,
        ..PackOptions::new(ffn)
    };
    let path = dir.path().join("model.ember");
    let away = || {
        let mut engine = open(&path, roomy(golden.tokens.len()));
        let found = all_logits(&mut engine, &golden.tokens, 16);
        std::fs::remove_file(&path).unwrap();
        let square = |sum: f64, x: f32| sum + f64::from(x).powi(2);
        let apart = found.iter().zip(&expected).map(|(a, b)| a - b);
        (apart.fold(0.0, square) / expected.iter().copied().fold(0.0, square)).sqrt()
    };
    for source in [case.clone(), case.join("model.gguf")] {
        pack(&source, &path, &options(DType::Q4), &mut |_, _| {}).unwrap();
        let container = Container::open(&path).unwrap();
        assert_eq!(container.bundle_dtype(), DType::Mxfp4.code());
        let packed = Packed::new(&container).unwrap();
        let checkpoint = emberflow_models::open(&source).unwrap();
        let same = compare(&container, &packed, checkpoint.as_ref(), &mut |_, _| {}).unwrap();
        assert_eq!(same.worst_share_of_bound, 0.0, "{same:?}");
        let away_in_8_bits = away();
        assert!(away_in_8_bits <= 0.02, "{source:?}: {away_in_8_bits}");
        pack(&source, &path, &options(DType::F16), &mut |_, _| {}).unwrap();
        let away_in_f16 = away();
        assert!(away_in_f16 <= 1e-4, "{source:?}: {away_in_f16}");
    }
}
