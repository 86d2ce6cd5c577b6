//! Names in the documents exist: files, symbols in them, links, commands, the example.
//!
//! `tools/tests/all/first_hour.rs` runs the commands of README.md and `docs/`; here those of all pages are
//! parsed. `benches/tests/all/report.rs` checks that the measured numbers are those of the CSV files.

use std::path::{Path, PathBuf};

use clap::Parser;
use emberflow::cli::Cli;
use emberflow_benches::cli::Cli as Lab;

/// All pages.
fn documents() -> Vec<String> {
    let mut all: Vec<String> = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "models/README.md",
        "models/demo-moe/README.md",
        "benches/README.md",
        "benches/NOTEBOOK.md",
    ]
    .map(str::to_owned)
    .into();
    let entries = std::fs::read_dir(root().join("docs")).expect("docs/ exists");
    let names = entries.map(|e| {
        e.expect("an entry")
            .file_name()
            .into_string()
            .expect("a name")
    });
    all.extend(names.map(|name| format!("docs/{name}")));
    assert!(all.len() >= 10, "the walk lost pages");
    all
}

/// Longest README, in lines.
const README_LINES: usize = 150;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ lies in the workspace")
        .to_path_buf()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Text in backquotes, each with the words between it and the previous one. Code blocks are
/// omitted.
fn quotes(text: &str) -> Vec<(String, String)> {
    let prose: String = text.split("```").step_by(2).collect();
    let parts: Vec<&str> = prose.split('`').collect();
    let quote = |pair: &[&str]| (pair[0].to_owned(), pair[1].to_owned());
    parts.chunks_exact(2).map(quote).collect()
}

/// `a/{b,c}.rs` as its two paths.
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
    let mut checked = 0;
    for document in documents() {
        for (_, quoted) in quotes(&read(&document)) {
            if !is_path(&quoted) {
                continue;
            }
            for path in spelled_out(&quoted) {
                checked += 1;
                let beside = root().join(&document).parent().map(|p| p.join(&path));
                assert!(
                    root().join(&path).exists() || beside.is_some_and(|p| p.exists()),
                    "{document} names {path}, which does not exist"
                );
            }
        }
    }
    assert!(checked >= 50, "the documents name only {checked} files");
}

/// Links inside the repository refer to a file, and to a heading in it.
#[test]
fn links_lead_somewhere() {
    let mut checked = 0;
    for document in documents() {
        let text = read(&document);
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap_or_default();
            if link.starts_with("http") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let folder = root().join(&document);
            let target = match file {
                "" => folder,
                file => folder.parent().expect("a folder").join(file),
            };
            assert!(target.exists(), "{document} links to {link}");
            if !heading.is_empty() {
                let page = std::fs::read_to_string(&target).expect(link);
                let found = (page.lines().filter(|line| line.starts_with('#')))
                    .any(|line| anchor(line) == heading);
                assert!(
                    found,
                    "{document} links to {link}, which has no such heading"
                );
            }
            checked += 1;
        }
    }
    assert!(checked >= 20, "the documents have only {checked} links");
}

/// A heading's name in links.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The words of a command line, up to a pipe or redirection.
fn words(command: &str) -> Vec<String> {
    let end = command
        .find([';', '|', '>', '<', '#'])
        .unwrap_or(command.len());
    command[..end]
        .split('"')
        .enumerate()
        .flat_map(|(i, part)| match i % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

/// The commands of a page: lines of its code blocks, and quotes without placeholders.
fn commands(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    for block in text.split("```").skip(1).step_by(2) {
        let (language, block) = block.split_once('\n').unwrap_or_default();
        if ["sh", "bash"].contains(&language) {
            all.extend(
                block
                    .lines()
                    .map(|line| line.trim_start_matches("./").to_owned()),
            );
        }
    }
    let quoted = quotes(text).into_iter().map(|(_, quoted)| quoted);
    all.extend(quoted.map(|q| q.split_whitespace().collect::<Vec<_>>().join(" ")));
    let whole = |c: &String| !c.contains(['[', '…', '<', '*']) && !c.contains("...");
    all.into_iter()
        .filter(whole)
        .map(|c| match c.split_once("| emberflow ") {
            Some((_, rest)) => format!("emberflow {rest}"),
            None => c.replace(
                "cargo run --release -p emberflow-benches -- ",
                "emberflow-lab ",
            ),
        })
        .collect()
}

/// Every command of every page parses, or names an existing target.
#[test]
fn commands_are_understood() {
    let (mut parsed, mut built, mut wrong) = (0, 0, Vec::new());
    for document in documents() {
        for command in commands(&read(&document)) {
            let words = words(&command);
            let ours = match words.first().map(String::as_str) {
                Some("emberflow" | "emberflow-lab") if words.len() > 1 => &words[..],
                Some("cargo") => {
                    targets_exist(&document, &words);
                    built += 1;
                    let program = words.iter().position(|w| w == "--");
                    match program.filter(|_| words[1] == "run" && !words.contains(&"-p".into())) {
                        Some(at) => &words[at..],
                        None => continue,
                    }
                }
                _ => continue,
            };
            let parsed_as = match ours[0].as_str() {
                "emberflow-lab" => Lab::try_parse_from(ours).map(drop),
                _ => Cli::try_parse_from(ours).map(drop),
            };
            if let Err(error) = parsed_as {
                use clap::error::ErrorKind as Kind;
                // A command's name alone is not a command line.
                let named = [
                    Kind::DisplayHelp,
                    Kind::DisplayVersion,
                    Kind::MissingRequiredArgument,
                    Kind::DisplayHelpOnMissingArgumentOrSubcommand,
                ];
                if !named.contains(&error.kind()) {
                    wrong.push(format!("{document}: {command}: {error}"));
                }
            }
            parsed += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        parsed >= 50 && built >= 5,
        "only {parsed} and {built} commands"
    );
}

/// Packages, examples, tests and benches named in a cargo command.
fn targets_exist(document: &str, words: &[String]) {
    let after = |option: &str| {
        let at = words.iter().position(|w| w == option)?;
        Some(words.get(at + 1)?.clone())
    };
    let Some(package) = after("-p") else { return };
    let folders = [
        "engine",
        "engine/devices",
        "engine/kernels",
        "engine/npu",
        "engine/opencl",
        "storage",
        "models",
        "predictor",
        "tools",
        "tests",
        "benches",
    ];
    let named = |folder: &&&str| {
        read(&format!("{folder}/Cargo.toml")).contains(&format!("name = \"{package}\""))
    };
    let folder = folders.iter().find(named);
    let folder = folder.unwrap_or_else(|| panic!("{document} names the package {package}"));
    for (option, place) in [
        ("--example", "examples"),
        ("--test", "tests"),
        ("--bench", "benches"),
    ] {
        if let Some(target) = after(option) {
            let place = root().join(folder).join(place);
            let files = [format!("{target}.rs"), format!("{target}/main.rs")];
            assert!(
                files.iter().any(|file| place.join(file).exists()),
                "{document} names {target} of {package}"
            );
        }
    }
}

/// The first page is short, and shows the two commands first.
#[test]
fn the_readme_is_short() {
    let readme = read("README.md");
    let lines = readme.lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines");
    let first: Vec<String> = commands(&readme).into_iter().take(2).collect();
    assert_eq!(
        first,
        [
            "cargo run --release -- run --ffn-resident 0.45",
            "cargo test --release"
        ]
    );
}

/// `Type::function` in `file.rs`, or `file.rs` (`Type`): the file has it.
#[test]
fn what_documents_place_in_a_file_is_there() {
    let mut checked = 0;
    for document in documents() {
        for pair in quotes(&read(&document)).windows(2) {
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
            // the last name is that of the file, and is defined there
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
        checked >= 18,
        "the documents place only {checked} names in files"
    );
}

/// The page's example is the one that is compiled and run as the documentation test of the crate.
#[test]
fn the_example_of_the_library_is_the_one_that_runs() {
    let example = read("engine/examples/generate.rs");
    let block = format!("```rust\n{example}```");
    assert!(
        read("docs/library.md").contains(&block),
        "docs/library.md shows other code:\n{example}"
    );
}
