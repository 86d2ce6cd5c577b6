//! Every command line of the README's walk works as it stands, in order.

mod common;

use std::path::Path;

#[test]
fn the_walk_works() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("models"), dir.path().join("models")).unwrap();
    let mut ran = 0;
    for block in readme.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap();
        for line in block.lines() {
            let Some(rest) = line.strip_prefix("emberflow ") else {
                assert!(
                    line.starts_with("cargo "),
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
    assert!(ran >= 12, "the README lost its commands: {ran}");
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
