//! Traces: the neurons of a text, replayed against caches, and the effect of the order on flash.

use std::path::Path;
use std::process::Output;

use crate::common::{call, exported, json, program};
use serde_json::Value;

const HELDOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// A part of the held-out text as a separate file.
fn part(dir: &Path, name: &str, from: usize, to: usize) -> String {
    let text = std::fs::read_to_string(HELDOUT).unwrap();
    let path = dir.join(name);
    let (from, to) = (text.floor_char_boundary(from), text.floor_char_boundary(to));
    std::fs::write(&path, &text[from..to]).unwrap();
    path.display().to_string()
}

/// Profiles a text with small windows.
fn profile(text: &str, out: &str, more: &[&str]) -> Output {
    let args = ["program", "profile", "-f", text, "-o", out];
    call(&[&args[..], &["--window", "32", "--json"], more].concat())
}

/// All activation counts of a statistics file.
fn counted(path: &str) -> Vec<u64> {
    let bytes = std::fs::read(path).unwrap();
    let stats = emberflow_predictor::stats::ActivationStats::read(&bytes).unwrap();
    let experts = stats.layers.into_iter().flat_map(|l| l.experts);
    experts.flat_map(|e| e.counts).collect()
}

/// Statistics that do not depend on the order of neurons, and those that do.
struct Ordered {
    perplexity: f64,
    /// Cache misses and reads per token, with the best cache of half the neurons.
    misses: f64,
    reads: f64,
}

/// A text, its statistics and their checkpoint.
struct Profiled<'a> {
    dir: &'a Path,
    checkpoint: String,
    text: String,
    stats: String,
    /// Another text.
    held: String,
}

impl Profiled<'_> {
    fn at(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    /// Packs the checkpoint in this order, checks it, and profiles it again.
    fn pack(&self, order: &str) -> String {
        let (model, stats) = (self.at(order), &self.stats);
        let pack = [
            "pack",
            &self.checkpoint,
            "-o",
            &model,
            "--quant",
            "f32",
            "--stats",
            stats,
        ];
        let pack = program(&[&pack[..], &["--order", order]].concat());
        assert_eq!(pack["order"], order);
        let inspection = program(&["inspect", &model]);
        assert_eq!(inspection["meta"]["order"], order);
        assert!(
            inspection["statistics"]["steps"][5].as_u64() > Some(0),
            "{inspection}"
        );
        program(&["verify", &model, "--source", &self.checkpoint]);
        // profiled in another order, the numbers are equal except for rounding
        let again = self.at(&format!("{order}.stats"));
        assert!(profile(&self.text, &again, &[&model]).status.success());
        let differing: usize = counted(stats)
            .iter()
            .zip(&counted(&again))
            .filter(|(a, b)| a.abs_diff(**b) > 2)
            .count();
        assert!(differing < 80, "{differing} of 7680 neurons");
        model
    }

    fn measure(&self, order: &str) -> Ordered {
        let model = self.pack(order);
        let quality = program(&["perplexity", &model, "-f", &self.held]);
        let trace = self.at(&format!("{order}.trace"));
        json(&[
            "trace", "record", &model, "-f", &self.held, "-o", &trace, "--json",
        ]);
        let simulated = json(&[
            "trace", "simulate", &trace, "--cache", "50%", "--policy", "belady", "--json",
        ]);
        let row = &simulated["results"][0];
        Ordered {
            perplexity: quality["perplexity"].as_f64().unwrap(),
            misses: row["misses_per_token"].as_f64().unwrap(),
            reads: row["reads_per_token"].as_f64().unwrap(),
        }
    }
}

#[test]
fn the_order_changes_and_the_answer_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let profiled = Profiled {
        dir: dir.path(),
        checkpoint: exported(dir.path()),
        text: part(dir.path(), "text", 0, 6000),
        stats: at("stats"),
        held: part(dir.path(), "held", 20_000, 23_000),
    };
    let Profiled {
        checkpoint,
        text,
        stats,
        ..
    } = &profiled;
    // statistics name their checkpoint
    let (plain, other) = (at("plain"), at("other"));
    program(&["pack", checkpoint, "-o", &plain, "--quant", "f32"]);
    assert!(profile(text, &other, &["--limit", "100"]).status.success());
    let refused = call(&[
        "program",
        "pack",
        checkpoint,
        "-o",
        &at("x"),
        "--stats",
        &other,
    ]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("fingerprint"));
    let done = profile(text, stats, &[&plain]);
    let done: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert!(done["tokens"].as_u64().unwrap() > 1000);
    let [temperature, coactivation] =
        ["temperature", "coactivation"].map(|order| profiled.measure(order));
    let ratio = temperature.perplexity / coactivation.perplexity;
    assert!((ratio - 1.0).abs() < 1e-4, "{ratio}");
    // The needed neurons do not depend on the order, except for rounding; the merging of reads
    // does.
    let ratio = temperature.misses / coactivation.misses;
    assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
    let (a, b) = (temperature.reads, coactivation.reads);
    assert!(b < 0.99 * a, "{a} {b}");
}

#[test]
fn a_trace_is_replayed_and_a_damaged_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (trace, svg) = (at("t"), at("t.svg"));
    let recorded = json(&[
        "trace", "record", "-f", HELDOUT, "-o", &trace, "--limit", "400", "--json",
    ]);
    let share = recorded["active_share"].as_f64().unwrap();
    assert!((0.1..0.25).contains(&share), "{recorded}");
    let simulated = json(&["trace", "simulate", &trace, "--svg", &svg, "--json"]);
    let rows = simulated["results"].as_array().unwrap();
    assert_eq!(rows.len(), 18);
    let rate = |row: &Value| row["miss_rate"].as_f64().unwrap();
    for size in rows.chunks(6) {
        let belady = size.iter().find(|r| r["policy"] == "belady").unwrap();
        let bypass = size
            .iter()
            .find(|r| r["policy"] == "belady-bypass")
            .unwrap();
        assert!(rate(bypass) <= rate(belady));
        for row in size {
            if row["policy"] != "belady-bypass" && row["policy"] != "shipped" {
                assert!(rate(row) >= rate(belady), "{row}");
            }
            assert!(row["reads_per_token"].as_f64() <= row["misses_per_token"].as_f64());
        }
    }
    assert!(std::fs::read_to_string(&svg).unwrap().contains("shipped"));
    let good = std::fs::read(&trace).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 4;
    // Regression: bytes after the end were accepted.
    for bad in [flipped, [&good[..], b"more"].concat()] {
        std::fs::write(&trace, &bad).unwrap();
        let refused = call(&["trace", "simulate", &trace]);
        assert_eq!(refused.status.code(), Some(3));
        let message = String::from_utf8_lossy(&refused.stderr);
        assert!(message.contains(&trace), "{message}");
    }
}

#[test]
fn the_miss_curve_of_one_text_tells_the_misses_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let [first, second] = [(0, 12_000), (12_000, 24_000)]
        .map(|(from, to)| part(dir.path(), &format!("{from}.txt"), from, to));
    let (stats, trace) = (at("stats"), at("trace"));
    let window = ["--window", "128"];
    program(&[&["profile", "-f", &first, "-o", &stats], &window[..]].concat());
    json(&["trace", "record", "-f", &second, "-o", &trace, "--json"]);
    let shown = program(&["profile", "show", &stats]);
    let curve = shown["misses"].as_array().unwrap();
    assert_eq!(curve.len(), 9);
    for point in curve {
        let (cache, expected) = (point["cache"].as_f64(), point["missed"].as_f64());
        let (cache, expected) = (cache.unwrap(), expected.unwrap());
        let size = format!("{}%", 100.0 * cache);
        let simulated = json(&[
            "trace", "simulate", &trace, "--cache", &size, "--policy", "shipped", "--json",
        ]);
        let found = simulated["results"][0]["miss_rate"].as_f64().unwrap();
        assert!(
            (expected / found - 1.0).abs() < 0.1 || cache > 0.7,
            "{size}: {expected} expected, {found} found"
        );
    }
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
fn routes_are_recorded_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let [gguf, ember] = ["m.gguf", "m.ember"].map(|name| path(dir, name));
    let synth = "synth --shape tiny-moe --measure 0 --popular 0.7 --reuse 0.6 --json -o";
    let words: Vec<&str> = synth.split(' ').chain([&*gguf]).collect();
    json(&words);
    program(&["pack", &gguf, "-o", &ember, "--quant", "q4"]);
    let [trace, svg] = ["routes", "t.svg"].map(|name| path(dir, name));
    let recorded = json(&[
        "trace", "record", &ember, "-f", HELDOUT, "-o", &trace, "--limit", "1500", "--json",
    ]);
    assert_eq!(recorded["unit"], "experts");
    assert_eq!(recorded["needed_per_token"], 16.0);
    assert_eq!(recorded["active_share"], 0.25);
    let simulated = json(&["trace", "simulate", &trace, "--json", "--svg", &svg]);
    assert_eq!(simulated["unit"], "experts");
    let rows = simulated["results"].as_array().unwrap();
    let rate = |cache: f64, policy: &str| {
        let of = |r: &&Value| number(r, "cache") == cache && r["policy"] == policy;
        number(rows.iter().find(of).unwrap(), "miss_rate")
    };
    for cache in [0.25, 0.5, 0.75] {
        let belady = rate(cache, "belady");
        for policy in ["shipped", "lru", "lfu", "s3fifo"] {
            assert!(rate(cache, policy) >= belady, "{policy} at {cache}");
        }
        assert!(rate(cache, "shipped") < 1.0 - cache, "{simulated}");
        assert!(rate(cache, "shipped") < rate(cache, "lru"), "{simulated}");
    }
    for row in rows {
        // an expert of 256 neurons of 3 × 256 weights in q4, read in one command
        let (missed, bytes) = (
            number(row, "misses_per_token"),
            number(row, "bytes_per_token"),
        );
        assert!(bytes >= missed * 3.0 * 256.0 * 144.0, "{row}");
        assert!(
            (number(row, "reads_per_token") - missed).abs() < 1e-9,
            "{row}"
        );
    }
    assert!(
        std::fs::read_to_string(&svg)
            .unwrap()
            .contains("share of experts")
    );
}
