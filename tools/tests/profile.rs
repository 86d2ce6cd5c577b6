//! Statistics, traces and the order that follows from them, through the program.

mod common;

use std::path::Path;
use std::process::Output;

use common::{call, exported, json};
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn heldout() -> String {
    let path = root().join("models/demo/heldout.txt");
    path.display().to_string()
}

/// A part of the held-out text as a file of its own.
fn part(dir: &Path, name: &str, from: usize, to: usize) -> String {
    let text = std::fs::read_to_string(heldout()).unwrap();
    let path = dir.join(name);
    let (from, to) = (text.floor_char_boundary(from), text.floor_char_boundary(to));
    std::fs::write(&path, &text[from..to]).unwrap();
    path.display().to_string()
}

/// Two texts that have nothing in common.
fn two_parts(dir: &Path) -> [String; 2] {
    [part(dir, "a", 0, 4000), part(dir, "b", 4000, 7000)]
}

/// Profiles a text with small windows.
fn profile(text: &str, out: &str, more: &[&str]) -> Output {
    let args = ["profile", "-f", text, "-o", out, "--window", "32", "--json"];
    call(&[&args[..], more].concat())
}

/// Tokens of statistics as `profile show` tells them.
fn tokens(shown: &Value) -> u64 {
    shown["tokens"].as_u64().unwrap()
}

#[test]
fn a_stopped_profile_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let [a, b] = two_parts(dir.path());
    let (whole, stopped) = (at("whole"), at("stopped"));
    assert!(profile(&a, &whole, &[]).status.success());
    let first = profile(&a, &stopped, &["--stop-after", "7"]);
    assert_eq!(first.status.code(), Some(130));
    assert!(!Path::new(&stopped).exists());
    // a checkpoint is of one run
    let other = profile(&b, &stopped, &[]);
    let message = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(
        !other.status.success() && message.contains("another"),
        "{message}"
    );
    // any budget gives the same numbers
    let second = profile(&a, &stopped, &["--ffn-resident", "0.4", "--chunk", "5"]);
    let done: Value = serde_json::from_slice(&second.stdout).unwrap();
    assert!(done["resumed_tokens"].as_u64().unwrap() > 0, "{done}");
    assert_eq!(
        std::fs::read(&whole).unwrap(),
        std::fs::read(&stopped).unwrap()
    );
    assert!(!Path::new(&at("stopped.checkpoint")).exists());
}

#[test]
fn parts_merge_and_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let [a, b] = two_parts(dir.path());
    let (first, second, sum, again) = (at("first"), at("second"), at("sum"), at("again"));
    assert!(profile(&a, &first, &[]).status.success());
    assert!(profile(&b, &second, &[]).status.success());
    let merge =
        |files: &[&str], out: &str| call(&[&["profile", "merge"], files, &["-o", out]].concat());
    assert!(merge(&[&first, &second], &sum).status.success());
    assert!(merge(&[&second, &first], &again).status.success());
    assert_eq!(std::fs::read(&sum).unwrap(), std::fs::read(&again).unwrap());
    let twice = merge(&[&sum, &second], &at("twice"));
    assert!(String::from_utf8_lossy(&twice.stderr).contains("both hold the text"));

    let [f, s, m] = [&first, &second, &sum].map(|f| json(&["profile", "show", f, "--json"]));
    assert_eq!(tokens(&f) + tokens(&s), tokens(&m));
    let layer = &m["layers"][4];
    let active = |i: usize| layer["batches"][i]["active_share"].as_f64().unwrap();
    // 1, 2, 4 … tokens touch more and more neurons
    assert!((0.08..0.2).contains(&active(0)), "{layer}");
    assert!((1..5).all(|i| active(i) > 1.2 * active(i - 1)), "{layer}");
    let persistence = layer["persistence"].as_f64().unwrap();
    assert!((0.2..0.5).contains(&persistence), "{layer}");
    // a batch of 32 takes as many windows; what was too short for one is told
    let said = |file: &str| String::from_utf8(call(&["profile", "show", file]).stdout).unwrap();
    assert!(said(&sum).contains("  32: ") && !said(&sum).contains("no batch of"));
    let short = at("short");
    assert!(profile(&a, &short, &["--limit", "700"]).status.success());
    let said = said(&short);
    assert!(said.contains("no batch of 32 was seen"), "{said}");
    assert!(!said.contains("no batch of 2 was seen"), "{said}");

    let svg = at("stats.svg");
    assert!(
        call(&["profile", "show", &sum, "--svg", &svg])
            .status
            .success()
    );
    let svg = std::fs::read_to_string(&svg).unwrap();
    for word in [
        "skew",
        "activity by batch size",
        "persistence",
        "published",
        "batch 32",
    ] {
        assert!(svg.contains(word), "{word}");
    }
}

#[test]
fn counts_alone_are_shown_too() {
    let old = root().join("models/demo/activation_stats.json");
    let shown = json(&["profile", "show", &old.display().to_string(), "--json"]);
    assert_eq!(tokens(&shown), 204_800);
}

/// All activation counts of a statistics file.
fn counted(path: &str) -> Vec<u64> {
    let bytes = std::fs::read(path).unwrap();
    let stats = emberflow_predictor::stats::ActivationStats::read(&bytes).unwrap();
    let experts = stats.layers.into_iter().flat_map(|l| l.experts);
    experts.flat_map(|e| e.counts).collect()
}

/// What does not depend on the order of neurons, and what does.
struct Ordered {
    perplexity: f64,
    /// Cache misses and reads per token, with the best cache of half the neurons.
    misses: f64,
    reads: f64,
}

/// A text, its statistics and the checkpoint that both are of.
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
        let pack = json(&[&pack[..], &["--order", order, "--json"]].concat());
        assert_eq!(pack["order"], order);
        let inspection = json(&["inspect", &model, "--json"]);
        assert_eq!(inspection["meta"]["order"], order);
        assert!(
            inspection["statistics"]["steps"][5].as_u64() > Some(0),
            "{inspection}"
        );
        assert!(
            call(&["verify", &model, "--source", &self.checkpoint])
                .status
                .success()
        );
        // profiled in another order, the numbers are the same but for rounding
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
        let quality = json(&["perplexity", &model, "-f", &self.held, "--json"]);
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
    // statistics name the checkpoint they are of
    let (plain, other) = (at("plain"), at("other"));
    json(&["pack", checkpoint, "-o", &plain, "--quant", "f32", "--json"]);
    assert!(profile(text, &other, &["--limit", "100"]).status.success());
    let refused = call(&["pack", checkpoint, "-o", &at("x"), "--stats", &other]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("fingerprint"));
    let done = profile(text, stats, &[&plain]);
    let done: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert!(done["tokens"].as_u64().unwrap() > 1000);
    let [temperature, coactivation] =
        ["temperature", "coactivation"].map(|order| profiled.measure(order));
    let ratio = temperature.perplexity / coactivation.perplexity;
    assert!((ratio - 1.0).abs() < 1e-4, "{ratio}");
    // What is needed does not depend on the order, but for rounding; the merging of reads does.
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
    let text = heldout();
    let recorded = json(&[
        "trace", "record", "-f", &text, "-o", &trace, "--limit", "400", "--json",
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
    // bytes behind the end were accepted
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
    json(
        &[
            &["profile", "-f", &first, "-o", &stats, "--json"],
            &window[..],
        ]
        .concat(),
    );
    json(&["trace", "record", "-f", &second, "-o", &trace, "--json"]);
    let shown = json(&["profile", "show", &stats, "--json"]);
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

/// It said what was wrong with statistics, and not with which.
#[test]
fn a_bad_statistics_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let demo = exported(dir.path());
    std::fs::write(at("bad.stats"), "EMBSTAT nonsense").unwrap();
    let of_another = r#"{"format": "emberflow-stats-v1", "tokens": 1, "layers": []}"#;
    std::fs::write(at("other.stats"), of_another).unwrap();
    for name in ["bad.stats", "other.stats"] {
        let bad = at(name);
        for args in [
            &["profile", "show", &bad][..],
            &["profile", "merge", &bad, "-o", &at("sum")],
            &["pack", &demo, "-o", &at("m.ember"), "--stats", &bad],
        ] {
            // statistics of nothing can be shown, and added up
            if name == "other.stats" && args[0] == "profile" {
                continue;
            }
            let output = call(args);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{args:?}");
            assert!(message.contains(&bad), "{args:?}: {message}");
        }
    }
}
