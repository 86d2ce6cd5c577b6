//! Chat templates of public models: what a template writes for a call, a model says, and the server reads it back.
//!
//! The templates are not in this repository. `.ci/templates` fetches them and sets `EMBERFLOW_CALL_TEMPLATES` to
//! their folders, separated by `:`; without it the test says SKIPPED.

mod cases;
mod cut;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use emberflow::serve::spoken::{Listener, Spoken};
use serde_json::Value;

use cases::{Case, Written, cases, plain, tools};
use cut::Author;

/// Lengths of the pieces in which a text comes. The last one is the whole text.
const LENGTHS: [usize; 7] = [1, 2, 3, 5, 8, 13, usize::MAX];

/// The fetched templates, those that write calls, and the cases that come back.
const ALL: [usize; 3] = [74, 70, 966];

/// Cases that do not come back, and why: template, case (empty: all), reason.
const KNOWN: [(&str, &str, &str); 7] = [
    (
        "LFM2.5-8B-A1B",
        "quotes",
        "the template does not escape what it puts in quotes",
    ),
    (
        "NVIDIA-Nemotron-Nano-v2",
        "content",
        "the template ends the message after the content and begins another one",
    ),
    (
        "fireworks-ai-llama-3-firefunction-v2",
        "",
        "the template wants a variable with the functions as text",
    ),
    ("Kimi-K3", "", FOREIGN),
    ("MiniMax-M3", "", FOREIGN),
    ("muse-glimmer", "", FOREIGN),
    ("meetkai-functionary-medium-v3.2", "", FOREIGN),
];
const FOREIGN: &str = "a format of one family, which does not run here";

/// How a template fared.
#[derive(Debug, Default)]
struct Outcome {
    passed: usize,
    /// Cases that the template cannot write.
    unwritten: Vec<&'static str>,
    /// Failed cases, and what happened.
    failed: Vec<(&'static str, String)>,
}

/// All templates.
#[derive(Debug, Default)]
struct Report {
    table: String,
    details: String,
    /// Failed cases that are not known.
    wrong: Vec<String>,
    writers: usize,
    passed: usize,
}

#[test]
fn calls_that_templates_write_come_back() {
    let Some(folders) = std::env::var_os("EMBERFLOW_CALL_TEMPLATES") else {
        println!(
            "SKIPPED: EMBERFLOW_CALL_TEMPLATES does not name folders of chat templates (see .ci/templates)"
        );
        return;
    };
    let mut report = Report::default();
    let paths = templates_of(&folders);
    for path in &paths {
        let name = path.file_stem().unwrap().to_str().unwrap();
        report.add(name, &std::fs::read_to_string(path).unwrap());
    }
    let Report {
        table,
        details,
        wrong,
        writers,
        passed,
    } = report;
    println!("{details}{table}");
    println!(
        "{} templates, {writers} write calls, {passed} cases came back",
        paths.len()
    );
    for (template, case, why) in KNOWN {
        println!("not expected: {template} {case}: {why}");
    }
    // All templates that `.ci/templates` fetches, or those of one package.
    let least = if paths.len() < ALL[0] {
        [1, 1]
    } else {
        [ALL[1], ALL[2]]
    };
    assert!(
        writers >= least[0] && passed >= least[1],
        "expected {ALL:?}"
    );
    assert!(wrong.is_empty(), "do not come back: {}", wrong.join(", "));
}

impl Report {
    fn add(&mut self, name: &str, source: &str) {
        let author = Author::new(name, source);
        let Some(begin) = author.writes_calls() else {
            let _ = writeln!(self.table, "{name:48} writes no call");
            return;
        };
        self.writers += 1;
        let mut outcome = Outcome::default();
        for case in cases(&begin.behind_value) {
            outcome.add(&author, &case);
        }
        self.passed += outcome.passed;
        let failed: Vec<&str> = outcome.failed.iter().map(|(case, _)| *case).collect();
        let list = |word: &str, cases: &[&str]| match cases {
            [] => String::new(),
            cases => format!(", {word}: {}", cases.join(", ")),
        };
        let _ = writeln!(
            self.table,
            "{name:48} {:34} {}/{}{}{}",
            begin.frame(),
            outcome.passed,
            outcome.passed + failed.len(),
            list("FAILED", &failed),
            list("not written", &outcome.unwritten),
        );
        for (case, what) in &outcome.failed {
            let _ = writeln!(self.details, "{name}, {case}: {what}\n");
        }
        let covers = |known: &(&str, &str, &str), case: &str| {
            known.0 == name && (known.1.is_empty() || known.1 == case)
        };
        let known = |case: &str| KNOWN.iter().any(|known| covers(known, case));
        let unknown = failed.iter().filter(|case| !known(case));
        let unknown = unknown.map(|case| format!("{name}: {case}"));
        self.wrong.extend(unknown);
        for known in KNOWN.iter().filter(|known| known.0 == name) {
            let holds = failed.iter().any(|case| covers(known, case));
            assert!(
                holds,
                "{name} {}: comes back; remove it from the list",
                known.1
            );
        }
    }
}

/// The templates in these folders, by name.
fn templates_of(folders: &std::ffi::OsStr) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for folder in std::env::split_paths(folders) {
        let entries = std::fs::read_dir(&folder);
        let entries = entries.unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let files = entries.map(|entry| entry.unwrap().path());
        all.extend(files.filter(|path| path.extension() == Some("jinja".as_ref())));
    }
    all.sort_by(|a: &PathBuf, b: &PathBuf| Path::file_name(a).cmp(&Path::file_name(b)));
    all
}

impl Outcome {
    fn add(&mut self, author: &Author, case: &Case) {
        let written = match author.write(case) {
            Ok(written) => written,
            Err(why) if case.name == plain().name => {
                self.failed
                    .push((case.name, format!("not rendered: {why}")));
                return;
            }
            Err(_) => {
                self.unwritten.push(case.name);
                return;
            }
        };
        match read_back(author, case, &written) {
            Ok(()) => self.passed += 1,
            Err(why) => self.failed.push((case.name, why)),
        }
    }
}

/// Reads the text in pieces of every length and compares the parts with what was put in.
fn read_back(author: &Author, case: &Case, written: &Written) -> Result<(), String> {
    let tools = tools();
    let (signs, ends) = (written.signs(), author.ends());
    let listener = Listener {
        template: &author.template,
        specials: &signs,
        ends: &ends,
        tools: &tools,
        prompt: &written.prompt,
    };
    for length in LENGTHS {
        let spoken = listener.read(&written.text, length)?;
        let same = same(case, written, &spoken);
        same.map_err(|why| {
            let pieces = match length {
                usize::MAX => "whole".to_owned(),
                length => format!("in pieces of {length}"),
            };
            let tail: String = written.prompt.chars().rev().take(40).collect();
            let tail: String = tail.chars().rev().collect();
            format!(
                "{why}, {pieces}\n  prompt …{tail:?}\n  text   {:?}\n  read   {spoken:?}",
                written.text
            )
        })?;
    }
    Ok(())
}

/// Whether the parts are what was put in.
fn same(case: &Case, written: &Written, spoken: &Spoken) -> Result<(), String> {
    let names: Vec<&str> = spoken.calls.iter().map(|call| &*call.name).collect();
    let wanted: Vec<&str> = case.calls.iter().map(|(name, _)| *name).collect();
    if names != wanted {
        return Err(format!("calls of {names:?} instead of {wanted:?}"));
    }
    for (call, (_, arguments)) in spoken.calls.iter().zip(&case.calls) {
        let read: Result<Value, _> = serde_json::from_str(&call.arguments);
        match read {
            Ok(read) if read == *arguments => {}
            Ok(read) => return Err(format!("arguments {read} instead of {arguments}")),
            Err(e) => return Err(format!("arguments are no JSON ({e}): {}", call.arguments)),
        }
    }
    let [thoughts, text] = [&spoken.thoughts, &spoken.text].map(|text| text.trim());
    // Some templates write the content before a call as thoughts.
    let (said, thought) = (written.content(case), &*written.thoughts);
    let plan = format!("{thought}{said}");
    if (text, thoughts) == (said, thought) || (text, thoughts) == ("", &*plan) {
        return Ok(());
    }
    Err(format!(
        "text {text:?}, thoughts {thoughts:?} instead of {said:?}, {thought:?}"
    ))
}
