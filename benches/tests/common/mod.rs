//! Running the laboratory itself.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The built program.
pub fn lab() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_emberflow-lab"));
    command.stdin(Stdio::null());
    // Plans follow what was measured of this machine; tests must not.
    let cache = format!(
        "{}/profiles-{}",
        env!("CARGO_TARGET_TMPDIR"),
        std::process::id()
    );
    command.env("XDG_CACHE_HOME", cache);
    command
}

/// Runs it and returns what it did.
#[allow(dead_code, reason = "not every test file expects failures")]
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
#[allow(dead_code, reason = "not every test file reads JSON")]
pub fn json(args: &[&str]) -> serde_json::Value {
    let output = succeed(lab().args(args));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command of the program that users have, and parses its JSON.
#[allow(dead_code, reason = "not every test file needs the program")]
pub fn program(args: &[&str]) -> serde_json::Value {
    json(&[&["program"], args, &["--json"]].concat())
}

/// The bundled model as a Hugging Face folder in `dir`.
#[allow(dead_code, reason = "not every test file needs a checkpoint")]
pub fn exported(dir: &Path) -> String {
    let folder = dir.join("demo-hf").display().to_string();
    program(&["export", "-o", &folder]);
    folder
}

/// Every command that does something, with its full name.
#[allow(dead_code, reason = "not every test file looks at all commands")]
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
