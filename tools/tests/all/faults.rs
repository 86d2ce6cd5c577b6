//! Runs that cannot continue: damaged files, files shortened while open, Ctrl-C.

use crate::common;
use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::common::call;

const PROMPT: &str = "A vector is a contiguous";

#[test]
fn damage_is_a_fault_whoever_meets_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (folder, model) = (path("demo-hf"), path("m.ember"));
    assert!(call(&["export", "-o", &folder]).status.success());
    assert!(call(&["pack", &folder, "-o", &model]).status.success());
    let mut bytes = std::fs::read(&model).unwrap();
    // the bundles are at the end of the file, and most of it
    let middle = bytes.len() * 3 / 4;
    bytes[middle..].iter_mut().for_each(|b| *b ^= 0x55);
    std::fs::write(&model, bytes).unwrap();
    for args in [
        &["verify", &model][..],
        &["run", &model, "-p", PROMPT, "-n", "4", "--ignore-eos"],
        &[
            "run",
            &model,
            "-p",
            PROMPT,
            "-n",
            "4",
            "--ffn-resident",
            "0.4",
        ],
        &[
            "run",
            &model,
            "-p",
            PROMPT,
            "-n",
            "4",
            "--ignore-eos",
            "--policy",
            "mmap",
        ],
    ] {
        let output = call(args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{args:?}: {message}");
        assert!(message.contains("m.ember"), "{message}");
    }
}

/// A run that has started to generate.
struct Started {
    child: Child,
    stdout: ChildStdout,
}

impl Started {
    /// Waits for the first text on standard output.
    fn new(command: &mut Command) -> Self {
        let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let mut text = [0; PROMPT.len() + 1];
        stdout.read_exact(&mut text).unwrap();
        Self { child, stdout }
    }

    /// Waits for the end with this exit code; returns standard error.
    fn ends_with(mut self, code: i32) -> String {
        let mut rest = Vec::new();
        self.stdout.read_to_end(&mut rest).unwrap();
        let output = self.child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{message}");
        message
    }
}

/// `--policy mmap` reads the file through a mapping, where a missing page is a signal, not an
/// error. Regression: a run whose file was shortened ended without a message.
#[test]
fn a_file_shortened_under_a_mapping_is_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m.ember");
    let folder = common::exported(dir.path());
    let packed = call(&["pack", &folder, "-o", &model.display().to_string()]);
    assert!(packed.status.success());
    let mut command = common::emberflow();
    command
        .arg("run")
        .arg(&model)
        .args(["-p", PROMPT, "-n", "900", "--ignore-eos"])
        .args(["--policy", "mmap", "--threads", "1"]);
    let started = Started::new(&mut command);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&model)
        .unwrap();
    file.set_len(4096).unwrap();
    let message = started.ends_with(3);
    let told = message.contains("m.ember") && message.contains("copy");
    assert!(told, "{message}");
}

#[test]
fn ctrl_c_ends_cleanly() {
    let mut command = common::emberflow();
    command
        .args([
            "run",
            "-p",
            PROMPT,
            "-n",
            "900",
            "--ignore-eos",
            "--sparsity",
            "dense",
            "--threads",
            "1",
        ])
        .env("EMBERFLOW_ISA", "scalar");
    let started = Started::new(&mut command);
    let status = Command::new("kill")
        .args(["-INT", &started.child.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
    let message = started.ends_with(130);
    assert!(message.contains("tok/s"), "no summary: {message}");
}

/// File systems without locks and flushing (network, user space), simulated by a library loaded
/// before the C library. Regression: `pack` was refused there, and left its journal.
#[test]
fn a_file_system_without_locks_and_flushing_is_good_enough() {
    const SOURCE: &str = "\
#include <errno.h>
int flock(int fd, int how) { errno = NUMBER; return -1; }
int fsync(int fd) { errno = NUMBER; return -1; }
int fdatasync(int fd) { errno = NUMBER; return -1; }
";
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let folder = common::exported(dir.path());
    for number in ["ENOSYS", "EOPNOTSUPP", "EINVAL"] {
        let (source, library) = (path("none.c"), path("none.so"));
        std::fs::write(&source, SOURCE.replace("NUMBER", number)).unwrap();
        let cc = ["-shared", "-fPIC", "-o", &library, &source];
        common::succeed(Command::new("cc").args(cc));
        let out = dir.path().join("out");
        std::fs::create_dir(&out).unwrap();
        let at = |name: &str| out.join(name).display().to_string();
        for line in [
            &["pack", &folder, "-o", &at("m.ember")][..],
            &["export", "-o", &at("demo-hf")],
            &["export", "-o", &at("demo.gguf")],
            &["inspect", "--svg", &at("picture.svg")],
        ] {
            let mut command = common::emberflow();
            let output = common::succeed(command.args(line).env("LD_PRELOAD", &library));
            let message = String::from_utf8_lossy(&output.stderr);
            let told = message.contains("has no locks") && message.contains("does not flush");
            assert!(told || line[0] != "pack", "{number}: {message}");
        }
        let verified = call(&["verify", &at("m.ember"), "--source", &folder]);
        assert!(verified.status.success());
        let left = std::fs::read_dir(&out).unwrap();
        let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["demo-hf", "demo.gguf", "m.ember", "picture.svg"]);
        std::fs::remove_dir_all(&out).unwrap();
    }
}
