//! The benchmarks in their quick mode, as a user runs them.

use crate::common;
use std::path::Path;

use crate::common::results::{files, number};
use crate::common::{call, json, program};
use serde_json::Value;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// The words before a benchmark's name.
const BENCH: &[&str] = &[];

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
    let long = call(&["prefill", "--quick", "--lengths", "9999999"]);
    assert_eq!(long.status.code(), Some(2));
}

#[test]
fn batches_share_what_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let report = bench(dir.path(), "batch", &["--sizes", "1,3", "--shares", "100"]);
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
    let output = call(&["cache", "--slots", "3"]);
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
    let made = program(&[&train[..], &["--tokens", "600", "-o", &named]].concat());
    let report = part(dir.path(), "predictor", &[&named, "--threads", "2"]);
    files(dir.path(), &report, "layer,kind,bytes,us,");
    let rows = report["rows"].as_array().unwrap();
    let layers = made["layers"].as_array().unwrap();
    assert_eq!(rows.len(), layers.len() + 1);
    for (row, layer) in rows.iter().zip(layers) {
        assert_eq!(row["layer"], layer["layer"]);
        // the recorded values are those measured by train-predictor
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
    program(&["pack", &demo, "-o", &plain]);
    let output = call(&["predictor", &plain]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("train-predictor"), "{said}");
}

#[test]
fn partitions_of_a_phone_are_simulated_beside_what_was_published() {
    let report = json(&["split", "--json", "--tokens", "256,525"]);
    assert!(report["simulated"].as_str().unwrap().contains("Snapdragon"));
    let table = report["table"].as_array().unwrap();
    assert_eq!(table.len(), 9);
    assert_eq!(table[1]["chosen"], "weights 3:1, NPU 1 tokens");
    let ms = |i: usize, key: &str| report["prompts"][i][key].as_f64().unwrap();
    // HeteroInfer has 247.9 tokens per second at 256 (§5.3.1), and 2.21 over padding at 525.
    assert!((200.0..300.0).contains(&(256.0 / ms(0, "split") * 1e3)));
    assert!((2.0..2.5).contains(&(ms(1, "padded") / ms(1, "split"))));
    // Synchronising with a slow fence costs more than the partition saves.
    let slow = json(&["split", "--json", "--sync-us", "400"]);
    assert_eq!(slow["table"][0]["chosen"], "GPU alone");
    let message = String::from_utf8(call(&["split", "--tokens", "0"]).stderr).unwrap();
    assert!(message.contains("1..=4096"), "{message}");
}

#[test]
fn schedules_of_phones_are_simulated_beside_what_was_published() {
    let report = json(&["phone", "--json", "-f", TEXT, "--limit", "2048"]);
    let figures = report["figures"].as_array().unwrap();
    let papers = ["llm.npu", "NPUMoE", "HeteroInfer", "PowerInfer-2"];
    for paper in papers {
        let of_paper = figures.iter().filter(|figure| figure["paper"] == paper);
        assert!(of_paper.count() >= 8, "{paper}");
    }
    // Plans of a model by its sizes, and of the bundled one.
    let plans = report["plans"].as_array().unwrap();
    for model in ["Bamboo-7B", "demo"] {
        let of_model: Vec<_> = plans.iter().filter(|plan| plan["model"] == model).collect();
        assert_eq!(of_model.len(), 8, "{model}");
        for pass in of_model
            .iter()
            .flat_map(|plan| [&plan["decode"], &plan["prompt"]])
        {
            let ms = |key: &str| pass[key].as_f64().unwrap();
            assert!(ms("forecast_ms") > 0.0 && ms("simulated_ms") >= 0.999 * ms("bound_ms"));
        }
    }
    // The bundled models actually ran: the mixture has experts, and both have inputs.
    let recorded = report["recorded"].as_array().unwrap();
    let [dense, experts] = [&recorded[0], &recorded[1]];
    assert_eq!([&dense["model"], &experts["model"]], ["demo", "demo-moe"]);
    assert!(dense["experts"].is_null());
    let routes = &experts["experts"];
    let sum = |keys: &[&str]| {
        keys.iter()
            .map(|key| routes[key].as_u64().unwrap())
            .sum::<u64>()
    };
    // Two of twelve experts for each token of six layers, none of them lost.
    let tokens = experts["tokens"].as_u64().unwrap();
    assert_eq!(sum(&["npu", "overflow", "cold"]), tokens * 6 * 2);
    assert!((0.0..1.0).contains(&routes["padding_share"].as_f64().unwrap()));
    assert_eq!(dense["outliers"][0]["channels"], 320);
    assert_eq!(dense["outliers"][1]["channels"], 960);
    let short = call(&["phone", "-f", TEXT, "--limit", "100"]);
    assert_eq!(short.status.code(), Some(2));
    let message = String::from_utf8(short.stderr).unwrap();
    assert!(message.contains("two passes of 256"), "{message}");
}
