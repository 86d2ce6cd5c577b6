//! The code rules, checked: crate edges, import cycles of files and folders, cycles through `self`, locations of
//! `unsafe`, leftovers.

mod code;
mod imports;
mod types;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use imports::Crate;
use types::House;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ lies in the workspace")
        .to_path_buf()
}

/// Every `.rs` file of the workspace, relative to its root.
fn sources() -> Vec<(String, String)> {
    fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
        let Ok(entries) = std::fs::read_dir(dir) else {
            return;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() {
                if name != "target" && !name.to_string_lossy().starts_with('.') {
                    walk(&path, out);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path);
            }
        }
    }
    let root = root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.sort();
    assert!(paths.len() > 40, "the walk lost the sources");
    paths
        .into_iter()
        .map(|p| {
            let name = p.strip_prefix(&root).expect("below the root");
            let text = std::fs::read_to_string(&p).expect("sources are UTF-8");
            (name.to_string_lossy().into_owned(), text)
        })
        .collect()
}

/// Dependencies point down only (tools → devices → engine → predictor, storage,
/// models → kernels; storage and kernels do not know each other, and the engine knows no device).
#[test]
fn crate_edges_point_down() {
    const ALL: [&str; 10] = [
        "kernels",
        "npu",
        "opencl",
        "storage",
        "models",
        "predictor",
        "engine",
        "devices",
        "emberflow",
        "benches",
    ];
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("engine/kernels", &[][..]),
        ("engine/npu", &[]),
        ("engine/opencl", &[]),
        ("storage", &[]),
        ("models", &["kernels"]),
        ("predictor", &["kernels"]),
        ("engine", &["kernels", "storage", "models", "predictor"]),
        (
            "engine/devices",
            &["kernels", "npu", "opencl", "storage", "models", "engine"],
        ),
        ("tools", &ALL[..8]),
        ("benches", &ALL[..9]),
        ("tests", &ALL),
    ]);
    for (dir, allowed) in allowed {
        let text = std::fs::read_to_string(root().join(dir).join("Cargo.toml")).expect(dir);
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let key = line.split(['.', ' ', '=']).next().unwrap_or_default();
            let Some(rest) = key.strip_prefix("emberflow") else {
                continue;
            };
            let name = rest.strip_prefix('-').unwrap_or("emberflow");
            // the program's tests make their models with the laboratory's library
            let of_tests = section == "[dev-dependencies]" && (dir, name) == ("tools", "benches");
            assert!(
                allowed.contains(&name) || of_tests,
                "{dir}/Cargo.toml: {dir} may not depend on {key}; allowed: {allowed:?}"
            );
        }
    }
}

/// Path prefixes where `unsafe` is allowed.
const UNSAFE_ROOMS: [&str; 5] = [
    "engine/kernels/src/",
    "engine/opencl/src/",
    "storage/src/io/",
    "storage/src/arena.rs",
    "storage/src/pages.rs",
];

#[test]
fn unsafe_lives_only_in_its_rooms() {
    for (name, text) in sources() {
        let test_allocator = name.starts_with("tests/") || name.starts_with("storage/tests/");
        if UNSAFE_ROOMS.iter().any(|room| name.starts_with(room)) {
            continue;
        }
        for (i, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let found = code.contains("unsafe {")
                || code.contains("unsafe fn")
                || code.contains("unsafe impl")
                || code.contains("unsafe extern");
            // a counting global allocator cannot be written without it
            let excused = test_allocator && text.contains("GlobalAlloc");
            assert!(
                !found || excused || name == "tests/tests/all/tidy.rs",
                "{name}:{}: unsafe outside {UNSAFE_ROOMS:?}",
                i + 1
            );
        }
    }
}

/// The 1-based lines of `unsafe` functions without a `# Safety` section. Methods that implement a
/// trait are excluded: their contract is that of the trait's method.
fn functions_without_contract(text: &str) -> Vec<usize> {
    let lines: Vec<&str> = text.lines().collect();
    let mut missing = Vec::new();
    // The end line of the trait implementation that contains the line.
    let mut end: Option<String> = None;
    for (i, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let start = code.trim_start();
        if start.starts_with("impl") || start.starts_with("unsafe impl") {
            let header = lines[i..].join(" ");
            let header = header.split('{').next().unwrap_or_default();
            let indent = &code[..code.len() - start.len()];
            end = header.contains(" for ").then(|| format!("{indent}}}"));
        } else if end.as_deref() == Some(line) {
            end = None;
        }
        // `unsafe fn(` is a type
        let unsafe_fn = code.contains("unsafe fn ") || code.contains("unsafe extern");
        if unsafe_fn && end.is_none() {
            let above = lines[..i].iter().rev().map(|line| line.trim_start());
            let mut docs =
                above.take_while(|line| line.starts_with("///") || line.starts_with("#["));
            if !docs.any(|line| line == "/// # Safety") {
                missing.push(i + 1);
            }
        }
    }
    missing
}

#[test]
fn a_missing_contract_is_found() {
    let text = "
        impl Lanes for Avx2 {
            unsafe fn of_a_trait() {}
        }
        /// # Safety
        /// None.
        #[inline(always)]
        unsafe fn with_contract(f: unsafe fn()) {}
        /// No contract.
        pub unsafe fn without() {}
        impl Avx2 {
            unsafe fn without_docs() {}
        }
        trait Lanes {
            unsafe fn without_docs();
        }";
    assert_eq!(functions_without_contract(text), [10, 12, 15]);
}

/// Clippy requires it only for exported items: with `check-private-items` it treats safe functions
/// that enable an instruction set as unsafe ones.
#[test]
fn every_unsafe_function_states_its_contract() {
    for (name, text) in sources() {
        if name == "tests/tests/all/tidy.rs" {
            continue;
        }
        let missing = functions_without_contract(&text);
        assert!(missing.is_empty(), "{name}:{missing:?}: no `# Safety`");
    }
}

/// The files of each crate's `src/`, by that folder.
fn crates(sources: &[(String, String)]) -> BTreeMap<String, Vec<(&str, &str)>> {
    let mut crates: BTreeMap<String, Vec<(&str, &str)>> = BTreeMap::new();
    for (name, text) in sources {
        if let Some((root, file)) = name.split_once("src/") {
            let files = crates.entry(format!("{root}src/")).or_default();
            files.push((file, text));
        }
    }
    assert!(crates.len() >= 8, "the walk lost crates");
    crates
}

/// A type's methods call each other through `self` within its file and its children, and folders import one way.
#[test]
fn types_and_folders_are_parts() {
    let mut wrong = Vec::new();
    for (src, files) in crates(&sources()) {
        let house = House::new(files.into_iter());
        let circles = house.circles().into_iter();
        wrong.extend(circles.map(|(of, files)| {
            format!(
                "{src}: calls of {of} through self go round {}",
                files.join(", ")
            )
        }));
        let folders = house.folder_circles().into_iter();
        wrong
            .extend(folders.map(|folders| {
                format!("{src}: folders import each other: {}", folders.join(", "))
            }));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn imports_have_no_circles() {
    let mut circles = Vec::new();
    for (src, files) in crates(&sources()) {
        let found = Crate::new(files.into_iter()).circles();
        circles.extend(found.iter().map(|c| format!("{src}: {}", c.join(" → "))));
    }
    assert!(
        circles.is_empty(),
        "circles of imports:\n{}",
        circles.join("\n")
    );
}

#[test]
fn nothing_is_left_over() {
    // split so that this file does not match itself
    let leftovers = [
        concat!("dbg", "!("),
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
    ];
    for (name, text) in sources() {
        for (i, line) in text.lines().enumerate() {
            for left in leftovers {
                assert!(!line.contains(left), "{name}:{}: {left}", i + 1);
            }
        }
    }
}
