//! The laboratory's command line: help, typos, written files, progress.

use std::path::Path;
use std::process::Command;

use crate::common::{call, commands, exported, lab, program};
use clap::{CommandFactory, Parser};
use emberflow_benches::cli::Cli;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// Splits as a shell does, double quotes included.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('"').enumerate();
    let words = parts.map(|(i, part)| match i % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    words.collect::<Vec<Vec<String>>>().concat()
}

#[test]
fn every_help_text_has_examples_that_parse() {
    let mut all = commands();
    all.push(("emberflow-lab".into(), Cli::command()));
    for (name, command) in all {
        assert!(command.get_about().is_some(), "{name} says nothing");
        let json = command
            .get_arguments()
            .any(|a| a.get_long() == Some("json"));
        assert!(json || name == "emberflow-lab", "{name} has no --json");
        let help = command.get_after_help().map(ToString::to_string);
        let help = help.unwrap_or_default();
        let lines = help.lines().filter(|l| l.starts_with("  "));
        let mut examples = 0;
        for part in lines.flat_map(|l| l.split(" && ")) {
            let part = part.trim().split("   ").next().unwrap_or_default();
            let Some(start) = part.find("emberflow-lab ") else {
                continue;
            };
            if let Err(error) = Cli::try_parse_from(words(&part[start..])) {
                panic!("{name}: the example {part:?} is refused: {error}");
            }
            examples += 1;
        }
        assert!(examples > 0, "{name} --help shows no example");
    }
}

#[test]
fn slips_are_understood() {
    for (line, wanted) in [
        ("kernls", "'kernels'"),
        ("trace simulat x", "'simulate'"),
        ("run -p a --ablation no-cahce", "'no-cache'"),
        ("run -p a --io urng", "'uring'"),
        ("run -p a --io telepathy", "telepathy"),
        ("synth --shape lama-7b -o x", "'llama-7b'"),
        (
            "synth --shape tiny -o x --skew bambo",
            "did you mean bamboo?",
        ),
    ] {
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(message.contains(wanted), "{line}: {message}");
    }
}

/// Arguments that a command needs besides the output file, to get as far as checking it.
const NEEDED: [(&str, &[&str]); 5] = [
    ("emberflow-lab trace record", &["-f", "x"]),
    ("emberflow-lab trace simulate", &["x"]),
    ("emberflow-lab synth", &["--shape", "tiny"]),
    ("emberflow-lab run", &["-p", "x"]),
    ("emberflow-lab judge", &["-f", "x"]),
];

/// Every option of every command that writes a file refuses, before any work, an existing file, and
/// reports at once if none can be written.
#[test]
fn nothing_is_replaced_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious.gguf");
    std::fs::write(&precious, "precious").unwrap();
    let long = dir.path().join(format!("{}.gguf", "x".repeat(300)));
    let mut tried = 0;
    for (name, command) in commands() {
        let has = |long: &str| command.get_arguments().any(|a| a.get_long() == Some(long));
        for option in ["output", "svg", "csv", "trace"]
            .into_iter()
            .filter(|o| has(o))
        {
            assert!(has("force"), "{name} --{option} cannot be told to replace");
            for (place, code, wanted) in [
                (&precious, 2, "already exists; use --force"),
                (&long, 1, "xxxxx"),
            ] {
                let mut args: Vec<&str> = name.split(' ').skip(1).collect();
                args.extend(NEEDED.iter().filter(|n| n.0 == name).flat_map(|n| n.1));
                let place = format!("--{option}={}", place.display());
                args.push(&place);
                let output = call(&args);
                let message = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
                assert!(message.contains(wanted), "{args:?}: {message}");
                assert!(output.stdout.is_empty(), "{args:?} has worked before");
            }
            tried += 1;
        }
    }
    assert!(tried >= 18, "{tried} options");
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
}

/// A file that is read is never overwritten, nor is a folder replaced.
#[test]
fn what_is_read_is_never_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("m.ember").display().to_string();
    let demo = exported(dir.path());
    program(&["pack", &demo, "-o", &container]);
    let before = std::fs::read(&container).unwrap();
    for line in [
        "run FILE -p x --trace FILE",
        "run -f FILE --trace FILE",
        "trace record FILE -f x -o FILE",
        "trace record -f FILE -o FILE",
        "trace simulate FILE --svg FILE",
        "predictor FILE --csv FILE",
        "serve FILE --csv FILE",
        "timeline FILE --svg FILE",
        "phone -f FILE --svg FILE",
    ] {
        let line = format!("{} --force", line.replace("FILE", &container));
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(message.contains("the same file as"), "{line}: {message}");
    }
    assert!(std::fs::read(&container).unwrap() == before);
    for line in [
        "synth --shape tiny --force -o",
        "trace record -f x --force -o",
    ] {
        let output = call(&line.split(' ').chain([&*demo]).collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(2), "{line}");
    }
    assert!(Path::new(&demo).join("config.json").is_file());
}

/// Commands that take long for a large model show their progress on a terminal.
#[test]
fn everything_long_shows_its_progress() {
    let dir = tempfile::tempdir().unwrap();
    let named = dir.path().join("p.ember").display().to_string();
    let train = ["train-predictor", "-f", TEXT, "--tokens", "600"];
    program(&[&train[..], &["--kind", "sign", "-o", &named]].concat());
    let on_a_terminal = |line: &str| {
        let program = lab().get_program().to_string_lossy().into_owned();
        let mut script = Command::new("script");
        script
            .args(["-qec", &format!("{program} {line}"), "/dev/null"])
            .current_dir(dir.path())
            .env("XDG_CACHE_HOME", dir.path())
            .env("TERM", "xterm");
        script.output()
    };
    if on_a_terminal("--help").is_err() {
        println!("SKIPPED: there is no `script` to play a terminal");
        return;
    }
    for (line, bars) in [
        ("trace record -f TEXT -o t --limit 300", &["recording"][..]),
        ("trace simulate t --cache 50%", &["simulating"]),
        ("synth --shape tiny -o t.gguf", &["writing", "decoding"]),
        ("decode -n 4 --oracle --sparsity exact", &["decoding"]),
        ("timeline --warm-up 4", &["decoding"]),
        ("kernels --quick", &["measuring"]),
        ("cache --quick", &["measuring"]),
        ("predictor p.ember --quick", &["selecting"]),
        ("judge p.ember -f TEXT --limit 600", &["perplexity"]),
    ] {
        let line = line.replace("TEXT", TEXT);
        let output = on_a_terminal(&line).unwrap();
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{line}: {shown}");
        for bar in bars {
            assert!(
                shown.contains(&format!("{bar} [")),
                "{line}: {bar}: {shown}"
            );
        }
    }
}

/// `kernels | head -1` does not fail.
#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    for line in [
        "synth --shape tiny --measure 0 -o tiny.gguf",
        "kernels --quick",
        "timeline --warm-up 2",
        "run -p a -n 2",
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = lab();
        command.args(line.split(' ')).current_dir(dir.path());
        let output = command.stdout(writer).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {message}");
        assert!(!message.contains("panicked"), "{line}: {message}");
    }
}
