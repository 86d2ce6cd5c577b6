//! `emberflow bench io` and `emberflow doctor`, as a user runs them.

use crate::common;
use std::path::Path;

use crate::common::{call, emberflow, json};
use serde_json::Value;

/// Runs it with its own cache folder and expects JSON.
fn in_dir(dir: &Path, args: &[&str]) -> Value {
    let mut command = emberflow();
    command.args(args).current_dir(dir);
    let output = common::succeed(command.env("XDG_CACHE_HOME", dir.join("cache")));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn has_keys(value: &Value, keys: &[&str]) {
    for key in keys {
        assert!(value.get(key).is_some(), "no {key}: {value}");
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn bench_io_measures_draws_and_saves() {
    let dir = tempfile::tempdir().unwrap();
    common::save_verdicts(&dir.path().join("cache"));
    let args = [
        "bench", "io", "--quick", "--size", "8MiB", "--millis", "10", "--json", "--svg", "io.svg",
        "--save",
    ];
    let report = in_dir(dir.path(), &args);
    has_keys(
        &report,
        &["version", "machine", "file", "points", "best", "saved_to"],
    );
    has_keys(
        &report["machine"],
        &["kernel", "arch", "cpu", "cores", "memory"],
    );
    let file_keys = [
        "path",
        "len",
        "fs",
        "device",
        "read_ahead_kb",
        "sector",
        "memory_align",
    ];
    has_keys(&report["file"], &file_keys);
    has_keys(
        &report["best"],
        &["engine", "depth", "random_mb_per_s", "sequential_mb_per_s"],
    );
    let points = report["points"].as_array().unwrap();
    // Six sizes at three depths, for pread and, where it works, io_uring.
    assert!(points.len() == 18 || points.len() == 36, "{}", points.len());
    for point in points {
        for key in [
            "mb_per_s",
            "iops",
            "io_cpu_us_per_read",
            "cpu_us_per_read",
            "p50_us",
            "p99_us",
        ] {
            assert!(point[key].as_f64().unwrap() > 0.0, "{key}: {point}");
        }
        has_keys(
            point,
            &["engine", "pattern", "size", "depth", "range", "reads"],
        );
    }
    let svg = std::fs::read_to_string(dir.path().join("io.svg")).unwrap();
    assert!(svg.contains("pread, random over 8.0 MiB"), "{svg}");
    // The test file is gone, and doctor finds the profile.
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "io.svg" && name != "cache")
        .collect();
    assert!(left.is_empty(), "{left:?}");
    let doctor = in_dir(dir.path(), &["doctor", "--json"]);
    // other tests may run at the same time, which is then reported
    let status = if report["doubt"].is_null() {
        "ok"
    } else {
        "advice"
    };
    assert_eq!(doctor["device_profile"]["status"], status, "{doctor}");
    let given = report["conditions"]["device_bytes"].as_f64();
    assert!(given.is_none_or(|share| share > 0.9), "{report}");
    assert_eq!(doctor["device_profile"]["engine"], report["best"]["engine"]);
}

/// Holes would be measured at memory speed.
#[test]
fn a_sparse_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    let mut command = emberflow();
    command
        .args(["bench", "io", "--quick", "--millis", "5"])
        .arg(&path);
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    // without direct I/O, it is reported that this is the page cache's speed
    let told = message.contains("holes are not read") || message.contains("no direct I/O");
    assert!(told, "{message}");
}

/// Plans use only a full measurement; after a quick one the remaining step is reported.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_quick_look_is_not_saved_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let notes = |more: &[&str]| {
        let quick = [
            "bench", "io", "--quick", "--size", "8MiB", "--millis", "5", "--json",
        ];
        let report = in_dir(dir.path(), &[&quick[..], more].concat());
        assert!(
            report["saved_to"].is_null() || more == ["--save"],
            "{report}"
        );
        report["notes"].to_string()
    };
    assert!(notes(&[]).contains("not saved for the planner"));
    assert!(!notes(&["--save"]).contains("not saved"));
    assert!(!notes(&["--io", "sim:ufs4"]).contains("not saved"));
}

#[test]
fn numbers_are_shown_even_where_they_cannot_be_kept() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let measured = |more: &str| {
        let output = emberflow()
            .args(["bench", "io", "--quick", "--size", "8MiB", "--millis", "10"])
            .args(["--io", "pread", more])
            .current_dir(dir.path())
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{more}: {message}");
        (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            message,
        )
    };
    // known in advance: nothing is measured
    let (shown, message) = measured("--save=file/device.json");
    assert!(
        shown.is_empty() && message.contains("file/device.json"),
        "{message}"
    );
    // detected when writing
    let (shown, message) = measured("--csv=/dev/full");
    assert!(message.contains("/dev/full"), "{message}");
    assert!(shown.contains("best: pread"), "{shown}");
    assert!(!shown.contains("written: "), "{shown}");
}

#[test]
fn a_simulated_device_shows_its_published_curve() {
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "bench",
        "io",
        "--size",
        "8MiB",
        "--sizes",
        "4KiB,512KiB,seq",
        "--depths",
        "8",
        "--millis",
        "100",
        "--io",
        "sim:emmc",
        "--json",
    ];
    let report = in_dir(dir.path(), &args);
    assert_eq!(report["saved_to"], Value::Null);
    let points = report["points"].as_array().unwrap();
    let speed = |size: u64| {
        let here = points
            .iter()
            .filter(|p| p["size"] == size && p["engine"] == "sim");
        here.map(|p| p["mb_per_s"].as_f64().unwrap())
            .fold(0.0, f64::max)
    };
    for (size, published) in [(4 << 10, 40.0), (512 << 10, 250.0), (1 << 20, 280.0)] {
        let share = speed(size) / published;
        // A busy machine may be late, but never early.
        assert!((0.25..1.1).contains(&share), "{size}: {}", speed(size));
    }
}

#[test]
fn doctor_looks_at_everything_and_never_fails() {
    common::save_verdicts(&common::cache());
    let report = json(&["doctor", "--json"]);
    for check in [
        "direct_io",
        "io_uring",
        "locked_memory",
        "memory",
        "cgroup",
        "cores",
        "isa",
        "huge_pages",
        "read_ahead",
        "device_profile",
    ] {
        has_keys(&report[check], &["status", "found", "advice"]);
        let advice = report[check]["advice"].is_string();
        assert_eq!(report[check]["status"] == "advice", advice, "{report}");
    }
    assert!(report["memory"]["auto_budget_bytes"].as_u64().unwrap() > 0);
    let nowhere = json(&["doctor", "/no/such/model.ember", "--json"]);
    assert_eq!(nowhere["direct_io"]["status"], "unknown");
    let text = String::from_utf8(call(&["doctor"]).stdout).unwrap();
    assert!(
        text.contains("io_uring") && text.contains("direct_io"),
        "{text}"
    );
}

#[test]
fn wrong_use_is_told_apart_from_failure() {
    let wrong = call(&["bench", "io", "--io", "floppy"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("floppy"));
    let missing = call(&["bench", "io", "/no/such/file"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/no/such/file"));
}

/// Measuring takes memory that no run uses; once it made the first plan require ten times as much
/// as the second.
#[test]
fn the_first_plan_is_that_of_a_measured_machine() {
    let dir = tempfile::tempdir().unwrap();
    let plan = || {
        in_dir(dir.path(), &["plan", "--json"])["smallest_bytes"]
            .as_f64()
            .unwrap()
    };
    let (first, second) = (plan(), plan());
    assert!((first / second - 1.0).abs() < 0.1, "{first} {second}");
}
