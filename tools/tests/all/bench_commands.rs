//! The benchmarks in their quick mode, as a user runs them.

use crate::common;
use std::path::Path;

use crate::common::results::{files, files_of, number};
use crate::common::{call, json};
use serde_json::Value;

/// The words before a benchmark's name.
const BENCH: &[&str] = &["bench"];

/// Runs a benchmark of whole runs of the bundled model with two threads, its files in `dir`.
fn bench(dir: &Path, name: &str, args: &[&str]) -> Value {
    let report = part(dir, name, &[&["--threads", "2"], args].concat());
    assert_eq!(report["hashes_equal"], true, "{report}");
    assert_eq!(report["differing"], Value::Array(Vec::new()));
    assert!(!report["machine"]["file"].is_null());
    assert_eq!(report["logits_hash"].as_str().map(str::len), Some(16));
    report
}

/// Runs any benchmark, its files in `dir`.
fn part(dir: &Path, name: &str, args: &[&str]) -> Value {
    let out = dir.display().to_string();
    let common = [name, "--quick", "--json", "--out", &out];
    let report = json(&[BENCH, &common, args].concat());
    assert_eq!(report["bench"], name);
    let machine = &report["machine"];
    for key in ["cpu", "cores", "kernel", "memory", "isa"] {
        assert!(!machine[key].is_null(), "{name}: no {key} in {machine}");
    }
    let notes = report["notes"].to_string();
    assert!(notes.contains("bound: "), "{name}: {notes}");
    report
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
    for part in [
        "within the budget",
        "full: ",
        "mmap: without a memory limit",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
}

/// The device is the last step.
#[test]
fn decoding_says_where_the_time_goes() {
    let dir = tempfile::tempdir().unwrap();
    let report = part(dir.path(), "decode", &["--contexts", "0,64"]);
    let svg = files_of(dir.path(), &report, "contexts", "context,sparsity,");
    for part in ["64 positions, FFN", "bytes / memory, bound", ">I/O wait<"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    for context in report["contexts"].as_array().unwrap() {
        let (time, bound) = (number(context, "ms"), number(context, "bound_ms"));
        assert!(bound > 0.0, "{context}");
        // the bound's bytes and speed are those of the share
        let share = number(context, "roofline");
        assert!((bound / time / share - 1.0).abs() < 1e-6, "{context}");
    }
}

/// Without a folder, files are written to the results folder below the current one; a result that
/// cannot be written is still printed.
#[test]
fn results_have_a_usual_place() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = common::emberflow();
        command.current_dir(dir.path()).args(["bench", "decode"]);
        command.args(["-n", "1"]).args(args).output().unwrap()
    };
    let output = run(&["--json", "--out"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let first = report["written"][0].as_str().unwrap();
    assert!(first.starts_with("benches/results/"), "{first}");
    assert!(first.ends_with("c/emberflow-demo-decode.csv"), "{first}");
    assert!(dir.path().join(first).exists());
    let output = run(&["--csv", "/dev/full"]);
    let shown = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    assert!(shown.contains("| context |"), "{shown}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("/dev/full"));
    // errors that can be known in advance are reported before measuring
    let output = run(&["--csv", "no/such.csv"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("folder no does not exist"));
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
    assert!(said.contains("logits: identical in all 2 runs"), "{said}");
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

/// Interactive requests do not wait for background work, but do with first come, first served; also
/// in simulated time.
#[test]
fn reads_stand_beside_the_fastest_ones() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, vec![7; 8 << 20]).unwrap();
    let file = file.display().to_string();
    let few = ["--sizes", "4KiB,64KiB", "--depths", "2", "--ranges", "0"];
    let rest = ["--millis", "5", "--rounds", "3", "--io", "pread"];
    let report = part(dir.path(), "io", &[&[&*file], &few[..], &rest].concat());
    let columns = "engine,pattern,size,depth,range,mb_per_s,mb_per_s_min,mb_per_s_max,";
    let svg = files_of(dir.path(), &report, "points", columns);
    assert!(svg.contains("pread, random") && svg.contains("cores"));
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    for point in points {
        // the point is the round of the median
        assert_eq!(number(point, "mb_per_s"), number(point, "range"));
        let [low, high] = ["min", "max"].map(|end| point["of_bound"][end].as_f64().unwrap());
        assert!(0.0 < low && low <= high && high <= 1.0, "{point}");
    }
    let best = points
        .iter()
        .map(|p| p["of_bound"]["max"].as_f64().unwrap());
    assert_eq!(best.fold(0.0, f64::max), 1.0);
}
