//! Runs the laboratory's program.

#[path = "../../../../tools/tests/all/common/kernels.rs"]
pub mod kernels;
#[path = "../../../../tools/tests/all/common/look.rs"]
pub mod look;
#[path = "../../../../tools/tests/all/common/results.rs"]
pub mod results;

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The built program.
pub fn lab() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_emberflow-lab"));
    command.stdin(Stdio::null());
    // Plans depend on measurements of this machine and on earlier runs: each test has its own cache.
    let test = std::thread::current()
        .name()
        .unwrap_or("unnamed")
        .replace("::", "-");
    let cache = format!(
        "{}/cache-{}",
        env!("CARGO_TARGET_TMPDIR"),
        std::process::id()
    );
    command.env("XDG_CACHE_HOME", format!("{cache}/{test}"));
    command.env("POCL_CACHE_DIR", kernels::compiled_kernels());
    command
}

/// Runs it and returns its output.
pub fn call(args: &[&str]) -> Output {
    lab().args(args).output().unwrap()
}

/// Runs a command that has to succeed.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {message}");
    output
}

/// Runs it, expects success, and parses its JSON.
pub fn json(args: &[&str]) -> serde_json::Value {
    let output = succeed(lab().args(args));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command of the program that users have, and parses its JSON.
pub fn program(args: &[&str]) -> serde_json::Value {
    json(&[&["program"], args, &["--json"]].concat())
}

/// The bundled model as a Hugging Face folder in `dir`.
pub fn exported(dir: &Path) -> String {
    let folder = dir.join("demo-hf").display().to_string();
    program(&["export", "-o", &folder]);
    folder
}

/// Every leaf command, with its full name.
pub fn commands() -> Vec<(String, clap::Command)> {
    let mut all = Vec::new();
    let lab = <emberflow_benches::cli::Cli as clap::CommandFactory>::command();
    for command in lab.get_subcommands().filter(|c| !c.is_hide_set()) {
        let name = format!("emberflow-lab {}", command.get_name());
        for sub in command.get_subcommands() {
            all.push((format!("{name} {}", sub.get_name()), sub.clone()));
        }
        if !command.has_subcommands() {
            all.push((name, command.clone()));
        }
    }
    assert!(all.len() >= 16, "the walk lost commands");
    all
}
