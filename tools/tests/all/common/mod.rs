//! Runs the program.

pub mod hub;
pub mod kernels;
pub mod look;
pub mod results;
pub mod server;
pub mod terminal;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// The built program.
pub fn emberflow() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_emberflow"));
    command.stdin(Stdio::null());
    // Plans depend on measurements of this machine and on earlier runs: each test has its own cache.
    command.env("XDG_CACHE_HOME", cache());
    command.env("POCL_CACHE_DIR", kernels::compiled_kernels());
    command
}

/// Saves the rates of this machine in a cache folder, as `plan` does where there are none.
pub fn save_rates(cache: &Path) {
    static RATES: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    save(&RATES, ["measure-machine", "machine.json"], cache);
}

/// Saves verdicts on the devices of this machine in a cache folder, as `doctor` does where there are none.
pub fn save_verdicts(cache: &Path) {
    static VERDICTS: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    save(&VERDICTS, ["doctor", "devices.json"], cache);
}

/// Saves a file of the cache as a command makes it. Each takes three to five seconds of a core, so all tests share what
/// the first one found.
fn save(found: &OnceLock<Option<Vec<u8>>>, [command, file]: [&str; 2], cache: &Path) {
    let file = cache.join("emberflow").join(file);
    let found = found.get_or_init(|| {
        succeed(emberflow().arg(command).env("XDG_CACHE_HOME", cache));
        std::fs::read(&file).ok()
    });
    // Without devices there are no verdicts.
    if let Some(found) = found {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, found).unwrap();
    }
}

/// The cache folder of the running test.
pub fn cache() -> PathBuf {
    let process = format!("cache-{}", std::process::id());
    (Path::new(env!("CARGO_TARGET_TMPDIR")).join(process)).join(this_test())
}

/// The name of the running test, which is that of its thread.
fn this_test() -> String {
    let thread = std::thread::current();
    thread.name().unwrap_or("unnamed").replace("::", "-")
}

/// Runs it and returns its output.
pub fn call(args: &[&str]) -> Output {
    emberflow().args(args).output().unwrap()
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
    let output = succeed(emberflow().args(args));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The smallest budget of a command in MiB, as its refusal of 1 MiB names it.
pub fn smallest_budget(args: &[&str]) -> u64 {
    let output = call(&[args, &["--memory", "1MiB"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let (_, after) = message.split_once("--memory ").expect(&message);
    let (mib, _) = after.split_once("MiB").expect(&message);
    mib.parse().expect(&message)
}

/// The bundled model as a Hugging Face folder in `dir`.
pub fn exported(dir: &Path) -> String {
    let folder = dir.join("demo-hf").display().to_string();
    succeed(emberflow().args(["export", "-o", &folder]));
    folder
}

/// Splits as a shell does, double quotes included.
pub fn words(line: &str) -> Vec<String> {
    line.split('"')
        .enumerate()
        .flat_map(|(i, part)| match i % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

/// Every leaf command, with its full name.
pub fn commands() -> Vec<(String, clap::Command)> {
    fn walk(command: &clap::Command, name: &str, out: &mut Vec<(String, clap::Command)>) {
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let name = format!("{name} {}", sub.get_name());
            // profile alone does something too
            if !sub.has_subcommands() || sub.is_args_conflicts_with_subcommands_set() {
                out.push((name.clone(), sub.clone()));
            }
            walk(sub, &name, out);
        }
    }
    let mut out = Vec::new();
    walk(
        &<emberflow::cli::Cli as clap::CommandFactory>::command(),
        "emberflow",
        &mut out,
    );
    assert!(out.len() >= 16, "the walk lost commands");
    out
}

/// A memory control group that is gone when this is.
pub struct Group(PathBuf);

impl Group {
    /// A group limited to `bytes`; `None` if none can be created.
    pub fn of(bytes: u64) -> Option<Self> {
        let name = format!(
            "emberflow-test-{}-{bytes}-{}",
            std::process::id(),
            this_test()
        );
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        places.into_iter().find_map(|(root, limit)| {
            let dir = Path::new(root).join(&name);
            std::fs::create_dir(&dir).ok()?;
            let group = Self(dir);
            std::fs::write(group.0.join(limit), bytes.to_string()).ok()?;
            Some(group)
        })
    }

    /// The program inside of it.
    pub fn command(&self) -> Command {
        let mut command = Command::new("sh");
        command.stdin(Stdio::null());
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        command.arg(self.0.join("cgroup.procs"));
        command.arg(env!("CARGO_BIN_EXE_emberflow"));
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}
