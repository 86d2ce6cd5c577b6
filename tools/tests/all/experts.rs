//! Commands on a model with experts: routing statistics, prefetching.

use std::path::{Path, PathBuf};

use crate::common::{cache, call, json, save_rates};
use emberflow_predictor::stats::{ActivationStats, ExpertStats};
use emberflow_storage::container::Container;
use serde_json::Value;

const HELDOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// A packed model with experts in `dir`, of `words` for `synth`.
fn model(dir: &Path, words: &str) -> PathBuf {
    let [gguf, ember] = ["m.gguf", "m.ember"].map(|name| dir.join(name));
    let (from, to) = (gguf.display().to_string(), ember.display().to_string());
    let synth = [
        "synth",
        "--shape",
        "tiny-moe",
        "--measure",
        "0",
        "-o",
        &from,
    ];
    let line: Vec<&str> = synth.into_iter().chain(words.split(' ')).collect();
    emberflow_benches::call(&line).unwrap();
    let packed = call(&["pack", &from, "-o", &to, "--quant", "q4"]);
    assert!(packed.status.success());
    ember
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).display().to_string()
}

/// A number of a JSON object.
fn number(value: &Value, key: &str) -> f64 {
    value[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key} in {value}"))
}

#[test]
fn statistics_say_how_experts_are_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ember = model(dir, "--popular 0.7 --reuse 0.6")
        .display()
        .to_string();
    let [all, first, svg] = ["all", "first", "s.svg"].map(|name| path(dir, name));
    let profile = |output: &str, limit: &str| {
        json(&[
            "profile", &ember, "-f", HELDOUT, "-o", output, "--limit", limit, "--json",
        ])
    };
    let done = profile(&all, "3000");
    assert_eq!(done["tokens"], 3000);
    assert!(
        (number(&done, "popular") / 0.7 - 1.0).abs() < 0.12,
        "{done}"
    );
    assert!((number(&done, "reuse") / 0.6 - 1.0).abs() < 0.12, "{done}");
    let shown = json(&["profile", "show", &all, "--json", "--svg", &svg]);
    assert_eq!(shown["reuse"], done["reuse"]);
    let layers = shown["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 4);
    for layer in layers {
        let popularity = layer["popularity"].as_array().unwrap();
        let sum: f64 = popularity.iter().filter_map(Value::as_f64).sum();
        assert_eq!(popularity.len(), 16);
        assert!((sum - 4.0).abs() < 1e-9, "{sum}");
        assert!(number(layer, "reuse") > number(layer, "reuse_by_popularity"));
        assert!(layer["together"]["lift"].as_f64().unwrap() > 1.0);
    }
    let misses = shown["misses"].as_array().unwrap();
    assert_eq!(misses.len(), 15);
    let missed: Vec<f64> = misses.iter().map(|m| number(m, "missed")).collect();
    assert!(missed.is_sorted_by(|a, b| a >= b), "{missed:?}");
    assert!(missed[7] < 0.4 && missed[14] < 0.1, "{missed:?}");
    let svg = std::fs::read_to_string(&svg).unwrap();
    assert!(
        svg.matches("<title>layer").count() == 64,
        "a cell for each expert"
    );
    let text = call(&["profile", "show", &all]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("times chance"), "{text}");

    // statistics of two texts add up, those of one text do not
    profile(&first, "500");
    let sum = path(dir, "sum");
    let merged = json(&["profile", "merge", &all, &first, "-o", &sum, "--json"]);
    assert_eq!(merged["tokens"], 3500);
    let twice = call(&["profile", "merge", &all, &all, "-o", &sum, "--force"]);
    assert!(!twice.status.success());
    let stopped = call(&[
        "profile",
        &ember,
        "-f",
        HELDOUT,
        "-o",
        &path(dir, "no"),
        "--stop-after",
        "1",
    ]);
    assert_eq!(stopped.status.code(), Some(130));
    assert!(!dir.join("no").exists());
}

/// Routing statistics do not reorder neurons, so experts with biases stay in four-bit blocks.
#[test]
fn experts_in_mxfp4_take_statistics() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, known, stats] = ["a.ember", "b.ember", "s"].map(|name| path(dir.path(), name));
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/models/gpt_oss"
    );
    let bundles = ["--quant", "q4k"];
    let packed = call(&[&["pack", folder, "-o", &plain][..], &bundles].concat());
    assert!(packed.status.success());
    let limit = ["--limit", "400", "--json"];
    json(
        &[
            &["profile", &plain, "-f", HELDOUT, "-o", &stats][..],
            &limit,
        ]
        .concat(),
    );
    let known_stats = ["pack", folder, "-o", &known, "--stats", &stats];
    let packed = call(&[&known_stats[..], &bundles].concat());
    assert!(packed.status.success(), "{packed:?}");
    let run = |model: &str| {
        let bytes = std::fs::read(model).unwrap();
        let stored = b"\"ffn\":\"mxfp4\"";
        assert!(bytes.windows(stored.len()).any(|part| part == stored));
        let done = json(&["run", model, "-p", "The river", "-n", "12", "--json"]);
        done["logits_hash"].clone()
    };
    assert_eq!(run(&plain), run(&known));
}

/// Activation counts of each expert's neurons in statistics, and in those of a container.
fn counts(bytes: &[u8]) -> Vec<ExpertStats> {
    let stats = ActivationStats::read(bytes).unwrap();
    let layers = stats.routing().unwrap().layers.iter();
    layers.flat_map(|layer| layer.neurons.clone()).collect()
}

#[test]
fn neurons_inside_experts_are_counted_and_ordered() {
    let dir = tempfile::tempdir().unwrap();
    let [folder, plain, ordered, stats, again] =
        ["hf", "p.ember", "o.ember", "s", "t"].map(|name| path(dir.path(), name));
    assert!(
        call(&["export", "demo-moe", "-o", &folder])
            .status
            .success()
    );
    let profile = |model: &str, to: &str| {
        let limit = ["--limit", "600", "--json"];
        json(&[&["profile", model, "-f", HELDOUT, "-o", to][..], &limit].concat());
        counts(&std::fs::read(to).unwrap())
    };
    let pack = |to: &str, more: &[&str]| {
        let args = ["pack", &folder, "-o", to, "--quant", "q8"];
        let done = call(&[&args[..], more].concat());
        assert!(done.status.success(), "{done:?}");
    };
    pack(&plain, &[]);
    let first = profile(&plain, &stats);
    assert!(first.iter().all(|expert| expert.original.is_empty()));
    let fired: u64 = first.iter().flat_map(|expert| &expert.counts).sum();
    assert!(fired > 0);
    let shown = json(&["profile", "show", &stats, "--json"]);
    for layer in shown["layers"].as_array().unwrap() {
        let active = number(layer, "active_share");
        assert!((0.02..0.6).contains(&active), "{layer}");
    }
    pack(&ordered, &["--stats", &stats]);
    let verify = ["verify", &ordered, "--source", &folder];
    assert!(call(&verify).status.success());
    let container = Container::open(Path::new(&ordered)).unwrap();
    let packed = counts(&container.read_stats().unwrap());
    for (packed, first) in packed.iter().zip(&first) {
        assert!(packed.counts.is_sorted_by(|a, b| a >= b), "{packed:?}");
        for (&id, count) in packed.original.iter().zip(&packed.counts) {
            assert_eq!(first.counts[id as usize], *count);
        }
    }
    // counted again, in the checkpoint's order: sums in another order change a few gates
    let second = profile(&ordered, &again);
    let pairs = || (first.iter().zip(&second)).flat_map(|(a, b)| a.counts.iter().zip(&b.counts));
    let off: u64 = pairs().map(|(a, b)| a.abs_diff(*b)).sum();
    assert!(100 * off < fired, "{off} of {fired}");
    // Forecasts know how many fire.
    save_rates(&cache());
    let plan = |model: &str| {
        let plan = json(&["plan", model, "--memory", "33MiB", "--json"]);
        plan["plans"][0]["basis"].clone()
    };
    assert_eq!(plan(&ordered)["neurons_assumed"], false);
}

/// A mapped model uses no more memory than any other: its pages count in the process's memory.
#[test]
fn a_mapped_model_keeps_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ember = model(dir, "--layers 16").display().to_string();
    let mut hashes = Vec::new();
    for (model, share) in [
        (Some(&ember), "0.2"),
        (Some(&ember), "0"),
        (None, "0.4"),
        (None, "0"),
    ] {
        let mut args = vec!["run"];
        args.extend(model.map(String::as_str));
        args.extend(["-p", "A vector is", "-n", "40", "--ignore-eos", "--json"]);
        args.extend(["--ffn-resident", share, "--policy", "mmap"]);
        let report = json(&args);
        let memory = &report["memory"];
        let [peak, budget] = ["peak_rss_bytes", "budget_bytes"].map(|key| number(memory, key));
        assert!(peak <= budget, "{model:?} {share}: {peak} of {budget}");
        hashes.push(report["logits_hash"].clone());
    }
    assert_eq!((&hashes[0], &hashes[2]), (&hashes[1], &hashes[3]));
}

/// Statistics change the initial residency and the forecast, but no bit of the text.
#[test]
fn popular_experts_stay_and_are_planned_for() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ember = model(dir, "--layers 8 --popular 0.6 --reuse 0.7")
        .display()
        .to_string();
    let [stats, pinned, gguf] = ["stats", "p.ember", "m.gguf"].map(|name| path(dir, name));
    json(&[
        "profile", &ember, "-f", HELDOUT, "-o", &stats, "--limit", "2000", "--json",
    ]);
    let pack = [
        "pack", &gguf, "-o", &pinned, "--quant", "q4", "--stats", &stats,
    ];
    let packed = call(&pack);
    assert!(
        packed.status.success(),
        "{}",
        String::from_utf8_lossy(&packed.stderr)
    );
    assert!(
        call(&["verify", &pinned, "--source", &gguf])
            .status
            .success()
    );
    let shown = json(&["inspect", &pinned, "--json"]);
    assert_eq!(shown["experts"]["chosen"], 4);
    assert!(shown["temperature"].is_null() && shown["statistics"].is_null());
    save_rates(&cache());
    let plan = |model: &str, budget: &str| json(&["plan", model, "--memory", budget, "--json"]);
    // memory for about half of the experts: 8 layers of 16 of 256 neurons of 3 rows of 144 bytes
    let least = number(&plan(&ember, "auto"), "smallest_bytes");
    let budget = format!("{}", least as u64 + 8 * 16 * 256 * 3 * 144 / 2);
    let outcome = |model: &str| {
        let plan = plan(model, &budget)["plans"][0].clone();
        let run = json(&[
            "run",
            model,
            "-p",
            "A vector is",
            "-n",
            "200",
            "--ignore-eos",
            "--json",
            "--memory",
            &budget,
        ]);
        (plan, run)
    };
    let ((plain, first), (known, second)) = (outcome(&ember), outcome(&pinned));
    assert_eq!(first["logits_hash"], second["logits_hash"]);
    // without statistics every expert is as likely as any other
    assert_eq!(plain["basis"]["statistics"], false);
    assert_eq!(known["basis"]["statistics"], true);
    let rates = [&plain, &known].map(|plan| number(plan, "expert_hit_rate"));
    assert!(
        (rates[0] - number(&plain, "ffn_resident_share")).abs() < 0.01,
        "{plain}"
    );
    assert!(rates[1] > rates[0] + 0.15, "{rates:?}");
    let found = number(&second["cache"], "hit_rate");
    assert!(
        (found - rates[1]).abs() < 0.12,
        "{found}, expected {rates:?}"
    );
    let bytes = number(&known["decode"], "bytes_read");
    assert!(bytes < number(&plain["decode"], "bytes_read"), "{known}");
}

/// Prefetching appears in the report, can be disabled, and changes no text.
#[test]
fn reading_ahead_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let ember = model(dir.path(), "--layers 8").display().to_string();
    let run = |mode: &str, json_too: bool| {
        let mut args = vec![
            "point",
            &ember,
            "-p",
            "A vector is",
            "-n",
            "60",
            "--ignore-eos",
        ];
        args.extend(["--ffn-resident", "0.4", "--read-ahead", mode]);
        args.extend(json_too.then_some("--json"));
        call(&args)
    };
    let [on, off] = ["on", "off"]
        .map(|mode| -> Value { serde_json::from_slice(&run(mode, true).stdout).unwrap() });
    assert_eq!(on["logits_hash"], off["logits_hash"]);
    let ahead = &on["read_ahead"];
    assert_eq!(ahead["passes_share"], 1.0);
    assert!(number(ahead, "precision") > 0.6, "{ahead}");
    assert!(
        number(ahead, "clusters") > 0.0 && number(ahead, "used_share") > 0.5,
        "{ahead}"
    );
    assert_eq!(off["read_ahead"]["guessed"], 0);
    let summary = String::from_utf8(run("on", false).stderr).unwrap();
    assert!(summary.contains("guessed a layer early"), "{summary}");
}
