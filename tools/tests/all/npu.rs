//! NPUs: what is found, and libraries that are missing, damaged, of another version, that crash and that hang.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use emberflow::npu::probe_by;
use emberflow_engine::device::Provider;

use crate::common::{emberflow, json};

/// Names the library, or its folder.
const VARIABLE: &str = "EMBERFLOW_ONNXRUNTIME";

/// Whether this machine has ONNX Runtime.
pub fn has_onnxruntime() -> bool {
    let found = probe_by(emberflow(), Provider::Cpu, Duration::from_secs(60));
    let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
    assert!(found.is_ok() || !needed, "{found:?}");
    found.is_ok()
}

/// A library of these functions in C; `None` without a compiler.
fn library(dir: &Path, name: &str, code: &str) -> Option<PathBuf> {
    let [source, library] = ["c", "so"].map(|end| dir.join(format!("{name}.{end}")));
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O0", "-o"]);
    let built = compiler.arg(&library).arg(&source).output().ok()?;
    assert!(built.status.success(), "{built:?}");
    Some(library)
}

/// What is said of a library within so many seconds.
fn refused(library: &Path, seconds: u64) -> String {
    let mut program = emberflow();
    program.env(VARIABLE, library);
    let start = Instant::now();
    let limit = Duration::from_secs(seconds);
    let error = probe_by(program, Provider::Cpu, limit).unwrap_err();
    assert_eq!(error.device, "npu:cpu");
    assert!(start.elapsed() < Duration::from_secs(60), "{error}");
    error.what
}

#[test]
fn libraries_that_fail_are_errors_within_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let missing = refused(&dir.path().join("missing.so"), 60);
    assert!(missing.contains("pip install onnxruntime") && missing.contains("missing.so"));
    let text = dir.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let damaged = refused(&text, 60);
    assert!(
        damaged.contains("text.so") && damaged.contains("pip install"),
        "{damaged}"
    );
    let aborts = "#include <stdlib.h>\n__attribute__((constructor)) void made(void) { abort(); }";
    let Some(aborts) = library(dir.path(), "aborts", aborts) else {
        return;
    };
    let crashed = refused(&aborts, 60);
    assert!(
        crashed.contains("crashed") && crashed.contains("SIGABRT"),
        "{crashed}"
    );
    let hangs = "__attribute__((constructor)) void made(void) { for (;;) { __asm__(\"\"); } }";
    let hangs = library(dir.path(), "hangs", hangs).unwrap();
    let hung = refused(&hangs, 1);
    assert!(
        hung.contains("within 1 seconds") && hung.contains("--device none"),
        "{hung}"
    );
    let old = "static const char *version(void) { return \"1.10.0\"; }\n\
               static const void *api(unsigned n) { return 0; }\n\
               static const void *base[2] = { api, version };\n\
               const void *OrtGetApiBase(void) { return base; }";
    let old = refused(&library(dir.path(), "old", old).unwrap(), 60);
    assert!(old.contains("1.10.0") && old.contains("1.24"), "{old}");
    let other = library(dir.path(), "other", "int other(void) { return 1; }").unwrap();
    assert!(refused(&other, 60).contains("OrtGetApiBase"));
}

/// The run ends before a model is opened, and its text is never mixed.
#[test]
fn a_run_with_a_missing_library_says_what_to_install() {
    let mut program = emberflow();
    program.env(VARIABLE, "/missing/libonnxruntime.so");
    program.args(["run", "-p", "x", "-n", "1", "--device", "npu:cpu"]);
    let output = program.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && output.stdout.is_empty(),
        "{said}"
    );
    for told in ["npu:cpu", "pip install onnxruntime", VARIABLE] {
        assert!(said.contains(told), "{said}");
    }
}

#[test]
fn doctor_lists_what_onnxruntime_has() {
    let doctor = json(&["doctor", "--json"]);
    let npu = &doctor["npu"];
    let devices = npu["devices"].as_array().unwrap();
    if !has_onnxruntime() {
        assert!(devices.is_empty() && npu["found"].as_str().unwrap().contains("pip install"));
        return;
    }
    assert!(
        npu["library"].as_str().unwrap().contains("onnxruntime"),
        "{npu}"
    );
    assert_eq!(devices[0]["device"], "npu:cpu");
    assert_eq!(devices[0]["same_bits"], true);
    assert_eq!(npu["status"], "ok");
}
