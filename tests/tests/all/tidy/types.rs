//! Types and folders as units: cycles of calls through `self` between files, and folders of a crate that import each
//! other.

use std::collections::{BTreeMap, BTreeSet};

use super::code::blanked;

/// The methods of a crate's types, and the imports of its folders.
pub struct House {
    /// By type, then by method.
    types: BTreeMap<String, BTreeMap<String, Method>>,
    /// Number of types with a name.
    named: BTreeMap<String, usize>,
    folders: BTreeMap<String, BTreeSet<String>>,
}

struct Method {
    /// The file, or its parent file.
    unit: String,
    body: String,
}

impl House {
    /// From the files below a crate's `src/`, as relative names and texts. Tests are excluded.
    pub fn new<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let files: Vec<(&str, String)> = files
            .filter(|(name, _)| !is_test(name))
            .map(|(name, text)| (name, code(text)))
            .collect();
        let names: BTreeSet<&str> = files.iter().map(|(name, _)| *name).collect();
        let mut house = Self {
            types: BTreeMap::new(),
            named: BTreeMap::new(),
            folders: BTreeMap::new(),
        };
        let parts: BTreeSet<&str> = names.iter().map(|name| folder(name)).collect();
        for (name, text) in &files {
            house.add_methods(&unit(name, &names), text);
            for defined in text.lines().filter_map(defined) {
                *house.named.entry(defined).or_default() += 1;
            }
            let here = folder(name);
            let imported = crate_paths(text).filter(|to| *to != here && parts.contains(to));
            let edges = house.folders.entry(here.to_owned()).or_default();
            edges.extend(imported.map(str::to_owned));
        }
        house
    }

    /// Inherent methods. The code is formatted: implementation blocks close in the first column, methods
    /// begin in the fifth.
    fn add_methods(&mut self, unit: &str, text: &str) {
        let mut of: Option<String> = None;
        let mut name = String::new();
        for line in text.lines() {
            if line.starts_with("impl") {
                of = implemented(line);
                name.clear();
            } else if line.starts_with('}') {
                of = None;
            }
            let Some(of) = &of else { continue };
            if let Some(found) = method(line) {
                name = found;
            }
            if !name.is_empty() {
                let methods = self.types.entry(of.clone()).or_default();
                let method = methods.entry(name.clone()).or_insert_with(|| Method {
                    unit: unit.to_owned(),
                    body: String::new(),
                });
                method.body += line;
                method.body.push('\n');
            }
        }
    }

    /// Whether only one type of the crate has this name; methods of several cannot be
    /// distinguished.
    fn is_unique(&self, name: &str) -> bool {
        self.named.get(name).is_none_or(|&count| count == 1)
    }

    /// Files of one type whose methods call each other through `self` in a cycle: the type and the files.
    pub fn circles(&self) -> Vec<(String, Vec<String>)> {
        let mut found = Vec::new();
        for (of, methods) in self.types.iter().filter(|(of, _)| self.is_unique(of)) {
            let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for method in methods.values() {
                let called = methods
                    .iter()
                    .filter(|(name, other)| other.unit != method.unit && calls(&method.body, name));
                let called = called.map(|(_, other)| other.unit.clone());
                edges.entry(method.unit.clone()).or_default().extend(called);
            }
            found.extend(circles(&edges).into_iter().map(|c| (of.clone(), c)));
        }
        found
    }

    /// Folders that import each other in a cycle; `x.rs` and `x/` are one.
    pub fn folder_circles(&self) -> Vec<Vec<String>> {
        circles(&self.folders)
    }
}

pub fn is_test(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    name.contains("tests/") || file.ends_with("tests.rs") || file == "testing.rs"
}

/// Without comments, literals and the module of tests at the end.
pub fn code(text: &str) -> String {
    let code = blanked(text);
    let end = code.find("#[cfg(test)]\nmod tests {");
    code[..end.unwrap_or(code.len())].to_owned()
}

fn folder(name: &str) -> &str {
    let first = name.split('/').next().unwrap_or(name);
    first.trim_end_matches(".rs")
}

/// The file that a file is a child of, or itself.
fn unit(name: &str, all: &BTreeSet<&str>) -> String {
    let parents = name
        .match_indices('/')
        .map(|(at, _)| format!("{}.rs", &name[..at]));
    let parent = parents.into_iter().find(|parent| all.contains(&**parent));
    parent.unwrap_or_else(|| name.to_owned())
}

/// The first parts of paths that begin at the crate's root.
fn crate_paths(text: &str) -> impl Iterator<Item = &str> {
    text.split("crate::").skip(1).flat_map(|rest| {
        let end = rest.find([';', '}']).unwrap_or(rest.len());
        let names: Vec<&str> = match rest.strip_prefix('{') {
            Some(inner) => inner[..end.saturating_sub(1)].split(',').collect(),
            None => vec![rest],
        };
        names.into_iter().map(|name| {
            let name = name.trim_start();
            let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            &name[..end.unwrap_or(name.len())]
        })
    })
}

/// The type whose inherent methods a block contains; `None` for trait implementations.
fn implemented(line: &str) -> Option<String> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(inner) => &inner[inner.find("> ")? + 1..],
        None => rest,
    };
    if line.contains(" for ") {
        return None;
    }
    let rest = rest.trim_start();
    let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
    Some(rest[..end].to_owned())
}

fn method(line: &str) -> Option<String> {
    let rest = line
        .strip_prefix("    ")
        .filter(|rest| !rest.starts_with(' '))?;
    let (before, after) = rest.split_once("fn ")?;
    let known = |word: &str| {
        word.starts_with("pub") || ["const", "unsafe", "async", "crate)", "super)"].contains(&word)
    };
    if !before
        .split_whitespace()
        .all(|word| known(word) || word.starts_with("in") || word.ends_with(')'))
    {
        return None;
    }
    let end = after.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
    Some(after[..end].to_owned())
}

/// The name of the type that a line defines.
pub fn defined(line: &str) -> Option<String> {
    let words = line
        .split_whitespace()
        .skip_while(|word| word.starts_with("pub"));
    let mut words = words.skip_while(|word| word.ends_with(')'));
    let kind = words.next()?;
    let name = words
        .next()
        .filter(|_| ["struct", "enum", "union", "type"].contains(&kind))?;
    let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    Some(name[..end.unwrap_or(name.len())].to_owned())
}

/// Whether the code calls this method on `self`.
fn calls(body: &str, name: &str) -> bool {
    body.match_indices("self").any(|(at, _)| {
        let rest = body[at + 4..].trim_start();
        let rest = rest.strip_prefix('.').map(str::trim_start);
        let after = rest.and_then(|rest| rest.strip_prefix(name));
        after.is_some_and(|after| after.starts_with('('))
    })
}

/// Nodes with a path back to themselves, in groups that reach each other.
fn circles(edges: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let reached = |from: &String| {
        let mut found = BTreeSet::new();
        let mut next = vec![from];
        while let Some(at) = next.pop() {
            for to in edges.get(at).into_iter().flatten() {
                if found.insert(to.clone()) {
                    next.push(to);
                }
            }
        }
        found
    };
    let all: BTreeMap<&String, BTreeSet<String>> = edges.keys().map(|k| (k, reached(k))).collect();
    let mut groups = BTreeSet::new();
    for (from, to) in &all {
        if to.contains(*from) {
            let group = to
                .iter()
                .filter(|other| all.get(other).is_some_and(|back| back.contains(*from)));
            groups.insert(group.cloned().collect::<Vec<String>>());
        }
    }
    groups.into_iter().collect()
}

#[test]
fn circles_through_self_are_found() {
    let files = [
        (
            "a.rs",
            "mod b;\npub struct A;\nimpl A {\n    pub fn one(&self) {\n        self.two();\n    }\n}\n",
        ),
        (
            "c.rs",
            "impl A {\n    pub(crate) fn two(&self) {\n        self\n            .one();\n    }\n}\nimpl Drop for A {\n    fn drop(&mut self) {}\n}\n",
        ),
        (
            "a/b.rs",
            "impl A {\n    fn three(&self) { self.one(); }\n}\n",
        ),
    ];
    let house = House::new(files.into_iter());
    assert_eq!(
        house.circles(),
        [("A".to_owned(), vec!["a.rs".to_owned(), "c.rs".to_owned()])]
    );
    // Two types of one name cannot be distinguished.
    let other = ("d.rs", "pub(crate) struct A<T> {\n}\n");
    assert!(
        House::new(files.into_iter().chain([other]))
            .circles()
            .is_empty()
    );
    // A child and its parent are one.
    assert!(
        House::new([files[0], files[2]].into_iter())
            .circles()
            .is_empty()
    );
}

#[test]
fn circles_of_folders_are_found() {
    let files = [
        ("a/mod.rs", "use crate::{b::B, c};\n"),
        ("b.rs", "use crate::c::C;\n// crate::a::A\n"),
        ("c/deep.rs", "use crate::a::A;\n"),
        ("c/tests.rs", "use crate::d::D;\n"),
        ("d.rs", "use crate::c::C;\n"),
    ];
    let house = House::new(files.into_iter());
    assert_eq!(house.folder_circles(), [["a", "b", "c"]]);
}
