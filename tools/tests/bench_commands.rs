//! The benchmarks in their small mode, as a user runs them.

mod common;

use std::path::Path;

use common::{call, json};
use serde_json::Value;

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
    let common = ["bench", name, "--quick", "--json", "--out", &out];
    let report = json(&[&common[..], args].concat());
    assert_eq!(report["bench"], name);
    let machine = &report["machine"];
    for key in ["cpu", "cores", "kernel", "memory", "isa"] {
        assert!(!machine[key].is_null(), "{name}: no {key} in {machine}");
    }
    let notes = report["notes"].to_string();
    assert!(notes.contains("bound: "), "{name}: {notes}");
    report
}

/// The files that were written: a chart, and points under their header.
fn files(dir: &Path, report: &Value, columns: &str) -> String {
    files_of(dir, report, "rows", columns)
}

/// As [`files`], where JSON has the points under another name.
fn files_of(dir: &Path, report: &Value, points: &str, columns: &str) -> String {
    let rows = report[points].as_array().unwrap().len();
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
    assert_eq!(saved[points], report[points]);
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
    let svg = files(dir.path(), &report, "io,policy,adds,");
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
        assert!(ladder.iter().all(|r| number(r, "of_bound") > 0.0));
        // Bundles halve the number of reads, a cache saves bytes.
        assert!(number(&ladder[1], "read_len") > 1.3 * number(&ladder[0], "read_len"));
        let mb = |i: usize| number(&ladder[i], "read_mb_per_token");
        assert!(mb(2) < mb(1), "{ladder:?}");
    }
}

/// The device is the last step.
#[test]
fn a_ladder_ends_with_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let report = bench(
        dir.path(),
        "ablation",
        &["-n", "4", "--io", "sim:ufs4,sim:ufs31", "--device", "cpu"],
    );
    files(dir.path(), &report, "io,policy,adds,");
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|r| [&r["io"], &r["adds"]]).collect();
    assert_eq!(rows.len(), 10, "{names:?}");
    assert_eq!(rows[4]["adds"], "+ device");
    assert_eq!(number(&rows[4], "paper_tokens_per_s"), 11.07);
    assert_eq!(report["hashes_equal"], true);
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
    assert!(rows.iter().all(|r| number(r, "of_bound") > 0.0), "{rows:?}");
}

#[test]
fn decoding_says_where_the_time_goes() {
    let dir = tempfile::tempdir().unwrap();
    let report = part(dir.path(), "decode", &["--contexts", "0,64"]);
    let svg = files_of(dir.path(), &report, "contexts", "context,sparsity,");
    for part in ["64 positions, FFN", "bytes / memory, bound", ">waiting<"] {
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

/// Without a folder files go where results are kept, below the current one; a result that cannot be
/// kept is shown all the same.
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
    // what can be known before is said before
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

#[test]
fn kernels_stand_beside_a_plain_read() {
    let dir = tempfile::tempdir().unwrap();
    let report = part(dir.path(), "kernels", &[]);
    let svg = files(dir.path(), &report, "threads,format,kernel,size,unit,rate,");
    assert!(svg.contains("q4, neurons: ") && svg.contains("f32, plain read: "));
    assert!(report.get("model").is_none() && report.get("hashes_equal").is_none());
    let rows = report["rows"].as_array().unwrap();
    for row in rows {
        assert!(number(row, "rate") > 0.0, "{row}");
        let bounded = row["kernel"] != "products";
        assert_eq!(row.get("of_bound").is_some(), bounded, "{row}");
        if bounded {
            let share = number(row, "rate") / number(row, "bound");
            assert!(
                (share / number(row, "of_bound") - 1.0).abs() < 1e-6,
                "{row}"
            );
        }
    }
    for format in ["q4", "q8", "f16", "f32"] {
        assert!(rows.iter().any(|r| r["format"] == format), "{format}");
    }
}

/// Interactive requests do not wait for background work, which they do first come, first served; in
/// simulated time either.
#[test]
fn interactive_requests_overtake_background_work() {
    for more in [&["--minutes", "1"][..], &["--minutes", "20", "--simulate"]] {
        let dir = tempfile::tempdir().unwrap();
        let args = [&["--reactive", "4"][..], more].concat();
        let report = part(dir.path(), "serve", &args);
        files(dir.path(), &report, "reactive_per_minute,scheduling");
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 4);
        assert_eq!(rows[0]["reactive_requests"], 0);
        let [fcfs, classes] = [&rows[2], &rows[3]];
        assert_eq!(fcfs["scheduling"], "fcfs");
        for key in ["reactive_requests", "proactive_requests"] {
            assert_eq!(fcfs[key], classes[key], "the load is the same");
            assert!(fcfs[key].as_u64() > Some(0), "{report}");
        }
        let wait = |row: &Value| row["reactive_wait_ms"]["median"].as_f64().unwrap();
        assert!(wait(classes) <= wait(fcfs), "{report}");
    }
}

#[test]
fn the_cache_stands_beside_an_access_to_memory() {
    let dir = tempfile::tempdir().unwrap();
    let report = part(dir.path(), "cache", &["--slots", "1024", "--rounds", "2"]);
    let svg = files(dir.path(), &report, "slots,table_bytes,step,ns,");
    assert!(svg.contains(">dependent access<"));
    let rows = report["rows"].as_array().unwrap();
    let steps: Vec<&str> = rows.iter().map(|r| r["step"].as_str().unwrap()).collect();
    assert_eq!(steps, ["look up", "find and pin", "release", "replace"]);
    for row in rows {
        assert!(
            number(row, "ns") > 0.0 && number(row, "access_ns") > 0.0,
            "{row}"
        );
        assert_eq!(row["slots"], 1024);
    }
    assert!(number(&rows[3], "ns") > number(&rows[0], "ns"), "{rows:?}");
    let output = call(&["bench", "cache", "--slots", "3"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn naming_stands_beside_the_speed_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let named = dir.path().join("named.ember").display().to_string();
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let train = [
        "train-predictor",
        "-f",
        text,
        "--kind",
        "sign",
        "--floor",
        "0.1",
    ];
    let made = json(&[&train[..], &["--tokens", "600", "-o", &named, "--json"]].concat());
    let report = part(dir.path(), "predictor", &[&named, "--threads", "2"]);
    files(dir.path(), &report, "layer,kind,bytes,us,");
    let rows = report["rows"].as_array().unwrap();
    let layers = made["layers"].as_array().unwrap();
    assert_eq!(rows.len(), layers.len() + 1);
    for (row, layer) in rows.iter().zip(layers) {
        assert_eq!(row["layer"], layer["layer"]);
        // what train-predictor measured is what is recorded
        let candidate = layer["candidates"].as_array().unwrap().last().unwrap();
        for key in ["bytes", "recall", "precision"] {
            assert_eq!(number(row, key), number(candidate, key), "{key}");
        }
        assert!(
            number(row, "us") > 0.0 && number(row, "bound_us") > 0.0,
            "{row}"
        );
    }
    let all = rows.last().unwrap();
    assert!(all["layer"].is_null());
    for key in ["recall", "precision"] {
        let (all, made) = (number(all, key), number(&made, key));
        assert!((all - made).abs() < 1e-6, "{key}: {all} {made}");
    }
    let plain = dir.path().join("plain.ember").display().to_string();
    let demo = common::exported(dir.path());
    assert!(call(&["pack", &demo, "-o", &plain]).status.success());
    let output = call(&["bench", "predictor", &plain]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("train-predictor"), "{said}");
}

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
