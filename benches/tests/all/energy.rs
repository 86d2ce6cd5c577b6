//! Energy per token, on a synthetic `/sys` tree: no real counter is read here.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{call, json};

/// Runs `work` while the counter in `file` increases by `step` every two milliseconds and wraps at
/// `range`; returns the counted microjoules.
fn while_counting<T>(file: &Path, step: u64, range: u64, work: impl FnOnce() -> T) -> (T, u64) {
    let done = AtomicBool::new(false);
    let replace = |value: u64| {
        // never observed half written
        let new = file.with_extension("new");
        fs::write(&new, format!("{value}\n")).unwrap();
        fs::rename(&new, file).unwrap();
    };
    replace(range - step);
    std::thread::scope(|scope| {
        let counter = scope.spawn(|| {
            let mut sum = 0;
            while !done.load(Ordering::Relaxed) {
                sum += step;
                replace((range - step + sum) % range);
                std::thread::sleep(Duration::from_millis(2));
            }
            sum
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        (result, counter.join().unwrap())
    })
}

#[test]
fn a_run_tells_its_joules_and_where_they_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let package = dir.path().join("class/powercap/intel-rapl:0");
    fs::create_dir_all(&package).unwrap();
    fs::write(package.join("name"), "package-0\n").unwrap();
    fs::write(package.join("max_energy_range_uj"), "900000\n").unwrap();
    let sysfs = dir.path().display().to_string();
    let counter = package.join("energy_uj");
    let run = ["run", "-n", "64", "--sysfs", &sysfs, "--json"];
    let (report, counted) = while_counting(&counter, 10_000, 900_000, || json(&run));
    let energy = &report["energy"];
    assert_eq!(energy["source"], "rapl package-0");
    let joules = energy["joules"].as_f64().unwrap();
    // it wraps at once, again and again: the sum is at most the count
    assert!(joules > 0.0 && joules <= counted as f64 / 1e6, "{joules}");
    let each = energy["joules_per_token"].as_f64().unwrap();
    assert!(
        each > 0.0 && each * 63.0 <= joules + 1e-9,
        "{each} {joules}"
    );

    let bench = ["decode", "-n", "64", "--sysfs", &sysfs, "--json"];
    let (report, counted) = while_counting(&counter, 10_000, 900_000, || json(&bench));
    assert_eq!(report["energy_source"], "rapl package-0");
    let each = report["contexts"][0]["joules_per_token"].as_f64().unwrap();
    assert!(each > 0.0 && each * 64.0 <= counted as f64 / 1e6, "{each}");
    let (output, _) = while_counting(&counter, 10_000, 900_000, || call(&bench[..5]));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(
        table.contains("J/token (context), rapl package-0: "),
        "{table}"
    );

    let (output, _) = while_counting(&counter, 10_000, 900_000, || call(&run[..5]));
    let summary = String::from_utf8_lossy(&output.stderr);
    assert!(summary.contains(" J/token (rapl package-0)"), "{summary}");
}

#[test]
fn a_battery_under_load_tells_and_a_charged_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let battery = dir.path().join("class/power_supply/BAT0");
    fs::create_dir_all(&battery).unwrap();
    for (file, text) in [
        ("type", "Battery"),
        ("status", "Discharging"),
        ("power_now", "12000000"),
    ] {
        fs::write(battery.join(file), text).unwrap();
    }
    let sysfs = dir.path().display().to_string();
    let run = ["run", "-n", "32", "--sysfs", &sysfs, "--json"];
    let report = json(&run);
    assert_eq!(report["energy"]["source"], "battery BAT0");
    // 12 W for the duration of the run
    let joules = report["energy"]["joules"].as_f64().unwrap();
    let mean = report["latency_ms"]["mean"].as_f64().unwrap();
    let seconds = (report["ttft_ms"].as_f64().unwrap() + mean * 31.0) / 1e3;
    let ratio = joules / (12.0 * seconds);
    assert!((0.9..1.3).contains(&ratio), "{joules} J in {seconds} s");

    fs::write(battery.join("status"), "Full").unwrap();
    assert!(json(&run).get("energy").is_none());
    let bench = json(&["decode", "-n", "4", "--sysfs", &sysfs, "--json"]);
    assert!(bench.get("energy_source").is_none());
    assert!(bench["contexts"][0].get("joules_per_token").is_none());
}
