//! Standard input and output other than terminals: piped input, and a reader that has exited.

use crate::common;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use crate::common::{call, commands, emberflow, exported, json};
use serde_json::Value;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// Runs a command whose reader exits before any output.
fn unread(dir: &Path, line: &str) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let words = common::words(&line.replace("TEXT", TEXT));
    emberflow()
        .args(words)
        .current_dir(dir)
        .env("XDG_CACHE_HOME", dir)
        .env("HF_ENDPOINT", &common::hub::bundled_hub().address)
        .env("EMBERFLOW_MODELS", dir.join("models"))
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .unwrap()
}

/// Regression: `plan | head -1` and `doctor | head` panicked.
#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    exported(dir.path());
    common::save_rates(dir.path());
    common::save_verdicts(dir.path());
    let mut tried = Vec::new();
    for line in [
        "run -n 2",
        "run -n 2 --json",
        "run -n 2 --temp 1 --best-of 2",
        "pack demo-hf -o m.ember",
        "inspect m.ember",
        "inspect m.ember --json",
        "verify m.ember",
        "perplexity -f TEXT --limit 64",
        "profile -f TEXT -o s.stats --limit 64",
        "profile show s.stats",
        "profile merge s.stats -o t.stats",
        "train-predictor m.ember -f TEXT --tokens 600 --kind sign -o p.ember",
        "pack demo-hf -o c.ember --quant q8c",
        "prune-outliers c.ember -f TEXT --limit 64 -o d.ember",
        "export -o again-hf",
        "plan",
        "plan --json",
        "plan o/n",
        "pull o/n",
        "list",
        "list --json",
        "remove o/n",
        "bench io --quick --size 8MiB --millis 5",
        "bench decode --quick -n 1",
        "doctor",
        "doctor --json",
        "completions bash",
        "man",
        "man --out man1",
        "--help",
        "run --help",
    ] {
        let output = unread(dir.path(), line);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{line}: {}: {message}",
            output.status
        );
        for bad in ["panicked", "roken pipe", "standard output"] {
            assert!(!message.contains(bad), "{line}: {message}");
        }
        tried.push(format!("emberflow {line} "));
    }
    all_tried(&tried);
    // the output file is complete
    for name in ["m.ember", "s.stats", "t.stats", "p.ember"] {
        assert!(at(name).is_file(), "{name}");
    }
}

/// The other benchmarks print in the same way, and a server does not exit by itself.
fn all_tried(tried: &[String]) {
    for (name, _) in commands() {
        let prints = (tried.iter()).any(|line| line.starts_with(&format!("{name} ")));
        let other = name.starts_with("emberflow bench ") || name == "emberflow serve";
        assert!(prints || other, "{name}");
    }
}

/// Runs a command whose messages cannot be written: a full disk, or a reader that has exited.
fn unheard(dir: &Path, line: &str, full: bool) -> Output {
    let stderr: Stdio = if full {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        full.unwrap().into()
    } else {
        std::io::pipe().unwrap().1.into()
    };
    emberflow()
        .args(common::words(&line.replace("TEXT", TEXT)))
        .current_dir(dir)
        .env("XDG_CACHE_HOME", dir)
        .stdin(Stdio::null())
        .stderr(stderr)
        .output()
        .unwrap()
}

/// Regression: `run 2>/dev/full` panicked after the text, with exit code 101.
#[test]
fn messages_that_nobody_gets_are_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    exported(dir.path());
    common::save_rates(dir.path());
    let mut tried = 0;
    for full in [true, false] {
        for (line, code) in [
            ("run -n 2 -v", 0),
            ("run -n 2 --temp 1 --best-of 2 -vv", 0),
            ("run --chat -n 2", 0),
            ("run nosuch.ember -p a", 1),
            ("run --memory 99999GiB", 2),
            ("run -p a --memory 1MiB", 1),
            ("pack demo-hf -o m.ember --force -v", 0),
            ("verify m.ember", 0),
            ("inspect nosuch", 1),
            ("perplexity -f TEXT --limit 64 -v", 0),
            ("profile -f TEXT -o s.stats --limit 64 --force -v", 0),
            ("plan --memory 99999GiB", 0),
            ("serve --port 0 --memory 1MiB", 1),
            ("bench io --quick --size 8MiB --millis 5", 0),
            ("bench decode --quick -n 1", 0),
            ("nosuch", 2),
        ] {
            let output = unheard(dir.path(), line, full);
            assert_eq!(output.status.code(), Some(code), "{line}, full: {full}");
        }
        for (name, _) in commands() {
            let name = name.strip_prefix("emberflow ").unwrap();
            let output = unheard(dir.path(), &format!("{name} --nosuch"), full);
            assert_eq!(output.status.code(), Some(2), "{name}, full: {full}");
            tried += 1;
        }
    }
    assert!(tried > 30, "{tried} commands");
    // the text is still complete
    let output = unheard(dir.path(), "run -n 2", true);
    assert!(output.stdout.starts_with(b"# Ownership"));
}

/// Runs it with bytes on standard input.
fn fed(args: &[&str], input: &[u8]) -> Output {
    let mut child = emberflow()
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // a command that does not read it may have exited
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

fn tokens(output: &Output) -> Value {
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    serde_json::json!([report["prompt_tokens"], report["tokens"]])
}

/// Regression: `echo text | emberflow run` used the default prompt.
#[test]
fn a_pipe_is_a_prompt() {
    let run = ["run", "-n", "4", "--json"];
    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [&["run", "-n", "4", "--json"], more].concat()
    }
    let named = tokens(&call(&with(&["-p", "A vector is"])));
    let default = tokens(&call(&run));
    assert_ne!(named, default);
    for (input, args) in [
        ("A vector is\n", &run[..]),
        ("A vector is", &run),
        ("A vector is\n", &with(&["-p", "-"])),
        ("A vector is", &with(&["-f", "-"])),
        // not looked at
        ("something else", &with(&["-p", "A vector is"])),
    ] {
        assert_eq!(tokens(&fed(args, input.as_bytes())), named, "{args:?}");
    }
    let line = tokens(&fed(&with(&["-f", "-"]), b"A vector is\n"));
    assert_ne!(line, named, "a file is taken as it is");
    for nothing in ["", "\n"] {
        assert_eq!(
            tokens(&fed(&run, nothing.as_bytes())),
            default,
            "{nothing:?}"
        );
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "A vector is\n").unwrap();
    let from_file = emberflow()
        .args(run)
        .stdin(std::fs::File::open(file.path()).unwrap())
        .output()
        .unwrap();
    assert_eq!(tokens(&from_file), named);
    let torn = fed(&run, b"A vector \xff");
    let message = String::from_utf8_lossy(&torn.stderr);
    assert_eq!(torn.status.code(), Some(1), "{message}");
    assert!(message.contains("standard input"), "{message}");
}

/// Programs that start others often leave them a pipe without a writer.
#[test]
fn a_silent_pipe_holds_nobody_up() {
    let (_reader_stays, _writer_stays);
    let (reader, writer) = std::io::pipe().unwrap();
    let output = emberflow()
        .args(["run", "-n", "2"])
        .stdin(reader.try_clone().unwrap())
        .output()
        .unwrap();
    (_reader_stays, _writer_stays) = (reader, writer);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}");
    assert!(message.contains("(use -p - to wait"), "{message}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("# Ownership"), "{text}");
}

/// Regression: the missing model was not the reported error.
#[test]
fn a_missing_model_is_named_before_a_missing_prompt() {
    for line in [
        "run nosuch.ember",
        "run nosuch.ember --chat",
        "run nosuch.ember -f nosuch.txt",
    ] {
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {message}");
        assert!(message.contains("nosuch.ember"), "{line}: {message}");
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = exported(dir.path());
    let model = dir.path().join("m.ember").display().to_string();
    json(&["pack", &folder, "-o", &model, "--json"]);
    let output = call(&["run", &model]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("no prompt"), "{message}");
    let piped = fed(&["run", &model, "-n", "2", "--json"], b"A trait\n");
    assert!(tokens(&piped)[0].as_u64() > Some(0));
}

/// Runs it within this much address space, with endless text on standard input.
fn endlessly_fed(args: &[&str], text: &str) -> Output {
    let mut child = within_address_space(args)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let block = text.repeat(10_000);
    while stdin.write_all(block.as_bytes()).is_ok() {}
    child.wait_with_output().unwrap()
}

/// A command that may map 700 MB, programs and libraries included.
fn within_address_space(args: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new("bash");
    let limited = "ulimit -v 700000; exec \"$0\" \"$@\"";
    command
        .args(["-c", limited])
        .arg(emberflow().get_program())
        .args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Regression: all input was read and tokenised first: 139 bytes of memory per byte of text.
#[test]
fn a_text_beyond_the_context_is_refused_with_both_numbers_before_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("long.txt");
    let text = std::fs::read_to_string(TEXT).unwrap();
    std::fs::write(&long, text.repeat((8 << 20) / text.len())).unwrap();
    let long = long.display().to_string();
    let refused = |output: Output, what: &str| {
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{what}: {message}");
        let (_, numbers) = message
            .split_once("the prompt has at least ")
            .expect(&message);
        let (least, context) = numbers
            .split_once(" tokens and the context holds ")
            .unwrap();
        assert!(least.parse::<usize>().unwrap() > 512, "{what}: {message}");
        assert!(
            context.starts_with("512 (the model was made for at most 1024)"),
            "{message}"
        );
    };
    let run = ["run", "--context", "512", "--memory", "34MiB"];
    for text in ["y\n", "all the words ", "字", "a"] {
        refused(endlessly_fed(&run, text), text);
    }
    refused(
        endlessly_fed(&[&run[..], &["-f", "-"]].concat(), "y\n"),
        "-f -",
    );
    let file = within_address_space(&[&run[..], &["-f", &long]].concat());
    refused({ file }.output().unwrap(), "-f FILE");
    for line in [
        "perplexity -f LONG --limit 600 --memory 60MiB",
        "profile -f LONG -o OUT --limit 600 --memory 60MiB",
    ] {
        let out = dir.path().join("out").display().to_string();
        let line = line.replace("LONG", &long).replace("OUT", &out);
        let output = within_address_space(
            &common::words(&line)
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>(),
        );
        let output = { output }.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {message}");
    }
}

/// Regression: opening a pipe waits for its writer, so `run PIPE` hung.
#[test]
fn a_pipe_in_place_of_a_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe").display().to_string();
    common::succeed(std::process::Command::new("mkfifo").arg(&pipe));
    let out = dir.path().join("out").display().to_string();
    for args in [
        &["run", &pipe, "-p", "x"][..],
        &["inspect", &pipe],
        &["verify", &pipe],
        &["verify", "--source", &pipe],
        &["plan", &pipe],
        &["perplexity", &pipe, "-f", TEXT],
        &["pack", &pipe, "-o", &out],
        &["export", &pipe, "-o", &out],
        &["doctor", &pipe],
        &["bench", "io", &pipe, "--quick"],
    ] {
        let mut child = emberflow()
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = std::time::Instant::now();
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if start.elapsed() > std::time::Duration::from_secs(60) {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        let ended = ended.unwrap_or_else(|| panic!("{args:?} waits for the pipe"));
        assert!(
            ended.code().is_some_and(|code| code != 101),
            "{args:?}: {ended}"
        );
        assert_eq!(ended.success(), args[0] == "doctor", "{args:?}");
    }
}
