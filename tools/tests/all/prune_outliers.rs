//! `prune-outliers` as a user runs it: the loss stays within its bound, and texts of its containers within their hash.

use std::path::Path;

use emberflow_engine::meta::Pruned;
use serde_json::Value;

use crate::common::{call, exported, json};
use crate::npu::has_onnxruntime;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// The bundled model in `dir`, in a format.
fn packed(dir: &Path, quant: &str) -> String {
    let dir = &dir.join(format!("of-{quant}"));
    std::fs::create_dir(dir).unwrap();
    let output = dir.join(quant).with_extension("ember");
    let output = output.display().to_string();
    json(&[
        "pack",
        &exported(dir),
        "-o",
        &output,
        "--quant",
        quant,
        "--json",
    ]);
    output
}

fn prune(model: &str, output: &str, loss: &str) -> Value {
    let line = [
        "prune-outliers",
        model,
        "-f",
        TEXT,
        "-o",
        output,
        "--loss",
        loss,
    ];
    json(&[&line[..], &["--limit", "1200", "--json"]].concat())
}

/// The numbers of the layers that a report calls pruned.
fn pruned(report: &Value) -> Vec<u64> {
    let layers = report["layers"].as_array().unwrap().iter();
    let pruned = layers.filter(|layer| layer["pruned"].as_bool().unwrap());
    pruned
        .map(|layer| layer["layer"].as_u64().unwrap())
        .collect()
}

fn perplexity(model: &str) -> f64 {
    let report = json(&["perplexity", model, "-f", TEXT, "--limit", "1200", "--json"]);
    report["perplexity"].as_f64().unwrap()
}

fn hash(model: &str, extra: &[&str]) -> String {
    let line = [
        "run",
        model,
        "-p",
        "A vector is",
        "-n",
        "24",
        "--temp",
        "0",
        "--json",
    ];
    json(&[&line[..], extra].concat())["logits_hash"].to_string()
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn the_loss_is_within_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let model = packed(dir.path(), "q8c");
    let plain = perplexity(&model);
    let layers = json(&["inspect", &model, "--json"])["meta"]["config"]["layers"].clone();
    let layers = layers.as_u64().unwrap();
    for (name, loss) in [("none", 0.0), ("some", 0.02), ("all", 1000.0)] {
        let output = at(name);
        let report = prune(&model, &output, &loss.to_string());
        let chosen = pruned(&report);
        assert_eq!(report["pruned"].as_u64(), Some(chosen.len() as u64));
        assert_eq!(report["layers"].as_array().unwrap().len() as u64, layers);
        assert!(loss < 1.0 || chosen.len() as u64 == layers, "{report}");
        // What is measured again is what was promised, to the last bit.
        let again = perplexity(&output);
        assert_eq!(report["perplexity"].as_f64(), Some(plain));
        assert_eq!(report["perplexity_pruned"].as_f64(), Some(again));
        assert!(again <= plain * (1.0 + loss / 100.0), "{report}");
        let meta = &json(&["inspect", &output, "--json"])["meta"]["pruned"];
        let of_meta = meta["layers"].as_array().unwrap().iter();
        let of_meta: Vec<u64> = of_meta.map(|layer| layer.as_u64().unwrap()).collect();
        assert_eq!(of_meta, chosen);
        assert_eq!(meta["loss_percent"], report["loss_percent"]);
        assert_eq!(meta["bound_percent"].as_f64(), Some(loss));
        assert_eq!(meta["tokens"], report["tokens"]);
        assert_eq!([&meta["numerics"], &report["numerics"]], ["cpu", "cpu"]);
        let shown = call(&["inspect", &output]);
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        let expected = format!("outliers   pruned in {} of {layers} layers", chosen.len());
        assert!(shown.contains(&expected), "{shown}");
        assert!(call(&["verify", &output]).status.success());
    }
    // Four layers cost 0.074 %, all of them 0.084. The least important are pruned first.
    let report = prune(&model, &at("half"), "0.08");
    let importance = |pruned: bool| {
        let layers = report["layers"].as_array().unwrap().iter();
        let these = layers.filter(move |layer| layer["pruned"] == pruned);
        these.map(|layer| layer["importance"].as_f64().unwrap())
    };
    let count = importance(true).count() as u64;
    assert!(0 < count && count < layers, "{report}");
    let most = importance(true).fold(1.0, f64::max);
    assert!(importance(false).all(|of| of >= most), "{report}");
    assert!(
        importance(true)
            .chain(importance(false))
            .all(|found| found >= 1.0)
    );
    // Pruned again with another bound, it is as if pruned once.
    let again = prune(&at("all"), &at("again"), "0.08");
    assert_eq!(pruned(&again), pruned(&report));
    let bytes = |name: &str| std::fs::read(at(name)).unwrap();
    assert!(bytes("again") == bytes("half"));
}

/// The loss on a device whose results are not the CPU's is that device's, and is said to be.
#[test]
fn the_loss_names_the_numerics_in_which_it_was_measured() {
    if !has_onnxruntime() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = packed(dir.path(), "q8c");
    let output = format!("{model}.pruned");
    let line = ["prune-outliers", &model, "-f", TEXT, "-o", &output];
    let more = ["--loss", "1000", "--limit", "200", "--json"];
    let device = ["--device", "npu:cpu-halves=2MiB"];
    let report = json(&[&line[..], &more, &device].concat());
    let named = report["numerics"].as_str().unwrap();
    assert!(named.starts_with("npu:cpu-halves "), "{report}");
    let meta = &json(&["inspect", &output, "--json"])["meta"]["pruned"];
    assert_eq!(meta["numerics"], named);
    let shown = call(&["inspect", &output]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let expected = format!("tokens, measured in the numerics of {named}");
    assert!(shown.contains(&expected), "{shown}");
    // A container of before has the CPU's.
    let pruned: Pruned = serde_json::from_value(serde_json::json!({
        "layers": [0], "loss_percent": 0.1, "bound_percent": 1.0, "tokens": 9
    }))
    .unwrap();
    assert_eq!(pruned.numerics, "cpu");
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn the_text_does_not_depend_on_budgets_and_threads() {
    let dir = tempfile::tempdir().unwrap();
    for quant in ["q8c", "q4c"] {
        let model = packed(dir.path(), quant);
        let output = format!("{model}.pruned");
        prune(&model, &output, "1000");
        let expected = hash(&output, &[]);
        assert_ne!(expected, hash(&model, &[]), "{quant}");
        for extra in [
            &["--ffn-resident", "0.3"][..],
            &["--threads", "1"],
            &["--device", "cpu=1MiB"],
        ] {
            assert_eq!(hash(&output, extra), expected, "{quant} {extra:?}");
        }
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn predictors_and_pruning_keep_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let model = packed(dir.path(), "q8c");
    let [named, both, other, last] = ["n", "b", "o", "l"].map(at);
    let train = |from: &str, to: &str| {
        let line = [
            "train-predictor",
            from,
            "-f",
            TEXT,
            "-o",
            to,
            "--kind",
            "sign",
        ];
        json(&[&line[..], &["--tokens", "600", "--floor", "0.01", "--json"]].concat());
    };
    train(&model, &named);
    prune(&named, &both, "1000");
    prune(&model, &other, "1000");
    train(&other, &last);
    for path in [&both, &last] {
        let shown = json(&["inspect", path, "--json"]);
        assert!(!shown["predictors"].is_null() && !shown["meta"]["pruned"].is_null());
    }
}

#[test]
fn what_cannot_be_pruned_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("x.ember").display().to_string();
    let refused = |args: &[&str]| {
        let done = call(&[&["prune-outliers", "-f", TEXT, "-o", &output], args].concat());
        assert_eq!(done.status.code(), Some(2), "{args:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    let message = refused(&["demo"]);
    assert!(message.contains("--quant q8c or q4c"), "{message}");
    for loss in ["-1", "nan", "inf", "much"] {
        let message = refused(&[&format!("--loss={loss}")]);
        assert!(message.contains("is not a percentage"), "{message}");
    }
    assert!(!Path::new(&output).exists());
}
