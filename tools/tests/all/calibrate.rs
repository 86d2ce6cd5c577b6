//! `pack --calibrate` as a user runs it: its gain, and determinism.

use std::path::{Path, PathBuf};

use crate::common::{call, emberflow, exported, json};

/// The held-out text in two parts: whole documents for calibration, others for evaluation. No
/// training text is in the repository.
fn texts(dir: &Path) -> [String; 2] {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let text = std::fs::read_to_string(demo).unwrap();
    let end = "<|endoftext|>\n";
    let cut = text[..text.len() * 2 / 3].rfind(end).unwrap() + end.len();
    let (calibrate, judge) = text.split_at(cut);
    [("calibrate.txt", calibrate), ("judge.txt", judge)].map(|(name, text)| {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    })
}

fn pack(folder: &str, output: &Path, extra: &[&str]) -> serde_json::Value {
    let output = output.display().to_string();
    json(&[&["pack", folder, "-o", &output, "--json"], extra].concat())
}

fn perplexity(model: &Path, text: &str) -> f64 {
    let model = model.display().to_string();
    let result = json(&["perplexity", &model, "-f", text, "--json"]);
    result["perplexity"].as_f64().unwrap()
}

/// The folder with rounded layers until the container is written.
fn layers(output: &Path) -> PathBuf {
    output.with_extension("ember.layers")
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn calibrating_closes_half_of_the_gap_of_four_bits() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let [text, judge] = texts(dir.path());
    let path = |name: &str| dir.path().join(name);
    pack(&folder, &path("source.ember"), &["--quant", "q8"]);
    pack(&folder, &path("plain.ember"), &["--quant", "q4"]);
    let output = path("calibrated.ember");
    let flags = [
        "--quant",
        "q4",
        "--calibrate",
        &text,
        "--calibrate-tokens",
        "4096",
    ];
    let report = pack(&folder, &output, &flags);
    assert!(
        report["calibrated"]["tokens"].as_u64().unwrap() > 4_000,
        "{report}"
    );
    assert!(!layers(&output).exists());
    let bytes = |name: &str| std::fs::metadata(path(name)).unwrap().len();
    assert_eq!(bytes("plain.ember"), bytes("calibrated.ember"));
    let [source, plain, calibrated] =
        ["source", "plain", "calibrated"].map(|n| perplexity(&path(&format!("{n}.ember")), &judge));
    assert!(
        calibrated - source < 0.5 * (plain - source),
        "source {source}, plain {plain}, calibrated {calibrated}"
    );

    // it reports calibration, and is compared with its source matrix by matrix
    let file = output.display().to_string();
    let meta = json(&["inspect", &file, "--json"])["meta"]["calibration"].clone();
    assert_eq!(meta["tokens"], report["calibrated"]["tokens"]);
    let result = json(&["verify", &file, "--source", &folder, "--json"]);
    let compared = &result["source"]["calibrated"];
    assert!(
        compared["weights"].as_u64().unwrap() > 7_000_000,
        "{result}"
    );
    assert!(
        compared["worst_relative_error"].as_f64().unwrap() < 0.3,
        "{result}"
    );
}

/// With one scale per row, compared with 8 bits of the same kind.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn calibrating_closes_a_third_of_the_gap_of_one_scale_per_row() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let [text, judge] = texts(dir.path());
    let path = |name: &str| dir.path().join(name);
    let against = ["--calibrate", &text, "--calibrate-tokens", "4096"];
    pack(&folder, &path("source.ember"), &["--quant", "q8c"]);
    pack(&folder, &path("plain.ember"), &["--quant", "q4c"]);
    let flags = [&["--quant", "q4c"][..], &against].concat();
    pack(&folder, &path("calibrated.ember"), &flags);
    let bytes = |name: &str| std::fs::metadata(path(name)).unwrap().len();
    assert_eq!(bytes("plain.ember"), bytes("calibrated.ember"));
    let [source, plain, calibrated] =
        ["source", "plain", "calibrated"].map(|n| perplexity(&path(&format!("{n}.ember")), &judge));
    assert!(
        calibrated - source < 0.67 * (plain - source),
        "source {source}, plain {plain}, calibrated {calibrated}"
    );
}

/// The model of experts, in four bits of both kinds: each expert is rounded against its own tokens.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn calibrating_experts_closes_half_of_the_gap_of_four_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let folder = path("experts").display().to_string();
    json(&["export", "demo-moe", "-o", &folder, "--json"]);
    let [text, judge] = texts(dir.path());
    pack(&folder, &path("source.ember"), &["--quant", "q8"]);
    pack(&folder, &path("q4.ember"), &["--quant", "q4"]);
    let against = ["--calibrate", &text, "--calibrate-tokens", "8192"];
    let flags = [&["--quant", "q4k"][..], &against].concat();
    let report = pack(&folder, &path("calibrated.ember"), &flags);
    assert!(report["calibrated"]["tokens"].as_u64().unwrap() > 8_000);
    let bytes = |name: &str| std::fs::metadata(path(name)).unwrap().len();
    assert_eq!(bytes("q4.ember"), bytes("calibrated.ember"));
    let [source, plain, calibrated] =
        ["source", "q4", "calibrated"].map(|n| perplexity(&path(&format!("{n}.ember")), &judge));
    assert!(
        calibrated - source < 0.5 * (plain - source),
        "source {source}, q4 {plain}, calibrated {calibrated}"
    );
    let file = path("calibrated.ember").display().to_string();
    let result = json(&["verify", &file, "--source", &folder, "--json"]);
    let compared = &result["source"]["calibrated"];
    // attention and all experts
    assert!(
        compared["weights"].as_u64().unwrap() > 9_000_000,
        "{result}"
    );
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn threads_and_a_kill_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let [text, _] = texts(dir.path());
    let flags = [
        "--calibrate",
        &text,
        "--calibrate-tokens",
        "1024",
        "--threads",
    ];
    let with = |threads| [&flags[..], &[threads]].concat();
    let whole = dir.path().join("whole.ember");
    pack(&folder, &whole, &with("1"));
    let output = dir.path().join("killed.ember");
    let kept = || {
        let entries = std::fs::read_dir(layers(&output))
            .into_iter()
            .flatten()
            .flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with("-stream")).count()
    };
    let mut child = emberflow()
        .args(["pack", &folder, "-o"])
        .arg(&output)
        .args(with("2"))
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() && kept() == 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!output.exists(), "it ended before it could be killed");
    let report = pack(&folder, &output, &with("2"));
    assert!(
        report["calibrated"]["resumed_layers"].as_u64().unwrap() > 0,
        "{report}"
    );
    assert!(std::fs::read(&output).unwrap() == std::fs::read(&whole).unwrap());
    assert!(!layers(&output).exists());
}

/// Neurons are sorted by the statistics after rounding.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn calibrated_neurons_can_be_sorted() {
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let [text, _] = texts(dir.path());
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (plain, stats) = (path("plain.ember"), path("demo.stats"));
    pack(&folder, Path::new(&plain), &[]);
    json(&[
        "profile", &plain, "-f", &text, "-o", &stats, "--limit", "2048", "--json",
    ]);
    let flags = [
        "--calibrate",
        &text,
        "--calibrate-tokens",
        "512",
        "--stats",
        &stats,
    ];
    let sorted = path("sorted.ember");
    pack(&folder, Path::new(&sorted), &flags);
    let result = json(&["verify", &sorted, "--source", &folder, "--json"]);
    assert_eq!(result["ok"], true, "{result}");
}

#[test]
fn floats_and_8_bits_per_row_are_not_calibrated() {
    let dir = tempfile::tempdir().unwrap();
    let [text, _] = texts(dir.path());
    let output = dir.path().join("m.ember").display().to_string();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models/relu");
    let args = ["pack", folder, "-o", &output, "--calibrate", &text];
    for quant in ["f16", "q8c"] {
        let result = call(&[&args[..], &["--quant", quant]].concat());
        let said = String::from_utf8_lossy(&result.stderr);
        assert_eq!(result.status.code(), Some(2), "{said}");
        assert!(said.contains("q4, q4k, q4c and q8"), "{said}");
        assert!(!Path::new(&output).exists());
    }
}

/// What one scale per row costs is told where no text was given.
#[test]
fn four_bits_per_row_advise_calibration() {
    let dir = tempfile::tempdir().unwrap();
    let [text, _] = texts(dir.path());
    let output = dir.path().join("m.ember").display().to_string();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models/relu");
    let advises = |extra: &[&str]| {
        let args = ["pack", folder, "-o", &output, "--force", "--quant"];
        let done = call(&[&args[..], extra].concat());
        assert!(done.status.success(), "{done:?}");
        String::from_utf8_lossy(&done.stdout).contains("--calibrate TEXT")
    };
    assert!(advises(&["q4c"]));
    assert!(!advises(&["q4"]));
    let calibrated = ["q4c", "--calibrate", &text, "--calibrate-tokens", "64"];
    assert!(!advises(&calibrated));
}
