//! Imports between the files of a crate, and their cycles.

use std::collections::{BTreeMap, BTreeSet};

use super::code::blanked;

/// The files of one library by module path; the root's is empty.
pub struct Crate {
    modules: BTreeMap<Vec<String>, Module>,
}

struct Module {
    file: String,
    code: String,
}

impl Crate {
    /// From the files below the crate's `src/`, as relative names and texts. Modules compiled only
    /// for tests are excluded.
    pub fn new<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let mut modules = BTreeMap::new();
        for (file, text) in files {
            // a program is a separate crate
            if file == "main.rs" {
                continue;
            }
            let path = file.trim_end_matches(".rs").split('/');
            let mut path: Vec<String> = path.map(str::to_owned).collect();
            if matches!(path.last().map(String::as_str), Some("lib" | "mod")) {
                path.pop();
            }
            let module = Module {
                file: file.to_owned(),
                code: without_tests(&blanked(text)),
            };
            modules.insert(path, module);
        }
        let tests: Vec<Vec<String>> = (modules.iter())
            .flat_map(|(path, module)| test_modules(path, &module.code))
            .collect();
        modules.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
        Self { modules }
    }

    /// Files that each import from the next, and the last from the first; empty without a cycle.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let edges: Edges<'_> = (self.modules.keys())
            .map(|path| (&path[..], self.imports(path)))
            .collect();
        let mut search = Search {
            edges: &edges,
            trail: Vec::new(),
            done: BTreeSet::new(),
            circles: Vec::new(),
        };
        edges.keys().for_each(|start| search.from(start));
        let file = |path: &&[String]| self.modules[*path].file.clone();
        let circles = search.circles.iter();
        circles.map(|c| c.iter().map(file).collect()).collect()
    }

    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let part = |name: &str| {
            let below = [module, &[name.to_owned()]].concat();
            self.modules.contains_key(&below)
        };
        absolute(module, path, part)
    }

    /// Modules whose files define what `path` imports.
    fn imports(&self, path: &[String]) -> BTreeSet<&[String]> {
        let mut found = BTreeSet::new();
        for statement in statements(&self.modules[path].code) {
            for item in statement.paths {
                let Some(absolute) = self.absolute(path, &item) else {
                    continue;
                };
                // reexports of a module's own parts are not imports
                if !(statement.public && absolute.starts_with(path)) {
                    found.extend(self.defining(&absolute, 0));
                }
            }
        }
        found.remove(path);
        found
    }

    /// The module whose file defines the item `path`, following reexports.
    fn defining(&self, path: &[String], depth: usize) -> Option<&[String]> {
        let at = (0..=path.len())
            .rev()
            .find(|&n| self.modules.contains_key(&path[..n]))?;
        let (module, _) = self.modules.get_key_value(&path[..at])?;
        let Some(name) = path.get(at) else {
            return Some(module);
        };
        // bounded, as two modules may reexport each other's names
        if depth < 8 && !defines(&self.modules[module].code, name) {
            for item in exports(&self.modules[module].code) {
                let Some(mut target) = self.absolute(module, &item) else {
                    continue;
                };
                let any = target.last().is_some_and(|last| last == "*");
                if any {
                    target.pop();
                    target.push(name.clone());
                }
                if target.last() == Some(name) && target[..] != path[..=at] {
                    let found = self.defining(&target, depth + 1);
                    if let Some(found) =
                        found.filter(|&found| !any || defines(&self.modules[found].code, name))
                    {
                        return Some(found);
                    }
                }
            }
        }
        Some(module)
    }
}

/// Modules that each module imports from.
type Edges<'a> = BTreeMap<&'a [String], BTreeSet<&'a [String]>>;

/// Depth-first search, which finds at least one cycle if there are any.
struct Search<'a, 'e> {
    edges: &'e Edges<'a>,
    /// The path from the start of the search.
    trail: Vec<&'a [String]>,
    done: BTreeSet<&'a [String]>,
    circles: Vec<Vec<&'a [String]>>,
}

impl<'a> Search<'a, '_> {
    fn from(&mut self, at: &'a [String]) {
        if let Some(start) = self.trail.iter().position(|&seen| seen == at) {
            return self.circles.push(self.trail[start..].to_vec());
        }
        if !self.done.insert(at) {
            return;
        }
        self.trail.push(at);
        let edges = self.edges;
        edges[at].iter().for_each(|next| self.from(next));
        self.trail.pop();
    }
}

/// The code without the contents of `#[cfg(test)] mod … { … }`.
fn without_tests(code: &str) -> String {
    let mut out = String::new();
    let mut rest = code;
    while let Some(at) = rest.find("#[cfg(test)]") {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let end = match after.find(['{', ';']) {
            Some(open) if after.as_bytes()[open] == b'{' && after[..open].contains("mod ") => {
                block_end(after, open)
            }
            _ => "#[cfg(test)]".len(),
        };
        // test-only modules are needed later
        if end == "#[cfg(test)]".len() {
            out.push_str("#[cfg(test)]");
        }
        rest = &after[end..];
    }
    out + rest
}

fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (i, c) in code[open..].bytes().enumerate() {
        match c {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return open + i + 1;
        }
    }
    code.len()
}

/// Paths of the modules in files declared by `#[cfg(test)] mod name;`.
fn test_modules(path: &[String], code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for part in code.split("#[cfg(test)]").skip(1) {
        let words = part.split(';').next().unwrap_or_default();
        let mut words = words.split_whitespace().skip_while(|w| *w != "mod");
        if let (Some(_), Some(name), None) = (words.next(), words.next(), words.next()) {
            found.push([path, &[name.to_owned()]].concat());
        }
    }
    found
}

/// Every path that the code reexports.
fn exports(code: &str) -> Vec<Vec<String>> {
    let public = statements(code).filter(|s| s.public);
    public.flat_map(|s| s.paths).collect()
}

/// One `use`.
struct Statement {
    public: bool,
    paths: Vec<Vec<String>>,
}

fn statements(code: &str) -> impl Iterator<Item = Statement> + '_ {
    code.split([';', '}', '{'].as_slice())
        .scan(0, move |at, part| {
            let from = *at;
            *at += part.len() + 1;
            Some((from, part))
        })
        .filter_map(move |(from, part)| {
            // code after an attribute counts as well
            let start = part.rfind("use ").filter(|&i| {
                let before = part[..i].trim_end();
                before.is_empty() || before.ends_with(['b', ')', ']'])
            })?;
            let end = code[from + start..].find(';')? + from + start;
            let tree = &code[from + start + 4..end];
            let before = part[..start].trim_end();
            Some(Statement {
                public: before.ends_with("pub") || before.ends_with(')'),
                paths: expand(tree),
            })
        })
}

/// `a::{b, c::d}` as `a::b` and `a::c::d`; `x as y` counts as `x`.
fn expand(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        let mut path: Vec<String> = path.split("::").map(|p| p.trim().to_owned()).collect();
        if path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        return vec![path];
    };
    let stem = tree[..open].trim_end().trim_end_matches("::");
    let stem: Vec<String> = match stem {
        "" => Vec::new(),
        stem => stem.split("::").map(|p| p.trim().to_owned()).collect(),
    };
    let inner = tree[open + 1..].trim_end().trim_end_matches('}');
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in inner.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("there is a first part").push(c);
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts
        .flat_map(|part| {
            // an inner group lost its last brace with the outer one if both ended together
            let missing = part.matches('{').count()
                - part.matches('}').count().min(part.matches('{').count());
            expand(&(part.clone() + &"}".repeat(missing)))
        })
        .map(|path| [&stem[..], &path].concat())
        .collect()
}

/// A path from the crate's root; `None` if it refers to another crate. `parts` tells names of
/// modules below `module`.
fn absolute(
    module: &[String],
    path: &[String],
    parts: impl Fn(&str) -> bool,
) -> Option<Vec<String>> {
    let mut base = match path.first()?.as_str() {
        "crate" => Vec::new(),
        "self" => module.to_vec(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        first if parts(first) => [module, &path[..1]].concat(),
        _ => return None,
    };
    for part in &path[1..] {
        match part.as_str() {
            "super" => _ = base.pop(),
            _ => base.push(part.clone()),
        }
    }
    Some(base)
}

/// Whether the code defines an item of this name.
fn defines(code: &str, name: &str) -> bool {
    let kinds = [
        "fn",
        "struct",
        "enum",
        "trait",
        "type",
        "const",
        "static",
        "union",
        "macro_rules!",
        "mod",
    ];
    kinds.iter().any(|kind| {
        let head = format!("{kind} {name}");
        code.match_indices(&head).any(|(at, _)| {
            let after = code[at + head.len()..].chars().next();
            !after.is_some_and(|c| c.is_alphanumeric() || c == '_')
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        Crate::new(files.iter().copied()).circles()
    }

    #[test]
    fn a_circle_of_two_is_found() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B; pub struct A;"),
            ("b.rs", "use super::a::A; pub struct B;"),
        ];
        assert_eq!(circles(&files), [["a.rs", "b.rs"]]);
        assert!(circles(&files[..2]).is_empty());
    }

    #[test]
    fn a_circle_through_what_is_exported_again_is_found() {
        let files = [
            (
                "lib.rs",
                "mod a; mod deep; pub use deep::*; pub use self::a::A;",
            ),
            (
                "a.rs",
                "use crate::{\n    deep::{mid::{Mid as M, Other}, self},\n};\npub struct A;",
            ),
            (
                "deep/mod.rs",
                "pub mod mid; mod low; pub(crate) use self::low::Low;",
            ),
            (
                "deep/mid.rs",
                "#[cfg(unix)]\nuse super::Low; pub struct Mid; pub struct Other;",
            ),
            ("deep/low.rs", "use crate::A; pub struct Low;"),
        ];
        assert_eq!(circles(&files), [["a.rs", "deep/mid.rs", "deep/low.rs"]]);
    }

    #[test]
    fn a_module_and_its_part_may_not_import_from_each_other() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod part; use part::P; pub struct A;"),
            ("a/part.rs", "use super::A; pub struct P;"),
        ];
        assert_eq!(circles(&files), [["a.rs", "a/part.rs"]]);
    }

    #[test]
    fn tests_comments_and_other_crates_are_no_imports() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            (
                "a.rs",
                "use crate::b::B; pub struct A; #[cfg(test)] mod tests;",
            ),
            ("a/tests.rs", "use crate::b::B; use super::*;"),
            (
                "b.rs",
                "// use crate::a::A;\nuse other::a::A;\n#[cfg(test)]\nmod tests { use crate::a::A; }",
            ),
        ];
        assert!(circles(&files).is_empty());
    }
}
