//! `--device` and what `doctor` says of devices, as a user runs them.

mod common;

use common::{call, emberflow, json};
use serde_json::Value;

fn run(more: &[&str]) -> Value {
    let args = ["run", "-p", "A vector is", "-n", "12", "--ignore-eos"];
    json(&[&args[..], &["--temp", "0", "--json"], more].concat())
}

/// Whether this machine has an OpenCL device.
fn has_opencl() -> bool {
    let found = !emberflow_engine::device::list().is_empty();
    assert!(
        found || std::env::var_os("EMBERFLOW_NEEDS_OPENCL").is_none(),
        "no OpenCL device: install pocl-opencl-icd and ocl-icd-libopencl1"
    );
    found
}

#[test]
fn a_device_computes_the_same_text_within_the_budget() {
    let plain = run(&[]);
    assert!(plain.get("device").is_none(), "{plain}");
    let mut devices = vec!["cpu"];
    if has_opencl() {
        devices.push("opencl:0");
    }
    for device in devices {
        for share in ["0.45", "1"] {
            let more = ["--device", device, "--device-memory", "2MiB"];
            let report = run(&[&more[..], &["--ffn-resident", share]].concat());
            assert_eq!(report["logits_hash"], plain["logits_hash"], "{report}");
            assert_eq!(report["text"], plain["text"]);
            let (memory, held) = (&report["memory"], &report["device"]);
            let [peak, budget] = ["peak_rss_bytes", "budget_bytes"].map(|key| memory[key].as_u64());
            assert!(peak <= budget, "{peak:?} of {budget:?}: {report}");
            assert!(held["clusters"].as_u64() > Some(0), "{report}");
            assert!(held["bytes"].as_u64() <= Some(2 << 20), "{report}");
            assert_eq!(held["lost"], Value::Null);
            if device == "cpu" {
                assert_eq!(held["numerics"], "cpu");
            }
        }
    }
}

#[test]
fn devices_that_are_not_there_are_refused() {
    for (name, told) in [
        ("opencl:99", "OpenCL"),
        ("gpu", "opencl:N"),
        ("opencl:", "opencl:N"),
    ] {
        let output = call(&["run", "-p", "x", "-n", "1", "--device", name]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && message.contains(told),
            "{message}"
        );
        assert!(output.stdout.is_empty());
    }
    let output = call(&["run", "demo-moe", "-p", "x", "-n", "1", "--device", "cpu"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains("experts") && message.contains("--device none"),
        "{message}"
    );
    // Nothing has to be there for `auto`.
    let output = emberflow()
        .args(["run", "-p", "x", "-n", "1", "--device", "auto"])
        .output();
    assert!(output.unwrap().status.success());
}

#[test]
fn doctor_tries_the_devices_out() {
    let doctor = json(&["doctor", "--json"]);
    let devices = doctor["devices"]["devices"].as_array().unwrap();
    assert_eq!(!devices.is_empty(), has_opencl(), "{doctor}");
    for device in devices {
        assert!(device["device"].as_str().unwrap().starts_with("opencl:"));
        assert_ne!(device["error"].is_null(), device["same_bits"].is_null());
    }
}
