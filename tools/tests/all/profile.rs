//! Statistics, through the program.

use std::path::Path;
use std::process::Output;

use crate::common::{call, exported, json};
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn heldout() -> String {
    let path = root().join("models/demo/heldout.txt");
    path.display().to_string()
}

/// A part of the held-out text as a separate file.
fn part(dir: &Path, name: &str, from: usize, to: usize) -> String {
    let text = std::fs::read_to_string(heldout()).unwrap();
    let path = dir.join(name);
    let (from, to) = (text.floor_char_boundary(from), text.floor_char_boundary(to));
    std::fs::write(&path, &text[from..to]).unwrap();
    path.display().to_string()
}

/// Two disjoint texts.
fn two_parts(dir: &Path) -> [String; 2] {
    [part(dir, "a", 0, 4000), part(dir, "b", 4000, 7000)]
}

/// Profiles a text with small windows.
fn profile(text: &str, out: &str, more: &[&str]) -> Output {
    let args = ["profile", "-f", text, "-o", out, "--window", "32", "--json"];
    call(&[&args[..], more].concat())
}

/// Tokens of statistics as shown by `profile show`.
fn tokens(shown: &Value) -> u64 {
    shown["tokens"].as_u64().unwrap()
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn a_stopped_profile_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let [a, b] = two_parts(dir.path());
    let (whole, stopped) = (at("whole"), at("stopped"));
    assert!(profile(&a, &whole, &[]).status.success());
    let first = profile(&a, &stopped, &["--stop-after", "7"]);
    assert_eq!(first.status.code(), Some(130));
    assert!(!Path::new(&stopped).exists());
    // a checkpoint is of one run
    let other = profile(&b, &stopped, &[]);
    let message = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(
        !other.status.success() && message.contains("another"),
        "{message}"
    );
    // any budget gives the same numbers
    let second = profile(&a, &stopped, &["--ffn-resident", "0.4", "--threads", "1"]);
    let done: Value = serde_json::from_slice(&second.stdout).unwrap();
    assert!(done["resumed_tokens"].as_u64().unwrap() > 0, "{done}");
    assert_eq!(
        std::fs::read(&whole).unwrap(),
        std::fs::read(&stopped).unwrap()
    );
    assert!(!Path::new(&at("stopped.checkpoint")).exists());
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn parts_merge_and_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let [a, b] = two_parts(dir.path());
    let (first, second, sum, again) = (at("first"), at("second"), at("sum"), at("again"));
    assert!(profile(&a, &first, &[]).status.success());
    assert!(profile(&b, &second, &[]).status.success());
    let merge =
        |files: &[&str], out: &str| call(&[&["profile", "merge"], files, &["-o", out]].concat());
    assert!(merge(&[&first, &second], &sum).status.success());
    assert!(merge(&[&second, &first], &again).status.success());
    assert_eq!(std::fs::read(&sum).unwrap(), std::fs::read(&again).unwrap());
    let twice = merge(&[&sum, &second], &at("twice"));
    assert!(String::from_utf8_lossy(&twice.stderr).contains("both hold the text"));

    let [f, s, m] = [&first, &second, &sum].map(|f| json(&["profile", "show", f, "--json"]));
    assert_eq!(tokens(&f) + tokens(&s), tokens(&m));
    let layer = &m["layers"][4];
    let active = |i: usize| layer["batches"][i]["active_share"].as_f64().unwrap();
    // 1, 2, 4 … tokens touch more and more neurons
    assert!((0.08..0.2).contains(&active(0)), "{layer}");
    assert!((1..5).all(|i| active(i) > 1.2 * active(i - 1)), "{layer}");
    let persistence = layer["persistence"].as_f64().unwrap();
    assert!((0.2..0.5).contains(&persistence), "{layer}");
    // a batch of 32 needs as many windows; too short a text is reported
    let said = |file: &str| String::from_utf8(call(&["profile", "show", file]).stdout).unwrap();
    assert!(said(&sum).contains("  32: ") && !said(&sum).contains("no batch of"));
    let short = at("short");
    assert!(profile(&a, &short, &["--limit", "700"]).status.success());
    let said = said(&short);
    assert!(said.contains("no batch of 32 was recorded"), "{said}");
    assert!(!said.contains("no batch of 2 was recorded"), "{said}");

    let svg = at("stats.svg");
    assert!(
        call(&["profile", "show", &sum, "--svg", &svg])
            .status
            .success()
    );
    let svg = std::fs::read_to_string(&svg).unwrap();
    for word in [
        "skew",
        "activity by batch size",
        "persistence",
        "published",
        "batch 32",
    ] {
        assert!(svg.contains(word), "{word}");
    }
}

#[test]
fn counts_alone_are_shown_too() {
    let old = root().join("models/demo/activation_stats.json");
    let shown = json(&["profile", "show", &old.display().to_string(), "--json"]);
    assert_eq!(tokens(&shown), 204_800);
}

/// Regression: the error about statistics did not name the file.
#[test]
fn a_bad_statistics_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let demo = exported(dir.path());
    std::fs::write(at("bad.stats"), "EMBSTAT nonsense").unwrap();
    let of_another = r#"{"format": "emberflow-stats-v1", "tokens": 1, "layers": []}"#;
    std::fs::write(at("other.stats"), of_another).unwrap();
    for name in ["bad.stats", "other.stats"] {
        let bad = at(name);
        for args in [
            &["profile", "show", &bad][..],
            &["profile", "merge", &bad, "-o", &at("sum")],
            &["pack", &demo, "-o", &at("m.ember"), "--stats", &bad],
        ] {
            // empty statistics can be shown and merged
            if name == "other.stats" && args[0] == "profile" {
                continue;
            }
            let output = call(args);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{args:?}");
            assert!(message.contains(&bad), "{args:?}: {message}");
        }
    }
}

/// Gemma 4 E2B: the layers that share keys and values have FFNs twice as wide.
#[test]
fn ffns_of_two_sizes_have_statistics() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let folder = at("model");
    std::fs::create_dir(&folder).unwrap();
    let source = root().join("tests/fixtures/models/gemma4_inputs");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let text = std::fs::read_to_string(source.join(name)).unwrap();
        // neurons that are zero for some tokens
        let text = text.replace("gelu_pytorch_tanh", "relu");
        std::fs::write(format!("{folder}/{name}"), text).unwrap();
    }
    let weights = "model.safetensors";
    std::fs::copy(source.join(weights), format!("{folder}/{weights}")).unwrap();
    let text = part(dir.path(), "text", 0, 600);
    let [plain, sorted] = [at("plain.ember"), at("sorted.ember")];
    let quant = ["--quant", "f32", "--json"];
    json(&[&["pack", &folder, "-o", &plain][..], &quant].concat());
    let shares = |model: &str, stats: &str| -> Vec<f64> {
        let output = profile(&text, stats, &[model]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{message}");
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        let shares = shown["active_share"].as_array().unwrap().iter();
        shares.map(|share| share.as_f64().unwrap()).collect()
    };
    let first = shares(&plain, &at("stats"));
    assert!(
        first.iter().all(|share| (0.1..0.9).contains(share)),
        "{first:?}"
    );
    let stats = at("stats");
    let pack = ["pack", &folder, "-o", &sorted, "--stats", &stats];
    json(&[&pack[..], &quant].concat());
    // neurons in another order fire as often
    let again = shares(&sorted, &at("again"));
    assert_eq!(first.len(), again.len());
    let near = first.iter().zip(&again).all(|(a, b)| (a - b).abs() < 1e-3);
    assert!(near, "{first:?} {again:?}");
    let checked = json(&["verify", &sorted, "--source", &folder, "--json"]);
    assert_eq!(checked["source"]["worst_share_of_bound"], 0.0);
    let inspected = json(&["inspect", &sorted, "--json"]);
    let temperatures = inspected["temperature"].as_array().unwrap();
    assert_eq!(temperatures.len(), first.len());
}
