//! How a run ends that cannot go on: damaged files, files shortened meanwhile, Ctrl-C.

mod common;

use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};

use common::call;

const PROMPT: &str = "A vector is a contiguous";

#[test]
fn damage_is_a_fault_whoever_meets_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (folder, model) = (path("demo-hf"), path("m.ember"));
    assert!(call(&["export", "-o", &folder]).status.success());
    assert!(call(&["pack", &folder, "-o", &model]).status.success());
    let mut bytes = std::fs::read(&model).unwrap();
    // the bundles are the last thing in the file, and most of it
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

/// A run that has begun to generate.
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

    /// Waits for the end with this exit code; what stands on standard error.
    fn ends_with(mut self, code: i32) -> String {
        let mut rest = Vec::new();
        self.stdout.read_to_end(&mut rest).unwrap();
        let output = self.child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{message}");
        message
    }
}

/// `--policy mmap` reads the file through a mapping, where a missing page is a signal and no error.
/// A run whose file was shortened died of it without a word.
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
