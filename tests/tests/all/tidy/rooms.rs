//! Sizes as a ratchet: lines of each room (folder), type names shared by several types of a crate, tuning
//! constants.
//!
//! `rooms.txt` and `names.txt` contain the allowed values.
//! `EMBERFLOW_RECORD=1 cargo test --release -p emberflow-tests --test all rooms::` rewrites both; a
//! reason for growth belongs in the commit and after the number in `rooms.txt`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::code::blanked;
use super::types::{code, defined, is_test};
use super::{all_functions, crates, root, sources};

const ROOMS: &str = "tests/tests/all/tidy/rooms.txt";
const NAMES: &str = "tests/tests/all/tidy/names.txt";

/// A room may grow by a tenth of the recorded size, or by 40 lines if that is more.
fn most(recorded: usize) -> usize {
    recorded + (recorded / 10).max(40)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_default()
}

/// Writes the file if requested.
fn record(file: &str, text: &str) -> bool {
    let asked = std::env::var_os("EMBERFLOW_RECORD").is_some();
    if asked {
        std::fs::write(root().join(file), text).expect("the list can be written");
    }
    asked
}

/// Lines of code without tests: a folder below a crate's `src/` is a room together with the file of its
/// name; all other files of the crate are one room.
fn rooms() -> BTreeMap<String, usize> {
    let sources = sources();
    let mut rooms = BTreeMap::new();
    for (src, files) in crates(&sources) {
        let folders: BTreeSet<&str> = files
            .iter()
            .filter_map(|(name, _)| Some(name.split_once('/')?.0))
            .collect();
        for (name, text) in files.iter().filter(|(name, _)| !is_test(name)) {
            let first = name.split('/').next().unwrap_or(name);
            let first = first.trim_end_matches(".rs");
            let room = if folders.contains(first) { first } else { "" };
            *rooms.entry(format!("{src}{room}")).or_default() += code(text).lines().count();
        }
    }
    rooms
}

#[test]
fn rooms_grow_for_a_reason() {
    let recorded = read(ROOMS);
    let lines = recorded.lines().filter_map(|line| line.split_once(' '));
    let recorded: BTreeMap<&str, &str> = lines.collect();
    let mut text = String::new();
    let mut wrong = Vec::new();
    for (room, lines) in rooms() {
        let (number, why) = recorded.get(&*room).map_or((0, ""), |rest| {
            let (number, why) = rest.split_once(' ').unwrap_or((rest, ""));
            (number.parse().expect("a number of lines"), why)
        });
        if lines > most(number) {
            wrong.push(format!("{room} has {lines} lines, {number} are recorded"));
        }
        let _ = writeln!(text, "{}", format!("{room} {lines} {why}").trim_end());
    }
    if !record(ROOMS, &text) {
        assert!(
            wrong.is_empty(),
            "make it smaller, or say why it grows in {ROOMS}:\n{}",
            wrong.join("\n")
        );
    }
}

#[test]
fn type_names_are_unique() {
    let allowed = read(NAMES);
    let allowed: BTreeSet<&str> = allowed.lines().collect();
    let mut found = BTreeSet::new();
    for (src, files) in crates(&sources()) {
        let mut named: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (file, text) in files.iter().filter(|(name, _)| !is_test(name)) {
            // one type per instruction set has the same name there
            if src == "engine/kernels/src/" && file.starts_with("simd/") {
                continue;
            }
            for name in code(text).lines().filter_map(defined) {
                named.entry(name).or_default().insert(file);
            }
        }
        let shared = named.into_iter().filter(|(_, files)| files.len() > 1);
        found.extend(shared.map(|(name, _)| format!("{src} {name}")));
    }
    let text: String = found.iter().map(|name| format!("{name}\n")).collect();
    if !record(NAMES, &text) {
        let new: Vec<&String> = found.iter().filter(|n| !allowed.contains(&***n)).collect();
        assert!(new.is_empty(), "the crate has a type of this name: {new:?}");
        let gone: Vec<&&str> = allowed.iter().filter(|n| !found.contains(**n)).collect();
        assert!(gone.is_empty(), "{NAMES} names what is unique: {gone:?}");
    }
}

/// Tuning constants of the engine (named floats) are few, and in the expected files.
#[test]
fn tuning_constants_stand_together() {
    const MOST: usize = 20;
    let mut found = Vec::new();
    for (name, text) in sources() {
        let Some(file) = name.strip_prefix("engine/src/").filter(|f| !is_test(f)) else {
            continue;
        };
        let constants = code(&text);
        let constants = constants.lines().map(str::trim_start).filter(|line| {
            let line = line.trim_start_matches("pub ");
            let line = line.trim_start_matches("pub(crate) ");
            let line = line.trim_start_matches("pub(super) ");
            line.starts_with("const ") && (line.contains(": f32") || line.contains(": f64"))
        });
        found.extend(constants.map(|line| format!("{file}: {line}")));
    }
    let all = found.join("\n");
    assert!(
        found.len() <= MOST,
        "{} of {MOST} tuning constants:\n{all}",
        found.len()
    );
}

/// Half of all functions are short, and few are long: a limit alone would be met by functions of just that
/// length.
#[test]
fn functions_are_short_as_a_whole() {
    let mut lines: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let functions = all_functions();
    for (file, function) in &functions {
        if let Some((src, _)) = file.split_once("src/").filter(|(_, rest)| !is_test(rest)) {
            lines.entry(src).or_default().push(function.lines);
        }
    }
    for (src, mut lines) in lines {
        lines.sort_unstable();
        let at = |share: usize| lines[lines.len() * share / 100];
        println!(
            "{src}: {} functions, median {}, p95 {}",
            lines.len(),
            at(50),
            at(95)
        );
        assert!(
            at(50) <= 13,
            "{src}: half of the functions have over {} lines",
            at(50)
        );
        assert!(
            at(95) <= 51,
            "{src}: one of twenty has over {} lines",
            at(95)
        );
    }
}

#[test]
fn what_is_no_code_is_not_counted() {
    assert_eq!(blanked("// a\nlet b = 1;").lines().count(), 2);
    assert_eq!(
        code("struct A;\n#[cfg(test)]\nmod tests {\n}")
            .lines()
            .count(),
        1
    );
    assert_eq!(most(1000), 1100);
    assert_eq!(most(10), 50);
}
