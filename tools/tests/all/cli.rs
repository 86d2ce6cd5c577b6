//! The command line: help, suggestions, completions, manual, exit codes.

use std::process::Command;

use crate::common::{call, commands, emberflow, exported, words};
use clap::{CommandFactory, Parser};
use emberflow::cli::Cli;

#[test]
fn every_help_text_has_examples_that_parse() {
    let mut all = commands();
    all.push(("emberflow".into(), Cli::command()));
    let mut tried = 0;
    for (name, command) in all {
        assert!(command.get_about().is_some(), "{name} says nothing");
        let help = command.get_after_help().map(ToString::to_string);
        let help = help.unwrap_or_default();
        let mut examples = 0;
        for line in help.lines().filter(|l| l.starts_with("  emberflow ")) {
            // what follows several blanks explains, what follows a redirection is the shell's
            let line = line.trim().split("   ").next().unwrap_or_default();
            for part in line.split(" && ") {
                let part = part.split(['>', '<', '|']).next().unwrap_or_default();
                let part = part.trim();
                let parsed = Cli::try_parse_from(words(part));
                let shown = |e: &clap::Error| e.kind() == clap::error::ErrorKind::DisplayHelp;
                if let Err(error) = parsed
                    && !shown(&error)
                {
                    panic!("{name}: the example {part:?} is refused: {error}");
                }
                examples += 1;
            }
        }
        assert!(examples > 0, "{name} --help shows no example");
        tried += examples;
    }
    assert!(tried >= 36, "{tried} examples");
}

#[test]
fn every_command_that_reports_can_do_so_in_json() {
    for (name, command) in commands() {
        let no_report = ["emberflow completions", "emberflow man", "emberflow serve"];
        let no_report = no_report.contains(&&*name);
        let json = command
            .get_arguments()
            .any(|a| a.get_long() == Some("json"));
        assert!(json != no_report, "{name}");
    }
}

#[test]
fn slips_are_understood() {
    let dir = tempfile::tempdir().unwrap();
    let near = dir.path().join("demo-q4.ember").display().to_string();
    std::fs::write(&near, "").unwrap();
    let wrong = dir.path().join("demo_q4.ember").display().to_string();
    let nowhere = dir.path().join("no/demo.ember").display().to_string();
    let folder = dir.path().join("no").display().to_string();
    let text = dir.path().join("text.txt").display().to_string();
    std::fs::write(&text, "").unwrap();
    let other = text.replace("text", "txet");
    for (line, wanted) in [
        ("rnu", "'run'"),
        ("pakc x -o y", "'pack'"),
        ("train-predictr", "'train-predictor'"),
        ("bench decod", "'decode'"),
        ("bench oi", "'io'"),
        ("run -p a --policy llmflsh", "'llmflash'"),
        ("bench io --io urng", "'uring'"),
        ("profile shw x.stats", "'show'"),
        ("profile mrege a b -o c", "'merge'"),
        ("run --memroy 1GiB", "'--memory'"),
        ("run --ffn-residnet 1", "'--ffn-resident'"),
        ("bench io --io sim:ufs5", "'sim:ufs4'"),
        ("plan --io sim:nvm", "'sim:nvme'"),
        ("run -p a --sparsity exat", "'exact'"),
        ("run -p a --memory atuo", "did you mean auto?"),
        ("run -p a --memory 30", "did you mean 30GiB?"),
        ("plan --memory 1GiB,2.5", "did you mean 2.5GiB?"),
        ("pack x -o y --quant q44", "did you mean q4?"),
        ("pack x -o y --quant q8_0", "here it is q8"),
        ("plan --quant q4", "--quant is for a config.json"),
        ("completions bsh", "'bash'"),
        (
            &format!("run {wrong} -p a"),
            &format!("did you mean {near}?"),
        ),
        (&format!("verify {wrong}"), &format!("did you mean {near}?")),
        (
            &format!("pack {wrong} -o x"),
            &format!("did you mean {near}?"),
        ),
        (
            &format!("bench io {wrong}"),
            &format!("did you mean {near}?"),
        ),
        (
            &format!("perplexity -f {other}"),
            &format!("did you mean {text}?"),
        ),
        (
            &format!("inspect {nowhere}"),
            &format!("the folder {folder} does not exist"),
        ),
        (&near, "'emberflow run"),
    ] {
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{line}");
        assert!(message.contains(wanted), "{line}: {message}");
    }
}

/// Number of leaf commands, of options of all of them, and of those of `run`, without `-v` and
/// `--help`. Options for measurements belong to the laboratory.
#[test]
fn there_are_no_more_commands_and_options_than_users_need() {
    let options = |command: &clap::Command| {
        let counted = command.get_arguments().filter(|a| {
            !a.is_positional()
                && !a.is_hide_set()
                && !["help", "verbose"].contains(&a.get_id().as_str())
        });
        counted.count()
    };
    let all: Vec<(String, usize)> = commands()
        .into_iter()
        .map(|(name, command)| (name, options(&command)))
        .collect();
    println!("{all:#?}");
    let sum: usize = all.iter().map(|(_, options)| options).sum();
    let run = all.iter().find(|(name, _)| name == "emberflow run");
    assert!(all.len() <= 22, "{} commands", all.len());
    assert!(sum <= 196, "{sum} options");
    assert!(run.is_some_and(|(_, options)| *options <= 27), "{run:?}");
}

/// Verbs of ollama and llama.cpp.
#[test]
fn commands_of_other_programs_are_answered() {
    for (verb, tip) in [
        ("ls", "emberflow list"),
        ("rm", "emberflow remove MODEL"),
        ("download", "emberflow pull MODEL"),
        ("show", "emberflow inspect MODEL"),
        ("chat", "emberflow run MODEL --chat"),
        ("quantize", "--quant FORMAT"),
        ("version", "emberflow --version"),
    ] {
        let refused = call(&[verb, "x"]);
        assert_eq!(refused.status.code(), Some(2));
        let told = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(told.contains(tip) && !told.contains("similar"), "{told}");
    }
}

/// Former commands of this program are answered with their new location.
#[test]
fn the_laboratory_is_named() {
    for (line, wanted) in [
        ("synth --shape tiny -o x", "emberflow-benches -- synth"),
        ("trace record -f x -o y", "emberflow-benches -- trace"),
        ("bench kernels", "emberflow-benches -- kernels"),
        ("bench device", "'emberflow bench io'"),
        ("run -p a --trace t.json", "emberflow-benches"),
        ("perplexity -f x --judge", "emberflow-benches"),
        ("run -p a --device-memory 1GiB", "'--device NAME=SIZE'"),
    ] {
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(message.contains(wanted), "{line}: {message}");
    }
}

#[test]
fn options_of_other_programs_are_answered() {
    for (line, wanted) in [
        ("run demo hello", "'-p \"hello\"'"),
        ("run -m x.gguf", "'emberflow run MODEL'"),
        ("run --model x.gguf", "'emberflow run MODEL'"),
        ("run -c 512", "'--context N'"),
        ("run -c512", "'--context N'"),
        ("run --ctx-size 512", "'--context N'"),
        ("serve --ctx-size=512", "'--context N'"),
        ("run -t 4", "'--threads N'"),
        ("run -i", "'--chat'"),
        ("run -cnv", "'--chat'"),
        ("run -ngl 99", "'--device opencl'"),
        ("run --n-gpu-layers 99", "'--device opencl'"),
        ("run --n-predict 9", "'-n N'"),
        ("run -n -2", "-1"),
        ("run --temperature 1", "'--temp T'"),
        ("serve -np 4", "'serve --parallel N'"),
        ("serve -m x.gguf", "'emberflow run MODEL'"),
        ("bench decode -t 4", "'--threads N'"),
    ] {
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(message.contains(wanted), "{line}: {message}");
    }
}

/// A text mistaken for a model, or for a command.
#[test]
fn a_text_without_its_option_is_told_how() {
    for words in [&["run", "Once upon a time"][..], &["Once upon a time"]] {
        let output = call(words);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{words:?}");
        assert!(message.contains("-p \"Once upon a time\""), "{message}");
    }
}

#[test]
fn completions_know_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = call(&["completions", shell]);
        assert!(output.status.success());
        let script = String::from_utf8(output.stdout).unwrap();
        for (name, _) in commands() {
            let last = name.rsplit(' ').next().unwrap();
            assert!(script.contains(last), "{shell}: {name}");
        }
        let knows_values = ["bash", "zsh", "fish"].contains(&shell);
        assert!(
            script.contains("llmflash") || !knows_values,
            "{shell}: values of --policy"
        );
        if shell == "bash"
            && let Ok(bash) = Command::new("bash").args(["-n", "-c", &script]).output()
        {
            assert!(bash.status.success(), "bash does not parse it");
        }
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("man1");
    let output = call(&["man", "--out", &folder.display().to_string()]);
    assert!(output.status.success());
    for (name, _) in commands() {
        let path = folder.join(format!("{}.1", name.replace(' ', "-")));
        let page = std::fs::read_to_string(&path).expect(&name);
        assert!(
            page.contains(".SH SYNOPSIS") && page.contains("Example"),
            "{name}"
        );
    }
    let page = String::from_utf8(call(&["man"]).stdout).unwrap();
    assert!(page.contains("larger than memory") && page.contains("Exit codes"));
}

/// The exit codes in `--help` and docs/shell.md are the actual ones.
#[test]
fn exit_codes_are_as_documented() {
    let dir = tempfile::tempdir().unwrap();
    let stats = dir.path().join("stats").display().to_string();
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let demo = exported(dir.path());
    let damaged = dir.path().join("damaged.ember").display().to_string();
    assert!(call(&["pack", &demo, "-o", &damaged]).status.success());
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let profile = format!("profile -f {text} -o {stats} --limit 1000 --stop-after 1");
    let cases = [
        (0, "inspect".to_owned()),
        (1, "run /no/such/model.ember -p a".to_owned()),
        (1, "run -p a --memory 1MiB".to_owned()),
        (2, "run --no-such-option".to_owned()),
        (2, "run -p a --best-of 2 --temp 0".to_owned()),
        (2, format!("export -o {demo}")),
        (3, format!("verify {damaged}")),
        (130, profile),
    ];
    for (code, line) in &cases {
        let output = call(&line.split(' ').collect::<Vec<_>>());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(*code), "{line}: {message}");
    }
    let help = String::from_utf8(call(&["--help"]).stdout).unwrap();
    let (_, listed) = help.split_once("Exit codes: ").expect("exit codes");
    let listed = listed.split("\n\n").next().unwrap_or_default();
    let of_help = listed.split(|c: char| !c.is_ascii_digit());
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/shell.md");
    let page = std::fs::read_to_string(page).unwrap();
    let of_page = page.lines().filter_map(|line| line.strip_prefix("| "));
    let of_page = of_page.map(|row| row.split(' ').next().unwrap_or_default());
    let mut seen: Vec<i32> = cases.iter().map(|(code, _)| *code).collect();
    seen.dedup();
    for numbers in [of_help.collect::<Vec<_>>(), of_page.collect()] {
        let mut codes: Vec<i32> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
        codes.dedup();
        assert_eq!(codes, seen, "{numbers:?}");
    }
}

/// Commands that take long for a large model show their progress on a terminal.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn everything_long_shows_its_progress() {
    let dir = tempfile::tempdir().unwrap();
    let demo = exported(dir.path());
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let program = env!("CARGO_BIN_EXE_emberflow");
    let on_a_terminal = |line: &str| {
        let mut script = Command::new("script");
        script
            .args(["-qec", &format!("{program} {line}"), "/dev/null"])
            .current_dir(dir.path())
            .env("XDG_CACHE_HOME", dir.path())
            .env("TERM", "xterm");
        script.output()
    };
    if on_a_terminal("inspect").is_err() {
        println!("SKIPPED: there is no `script` to play a terminal");
        return;
    }
    // output for a reading program is not disturbed
    assert!(on_a_terminal("run -p a -n 4 --json").is_ok_and(|o| o.stdout.starts_with(b"{")));
    for (line, bars) in [
        ("export -o other-hf", &["exporting"][..]),
        ("pack demo-hf -o m.ember", &["packing"]),
        (
            "verify m.ember --source demo-hf",
            &["verifying", "comparing weights"],
        ),
        ("perplexity m.ember -f TEXT --limit 600", &["perplexity"]),
        ("profile m.ember -f TEXT -o s --limit 600", &["profiling"]),
        (
            "train-predictor m.ember -f TEXT --tokens 600 --kind sign -o p.ember",
            &["reading the text", "predictors", "copying the model"],
        ),
        ("bench decode -n 4 --sparsity exact", &["decoding"]),
        (
            "bench io --quick --sizes 4KiB --depths 1 --millis 5 --size 8MiB",
            &["measuring"],
        ),
        ("plan", &["measuring"]),
        ("run m.ember -p a -n 4", &["loading the model"]),
    ] {
        let line = line.replace("demo-hf", &demo).replace("TEXT", text);
        let output = on_a_terminal(&line).unwrap();
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{line}: {shown}");
        for bar in bars {
            assert!(
                shown.contains(&format!("{bar} [")),
                "{line}: {bar}: {shown}"
            );
        }
        // in a pipe there is no progress bar
        if line.starts_with("perplexity") {
            let mut piped = emberflow();
            piped.current_dir(dir.path()).args(line.split(' '));
            assert!(piped.output().unwrap().stderr.is_empty());
        }
    }
}

/// Windows are as `--help` describes them: each begins with the start token.
#[test]
fn perplexity_says_how_its_windows_begin() {
    let help = String::from_utf8(call(&["perplexity", "--help"]).stdout).unwrap();
    let words: Vec<&str> = help.split_whitespace().collect();
    let help = words.join(" ");
    assert!(
        help.contains("starts with an empty context: with BOS"),
        "{help}"
    );
}
