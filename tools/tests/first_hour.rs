//! The first hour of a newcomer who has a fresh clone, the README and nothing else: every command
//! line of the README as it stands, in order, in an empty folder; then what they should see.
//!
//! Blocks marked `sh` hold nothing else. Blocks marked `bash` are for a phone and the desktop
//! beside it: only what they do with the program can be tried here.

mod common;

use std::path::Path;

use serde_json::Value;

/// A command line of the README, and what it printed.
struct Done {
    line: String,
    words: Vec<String>,
    json: Option<Value>,
}

impl Done {
    /// What follows `option`.
    fn option(&self, option: &str) -> Option<&str> {
        let at = self.words.iter().position(|w| w == option)?;
        Some(self.words.get(at + 1)?)
    }
}

/// Runs every command line in `dir`.
fn walk(readme: &str, dir: &Path) -> Vec<Done> {
    let mut all = Vec::new();
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
            let (rest, file) = match rest.split_once(" > ") {
                Some((rest, file)) => (rest, Some(file)),
                None => (rest, None),
            };
            let words = common::words(rest);
            let mut command = common::emberflow();
            command.args(&words).current_dir(dir);
            let output = common::succeed(command.env("XDG_CACHE_HOME", dir));
            assert!(!output.stdout.is_empty(), "{line} printed nothing");
            if let Some(file) = file {
                std::fs::write(dir.join(file), &output.stdout).unwrap();
            }
            let json = words.iter().any(|w| w == "--json");
            all.push(Done {
                line: line.to_owned(),
                json: json.then(|| serde_json::from_slice(&output.stdout).expect(line)),
                words,
            });
        }
    }
    all
}

#[test]
fn the_readme_works_and_shows_what_it_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("models"), dir.path().join("models")).unwrap();
    let all = walk(&readme, dir.path());

    // the whole way is there
    for step in [
        "run -p",
        "export -o demo-hf",
        "pack demo-hf",
        "export -o demo.gguf",
        "pack demo.gguf",
        "verify ",
        "profile ",
        "train-predictor ",
        "plan --memory",
        "perplexity ",
        "trace simulate ",
        "bench io ",
        "doctor",
    ] {
        let step = format!("emberflow {step}");
        assert!(
            all.iter().any(|d| d.line.contains(&step)),
            "the README lost {step:?}"
        );
    }

    the_checkout_stays_clean(root, dir.path());
    pictures_are_well_formed(&all, dir.path());
    memory_changes_speed_and_no_text(&all);
}

/// Whatever the commands leave in the checkout, git ignores.
fn the_checkout_stays_clean(root: &Path, dir: &Path) {
    let rules = std::fs::read_to_string(root.join(".gitignore")).unwrap();
    let ignores = |rule: &str, name: &str| {
        let rule = rule.trim_start_matches('/').trim_end_matches('/');
        match rule.strip_prefix('*') {
            Some(end) => name.ends_with(end),
            None => name == rule,
        }
    };
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // the link to the models, and the caches of this test
        if ["models", "emberflow"].contains(&&*name) {
            continue;
        }
        assert!(
            rules.lines().any(|rule| ignores(rule, &name)),
            "the README's commands leave {name}, which git does not ignore"
        );
        seen += 1;
    }
    assert!(seen >= 10, "the README's commands leave {seen} files");
}

/// Every picture that a command was asked for is there and is an SVG with something in it.
fn pictures_are_well_formed(all: &[Done], dir: &Path) {
    let mut seen = 0;
    for done in all {
        if let Some(file) = done.option("--svg") {
            let text = std::fs::read_to_string(dir.join(file)).expect(&done.line);
            let svg = roxmltree::Document::parse(&text).expect(&done.line);
            assert_eq!(svg.root_element().tag_name().name(), "svg", "{file}");
            let shapes = ["path", "polyline", "rect", "line", "circle"];
            let drawn = svg
                .descendants()
                .filter(|n| shapes.contains(&n.tag_name().name()));
            assert!(drawn.count() > 5, "{file} is nearly empty");
            seen += 1;
        }
        if let Some(file) = done.option("--trace") {
            let text = std::fs::read(dir.join(file)).expect(&done.line);
            serde_json::from_slice::<Value>(&text).expect(file);
        }
    }
    assert!(seen >= 2, "the README draws {seen} pictures");
}

/// The same text under 25 %, 50 % and all of the FFN in memory: less memory, more bytes read, the same
/// logits, never more memory than the budget.
fn memory_changes_speed_and_no_text(all: &[Done]) {
    let share = |d: &Done| d.option("--ffn-resident")?.parse::<f64>().ok();
    let mut runs: Vec<(f64, &Value)> = all
        .iter()
        .filter(|d| d.words[0] == "run")
        .filter_map(|d| Some((share(d)?, d.json.as_ref()?)))
        .collect();
    runs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let shares: Vec<f64> = runs.iter().map(|r| r.0).collect();
    assert_eq!(shares, [0.25, 0.5, 1.0]);
    let number = |run: &Value, key: &str| run.pointer(key).and_then(Value::as_f64).expect(key);
    for (share, run) in &runs {
        let [peak, budget] =
            ["/memory/peak_rss_bytes", "/memory/budget_bytes"].map(|k| number(run, k));
        assert!(peak <= budget, "{share}: {peak} of {budget}");
        assert!(number(run, "/decode_tokens_per_s") > 0.0);
        println!(
            "{share}: {:.1} tok/s, {} bytes read, peak {peak} of {budget}",
            number(run, "/decode_tokens_per_s"),
            number(run, "/io/bytes_read"),
        );
    }
    for pair in runs.windows(2) {
        let [(less, a), (more, b)] = pair else {
            continue;
        };
        for key in ["logits_hash", "text"] {
            assert_eq!(a[key], b[key], "{key} under {less} and {more}");
        }
        for (key, falls) in [("/io/bytes_read", true), ("/memory/budget_bytes", false)] {
            let (a, b) = (number(a, key), number(b, key));
            assert!(
                if falls { a > b } else { a < b },
                "{key}: {a} under {less}, {b} under {more}"
            );
        }
    }
    let last = runs.last().map(|r| number(r.1, "/io/reads"));
    assert_eq!(last, Some(0.0), "reads with everything in memory");
}
