//! The benchmarks of whole runs in their small mode, as a user runs them.

mod common;

use std::path::Path;

use common::{call, json};
use serde_json::Value;

/// Runs a benchmark of the bundled model with two threads, its files in `dir`.
fn bench(dir: &Path, name: &str, args: &[&str]) -> Value {
    let out = dir.display().to_string();
    let common = [
        "bench",
        name,
        "--quick",
        "--threads",
        "2",
        "--json",
        "--out",
        &out,
    ];
    let report = json(&[&common[..], args].concat());
    assert_eq!(report["bench"], name);
    assert_eq!(report["hashes_equal"], true, "{report}");
    assert_eq!(report["differing"], Value::Array(Vec::new()));
    let machine = &report["machine"];
    for key in ["cpu", "cores", "kernel", "memory", "isa", "file"] {
        assert!(!machine[key].is_null(), "{name}: no {key} in {machine}");
    }
    assert_eq!(report["logits_hash"].as_str().map(str::len), Some(16));
    report
}

/// The files that were written: a chart, and points under their header.
fn files(dir: &Path, report: &Value, columns: &str) -> String {
    let rows = report["rows"].as_array().unwrap().len();
    let written = report["written"].as_array().unwrap();
    assert_eq!(written.len(), 3, "{written:?}");
    let text = |ext: &str| {
        let mut of = written.iter().map(|p| Path::new(p.as_str().unwrap()));
        let path = of
            .find(|p| p.extension().is_some_and(|e| e == ext))
            .unwrap();
        assert!(path.starts_with(dir));
        std::fs::read_to_string(path).unwrap()
    };
    let csv = text("csv");
    assert!(csv.starts_with(columns), "{csv}");
    assert_eq!(csv.lines().count(), 1 + rows, "{csv}");
    let saved: Value = serde_json::from_str(&text("json")).unwrap();
    assert_eq!(saved["rows"], report["rows"]);
    let svg = text("svg");
    well_formed(&svg);
    svg
}

/// Every element is closed in the order in which it was opened, and no number is missing.
fn well_formed(svg: &str) {
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"));
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    let mut open: Vec<&str> = Vec::new();
    for part in svg.split('<').skip(1) {
        let (tag, _) = part.split_once('>').expect("a tag ends");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split(' ').next().unwrap());
        }
    }
    assert!(open.is_empty(), "{open:?} are not closed");
}

fn number(row: &Value, key: &str) -> f64 {
    let value = &row[key];
    let value = value.as_f64().or_else(|| value["median"].as_f64());
    value.unwrap_or_else(|| panic!("no number {key} in {row}"))
}

#[test]
fn a_sweep_compares_shares_and_policies() {
    let dir = tempfile::tempdir().unwrap();
    let beside = dir.path().join("other.csv");
    let other = "share,name,median,low,high\n0.5,\"another program, slow\",3,2,4\n";
    std::fs::write(&beside, other).unwrap();
    let beside = beside.display().to_string();
    let report = bench(dir.path(), "sweep", &["--beside", &beside]);
    let svg = files(dir.path(), &report, "share,policy,");
    assert!(svg.contains("another program, slow"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        assert!(number(row, "tokens_per_s") > 0.0, "{row}");
        let mapped = row["policy"] == "mmap";
        assert_eq!(
            row["within_budget"],
            if mapped { Value::Null } else { true.into() }
        );
        assert!(mapped || number(row, "of_bound") > 0.0, "{row}");
    }
    let read = |row: &Value| row["bound"]["read_bytes"].as_f64().unwrap();
    assert!(read(&rows[0]) > read(&rows[3]));
    let notes = report["notes"].to_string();
    for part in ["within the budget", "full: ", "mmap: without a limit"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
}

#[test]
fn a_ladder_stands_beside_the_paper() {
    let dir = tempfile::tempdir().unwrap();
    let report = bench(dir.path(), "ablation", &["-n", "4"]);
    let svg = files(dir.path(), &report, "io,policy,");
    assert!(svg.contains("paper (their phone)"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    for ladder in rows.chunks(4) {
        assert_eq!(number(&ladder[0], "factor"), 1.0);
        let speeds: Vec<f64> = ladder.iter().map(|r| number(r, "tokens_per_s")).collect();
        let last = speeds[3] / speeds[0];
        assert!((number(&ladder[3], "of_first") - last).abs() < 1e-9 * last);
        let paper: Vec<f64> = ladder
            .iter()
            .map(|r| number(r, "paper_tokens_per_s"))
            .collect();
        assert_eq!(paper, [0.4, 1.1, 4.181, 9.6]);
        // Bundles halve the number of reads, a cache saves bytes.
        assert!(number(&ladder[1], "read_len") > 1.3 * number(&ladder[0], "read_len"));
        let mb = |i: usize| number(&ladder[i], "read_mb_per_token");
        assert!(mb(2) < mb(1), "{ladder:?}");
    }
}

#[test]
fn latencies_are_a_distribution() {
    let dir = tempfile::tempdir().unwrap();
    let report = bench(dir.path(), "latency", &["-n", "16", "--rounds", "2"]);
    files(dir.path(), &report, "share,policy,tokens,mean_ms,");
    let row = &report["rows"][0];
    // The first token of each round is not one of them.
    assert_eq!(number(row, "tokens"), 30.0);
    let order = ["p50_ms", "p90_ms", "p99_ms", "max_ms"].map(|key| number(row, key));
    assert!(order.is_sorted() && order[0] > 0.0, "{order:?}");
    let classes = row["by_hit_rate"].as_array().unwrap();
    let tokens: f64 = classes.iter().map(|c| number(c, "tokens")).sum();
    assert_eq!(tokens, 30.0);
    assert!(number(&row["bound"], "ms") > 0.0 && number(row, "of_bound") > 0.0);
}

#[test]
fn prompts_are_measured_beside_memory() {
    let dir = tempfile::tempdir().unwrap();
    let report = bench(dir.path(), "prefill", &["--chunks", "0,16"]);
    files(dir.path(), &report, "prompt_tokens,chunk,share,");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for pair in rows.chunks(2) {
        assert!(number(&pair[0], "bytes_read") > 0.0 && number(&pair[1], "bytes_read") == 0.0);
        assert_eq!(number(&pair[1], "of_resident"), 1.0);
        let tokens = number(&pair[0], "prompt_tokens");
        assert!((40.0..=48.0).contains(&tokens), "{tokens}");
    }
    assert_eq!(number(&rows[2], "chunk"), 16.0);
    let long = call(&["bench", "prefill", "--quick", "--lengths", "9999999"]);
    assert_eq!(long.status.code(), Some(2));
}

#[test]
fn batches_share_what_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let report = bench(dir.path(), "batch", &["--sizes", "1,3", "--shares", "50"]);
    files(dir.path(), &report, "share,texts,tokens_per_s,");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!((rows.len(), number(&rows[0], "gain")), (2, 1.0));
    let needed = [0, 1].map(|i| number(&rows[i], "needed_share"));
    assert!(
        needed[1] > needed[0] && needed[1] < 3.0 * needed[0],
        "{needed:?}"
    );
    assert!(number(&rows[1], "hot_cut") > number(&rows[0], "hot_cut"));
}

#[test]
fn a_table_is_printed_and_wrong_points_are_refused() {
    let output = call(&[
        "bench",
        "sweep",
        "--quick",
        "-n",
        "3",
        "--shares",
        "40,100",
        "--policies",
        "full",
    ]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("| FFN in memory | policy |"), "{said}");
    assert!(said.contains("logits: the same in all 2 runs"), "{said}");
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(progress.contains("[  2/2, "), "{progress}");
    for bad in [
        &["--shares", "0"][..],
        &["--io", "sim:tape"],
        &["--policies", "fast"],
    ] {
        let output = call(&[&["bench", "sweep", "--quick"], bad].concat());
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
}
