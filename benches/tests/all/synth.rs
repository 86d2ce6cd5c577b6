//! Synthetic checkpoints: readable, reproducible, with the requested statistics.

use std::path::Path;

use crate::common::{call, json};
use emberflow_models::config::Activation;
use emberflow_models::names::required;
use serde_json::Value;

/// Runs `synth --shape tiny --json` with these arguments, into `output`.
fn tiny(output: &Path, words: &[&str]) -> Value {
    synth("tiny", output, words)
}

fn synth(shape: &str, output: &Path, words: &[&str]) -> Value {
    let output = output.display().to_string();
    let mut args = vec!["synth", "--shape", shape, "--json", "-o", &output];
    args.extend(words);
    json(&args)
}

/// Target and measurement agree within `tolerance`, relative.
fn close(report: &Value, key: &str, tolerance: f64) {
    let [target, found] = ["target", "measured"].map(|side| report[side][key].as_f64().unwrap());
    assert!(
        (found / target - 1.0).abs() < tolerance,
        "{key}: target {target}, measured {found}: {report}"
    );
}

#[test]
fn decoding_has_the_statistics_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for (i, words) in [
        "--act relu --active 0.1 --skew opt-30b --quant q8_0",
        "--act relu --active 0.33 --skew llama2-reglu-70b --persistence 0.7",
        "--act drelu --active 0.15 --skew bamboo --persistence 0.9",
        "--act silu --skew swiglu --quant f16 --seed 5",
        "--act relu --active 0.1 --skew bamboo --gate-rank 96",
    ]
    .iter()
    .enumerate()
    {
        let mut words: Vec<&str> = words.split(' ').collect();
        words.extend(["--measure", "600"]);
        let report = tiny(&dir.path().join(format!("{i}.gguf")), &words);
        close(&report, "active", 0.12);
        close(&report, "hot_share", 0.15);
        close(&report, "persistence", 0.03);
        // greedy decoding follows the walk through the vocabulary: the weights are correct in every
        // part of the network
        let walk = report["measured"]["walk"].as_f64().unwrap();
        assert!(walk > 0.98, "{words:?}: {walk}");
        let [active, gates] =
            ["active", "engine_active"].map(|key| report["measured"][key].as_f64().unwrap());
        match words[1] {
            // gates fire for these regardless of the up projection
            "drelu" => assert!((active / gates - 0.8).abs() < 0.05, "{report}"),
            // no exact zeros
            "silu" => assert_eq!(gates, 1.0),
            // counted by the engine and from its inputs
            _ => assert!((active / gates - 1.0).abs() < 2e-3, "{report}"),
        }
    }
    let left = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 5, "measuring left a file");
}

#[test]
fn experts_are_chosen_as_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (shape, words)) in [
        ("tiny-moe", "--reuse 0.6"),
        ("tiny-moe", "--popular 0.9 --reuse 0.35 --act silu"),
        (
            "tiny-moe",
            "--popular 0.6 --reuse 0.75 --act drelu --active 0.15",
        ),
        (
            "tiny-moe",
            "--popular 0.8 --reuse 0.45 --act relu --active 0.2 --persistence 0.9",
        ),
        ("tiny-moe-early", "--popular 0.6 --reuse 0.55 --active 0.4"),
        ("tiny-moe-oss", "--popular 0.75 --reuse 0.4"),
    ]
    .iter()
    .enumerate()
    {
        let mut words: Vec<&str> = words.split(' ').collect();
        words.extend(["--measure", "1500"]);
        let report = synth(shape, &dir.path().join(format!("{i}.gguf")), &words);
        close(&report, "popular", 0.08);
        close(&report, "reuse", 0.06);
        if words.contains(&"--active") {
            close(&report, "active", 0.12);
            close(&report, "persistence", 0.03);
        }
        let walk = report["measured"]["walk"].as_f64().unwrap();
        assert!(walk > 0.98, "{words:?}: {walk}");
    }
}

/// Every shape given by a `config.json`, with small layers of all its kinds: the file reads back as
/// the configuration, decoding is correct, and experts are chosen as requested.
#[test]
fn described_shapes_have_the_statistics_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for (shape, layers, reuse) in [
        ("qwen3.6-35b-a3b", 4, "0.5"),
        ("glm-4.7-flash", 3, "0.45"),
        ("nemotron-3-nano", 7, "0.5"),
        ("gemma-4-26b-a4b", 6, "0.6"),
        ("deepseek-v2-lite", 3, "0.5"),
        ("lfm2.5-8b-a1b", 4, "0.5"),
        ("glm-4.5-air", 3, "0.5"),
        ("minimax-m2", 2, "0.5"),
    ] {
        let layers = layers.to_string();
        let words = ["--small", "--layers", &layers, "--popular", "0.7"];
        let words = [&words[..], &["--reuse", reuse, "--measure", "1000"]].concat();
        let path = dir.path().join(format!("{shape}.gguf"));
        let report = synth(shape, &path, &words);
        close(&report, "popular", 0.08);
        close(&report, "reuse", 0.08);
        // 1,000 tokens of few experts: a deviation of a twentieth is chance
        close(&report, "active", 0.08);
        close(&report, "persistence", 0.06);
        let walk = report["measured"]["walk"].as_f64().unwrap();
        assert!(walk > 0.98, "{shape}: {walk}");
        let model = emberflow_models::open(&path).unwrap();
        let c = model.config();
        assert_eq!((c.d_model, c.experts, c.vocab), (256, 16, 4096));
        let ids: Vec<_> = model.tensors().iter().map(|t| t.id).collect();
        let wanted: Vec<_> = required(c).iter().map(|t| t.id).collect();
        assert_eq!(ids, wanted, "{shape}");
    }
}

#[test]
fn files_and_folders_read_back() {
    let dir = tempfile::tempdir().unwrap();
    for (name, act, words) in [
        ("a.gguf", Activation::Relu, "--act drelu"),
        ("b.gguf", Activation::Relu, "--quant q8_0"),
        ("c.gguf", Activation::Silu, "--act silu --quant f16"),
        ("d", Activation::Relu, "--act drelu"),
        ("e", Activation::GeluTanh, "--act gelu-tanh"),
    ] {
        let path = dir.path().join(name);
        let mut words: Vec<&str> = words.split(' ').collect();
        words.extend(["--measure", "0"]);
        let report = tiny(&path, &words);
        assert!(report["measured"].is_null());
        let model = emberflow_models::open(&path).unwrap();
        let c = model.config();
        assert_eq!(c.ffn_kind.activation, act, "{name}");
        assert_eq!(c.ffn_kind.relu_on_up, words[1] == "drelu", "{name}");
        assert_eq!((c.d_model, c.ffn, c.layers, c.vocab), (256, 1024, 4, 4096));
        assert!(c.add_bos);
        let ids: Vec<_> = model.tensors().iter().map(|t| t.id).collect();
        let wanted: Vec<_> = required(c).iter().map(|t| t.id).collect();
        assert_eq!(ids, wanted, "{name}");
        for t in model.tensors() {
            let mut rows = vec![f32::NAN; t.rows * t.cols];
            model.read_rows(t.id, 0, t.rows, &mut rows).unwrap();
            assert!(rows.iter().all(|v| v.is_finite()));
            assert!(rows.iter().any(|v| *v != 0.0), "{name}: {} is empty", t.id);
        }
        let tokenizer =
            emberflow_models::tokenizer::Tokenizer::from_json(model.tokenizer_json()).unwrap();
        let text = "Any text, even 音 and\nlines";
        let tokens = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&tokens, true).unwrap(), text, "{name}");
    }
}

#[test]
fn a_seed_stands_for_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = |name: &str, seed: &str| {
        let path = dir.path().join(name);
        tiny(&path, &["--seed", seed, "--measure", "0"]);
        std::fs::read(if path.is_dir() {
            path.join("model.safetensors")
        } else {
            path
        })
        .unwrap()
    };
    for suffix in [".gguf", ""] {
        let [a, b, c] = [("a", "1"), ("b", "1"), ("c", "2")]
            .map(|(name, seed)| bytes(&format!("{name}{suffix}"), seed));
        assert!(a == b, "{suffix}: one seed, two files");
        assert!(a != c, "{suffix}: two seeds, one file");
    }
}

#[test]
fn a_large_file_needs_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.gguf").display().to_string();
    let report = json(&["synth", "--shape", "llama-1b", "--json", "-o", &path]);
    let bytes = report["bytes"].as_u64().unwrap();
    assert!(bytes > 600_000_000);
    let peak = report["peak_rss_bytes"].as_u64().unwrap();
    assert!(peak < 100 << 20, "{peak} bytes for a file of {bytes}");
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.gguf").display().to_string();
    let folder = dir.path().join("x").display().to_string();
    let here = dir.path().display().to_string();
    let inside = dir.path().join("no/x.gguf").display().to_string();
    for (words, output, wanted) in [
        ("--shape lama-1b", &file, "similar value exists: 'llama-1b'"),
        ("--shape huge", &file, "bamboo-7b"),
        ("--shape tiny --skew steep", &file, "curves: opt-30b"),
        ("--shape tiny --skew 0.9", &file, "at most 0.8"),
        (
            "--shape tiny --active 0.6 --skew opt-30b",
            &file,
            "lower --active",
        ),
        ("--shape tiny --active 0", &file, "above 0"),
        ("--shape llama-1b --active 0.1", &file, "llama-1b with silu"),
        ("--shape tiny --act silu --active 0.5", &file, "--act relu"),
        ("--shape tiny --persistence 0.01", &file, "lies between"),
        ("--shape tiny --gate-rank 16", &file, "expected 32 to 160"),
        ("--shape tiny --gate-rank 256", &file, "expected 32 to 160"),
        ("--shape tiny --measure 5", &file, "16 to"),
        ("--shape tiny --measure 5000", &file, "16 to"),
        ("--shape tiny --reuse 0.5", &file, "tiny has none"),
        ("--shape tiny-moe --reuse 0.1", &file, "lies between"),
        ("--shape tiny-moe --popular 0.2", &file, "4 of 16 experts"),
        ("--shape tiny-moe --layers 0", &file, "1..=4096"),
        ("--shape tiny --small", &file, "one size"),
        ("--shape glm-4.7-flash --act relu", &file, "--act"),
        ("--shape qwen3.6-35b-a3b --layers 3", &file, "first 4 are"),
        ("--shape glm-4.7-flash --layers 48", &file, "47 layers"),
        (
            "--shape gemma-4-26b-a4b --layers 8",
            &file,
            "full_attention",
        ),
        ("--shape nemotron-3-nano", &folder, "gguf file only"),
        ("--shape tiny --quant q4_0", &folder, "ends in .gguf"),
        ("--shape tiny", &here, "exists"),
        ("--shape tiny", &inside, "does not exist"),
    ] {
        let mut args = vec!["synth", "-o", output];
        args.extend(words.split(' '));
        let result = call(&args);
        let message = String::from_utf8_lossy(&result.stderr);
        assert_eq!(result.status.code(), Some(2), "{words}: {message}");
        assert!(message.contains(wanted), "{words}: {message}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
