//! The comparisons with other programs in their quick mode: with llama.cpp if the installed Python
//! has it, else without.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::call;

fn python(arguments: &[&str]) -> Option<std::process::Output> {
    Command::new("python3").args(arguments).output().ok()
}

/// Runs a script of benches/peers on the bundled model and returns its output and files; `None`
/// without Python.
fn compare(dir: &Path, script: &str) -> Option<(String, String, String)> {
    let file = |name: &str| dir.join(name).display().to_string();
    let [gguf, ember, csv, svg] = ["demo.gguf", "demo.ember", "a.csv", "a.svg"].map(file);
    let known = python(&["-c", "import llama_cpp"]);
    let Some(known) = known else {
        println!("SKIPPED: there is no python3");
        return None;
    };
    assert!(call(&["export", "-o", &gguf]).status.success());
    let pack = ["pack", &gguf, "-o", &ember, "--quant", "q4"];
    assert!(call(&pack).status.success());
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../benches/peers");
    let script = root.join(script).display().to_string();
    let program = env!("CARGO_BIN_EXE_emberflow");
    let files = ["-B", &script, &gguf, &ember, "--csv", &csv, "--svg", &svg];
    let mut arguments = [&files[..], &["--quick", "--emberflow", program]].concat();
    if !known.status.success() {
        println!("without llama.cpp: this Python has no llama_cpp");
        arguments.push("--no-llama");
    }
    let output = python(&arguments)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let text = |path: &str| std::fs::read_to_string(path).unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        shown.contains("machine: ") && shown.contains(" cores, Linux "),
        "{shown}"
    );
    let svg = text(&svg);
    roxmltree::Document::parse(&svg).unwrap();
    Some((shown, text(&csv), svg))
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn in_memory_each_has_its_rates_and_a_bound() {
    let dir = tempfile::tempdir().unwrap();
    let Some((shown, csv, svg)) = compare(dir.path(), "compare_llama_cpp.py") else {
        return;
    };
    assert!(shown.contains(" of the bound"), "{shown}");
    assert!(
        csv.starts_with("name,decode,decode_low,decode_high,prefill,"),
        "{csv}"
    );
    for name in ["emberflow dense", "emberflow exact"] {
        let line = csv.lines().find(|l| l.starts_with(name)).expect(&csv);
        let numbers: Vec<f64> = line
            .split(',')
            .skip(1)
            .map(|n| n.parse().unwrap())
            .collect();
        assert!(
            numbers.len() == 7 && numbers.iter().all(|&n| n > 0.0),
            "{csv}"
        );
        assert!(svg.contains(name), "{svg}");
    }
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn on_disk_each_policy_has_its_rate_at_each_share() {
    let dir = tempfile::tempdir().unwrap();
    let Some((shown, csv, svg)) = compare(dir.path(), "offload.py") else {
        return;
    };
    assert!(shown.contains("50% of the FFN in memory"), "{shown}");
    assert!(csv.starts_with("share,name,median,low,high\n"), "{csv}");
    for policy in ["full", "llmflash"] {
        let name = format!("emberflow {policy}");
        assert_eq!(
            csv.lines().filter(|l| l.contains(&name)).count(),
            2,
            "{csv}"
        );
        assert!(svg.contains(&name), "{svg}");
    }
}
