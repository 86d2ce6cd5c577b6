//! NPUs: detection, libraries that are missing, damaged, of another version, that crash and that hang, and a child
//! process's output.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use emberflow::child::PROGRESS;
use emberflow::probe::npu::{Found, probe_by, try_out_by};
use emberflow::probe::{Cause, Unusable};
use emberflow_devices::Provider;

use crate::common::{cache, emberflow, exported, json, save_verdicts, words};

/// Names the library, or its folder.
const VARIABLE: &str = "EMBERFLOW_ONNXRUNTIME";

/// Whether tests that need ONNX Runtime or a C compiler are required.
pub fn is_needed() -> bool {
    std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some()
}

/// Whether this machine has ONNX Runtime, and what stands in for an NPU.
pub fn has_onnxruntime() -> bool {
    let provider = Provider::for_tests().unwrap();
    let found = probe_by(emberflow(), provider, Duration::from_secs(60));
    assert!(found.is_ok() || !is_needed(), "{found:?}");
    found.is_ok()
}

/// A library of these functions in C; `None` without a compiler.
pub fn library(dir: &Path, name: &str, code: &str) -> Option<PathBuf> {
    let [source, library] = ["c", "so"].map(|end| dir.join(format!("{name}.{end}")));
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O0", "-o"]);
    let built = compiler.arg(&library).arg(&source).output().ok()?;
    assert!(built.status.success(), "{built:?}");
    Some(library)
}

/// The error with a library within this many seconds.
fn refused(library: &Path, seconds: u64) -> Unusable {
    let start = Instant::now();
    let limit = Duration::from_secs(seconds);
    let error = probe_by(with_library(library), Provider::Cpu, limit).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(60), "{error:?}");
    error
}

/// The error with an unusable library.
fn broken(library: &Path, seconds: u64) -> String {
    let Unusable { cause, what } = refused(library, seconds);
    assert_eq!(cause, Cause::Broken, "{what}");
    what
}

#[test]
fn libraries_that_fail_are_errors_within_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let Unusable { cause, what } = refused(&dir.path().join("missing.so"), 60);
    assert_eq!(cause, Cause::Missing, "{what}");
    assert!(what.contains("pip install onnxruntime") && what.contains("missing.so"));
    let Unusable { cause, what } = refused(dir.path(), 60);
    assert_eq!(cause, Cause::Missing, "{what}");
    assert!(what.contains(dir.path().to_str().unwrap()), "{what}");
    let text = dir.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let damaged = broken(&text, 60);
    assert!(
        damaged.contains("text.so") && damaged.contains("pip install"),
        "{damaged}"
    );
    let aborts = "#include <stdlib.h>\n__attribute__((constructor)) void made(void) { abort(); }";
    let Some(aborts) = library(dir.path(), "aborts", aborts) else {
        assert!(!is_needed(), "no C compiler `cc`");
        eprintln!("SKIPPED: no C compiler `cc`");
        return;
    };
    let crashed = broken(&aborts, 60);
    assert!(
        crashed.contains("crashed") && crashed.contains("SIGABRT"),
        "{crashed}"
    );
    let hangs = "__attribute__((constructor)) void made(void) { for (;;) { __asm__(\"\"); } }";
    let hangs = library(dir.path(), "hangs", hangs).unwrap();
    let hung = broken(&hangs, 1);
    assert!(hung.contains("no progress within 1 seconds"), "{hung}");
    let old = "static const char *version(void) { return \"1.10.0\"; }\n\
               static const void *api(unsigned n) { return 0; }\n\
               static const void *base[2] = { api, version };\n\
               const void *OrtGetApiBase(void) { return base; }";
    let old = broken(&library(dir.path(), "old", old).unwrap(), 60);
    assert!(old.contains("1.10.0") && old.contains("1.24"), "{old}");
    assert!(
        old.contains("too old") && !old.contains("was found"),
        "{old}"
    );
    let no_base = "const void *OrtGetApiBase(void) { return 0; }";
    let no_api = "static const char *version(void) { return \"1.99.0\"; }\n\
                  static const void *api(unsigned n) { return 0; }\n\
                  static const void *base[2] = { api, version };\n\
                  const void *OrtGetApiBase(void) { return base; }";
    for (name, code) in [("no_base", no_base), ("no_api", no_api)] {
        let what = broken(&library(dir.path(), name, code).unwrap(), 60);
        let words = [
            &*format!("{name}.so"),
            "interface of ONNX Runtime 1.24",
            "pip install",
        ];
        assert!(words.iter().all(|words| what.contains(*words)), "{what}");
        assert!(!what.contains("assertion"), "{what}");
    }
    let other = library(dir.path(), "other", "int other(void) { return 1; }").unwrap();
    assert!(broken(&other, 60).contains("OrtGetApiBase"));
}

/// ONNX Runtime with a compiler that fails on graphs for a model's rows, in any process, but not on the small ones of the
/// check: `FAIL` is a statement.
const FAILS_LATER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/mman.h>
typedef void *(*Create)(void *, const void *, size_t, const void *, void **);
typedef struct { const void *(*api)(unsigned); const char *(*version)(void); } Base;
static const Base *real;
static Create create_session;
static int is_check(void) {
    char words[4096];
    FILE *file = fopen("/proc/self/cmdline", "r");
    size_t len = fread(words, 1, sizeof words, file), last = sizeof "cpu-floats";
    fclose(file);
    return len > last && memmem(words, len, "check-npu", 9) && !memcmp(words + len - last, "cpu-floats", last);
}
static void *create(void *env, const void *model, size_t len, const void *options, void **session) {
    if (!is_check()) FAIL;
    return create_session(env, model, len, options, session);
}
static const void *api(unsigned version) {
    void **functions = (void **)real->api(version);
    if (functions && functions[8] != (void *)create) {
        /* The ninth function of OrtApi, whose order never changes. */
        size_t page = sysconf(_SC_PAGESIZE);
        char *at = (char *)((size_t)(functions + 8) / page * page);
        mprotect(at, page, PROT_READ | PROT_WRITE);
        create_session = (Create)functions[8];
        functions[8] = (void *)create;
    }
    return functions;
}
__attribute__((destructor)) void end(void) {
    if (write(1, "the end\n", 8) < 0) _exit(1);
}
const Base *OrtGetApiBase(void) {
    static Base base;
    void *library = dlopen(REAL, RTLD_NOW);
    real = ((const Base *(*)(void))dlsym(library, "OrtGetApiBase"))();
    base.api = api;
    base.version = real->version;
    return &base;
}
"#;

/// ONNX Runtime with a compiler that does this with graphs for a model's rows; `None` without a compiler of C.
fn failing_later(dir: &Path, name: &str, real: &Found, fail: &str) -> Option<PathBuf> {
    let code = FAILS_LATER.replace("FAIL", fail);
    let real = format!("{:?}", real.library);
    library(dir, name, &code.replace("REAL", &real))
}

/// This program with a library.
fn with_library(library: &Path) -> Command {
    let mut program = emberflow();
    program.env(VARIABLE, library);
    program
}

/// A provider that stands in for an NPU's, if ONNX Runtime's own kernels are tested.
fn stand_in() -> Option<(Provider, Found)> {
    if !has_onnxruntime() || std::env::var_os("EMBERFLOW_TEST_PROVIDER").is_some() {
        return None;
    }
    let provider = Provider::CpuFloats;
    let found = probe_by(emberflow(), provider, Duration::from_secs(60));
    Some((provider, found.unwrap()))
}

/// A compiler that crashes or hangs on a model's graphs does so in a child.
#[test]
fn compilers_that_fail_on_a_models_graphs_are_errors_within_seconds() {
    let Some((provider, real)) = stand_in() else {
        return;
    };
    let wanted = serde_json::json!({"rows": {
        "weights": "Bytes", "summed": {"ByRow": 0}, "groups": 3, "row_bytes": 100,
    }});
    let wanted = serde_json::from_value(wanted).unwrap();
    let tried = |library: &Path, seconds| {
        let limit = Duration::from_secs(seconds);
        try_out_by(with_library(library), provider, wanted, limit)
    };
    tried(Path::new(&real.library), 60).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (name, fail, seconds, words) in [
        ("aborts", "abort()", 60, "SIGABRT"),
        ("hangs", "pause()", 2, "no progress within 2"),
    ] {
        let Some(library) = failing_later(dir.path(), name, &real, fail) else {
            assert!(!is_needed(), "no C compiler `cc`");
            return;
        };
        let start = Instant::now();
        let error = tried(&library, seconds).unwrap_err();
        assert!(error.contains(words), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30), "{error}");
        let checked = probe_by(with_library(&library), provider, Duration::from_secs(60));
        assert!(checked.is_ok(), "{checked:?}");
    }
}

/// Then a run ends with an error, before a text has begun.
#[test]
fn a_run_ends_with_an_error_if_the_compiler_crashes() {
    let Some((_, real)) = stand_in() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let Some(aborts) = failing_later(dir.path(), "aborts", &real, "abort()") else {
        return;
    };
    let (model, from) = (dir.path().join("m.ember"), exported(dir.path()));
    let model = model.display().to_string();
    json(&["pack", &from, "-o", &model, "--quant", "q8c", "--json"]);
    let run = [
        "run",
        &model,
        "-p",
        "A",
        "-n",
        "1",
        "--device",
        "npu:cpu-floats",
    ];
    assert!(emberflow().args(run).output().unwrap().status.success());
    let refused = with_library(&aborts).args(run).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(1) && refused.stdout.is_empty(),
        "{said}"
    );
    for words in ["npu:cpu-floats", "crashed", "SIGABRT", "--device none"] {
        assert!(said.contains(words), "{said}");
    }
}

/// Graphs of groups of experts that a compiler crashes on are left out: the text is that without a device.
#[test]
fn experts_are_computed_one_by_one_if_the_compiler_crashes_on_groups() {
    let Some((_, real)) = stand_in() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let fail = "{ if (memmem(model, len, \"experts\", 7)) abort(); }";
    let Some(aborts) = failing_later(dir.path(), "groups", &real, fail) else {
        return;
    };
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (folder, model) = (at("moe"), at("moe.ember"));
    json(&["export", "demo-moe", "-o", &folder, "--json"]);
    json(&["pack", &folder, "-o", &model, "--quant", "q8c", "--json"]);
    let prompt = std::fs::read_to_string("../models/demo/heldout.txt").unwrap();
    let prompt: String = prompt.chars().take(1500).collect();
    let hash = |device: &str| {
        let mut program = with_library(&aborts);
        program.args([
            "run", &model, "-p", &prompt, "-n", "1", "--temp", "0", "--json",
        ]);
        let output = program.args(["--device", device]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (report["logits_hash"].to_string(), said)
    };
    let (plain, _) = hash("none");
    let (found, said) = hash("npu:cpu-floats=8MiB");
    assert_eq!(found, plain, "{said}");
    assert!(
        said.contains("groups of experts") && said.contains("SIGABRT"),
        "{said}"
    );
}

/// What a library prints when the program ends is beside the output.
#[test]
fn libraries_that_print_at_the_end_leave_the_output_alone() {
    let Some((_, real)) = stand_in() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let Some(talks) = failing_later(dir.path(), "talks", &real, "(void)0") else {
        return;
    };
    let run = "run -p A -n 1 --temp 0 --json --device npu:cpu";
    let output = with_library(&talks).args(words(run)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.ends_with("the end\n"),
        "{said}"
    );
    serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
}

/// A provider that takes its time is none that hangs.
#[test]
fn the_check_tells_its_progress_graph_by_graph() {
    if !has_onnxruntime() {
        return;
    }
    let provider = Provider::for_tests().unwrap();
    let mut program = emberflow();
    let output = program.args(["check-npu", provider.name()]).output();
    let told = output.unwrap().stdout;
    let graphs = told.iter().filter(|&&byte| byte == PROGRESS).count();
    // Of each of five formats one for each number of tokens at least, compiled and tried, and a comparison.
    assert!(graphs >= 5 * (2 * 4 + 1), "{graphs}");
}

/// The run ends before a model is opened, and its output is never mixed.
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
    for part in ["npu:cpu", "pip install onnxruntime", VARIABLE] {
        assert!(said.contains(part), "{said}");
    }
}

/// The parsed result of a child process that runs this script.
fn understood(script: &str) -> Result<Found, String> {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]);
    let found = probe_by(shell, Provider::Cpu, Duration::from_secs(60));
    found.map_err(|e| e.what)
}

#[test]
fn answers_are_found_among_what_drivers_print() {
    const ANSWER: &str =
        r#"{"found":{"library":"l","build":"b","formats":["q8"],"same_bits":true}}"#;
    let long = "i=0; while [ $i -lt 9000 ]; do echo '[a line of a driver]'; i=$((i+1)); done";
    let found = understood(&format!(
        "{long}; echo 1; echo '{ANSWER}'; printf 'end {{}}'"
    ))
    .unwrap();
    assert_eq!([found.library, found.build], ["l", "b"]);
    // What a driver starts may outlive the answer, with its output.
    let start = Instant::now();
    understood(&format!("sleep 50 & echo '{ANSWER}'")).unwrap();
    assert!(start.elapsed() < Duration::from_secs(30));
    assert!(
        understood("echo 1; echo '{}'")
            .unwrap_err()
            .contains("without an answer")
    );
    let panicked = "printf \"thread 'main' panicked at a.rs:1:2:\\nthe message\\nnote: run with\\n\" >&2; exit 101";
    assert_eq!(understood(panicked).unwrap_err(), "the message");
    let failed = "echo noise >&2; echo 'emberflow: no such thing' >&2; exit 1";
    assert_eq!(understood(failed).unwrap_err(), "no such thing");
}

#[test]
fn doctor_lists_what_onnxruntime_has() {
    save_verdicts(&cache());
    let doctor = json(&["doctor", "--json"]);
    let npu = &doctor["npu"];
    let devices = npu["devices"].as_array().unwrap();
    let names = Provider::ALL.map(|provider| format!("npu:{provider}"));
    let listed: Vec<&str> = devices
        .iter()
        .filter_map(|of| of["device"].as_str())
        .collect();
    assert_eq!(listed, names);
    if !has_onnxruntime() {
        assert!(npu["found"].as_str().unwrap().contains("pip install"));
        return;
    }
    assert!(
        npu["library"].as_str().unwrap().contains("onnxruntime"),
        "{npu}"
    );
    let npu_device = format!("npu:{}", Provider::for_tests().unwrap());
    let its = devices
        .iter()
        .find(|of| of["device"] == npu_device.as_str());
    assert_eq!(its.unwrap()["same_bits"], true, "{npu}");
    assert_eq!(npu["status"], "ok");
    // No library has the providers of several systems.
    let found = npu["found"].as_str().unwrap();
    let mut missing = 0;
    for (of, provider) in devices.iter().zip(Provider::ALL) {
        let said = of["error"].as_str().unwrap_or_default();
        assert_eq!(of["same_bits"].is_null(), !said.is_empty(), "{npu}");
        if said.contains("has no provider") {
            let (Ok(advice) | Err(advice)) = provider.advice();
            let words = [format!("npu:{provider} missing: "), advice.to_owned()];
            assert!(words.iter().all(|words| found.contains(words)), "{found}");
            assert_eq!(of["install"].as_str(), provider.advice().ok(), "{npu}");
            missing += 1;
        } else {
            assert!(of["install"].is_null(), "{npu}");
        }
    }
    assert!(missing > 0, "{npu}");
}

/// Without any library each provider has its advice, in JSON as in the text.
#[test]
fn doctor_says_what_to_install() {
    let mut program = emberflow();
    program.args(["doctor", "--json"]);
    program.env(VARIABLE, "/missing/libonnxruntime.so");
    let output = program.output().unwrap();
    let doctor: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let npu = &doctor["npu"];
    assert!(
        npu["found"].as_str().unwrap().contains("pip install"),
        "{npu}"
    );
    let devices = npu["devices"].as_array().unwrap();
    assert_eq!(devices.len(), Provider::ALL.len());
    for (of, provider) in devices.iter().zip(Provider::ALL) {
        assert!(of["error"].as_str().unwrap().contains("missing"), "{of}");
        let install = of["install"].as_str();
        assert_eq!(install, provider.advice().ok(), "{of}");
        let apple = cfg!(target_vendor = "apple");
        match provider {
            Provider::Cpu => assert!(install.unwrap().contains("pip install onnxruntime")),
            Provider::CoreMl => assert_eq!(install.is_some(), apple),
            _ => {}
        }
    }
}
