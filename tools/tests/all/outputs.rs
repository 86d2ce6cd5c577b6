//! Files that commands write: one rule for all of them.

use crate::common;
use std::path::Path;
use std::process::Output;

use crate::common::{call, commands, json};

/// Arguments that a command needs besides the output file, to get as far as checking it.
const NEEDED: [(&str, &[&str]); 6] = [
    ("emberflow pack", &["x"]),
    ("emberflow profile", &["-f", "x"]),
    ("emberflow profile merge", &["x"]),
    ("emberflow profile show", &["x"]),
    ("emberflow train-predictor", &["-f", "x"]),
    ("emberflow prune-outliers", &["-f", "x"]),
];

/// Options that name an output file or folder.
const WRITES: [&str; 5] = ["output", "svg", "csv", "save", "out"];

/// Runs a command with its required arguments and this output; also returns the arguments.
fn write_to(name: &str, option: &str, place: &Path) -> (Vec<String>, Output) {
    let mut args: Vec<&str> = name.split(' ').skip(1).collect();
    args.extend(NEEDED.iter().filter(|n| n.0 == name).flat_map(|n| n.1));
    let place = format!("--{option}={}", place.display());
    args.push(&place);
    let output = call(&args);
    (args.into_iter().map(str::to_owned).collect(), output)
}

/// Every option of every command that writes a file refuses an existing one, before any work.
#[test]
fn nothing_is_replaced_unasked() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("precious.gguf");
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let mut tried = 0;
    for (name, command) in commands() {
        let bench = name.rsplit(' ').next().unwrap();
        let names = [
            format!("{bench}.json"),
            format!("emberflow-demo-{bench}.json"),
            "emberflow.1".into(),
        ];
        let has = |long: &str| command.get_arguments().any(|a| a.get_long() == Some(long));
        for option in WRITES.into_iter().filter(|o| has(o)) {
            assert!(has("force"), "{name} --{option} cannot be told to replace");
            let files = match option {
                "out" => names.iter().map(|n| out.join(n)).collect(),
                _ => vec![file.clone()],
            };
            for file in &files {
                std::fs::write(file, "precious").unwrap();
            }
            let (args, output) =
                write_to(&name, option, if option == "out" { &out } else { &file });
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
            assert!(
                message.contains("already exists; use --force"),
                "{args:?}: {message}"
            );
            for file in files {
                assert_eq!(std::fs::read(&file).unwrap(), b"precious", "{args:?}");
                std::fs::remove_file(file).unwrap();
            }
            tried += 1;
        }
    }
    assert!(tried >= 18, "{tried} options");
}

/// A file that cannot be written is reported before any work.
#[test]
fn what_cannot_be_written_is_told_at_once() {
    let dir = tempfile::tempdir().unwrap();
    // root may write nearly everywhere, but not under a name of this length
    let long = "x".repeat(300);
    let place = dir.path().join(&long).join("out.gguf");
    let file = dir.path().join(format!("{long}.gguf"));
    let mut tried = 0;
    for (name, command) in commands() {
        let has = |long: &str| command.get_arguments().any(|a| a.get_long() == Some(long));
        for option in WRITES.into_iter().filter(|o| has(o)) {
            let place = if option == "out" { &place } else { &file };
            let (args, output) = write_to(&name, option, place);
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
            assert!(message.contains(&long), "{args:?}: {message}");
            assert!(output.stdout.is_empty(), "{args:?} has worked before");
            tried += 1;
        }
    }
    assert!(tried >= 18, "{tried} options");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// With `--force` the file is replaced, and no other file is left.
#[test]
fn what_may_be_replaced_is() {
    let dir = tempfile::tempdir().unwrap();
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let place = dir.path().join("file.gguf").display().to_string();
    for line in [
        "export --json -o",
        "profile -f TEXT --limit 100 --json -o",
        "inspect --json --svg",
        "bench decode --quick -n 1 --json --csv",
    ] {
        std::fs::write(&place, "before").unwrap();
        let words = line.split(' ').map(|w| if w == "TEXT" { text } else { w });
        let args: Vec<&str> = words.chain([&*place, "--force"]).collect();
        json(&args);
        assert_ne!(std::fs::read(&place).unwrap(), b"before", "{line}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "{line}");
    }
}

/// A file that is read.
enum Kind {
    Source,
    Container,
    Shard,
}

/// Commands whose output file is also their input.
const WRITERS: [(&str, Kind); 20] = [
    ("pack FILE -o", Kind::Source),
    ("pack SOURCE --calibrate FILE -o", Kind::Container),
    ("pack SOURCE --stats FILE -o", Kind::Container),
    ("pack demo-hf -o", Kind::Shard),
    ("pack demo-hf/model.safetensors -o", Kind::Shard),
    ("export FILE -o", Kind::Source),
    ("inspect FILE --svg", Kind::Container),
    ("plan FILE --svg", Kind::Container),
    ("profile FILE -f x -o", Kind::Container),
    ("profile -f FILE -o", Kind::Container),
    ("profile merge x FILE -o", Kind::Container),
    ("profile show FILE --svg", Kind::Container),
    ("train-predictor FILE -f x -o", Kind::Container),
    ("train-predictor -f FILE -o", Kind::Container),
    ("prune-outliers FILE -f x -o", Kind::Container),
    ("prune-outliers -f FILE -o", Kind::Container),
    ("bench sweep FILE --csv", Kind::Container),
    ("bench sweep --beside FILE --svg", Kind::Container),
    ("bench decode FILE --svg", Kind::Container),
    ("bench io FILE --csv", Kind::Container),
];

/// Regression: `pack X -o X --force` and others replaced their input, with exit code 0.
#[test]
fn what_is_read_is_never_written_to() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    json(&["export", "-o", &at("source.gguf"), "--json"]);
    let folder = common::exported(dir.path());
    let (source, shard) = (at("source.gguf"), format!("{folder}/model.safetensors"));
    let container = at("m.ember");
    json(&["pack", &source, "-o", &container, "--json"]);
    // links to each, in a folder that is a link itself
    std::fs::create_dir(dir.path().join("links")).unwrap();
    symlink(dir.path().join("links"), dir.path().join("way")).unwrap();
    for (line, kind) in WRITERS {
        let file = match kind {
            Kind::Source => &source,
            Kind::Container => &container,
            Kind::Shard => &shard,
        };
        let before = std::fs::metadata(file).unwrap();
        let [hard, soft] = ["hard.gguf", "soft.gguf"].map(|n| dir.path().join("links").join(n));
        std::fs::hard_link(file, &hard).unwrap();
        symlink(file, &soft).unwrap();
        for place in [file, &at("way/hard.gguf"), &at("links/soft.gguf")] {
            let words = line.split(' ').map(|w| match w {
                "FILE" => file,
                "SOURCE" => &*source,
                word => word,
            });
            let args: Vec<&str> = words.chain([&**place, "--force"]).collect();
            let output = common::emberflow()
                .args(&args)
                .current_dir(dir.path())
                .output()
                .unwrap();
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
            assert!(message.contains("the same file as"), "{args:?}: {message}");
        }
        let after = std::fs::metadata(file).unwrap();
        let facts = |m: &std::fs::Metadata| (m.ino(), m.len(), m.modified().unwrap());
        assert_eq!(facts(&before), facts(&after), "{line}");
        std::fs::remove_file(hard).unwrap();
        std::fs::remove_file(soft).unwrap();
    }
    // neither two results in one file, nor one that is also the input text
    let [csv, text] = ["both.csv", "text.txt"].map(at);
    let output = call(&["bench", "decode", "--quick", "--csv", &csv, "--svg", &csv]);
    assert_eq!(output.status.code(), Some(2));
    std::fs::write(&text, "some text").unwrap();
    let mut command = common::emberflow();
    command.args(["point", "--trace", &text, "--force"]);
    command.stdin(std::fs::File::open(&text).unwrap());
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("standard input"), "{message}");
    assert_eq!(std::fs::read(&text).unwrap(), b"some text");
}

/// A folder may contain more than the files once written there.
#[test]
fn no_folder_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("precious"), "precious").unwrap();
    let folder = dir.path().display().to_string();
    for line in ["export -o", "pack x -o", "inspect --svg"] {
        let args: Vec<&str> = line.split(' ').chain([&*folder, "--force"]).collect();
        let output = call(&args);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(Path::new(&folder).join("precious").is_file(), "{line}");
    }
}

/// A redirected output is a pipe or a device: written to, never replaced.
#[test]
fn pictures_go_to_standard_output_too() {
    let output = call(&["inspect", "--svg", "/dev/stdout"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success());
    assert!(text.contains("<svg") && text.contains("</svg>"), "{text}");
}
