//! Ctrl-C during writing: no useless file is left, and the same command works again.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::lab;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

fn entries(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = names
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Starts a command, waits until it has begun to write `partial`, and stops it.
fn stopped(dir: &Path, line: &str, partial: &str) {
    let mut child = lab()
        .args(line.replace("TEXT", TEXT).split(' '))
        .current_dir(dir)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !dir.join(partial).exists() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{line}: no {partial}"
        );
        assert!(
            child.try_wait().unwrap().is_none(),
            "{line} ended too early"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    let id = child.id().to_string();
    Command::new("kill").args(["-INT", &id]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{line}: {message}");
    assert!(message.contains("stopped"), "{line}: {message}");
}

#[test]
fn nothing_unfinished_is_left() {
    let dir = tempfile::tempdir().unwrap();
    for (line, partial) in [
        ("trace record -f TEXT -o t.trace", "t.trace.partial"),
        ("synth --shape llama-1b -o big.gguf", "big.gguf.partial"),
        ("synth --shape llama-1b -o big-hf", "big-hf.partial"),
    ] {
        stopped(dir.path(), line, partial);
        // either finished in time, or nothing
        let whole = partial.trim_end_matches(".partial");
        let left = entries(dir.path());
        let left: Vec<_> = left.iter().filter(|name| *name != whole).collect();
        assert!(left.is_empty(), "{line} leaves {left:?}");
    }
}

/// Files left by another program, or by a killed run, are not removed.
#[test]
fn the_unfinished_work_of_others_stays() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.gguf.partial"), "theirs").unwrap();
    let output = lab()
        .args(["synth", "--shape", "tiny", "-o", "t.gguf"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert_eq!(entries(dir.path()), ["t.gguf.partial"]);
}
