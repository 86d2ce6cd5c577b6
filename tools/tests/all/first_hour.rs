//! Runs every command line of the README and its further pages in a fresh clone, page after page, in
//! an empty folder; then checks the results.
//!
//! Blocks marked `sh` contain only such commands. Blocks marked `bash` are for a phone and its
//! desktop: only their `emberflow` commands can be tested here.

use crate::common;
use crate::common::hub::bundled_hub;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// In reading order.
const PAGES: [&str; 9] = [
    "README.md",
    "docs/running.md",
    "docs/devices.md",
    "docs/models.md",
    "docs/serve.md",
    "docs/policies.md",
    "docs/shell.md",
    "docs/library.md",
    "docs/phone.md",
];

/// A command line of a page, and its output.
struct Done {
    line: String,
    words: Vec<String>,
    json: Option<Value>,
}

impl Done {
    /// The value after `option`.
    fn option(&self, option: &str) -> Option<&str> {
        let at = self.words.iter().position(|w| w == option)?;
        Some(self.words.get(at + 1)?)
    }
}

/// Runs one command line in `dir`: by itself, or by a shell where it has a pipe.
fn call(line: &str, dir: &Path) -> Output {
    let rest = line.strip_prefix("emberflow ");
    let mut command = match rest.filter(|_| !line.contains('|')) {
        Some(rest) => {
            let rest = rest.split(" > ").next().unwrap_or(rest);
            let mut command = common::emberflow();
            command.args(common::words(rest));
            command
        }
        None => {
            let program = Path::new(env!("CARGO_BIN_EXE_emberflow"));
            let folders = [program.parent().unwrap().display().to_string()];
            let path = folders.into_iter().chain(std::env::var("PATH"));
            let mut command = Command::new("sh");
            command.args(["-c", line]).stdin(Stdio::null());
            command.env("PATH", path.collect::<Vec<_>>().join(":"));
            command.env("POCL_CACHE_DIR", common::kernels::compiled_kernels());
            command
        }
    };
    command.current_dir(dir).env("XDG_CACHE_HOME", dir);
    // Names of models are those of a hub that has the bundled one under each.
    static MODELS: OnceLock<TempDir> = OnceLock::new();
    let models = MODELS.get_or_init(|| tempfile::tempdir().unwrap());
    command
        .env("HF_ENDPOINT", &bundled_hub().address)
        .env("EMBERFLOW_MODELS", models.path());
    command.output().unwrap()
}

/// A command that runs during the rest of its page.
struct Server(Child);

impl Server {
    /// Starts it and waits for its first line.
    fn start(line: &str, dir: &Path) -> Self {
        let words = common::words(line.strip_prefix("emberflow ").unwrap());
        let mut command = common::emberflow();
        let mut child = (command.args(words).current_dir(dir))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut first).unwrap();
        assert!(first.starts_with("http://"), "{line}: {first}");
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a line of curl, if curl is installed.
fn ask(line: &str, dir: &Path) {
    let mut command = Command::new("sh");
    let output = command
        .args(["-c", line])
        .current_dir(dir)
        .output()
        .unwrap();
    if output.status.code() == Some(127) {
        eprintln!("SKIPPED: no curl: {line}");
        return;
    }
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{line}: {text}");
    assert!(
        !text.is_empty() && !text.contains("\"error\":{"),
        "{line}: {text}"
    );
}

/// Runs every command line of a page in `dir`.
fn walk(page: &str, text: &str, dir: &Path) -> Vec<Done> {
    let mut all = Vec::new();
    let mut server = None;
    for block in text.split("```").skip(1).step_by(2) {
        let (language, block) = block.split_once('\n').unwrap();
        // models from elsewhere are fetched and tested by .ci/real
        if !["sh", "bash"].contains(&language) || block.starts_with("pip ") {
            continue;
        }
        for line in block.lines() {
            let line = match language {
                "bash" => line.strip_prefix("./").unwrap_or(line),
                _ => line,
            };
            if let Some(line) = line.strip_suffix(" &") {
                server = Some(Server::start(line, dir));
                continue;
            }
            if line.starts_with("curl ") {
                assert!(server.is_some(), "{page}: {line}: nothing to ask");
                ask(line, dir);
                continue;
            }
            let piped = language == "sh" && line.contains("| emberflow ");
            if !line.starts_with("emberflow ") && !piped {
                assert!(
                    language == "bash" || line.starts_with("cargo "),
                    "{page}: neither cargo nor emberflow: {line}"
                );
                continue;
            }
            if line.contains("npu:") && !crate::npu::has_onnxruntime() {
                eprintln!("SKIPPED: no ONNX Runtime: {line}");
                continue;
            }
            // It asks a person; `.ci/real` has a chat with the README's model.
            if language == "bash" && line.ends_with(" --chat") {
                continue;
            }
            let output = call(line, dir);
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{page}: {line}: {message}");
            assert!(!output.stdout.is_empty(), "{page}: {line} printed nothing");
            if let Some((_, file)) = line.split_once(" > ") {
                std::fs::write(dir.join(file), &output.stdout).unwrap();
            }
            let words = common::words(line.strip_prefix("emberflow ").unwrap_or(line));
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
#[ignore = "long: `.ci/run long` runs it"]
fn the_pages_work_and_show_what_they_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("models"), dir.path().join("models")).unwrap();
    let all: Vec<Done> = (PAGES.iter())
        .flat_map(|page| {
            let text = std::fs::read_to_string(root.join(page)).unwrap();
            walk(page, &text, dir.path())
        })
        .collect();
    for entry in std::fs::read_dir(root.join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let page = format!("docs/{name}");
        assert!(
            !name.ends_with(".md") || PAGES.contains(&&*page),
            "nobody tries the commands of {page}"
        );
    }

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
        "prune-outliers ",
        "plan --memory",
        "perplexity ",
        "bench io ",
        "doctor",
        "completions ",
        "man ",
    ] {
        let step = format!("emberflow {step}");
        assert!(
            all.iter().any(|d| d.line.contains(&step)),
            "the pages lost {step:?}"
        );
    }

    the_checkout_stays_clean(root, dir.path());
    pictures_are_well_formed(&all, dir.path());
    memory_changes_speed_and_no_text(&all);
}

/// git ignores everything that the commands leave in the checkout.
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
        // the link to the models, and the caches of this program, OpenCL and ONNX Runtime
        if ["models", "emberflow", "pocl", "Microsoft"].contains(&&*name) {
            continue;
        }
        assert!(
            rules.lines().any(|rule| ignores(rule, &name)),
            "the pages' commands leave {name}, which git does not ignore"
        );
        seen += 1;
    }
    assert!(seen >= 10, "the pages' commands leave {seen} files");
}

/// Every requested picture exists and is a nonempty SVG.
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
    }
    assert!(seen >= 2, "the pages draw {seen} pictures");
}

/// The same text with 25 %, 50 % and all of the FFN in memory: less memory, more bytes read, the same
/// logits, never more memory than the budget.
fn memory_changes_speed_and_no_text(all: &[Done]) {
    let share = |d: &Done| d.option("--ffn-resident")?.parse::<f64>().ok();
    let mut runs: Vec<(f64, &Value)> = all
        .iter()
        .filter(|d| d.words[0] == "run" && d.option("--policy").is_none())
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
