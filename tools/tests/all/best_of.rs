//! `emberflow run --best-of`, as a user runs it.

use crate::common::{call, json, smallest_budget};
use serde_json::Value;

const RUN: [&str; 9] = [
    "run",
    "-p",
    "A trait object",
    "-n",
    "20",
    "--temp",
    "0.9",
    "--json",
    "--seed",
];

fn run(seed: u64, extra: &[&str]) -> Value {
    let seed = seed.to_string();
    json(&[&RUN[..], &[&seed], extra].concat())
}

/// Each text is the one that its seed gives alone, within a budget that fits all of them.
#[test]
fn every_text_is_what_its_seed_gives_alone() {
    let least = smallest_budget(&[&RUN[..], &["3", "--best-of", "4"]].concat());
    let smallest = format!("{least}MiB");
    let alone: Vec<Value> = (3..7).map(|seed| run(seed, &[])).collect();
    for budget in [
        ["--memory", &smallest],
        ["--ffn-resident", "0.45"],
        ["--ffn-resident", "0.8"],
    ] {
        let report = run(3, &[&["--best-of", "4"], &budget[..]].concat());
        let peak = report["memory"]["peak_rss_bytes"].as_u64().unwrap();
        let allowed = report["memory"]["budget_bytes"].as_u64().unwrap();
        assert!(peak <= allowed, "{budget:?}: peak {peak} above {allowed}");
        let samples = report["best_of"]["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 4);
        for (sample, alone) in samples.iter().zip(&alone) {
            for key in ["tokens", "text", "logits_hash", "stop"] {
                assert_eq!(sample[key], alone[key], "{budget:?}: {key}");
            }
        }
        let score = |i: usize| samples[i]["score"].as_f64().unwrap();
        let best = report["best_of"]["best"].as_u64().unwrap() as usize;
        assert!((0..4).all(|i| score(i) <= score(best) && score(i) < 0.0));
        assert_eq!(report["text"], samples[best]["text"]);
        assert_eq!(report["logits_hash"], samples[best]["logits_hash"]);
        assert!(report["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    // keys and values of four, and their other memory
    let kv = |report: &Value| report["memory"]["kv"].as_u64().unwrap();
    let four = run(3, &["--best-of", "4"]);
    assert_eq!(kv(&four), 4 * kv(&alone[0]));
}

/// Without `--json`: only the text with the highest score, at any position.
#[test]
fn the_best_text_is_printed() {
    let mut places = Vec::new();
    for seed in 1..6 {
        let report = run(seed, &["--best-of", "3"]);
        let best = report["best_of"]["best"].as_u64().unwrap();
        let sample = &report["best_of"]["samples"][best as usize];
        let output = call(
            &RUN[..RUN.len() - 2]
                .iter()
                .copied()
                .chain(["--seed", &seed.to_string(), "--best-of", "3"])
                .collect::<Vec<_>>(),
        );
        let summary = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{summary}");
        let (winner, score) = (seed + best, sample["score"].as_f64().unwrap());
        let named = format!("best of 3: seed {winner}, mean log-probability {score:.3}\n");
        assert!(summary.contains(&named), "{summary}");
        let text = String::from_utf8(output.stdout).unwrap();
        let continuation = sample["text"].as_str().unwrap();
        assert_eq!(text, format!("A trait object{continuation}\n"));
        places.push(best);
    }
    places.sort_unstable();
    places.dedup();
    assert!(places.len() > 1, "always the same place: {places:?}");
}

#[test]
fn equal_texts_are_not_drawn() {
    let greedy = call(&["run", "-p", "a", "--temp", "0", "--best-of", "2"]);
    assert_eq!(greedy.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&greedy.stderr).contains("--temp"));
    assert_eq!(
        call(&["run", "-p", "a", "--best-of", "0"]).status.code(),
        Some(2)
    );
}

/// A command that samples 12 tokens of a model.
fn sampled<'a>(model: &'a str, extra: &[&'a str]) -> Vec<&'a str> {
    let common = [
        "run",
        model,
        "-p",
        "a b c d",
        "-n",
        "12",
        "--ignore-eos",
        "--temp",
        "1",
        "--seed",
        "3",
        "--json",
    ];
    [&common[..], extra].concat()
}

/// The report of a command in its smallest budget, which its peak does not exceed.
fn in_the_smallest_budget(name: &str, command: &[&str]) -> Value {
    let memory = format!("{}MiB", smallest_budget(command));
    let report = json(&[command, &["--memory", &memory]].concat());
    let [peak, allowed] =
        ["peak_rss_bytes", "budget_bytes"].map(|key| report["memory"][key].as_u64().unwrap());
    assert!(peak <= allowed, "{name}: peak {peak} above {allowed}");
    report
}

/// Eight sequences of each kind of state, and a long prompt, in the smallest budget: keys and values, windows,
/// recurrent blocks, latent vectors, pools and residual streams.
#[test]
fn eight_sequences_of_every_kind_stay_within_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let long = "a b c d ".repeat(40);
    for name in [
        "bailing_hybrid",
        "deepseek_v3",
        "deepseek_v4_release",
        "falcon_h1",
        "gemma3",
        "gemma4_inputs",
        "glm_moe_dsa",
        "gpt_oss",
        "granitehybrid_dense",
        "granitemoehybrid",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "llama4",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen3_5",
        "qwen3_next",
        "qwen4_exp",
    ] {
        let folder = format!(
            "{}/../tests/fixtures/models/{name}",
            env!("CARGO_MANIFEST_DIR")
        );
        let model = dir.path().join("model.ember").display().to_string();
        let packed = call(&["pack", &folder, "-o", &model, "--force"]);
        assert!(packed.status.success(), "{name}: {packed:?}");
        let eight = sampled(&model, &["--best-of", "8"]);
        let report = in_the_smallest_budget(name, &eight);
        let samples = report["best_of"]["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 8);
        let alone = json(&sampled(&model, &[]));
        assert_eq!(samples[0]["logits_hash"], alone["logits_hash"], "{name}");
        let mut prompted = sampled(&model, &[]);
        prompted[3] = &long;
        let report = in_the_smallest_budget(name, &prompted);
        let free = json(&prompted);
        assert_eq!(report["logits_hash"], free["logits_hash"], "{name}");
        assert!(free["prompt_tokens"].as_u64().unwrap() > 128, "{name}");
    }
}
