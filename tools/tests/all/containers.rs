//! `pack`, `verify`, `inspect` and `export` as a user runs them.

use std::path::Path;

use crate::common::{call, emberflow, exported, json};

fn fixture(name: &str) -> String {
    format!(
        "{}/../tests/fixtures/models/{name}",
        env!("CARGO_MANIFEST_DIR")
    )
}

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
    // in f32: quantised activations would amplify a last bit to a step of 1/127
    let packed = |name: &str, options: &[&str]| {
        let file = dir.path().join(name);
        pack(&folder, &file, &[&["--quant", "f32"], options].concat());
        file.display().to_string()
    };
    let sorted = packed("sorted32.ember", &["--stats", &stats_file]);
    assert_eq!(run(&sorted), run(&packed("plain32.ember", &[])));
}

/// The location of scales and the alignment of bundles change the file, but no logit.
#[test]
fn format_parameters_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let path = dir.path().join("m.ember");
    let file = path.display().to_string();
    let mut strides = std::collections::BTreeSet::new();
    let mut hashes = std::collections::BTreeSet::new();
    for scales in ["inline", "resident"] {
        for sector in ["512", "4096"] {
            let flags = [
                "--quant", "q8", "--scales", scales, "--sector", sector, "--force",
            ];
            let report = pack(&folder, &path, &flags);
            strides.insert((scales, report["bundle_bytes"].as_u64().unwrap()));
            assert_eq!(
                json(&["inspect", &file, "--json"])["bundle"]["scales"],
                scales
            );
            for share in ["0", "0.5", "1"] {
                let run = ["run", &file, "-p", "A trait", "-n", "8", "--ignore-eos"];
                let report = json(&[&run[..], &["--ffn-resident", share, "--json"]].concat());
                hashes.insert(report["logits_hash"].as_str().unwrap().to_owned());
            }
        }
    }
    assert_eq!(strides.len(), 4, "{strides:?}");
    assert_eq!(hashes.len(), 1, "{hashes:?}");
}

/// A killed pack leaves nothing under the final name, and the next one resumes and writes the same
/// bytes. A fast machine may finish before it can be killed; then the attempt is repeated.
#[test]
fn a_killed_pack_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let whole = dir.path().join("whole.ember");
    pack(&folder, &whole, &["--quant", "f32"]);
    let output = dir.path().join("out.ember");
    let partial = dir.path().join("out.ember.partial");
    let journal = dir.path().join("out.ember.partial.journal");
    // two lines begin the journal; every further one is a finished part
    let parts =
        || std::fs::read_to_string(&journal).map_or(0, |t| t.lines().count().saturating_sub(2));
    for _ in 0..30 {
        let mut child = emberflow()
            .args(["pack", &folder, "--quant", "f32", "--force", "-o"])
            .arg(&output)
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while child.try_wait().unwrap().is_none() && parts() == 0 {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if output.exists() {
            std::fs::remove_file(&output).unwrap();
            continue;
        }
        let report = pack(&folder, &output, &["--quant", "f32"]);
        assert!(report["resumed_units"].as_u64().unwrap() > 0, "{report}");
        assert!(std::fs::read(&output).unwrap() == std::fs::read(&whole).unwrap());
        assert!(!partial.exists() && !journal.exists());
        return;
    }
    panic!("every pack ended before it could be killed");
}

/// Packing streams: it needs less than half of the bytes that it writes (measured: a third, most of
/// it the program, its tokenizer and one Down matrix, none of which grow with the number of
/// layers).
#[test]
fn packing_needs_far_less_memory_than_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let output = dir.path().join("m.ember");
    let mut child = emberflow()
        .args(["pack", &folder, "--quant", "f32", "-o"])
        .arg(&output)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        if let Some(kib) = line.and_then(|l| l.trim().strip_suffix(" kB")) {
            peak = kib.parse::<u64>().unwrap() << 10;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(child.wait().unwrap().success());
    let written = std::fs::metadata(&output).unwrap().len();
    assert!(peak > 0 && peak < written / 2, "{peak} of {written} bytes");
}

#[test]
fn packing_touches_no_file_beside_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("m.ember.probe");
    std::fs::write(&precious, "precious").unwrap();
    pack(&fixture("relu"), &dir.path().join("m.ember"), &[]);
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// A copy of a fixture with another tokenizer.
fn with_tokenizer(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) -> String {
    let folder = dir.join("hf");
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(fixture("relu")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let path = folder.join("tokenizer.json");
    let mut tokenizer = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut tokenizer);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    folder.display().to_string()
}

#[test]
fn tokens_past_the_vocabulary_are_told_and_a_broken_tokenizer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = with_tokenizer(dir.path(), |t| {
        let base = t["model"]["vocab"].as_object().unwrap().len();
        let added = t["added_tokens"].as_array_mut().unwrap();
        let inside = added
            .iter()
            .filter(|a| (a["id"].as_u64().unwrap() as usize) < base)
            .count();
        let next = base + added.len() - inside;
        for id in next..=400 {
            added.push(serde_json::json!({
                "id": id, "content": format!("<extra-{id}>"), "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
            }));
        }
    });
    let output = dir.path().join("m.ember").display().to_string();
    let done = call(&["pack", &folder, "-o", &output]);
    let message = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{message}");
    assert!(
        message.contains("400") && message.contains("320"),
        "{message}"
    );

    let broken = tempfile::tempdir().unwrap();
    let folder = with_tokenizer(broken.path(), |t| t["model"]["type"] = "Unigram".into());
    let output = broken.path().join("m.ember").display().to_string();
    let done = call(&["pack", &folder, "-o", &output]);
    assert_eq!(done.status.code(), Some(1));
    let message = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        message.contains(&folder) && message.contains("tokenizer"),
        "{message}"
    );
    assert!(!Path::new(&output).exists());
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
        // either it is refused, or this run never uses the byte
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

/// The reader of the output may exit: no panic, no error message.
#[test]
fn a_closed_pipe_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.ember").display().to_string();
    let folder = dir.path().join("out").display().to_string();
    for args in [
        &["pack", &fixture("relu"), "-o", &path][..],
        &["inspect", &path],
        &["verify", &path],
        &["export", &path, "-o", &folder],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = emberflow().args(args).stdout(writer).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && message.is_empty(),
            "{args:?}: {message}"
        );
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
#[ignore = "long: `.ci/run long` runs it"]
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
