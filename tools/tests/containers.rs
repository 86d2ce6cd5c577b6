//! `pack`, `verify`, `inspect` and `export` as a user runs them.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{call, emberflow, exported, json};

fn pack(folder: &str, output: &Path, extra: &[&str]) -> serde_json::Value {
    let output = output.display().to_string();
    let mut args = vec!["pack", folder, "-o", &output, "--json"];
    args.extend(extra);
    json(&args)
}

#[test]
fn packing_is_deterministic_and_verifies_against_its_source() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    for quant in ["q4", "q8", "f16", "f32"] {
        let (a, b) = (dir.path().join("a.ember"), dir.path().join("b.ember"));
        pack(&folder, &a, &["--quant", quant, "--force"]);
        pack(&folder, &b, &["--quant", quant, "--force"]);
        assert!(
            std::fs::read(&a).unwrap() == std::fs::read(&b).unwrap(),
            "{quant}"
        );
        let a = a.display().to_string();
        let result = json(&["verify", &a, "--source", &folder, "--json"]);
        assert_eq!(result["ok"], true, "{result}");
        assert!(
            result["source"]["weights"].as_u64().unwrap() > 1_000_000,
            "{result}"
        );
    }
}

#[test]
fn temperature_order_keeps_the_model_and_shows_in_inspect() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{folder}/config.json")).unwrap()).unwrap();
    let (layers, ffn) = (
        config["num_hidden_layers"].as_u64().unwrap(),
        config["intermediate_size"].as_u64().unwrap(),
    );
    // neuron i fired (i · 7) mod ffn times: a shuffled order
    let counts: Vec<u64> = (0..ffn).map(|i| (i * 7) % ffn).collect();
    let stats = serde_json::json!({
        "format": "emberflow-stats-v1",
        "tokens": ffn,
        "layers": (0..layers).map(|l| serde_json::json!({
            "layer": l, "experts": [{"expert": 0, "counts": counts}]
        })).collect::<Vec<_>>(),
    });
    let stats_file = dir.path().join("stats.json").display().to_string();
    std::fs::write(&stats_file, stats.to_string()).unwrap();
    let sorted = dir.path().join("sorted.ember");
    pack(&folder, &sorted, &["--quant", "q8", "--stats", &stats_file]);
    let sorted = sorted.display().to_string();
    let result = json(&["verify", &sorted, "--source", &folder, "--json"]);
    assert_eq!(result["ok"], true);
    let svg = dir.path().join("t.svg").display().to_string();
    let shown = json(&["inspect", &sorted, "--json", "--tensors", "--svg", &svg]);
    assert_eq!(shown["meta"]["order"], "temperature");
    assert_eq!(
        shown["temperature"].as_array().unwrap().len() as u64,
        layers
    );
    assert!(shown["tensors"].as_array().unwrap().len() as u64 > layers);
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));
    // the same text up to summation order: same tokens for a short greedy run
    let run = |model: &str| {
        json(&[
            "run",
            model,
            "-p",
            "The compiler",
            "-n",
            "12",
            "--ignore-eos",
            "--json",
        ])["tokens"]
            .clone()
    };
    let plain = dir.path().join("plain.ember");
    pack(&folder, &plain, &["--quant", "q8"]);
    assert_eq!(run(&sorted), run(&plain.display().to_string()));
}

/// A killed pack leaves nothing under the final name, and the next one goes on
/// where it stopped and writes the same bytes.
#[test]
fn a_killed_pack_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let whole = dir.path().join("whole.ember");
    pack(&folder, &whole, &["--quant", "f32"]);
    let output = dir.path().join("out.ember");
    let partial = dir.path().join("out.ember.partial");
    let journal = dir.path().join("out.ember.partial.journal");
    // two lines open the journal; every further one is a finished part
    let parts =
        || std::fs::read_to_string(&journal).map_or(0, |t| t.lines().count().saturating_sub(2));
    let mut resumed = 0;
    for _ in 0..5 {
        let mut child = emberflow()
            .args(["pack", &folder, "--quant", "f32", "-o"])
            .arg(&output)
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let (before, start) = (parts(), Instant::now());
        while child.try_wait().unwrap().is_none()
            && parts() <= before
            && start.elapsed() < Duration::from_secs(20)
        {
            std::thread::sleep(Duration::from_micros(200));
        }
        let finished = child.try_wait().unwrap().is_some();
        child.kill().unwrap();
        child.wait().unwrap();
        if finished {
            break;
        }
        assert!(!output.exists(), "a killed pack left its final name");
    }
    if !output.exists() {
        let report = pack(&folder, &output, &["--quant", "f32"]);
        resumed = report["resumed_units"].as_u64().unwrap();
    }
    assert!(std::fs::read(&output).unwrap() == std::fs::read(&whole).unwrap());
    assert!(!partial.exists() && !journal.exists());
    assert!(
        resumed > 0,
        "nothing was taken over, or every attempt ended before it could be killed"
    );
}

#[test]
fn damage_is_found_and_never_runs() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let path = dir.path().join("m.ember");
    pack(&folder, &path, &["--quant", "q8"]);
    let good = std::fs::read(&path).unwrap();
    let file = path.display().to_string();
    let run = || {
        call(&[
            "run",
            &file,
            "-p",
            "The",
            "-n",
            "4",
            "--ignore-eos",
            "--json",
        ])
    };
    let hash = |output: &std::process::Output| {
        serde_json::from_slice::<serde_json::Value>(&output.stdout)
            .map(|v| v["logits_hash"].clone())
            .ok()
    };
    let expected = hash(&run()).unwrap();
    for i in 0..40 {
        let at = (i * 2_654_435_761_usize + 17) % good.len();
        let mut bad = good.clone();
        bad[at] ^= 1 << (i % 8);
        std::fs::write(&path, &bad).unwrap();
        let output = call(&["verify", &file]);
        assert!(
            matches!(output.status.code(), Some(1 | 3)),
            "flip at {at} is not found"
        );
        // either it is refused, or the byte is one that this run never uses
        let output = run();
        if output.status.success() {
            assert_eq!(
                hash(&output),
                Some(expected.clone()),
                "flip at {at} changed the text"
            );
        } else {
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(message.contains(&file), "{message}");
        }
    }
    for len in [0, 1, 100, 4095, 4096, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..len]).unwrap();
        assert!(!run().status.success(), "{len} bytes were accepted");
    }
}

#[test]
fn an_existing_output_is_not_replaced_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let path = dir.path().join("m.ember");
    std::fs::write(&path, "precious").unwrap();
    let output = call(&["pack", &folder, "-o", &path.display().to_string()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--force"));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn perplexity_depends_on_the_format_as_it_should() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let of = |quant: &str| {
        let path = dir.path().join(format!("{quant}.ember"));
        pack(&folder, &path, &["--quant", quant]);
        let path = path.display().to_string();
        let result = json(&[
            "perplexity",
            &path,
            "-f",
            text,
            "--limit",
            "3000",
            "--window",
            "256",
            "--json",
        ]);
        result["perplexity"].as_f64().unwrap()
    };
    let (f32, q8, q4) = (of("f32"), of("q8"), of("q4"));
    assert!((q8 / f32 - 1.0).abs() < 0.001, "q8 {q8} against f32 {f32}");
    assert!((q4 / f32 - 1.0).abs() < 0.05, "q4 {q4} against f32 {f32}");
    assert!(f32 > 2.0 && f32 < 60.0, "not a language model: {f32}");
}
