//! Every command line of the README works as it stands, in order.
//!
//! Blocks marked `sh` hold nothing else. Blocks marked `bash` are for a phone and the desktop
//! beside it: only what they do with the program can be tried here.

mod common;

use std::path::Path;

#[test]
fn the_walk_works() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("models"), dir.path().join("models")).unwrap();
    let mut ran = 0;
    for block in readme.split("```").skip(1).step_by(2) {
        let (language, block) = block.split_once('\n').unwrap();
        if !["sh", "bash"].contains(&language) {
            continue;
        }
        for line in block.lines() {
            let command = line.strip_prefix("./").filter(|_| language == "bash");
            let Some(rest) = command.unwrap_or(line).strip_prefix("emberflow ") else {
                assert!(
                    language == "bash" || line.starts_with("cargo "),
                    "neither cargo nor emberflow: {line}"
                );
                continue;
            };
            let output = common::emberflow()
                .args(words(rest))
                .current_dir(dir.path())
                .env("XDG_CACHE_HOME", dir.path())
                .output()
                .unwrap();
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {message}");
            assert!(!output.stdout.is_empty(), "{line} printed nothing");
            ran += 1;
        }
    }
    assert!(ran >= 15, "the README lost its commands: {ran}");
}

/// Splits as a shell does, double quotes included.
fn words(line: &str) -> Vec<String> {
    line.split('"')
        .enumerate()
        .flat_map(|(i, part)| match i % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}
