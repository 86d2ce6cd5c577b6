//! `plan` and `run` agree.

use std::path::Path;

use crate::common::{emberflow, save_rates};
use serde_json::{Value, json};

/// Runs it with a cache folder, or without one, and expects JSON.
fn report(cache: Option<&Path>, args: &[&str]) -> Value {
    let mut command = emberflow();
    command.args(args).env_remove("HOME");
    match cache {
        Some(dir) => command.env("XDG_CACHE_HOME", dir),
        None => command.env_remove("XDG_CACHE_HOME"),
    };
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {message}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn smallest(plan: &Value) -> u64 {
    plan["smallest_bytes"].as_u64().unwrap()
}

/// Regression: `run` refused a planned budget by a MiB: the plan did not include the tokenizer's
/// memory after use, nor the variation of process sizes between starts.
#[test]
fn the_smallest_budget_of_a_plan_is_one_that_runs() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(dir.path());
    for options in [
        "--context 24",
        "--context 200",
        "--context 1024",
        "--context 512 --sparsity dense --threads 1",
        "--context 1024 --threads 2",
    ] {
        let options: Vec<&str> = options.split(' ').collect();
        let plan = report(
            Some(dir.path()),
            &[&["plan", "--json"], &options[..]].concat(),
        );
        let smallest = smallest(&plan);
        let first = &plan["plans"][0]["memory"]["budget_bytes"];
        assert_eq!(first.as_u64(), Some(smallest), "{options:?}");
        let memory = smallest.to_string();
        for _ in 0..3 {
            let run = ["run", "-n", "8", "--json", "--memory", &memory];
            let run = report(Some(dir.path()), &[&run, &options[..]].concat());
            let peak = run["memory"]["peak_rss_bytes"].as_u64().unwrap();
            assert!(peak <= smallest, "{options:?}: {peak} of {smallest}");
        }
        // and it is tight: a few MiB less is refused
        let less = (smallest - (4 << 20)).to_string();
        let refused = emberflow()
            .args(["run", "-n", "8", "--json", "--memory", &less])
            .args(&options)
            .output()
            .unwrap();
        assert_eq!(refused.status.code(), Some(1), "{options:?}");
        // both name the context, and the same budget: what of the program's file is resident when a process starts differs
        // by up to 2 MiB with what the page cache holds
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        let context = plan["context"].as_u64().unwrap();
        assert_eq!(context.to_string(), options[1]);
        let said = format!("with a context of {context} tokens; the smallest that works is ");
        assert!(message.contains(&said), "{message}");
        let (_, after) = message.split_once("--memory ").unwrap();
        let named: u64 = after.split_once("MiB").unwrap().0.parse().unwrap();
        assert!(named.abs_diff(smallest >> 20) <= 2, "{named}: {smallest}");
    }
}

/// A budget that is too small does not hide the plans of others.
#[test]
fn budgets_that_are_too_small_are_named_beside_the_others() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(dir.path());
    let planned = |more: &[&str]| {
        let mut command = emberflow();
        command.env("XDG_CACHE_HOME", dir.path());
        command.args(["plan"]).args(more).output().unwrap()
    };
    let report = report(
        Some(dir.path()),
        &["plan", "--json", "--memory", "1MiB,200MiB,2MiB,1GiB"],
    );
    let bytes = |name: &str, list: &str| -> Vec<u64> {
        let all = report[list].as_array().unwrap().iter();
        all.map(|of| of.pointer(name).unwrap().as_u64().unwrap())
            .collect()
    };
    assert_eq!(bytes("/memory/budget_bytes", "plans"), [200 << 20, 1 << 30]);
    assert_eq!(bytes("/budget_bytes", "too_small"), [1 << 20, 2 << 20]);
    let least = smallest(&report);
    // What is resident of the program when it starts differs between starts.
    for named in bytes("/smallest_bytes", "too_small") {
        assert!(named.abs_diff(least) <= 4 << 20, "{named}: {least}");
    }
    let table = planned(&["--memory", "1MiB,200MiB"]);
    assert!(table.status.success(), "{table:?}");
    let text = String::from_utf8(table.stdout).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("MiB")).collect();
    assert!(
        lines[1].contains("is too small; the smallest that works is"),
        "{text}"
    );
    assert!(lines[2].trim_start().starts_with("200"), "{text}");
    let refused = planned(&["--memory", "1MiB,2MiB", "--json"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty());
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("the smallest that works is"), "{message}");
}

/// Regression: without a cache folder, the planning process itself measured the machine, and that
/// memory was attributed to the model.
#[test]
fn a_measurement_that_cannot_be_kept_counts_too_and_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(dir.path());
    let kept = report(Some(dir.path()), &["plan", "--json"]);
    // a file in place of the folder cannot be written to by anyone
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for nowhere in [None, Some(&*file)] {
        let plan = report(nowhere, &["plan", "--json"]);
        let (kept, nowhere) = (smallest(&kept), smallest(&plan));
        assert!(
            kept.abs_diff(nowhere) <= 2 << 20,
            "{kept} with a cache folder, {nowhere} without"
        );
        let basis = &plan["plans"][0]["basis"];
        assert_eq!(basis["machine_measured"], true, "{basis}");
    }
}

/// The disk by a few reads of the model, CPU and memory for the model's formats; a longer measurement is never replaced.
#[test]
fn a_plan_measures_what_is_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.ember");
    std::fs::copy("../models/demo/demo.ember", &model).unwrap();
    let words = ["plan", "--json", model.to_str().unwrap()];
    let basis = |cache| report(cache, &words)["plans"][0]["basis"].clone();
    let cache = dir.path().join("emberflow");
    let saved = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(cache.join(name)).unwrap()).unwrap()
    };
    for cache in [None, Some(dir.path())] {
        let basis = basis(cache);
        assert_eq!(basis["machine_measured"], true, "{basis}");
        assert_eq!(basis["device_measured"], true, "{basis}");
    }
    let quant = report(Some(dir.path()), &words)["quant"].clone();
    for with in saved("machine.json")["threads"].as_array().unwrap() {
        let kernels = with["kernels"].as_array().unwrap();
        let measured = |format: &Value| kernels.iter().any(|kernel| kernel["dtype"] == *format);
        assert!(
            measured(&quant["ffn"]) && measured(&quant["attention"]),
            "{with}"
        );
        assert!(kernels.len() < 4, "formats of the model only: {with}");
    }
    let mut disk = saved("device.json");
    assert_eq!(disk["brief"], true);
    // A full profile of another device stays, and this one is measured for each plan.
    disk["brief"] = json!(false);
    disk["file"]["device"] = json!("/dev/other");
    std::fs::write(cache.join("device.json"), disk.to_string()).unwrap();
    assert_eq!(basis(Some(dir.path()))["device_measured"], true);
    assert_eq!(saved("device.json"), disk);
    // A simulated device, and a model without a file, are not read.
    std::fs::remove_file(cache.join("device.json")).unwrap();
    report(
        Some(dir.path()),
        &[&words[..], &["--io", "sim:ufs4"]].concat(),
    );
    report(Some(dir.path()), &["plan", "--json"]);
    assert!(!cache.join("device.json").exists());
}

/// Whole experts or single neurons: the plan chooses the one that it expects to be faster.
#[test]
fn a_larger_budget_never_makes_a_plan_of_experts_slower() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(dir.path());
    let plan = |budgets: &str| {
        let words = "plan demo-moe --io sim:ufs4 --context 256 --json --memory";
        let words: Vec<&str> = words.split(' ').chain([budgets]).collect();
        report(Some(dir.path()), &words)
    };
    // Process sizes vary by a MiB between starts.
    let least = smallest(&plan("1GiB")).div_ceil(1 << 20) + 2;
    let budgets: Vec<String> = (least..least + 15).map(|mib| format!("{mib}MiB")).collect();
    let report = plan(&budgets.join(","));
    let plans = report["plans"].as_array().unwrap();
    let speeds: Vec<f64> = plans
        .iter()
        .map(|plan| plan["decode"]["tokens_per_s"].as_f64().unwrap())
        .collect();
    assert!(speeds.windows(2).all(|w| w[1] > 0.98 * w[0]), "{speeds:?}");
    assert!(speeds[14] > speeds[0], "{speeds:?}");
    let mut known = plans.iter().map(|plan| &plan["basis"]["statistics"]);
    assert!(known.all(|known| known == true), "{report}");
}

/// `quantization_config` decides the formats: q8 for weights in FP8, q4k for floats. What `pack` does not read is
/// refused by its name.
#[test]
fn a_description_has_the_formats_of_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(dir.path());
    let path = dir.path().join("config.json");
    let planned = |name: &str, quantization: Option<Value>| {
        let shape = Path::new("../benches/shapes").join(format!("{name}.json"));
        let text = std::fs::read_to_string(shape).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        if let Some(quantization) = quantization {
            config["quantization_config"] = quantization;
        }
        std::fs::write(&path, config.to_string()).unwrap();
        let mut command = emberflow();
        command.env("XDG_CACHE_HOME", dir.path());
        command.args(["plan", "--json"]).arg(&path);
        command.output().unwrap()
    };
    let full = |name: &str, quantization: Option<Value>| {
        let output = planned(name, quantization);
        assert!(output.status.success(), "{name}: {output:?}");
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["full_bytes"].as_f64().unwrap()
    };
    // as releases name the type; in the second the text model is a part of a whole
    for (name, fmt) in [
        ("minimax-m2", "float8_e4m3fn"),
        ("qwen3.6-35b-a3b", "e4m3"),
        ("deepseek-v2-lite", "e4m3"),
    ] {
        let quantization = json!({
            "quant_method": "fp8", "fmt": fmt, "weight_block_size": [128, 128],
            "activation_scheme": "dynamic", "modules_to_not_convert": ["gate", "lm_head"],
        });
        // 8.5 bits in place of 4.5
        let ratio = full(name, Some(quantization)) / full(name, None);
        assert!((1.7..1.9).contains(&ratio), "{name}: {ratio}");
    }
    // experts have 4.5 bits as those of floats, the other matrices q8
    for quantization in [
        json!({"quant_method": "awq", "bits": 4, "group_size": 128}),
        json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}}),
    ] {
        let name = "qwen3.6-35b-a3b";
        let ratio = full(name, Some(quantization)) / full(name, None);
        assert!((0.95..1.1).contains(&ratio), "{ratio}");
    }
    for (name, quantization) in [
        ("minimax-m2", json!({"quant_method": "mxfp4"})),
        (
            "qwen3.6-35b-a3b",
            json!({"quant_method": "awq", "bits": 3, "group_size": 128}),
        ),
        ("minimax-m2", json!({"quant_method": "compressed-tensors"})),
        ("minimax-m2", json!({"quant_method": "hqq"})),
        (
            "deepseek-v2-lite",
            json!({"quant_method": "fp8", "fmt": "e5m2"}),
        ),
    ] {
        let output = planned(name, Some(quantization.clone()));
        assert_eq!(output.status.code(), Some(1), "{quantization}: {output:?}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("quantization_config"), "{message}");
    }
}

/// What a device holds of a mixture is not read.
#[test]
fn a_mixture_in_memory_beside_a_device_reads_nothing() {
    let plan = report(
        None,
        &[
            "plan", "demo-moe", "--device", "cpu=2MiB", "--memory", "2GiB", "--json",
        ],
    );
    let decode = &plan["plans"][0]["decode"];
    assert_eq!(decode["reads"], 0.0, "{decode}");
    assert_eq!(decode["limit"], "compute", "{decode}");
}

/// The shapes in `benches/shapes` have the parameters in their models' names.
#[test]
fn shapes_have_the_parameters_of_their_models() {
    for (name, billions) in SHAPES {
        let path = Path::new("../benches/shapes").join(format!("{name}.json"));
        let config = emberflow_models::describe(&path).unwrap().config;
        let parameters: f64 = emberflow_models::names::required(&config)
            .iter()
            .map(|t| t.rows as f64 * t.cols as f64)
            .sum();
        let found = parameters / 1e9;
        assert!(
            (found - billions).abs() < 0.05,
            "{name}: {found:.2} billions"
        );
    }
}

/// Billions of parameters of the text models without layers for multi-token prediction.
const SHAPES: [(&str, f64); 8] = [
    ("deepseek-v2-lite", 15.7),
    ("gemma-4-26b-a4b", 25.2),
    ("glm-4.5-air", 106.9),
    ("glm-4.7-flash", 29.9),
    ("lfm2.5-8b-a1b", 8.3),
    ("minimax-m2", 228.7),
    ("nemotron-3-nano", 31.6),
    ("qwen3.6-35b-a3b", 34.7),
];
