//! `--device` and its section in `doctor`, as a user runs them.

use std::path::Path;
use std::time::Duration;

use crate::common::{call, emberflow, json};
use crate::npu::{has_onnxruntime, is_needed, library};
use emberflow::child::PROGRESS;
use emberflow::probe::{Cause, opencl};
use emberflow_devices::Provider;
use serde_json::Value;

fn run(more: &[&str]) -> Value {
    let args = ["run", "-p", "A vector is", "-n", "12", "--ignore-eos"];
    json(&[&args[..], &["--temp", "0", "--json"], more].concat())
}

/// Whether this machine has an OpenCL device.
fn has_opencl() -> bool {
    let found = !emberflow_devices::list().is_empty();
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
    let mut devices = vec!["cpu".to_owned()];
    if has_opencl() {
        devices.push("opencl:0".into());
    }
    if has_onnxruntime() {
        let npu = format!("npu:{}", Provider::for_tests().unwrap());
        devices.push(format!("cpu,{npu}"));
        if has_opencl() {
            devices.push(format!("opencl:0,{npu}"));
        }
        devices.push(npu);
    }
    for device in devices {
        for share in ["0.45", "1"] {
            let device_part = format!("{device}=2MiB");
            let more = ["--device", &device_part];
            let report = run(&[&more[..], &["--ffn-resident", share]].concat());
            assert_eq!(report["logits_hash"], plain["logits_hash"], "{report}");
            assert_eq!(report["text"], plain["text"]);
            let (memory, held) = (&report["memory"], &report["device"]);
            let [peak, budget] = ["peak_rss_bytes", "budget_bytes"].map(|key| memory[key].as_u64());
            assert!(peak <= budget, "{peak:?} of {budget:?}: {report}");
            assert!(held["clusters"].as_u64() > Some(0), "{report}");
            assert!(held["bytes"].as_u64() <= Some(2 << 20), "{report}");
            assert_eq!(held["lost"], Value::Null);
            let each = held["devices"].as_array().unwrap();
            assert_eq!(each.len(), device.split(',').count(), "{report}");
            if device != "opencl:0" {
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
        ("npu:gpu", "npu:openvino"),
        ("cpu,cpu", "named twice"),
        ("cpu,none", "stand alone"),
    ] {
        let output = call(&["run", "-p", "x", "-n", "1", "--device", name]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && message.contains(told),
            "{message}"
        );
        assert!(output.stdout.is_empty());
    }
    // `auto` works without any device.
    let output = emberflow()
        .args(["run", "-p", "x", "-n", "1", "--device", "auto"])
        .output();
    assert!(output.unwrap().status.success());
}

/// An OpenCL driver that ends its process, or never answers, is an error of the commands that load it.
#[test]
fn opencl_drivers_that_fail_are_errors_within_seconds() {
    if !has_opencl() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (name, code, told) in [
        (
            "aborts",
            "#include <stdlib.h>\n__attribute__((constructor)) void made(void) { abort(); }",
            "crashed",
        ),
        (
            "hangs",
            "#include <unistd.h>\n__attribute__((constructor)) void made(void) { sleep(600); }",
            "no progress",
        ),
    ] {
        let Some(driver) = library(dir.path(), name, code) else {
            assert!(!is_needed(), "no C compiler `cc`");
            return;
        };
        let vendors = dir.path().join(format!("{name}.vendors"));
        std::fs::create_dir(&vendors).unwrap();
        std::fs::write(vendors.join("driver.icd"), driver.display().to_string()).unwrap();
        let with_driver = |args: &[&str]| {
            let mut program = emberflow();
            program.args(args).env("OCL_ICD_VENDORS", &vendors);
            program
        };
        let failed =
            opencl::probe_by(with_driver(&[]), Some(0), Duration::from_secs(3)).unwrap_err();
        assert!(
            failed.cause == Cause::Broken && failed.what.contains(told),
            "{failed:?}"
        );
        if name == "hangs" {
            continue;
        }
        let run = ["run", "-p", "A", "-n", "1", "--device"];
        let refused = with_driver(&[&run[..], &["opencl"]].concat())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            refused.status.code() == Some(1) && said.contains(told),
            "{said}"
        );
        let without = with_driver(&[&run[..], &["auto"]].concat())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&without.stderr).into_owned();
        assert!(without.status.success() && said.contains(told), "{said}");
        let doctor = with_driver(&["doctor"]).output().unwrap();
        let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
        assert!(
            doctor.status.code().is_some() && said.contains(told),
            "{said}"
        );
    }
}

/// A driver that may crash compiles and runs kernels in the child first, until there is a verdict on it.
#[test]
fn kernels_of_a_new_driver_are_tried_in_a_child() {
    if !has_opencl() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let tried = || {
        let child = with_cache(dir.path(), &["check-opencl", "0"]);
        assert!(child.status.success(), "{child:?}");
        let tried = child.stdout.iter().filter(|&&byte| byte == PROGRESS);
        tried.count()
    };
    assert!(tried() >= 5);
    let run = ["run", "-p", "A", "-n", "1", "--device", "opencl:0=1MiB"];
    assert!(with_cache(dir.path(), &run).status.success());
    assert_eq!(tried(), 0);
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

/// Runs it with a separate cache folder.
fn with_cache(dir: &Path, args: &[&str]) -> std::process::Output {
    let mut command = emberflow();
    command.args(args).env("XDG_CACHE_HOME", dir);
    command.output().unwrap()
}

/// A wrong device is refused at every start until it is tested again; a correct one is remembered.
#[test]
fn verdicts_are_kept_and_tried_anew_on_demand() {
    if !has_opencl() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = || {
        let args = ["run", "-p", "A vector is", "-n", "4", "--ignore-eos"];
        let more = ["--json", "--device", "opencl:0=1MiB"];
        with_cache(dir.path(), &[&args[..], &more].concat())
    };
    let report = |output: std::process::Output| -> Value {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let first = report(run());
    let path = dir.path().join("emberflow").join("devices.json");
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(
        kept.contains("FFN of ") && kept.contains("products of"),
        "{kept}"
    );
    let second = report(run());
    assert_eq!(first["logits_hash"], second["logits_hash"]);
    assert_eq!(first["device"]["numerics"], second["device"]["numerics"]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), kept);
    // as left by a wrong device
    let mut verdicts: Value = serde_json::from_str(&kept).unwrap();
    let of_ffn = |v: &&mut Value| v["kernels"].as_str().unwrap().starts_with("FFN");
    let all = verdicts["verdicts"].as_array_mut().unwrap();
    all.iter_mut().find(of_ffn).unwrap()["found"] = serde_json::json!({ "wrong": "apart by 0.5" });
    std::fs::write(&path, verdicts.to_string()).unwrap();
    for _ in 0..2 {
        let output = run();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{message}");
        for told in ["apart by 0.5", "--retry-devices", "--device none"] {
            assert!(message.contains(told), "{told}: {message}");
        }
    }
    let doctor = |more: &[&str]| {
        let args = [&["doctor", "--json"], more].concat();
        report(with_cache(dir.path(), &args))["devices"].clone()
    };
    let listed = doctor(&[]);
    assert_eq!(listed["status"], "advice", "{listed}");
    let of = |all: &Value, key: &str| -> Vec<Value> {
        let verdicts = all["devices"][0]["verdicts"].as_array().unwrap();
        verdicts.iter().map(|v| v[key].clone()).collect()
    };
    assert!(
        of(&listed, "wrong").contains(&"apart by 0.5".into()),
        "{listed}"
    );
    let anew = doctor(&["--retry-devices"]);
    assert_eq!(of(&anew, "wrong"), [Value::Null], "{anew}");
    let named = &anew["devices"][0]["kernels"];
    assert!(named["few"]["team"].is_string(), "{anew}");
    report(run());
    // an unreadable entry is measured again
    std::fs::write(&path, "{").unwrap();
    report(run());
}

/// Of each device the plan gives its times beside the CPU's, and what follows from them.
#[test]
fn a_plan_says_what_devices_are_given_and_why() {
    let output = call(&["plan", "--device", "cpu", "--memory", "auto"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    let line = said.lines().find(|line| line.starts_with("device "));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    let told = [
        "cpu: a layer for 1 rows takes",
        "on the CPU alone: computes",
    ];
    assert!(told.iter().all(|told| line.contains(told)), "{line}");
}
