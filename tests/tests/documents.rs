//! What the documents name exists: files, what is in them, the layout, the example.

use std::path::{Path, PathBuf};

const DOCUMENTS: [&str; 4] = [
    "README.md",
    "ARCHITECTURE.md",
    "models/README.md",
    "benches/README.md",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ lies in the workspace")
        .to_path_buf()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Text in backquotes, each with the words between it and the one before. Blocks of code are left
/// out.
fn quotes(text: &str) -> Vec<(String, String)> {
    let prose: String = text.split("```").step_by(2).collect();
    let parts: Vec<&str> = prose.split('`').collect();
    let quote = |pair: &[&str]| (pair[0].to_owned(), pair[1].to_owned());
    parts.chunks_exact(2).map(quote).collect()
}

/// `a/{b,c}.rs` as the two paths it stands for.
fn spelled_out(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else {
        return vec![path.to_owned()];
    };
    let (choices, after) = rest.split_once('}').expect(path);
    let paths = choices.split(',').map(|c| format!("{before}{c}{after}"));
    paths.collect()
}

fn is_path(quoted: &str) -> bool {
    let endings = [
        ".rs", ".py", "/", ".md", ".svg", ".json", ".txt", ".sh", ".ember", ".csv",
    ];
    quoted.contains('/')
        && !quoted.contains([' ', '<', '*', '$', '~'])
        && !quoted.starts_with(['/', '-'])
        && endings.iter().any(|e| quoted.ends_with(e))
}

#[test]
fn documents_name_files_that_exist() {
    for document in DOCUMENTS {
        let mut checked = 0;
        for (_, quoted) in quotes(&read(document)) {
            if !is_path(&quoted) {
                continue;
            }
            for path in spelled_out(&quoted) {
                checked += 1;
                let beside = root().join(document).parent().map(|p| p.join(&path));
                assert!(
                    root().join(&path).exists() || beside.is_some_and(|p| p.exists()),
                    "{document} names {path}, which does not exist"
                );
            }
        }
        assert!(checked > 0, "{document} names no file at all");
    }
}

/// `Type::function` in `file.rs`, or `file.rs` (`Type`): the file has it.
#[test]
fn what_documents_place_in_a_file_is_there() {
    let mut checked = 0;
    for document in ["README.md", "ARCHITECTURE.md"] {
        for pair in quotes(&read(document)).windows(2) {
            let [(_, first), (between, second)] = pair else {
                continue;
            };
            let between = between.split_whitespace().collect::<Vec<_>>().join(" ");
            let (symbol, path) = match between.as_str() {
                "in" if is_path(second) => (first, second),
                "(" if is_path(first) => (second, first),
                "(" if is_path(second) => (first, second),
                _ => continue,
            };
            if !symbol
                .chars()
                .all(|c| c.is_alphanumeric() || c == '_' || c == ':')
            {
                continue;
            }
            let code = read(path);
            for name in symbol.split("::") {
                let words = |c: char| !c.is_alphanumeric() && c != '_';
                assert!(
                    code.split(words).any(|word| word == name),
                    "{document} places {symbol} in {path}, which has no {name}"
                );
            }
            // the last name is what the file is named for, and defined there
            let name = symbol.rsplit("::").next().unwrap_or_default();
            let kinds = ["fn", "struct", "enum", "trait", "const", "type", "mod"];
            assert!(
                kinds
                    .iter()
                    .any(|kind| code.contains(&format!("{kind} {name}"))),
                "{document} places {symbol} in {path}, which only uses it"
            );
            checked += 1;
        }
    }
    assert!(
        checked >= 25,
        "the documents place only {checked} names in files"
    );
}

/// The README's example is the one that is compiled, and run as the documentation test of the crate.
#[test]
fn the_example_of_the_readme_is_the_one_that_runs() {
    let example = read("engine/examples/generate.rs");
    let block = format!("```rust\n{example}```");
    assert!(
        read("README.md").contains(&block),
        "README.md shows other code:\n{example}"
    );
}

/// The DATA LAYOUT diagram in the document is the one in the code.
#[test]
fn the_layout_diagram_is_the_codes_own() {
    let code = read("storage/src/container/format.rs");
    let diagram: String = code
        .lines()
        .skip_while(|l| *l != "//! ```text")
        .skip(1)
        .take_while(|l| *l != "//! ```")
        .map(|l| {
            format!(
                "{}\n",
                l.trim_start_matches("//!").strip_prefix(' ').unwrap_or("")
            )
        })
        .collect();
    assert!(diagram.contains("superblock"), "the code lost its diagram");
    let document = read("ARCHITECTURE.md");
    assert!(
        document.contains(&diagram),
        "ARCHITECTURE.md shows another layout"
    );
}
