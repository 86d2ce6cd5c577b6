//! The pages with measured numbers equal the script's output for the CSV files.

use std::path::{Path, PathBuf};

use emberflow_benches::report::{FILES, Report, folder_of};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

const AGAIN: &str = "run: cargo run --release -p emberflow-benches --example report";

/// So no number of these pages is typed by hand, and README and benches/README.md have the same
/// ones.
#[test]
fn the_pages_are_what_the_script_makes() {
    let page = read("benches/README.md");
    let folder = folder_of(&page).expect("the page names its folder");
    let report = Report::make(&root(), &folder).unwrap();
    assert!(report.page == page, "benches/README.md is stale; {AGAIN}");
    let readme = read("README.md");
    assert!(
        report.in_readme(&readme).unwrap() == readme,
        "README.md is stale; {AGAIN}"
    );
    let (path, svg) = report.picture.expect("there is a sweep");
    assert!(read(&path) == svg, "{} is stale; {AGAIN}", path.display());
}

/// Every machine's files give a page, even if some are missing.
#[test]
fn every_folder_makes_a_page() {
    let mut folders = 0;
    for entry in std::fs::read_dir(root().join("benches/results")).unwrap() {
        let folder = Path::new("benches/results").join(entry.unwrap().file_name());
        let report = Report::make(&root(), &folder).unwrap();
        assert!(!report.page.contains("\n@") && !report.page.contains("NaN"));
        folders += 1;
    }
    assert!(folders >= 2);
}

/// A machine with only some measurements, some of another commit.
#[test]
fn what_is_not_there_is_left_out_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let template = dir.path().join("benches");
    std::fs::create_dir_all(&template).unwrap();
    std::fs::copy(root().join("benches/report.md"), template.join("report.md")).unwrap();
    let folder = Path::new("benches/results/here");
    let results = dir.path().join(folder);
    std::fs::create_dir_all(&results).unwrap();
    let write = |name: &str, text: &str| std::fs::write(results.join(name), text).unwrap();
    write(
        "machine.csv",
        "what,value\ncores,2\nprocessor,a processor\n",
    );
    write(
        "measured.csv",
        "file,commit,date,rounds\noffload-50.csv,new,2026-01-02,5\nlatency.csv,old,2026-01-01,1\n",
    );
    write(
        "offload-50.csv",
        "share,name,median,low,high\n0.5,emberflow full,8.0,7.0,9.0\n0.5,llama.cpp default,0,0,0\n\
         0.5,\"llama.cpp mmap, read-ahead 8192 KiB\",0.4,0.3,0.5\n",
    );
    write("latency.csv", "mean_ms\n1\n");
    let report = Report::make(dir.path(), folder).unwrap();
    assert!(report.page.contains("commit `new`"), "{}", report.page);
    assert!(report.page.contains("**20.0 times**"), "{}", report.page);
    assert!(report.page.contains(
        "Left out: `latency.csv` is of another commit (old); `benches/reproduce.sh DIR runs`"
    ));
    assert!(report.page.contains("benches/reproduce.sh DIR device"));
    assert!(report.picture.is_none());
    assert!(report.summary.contains("**8.00 tokens/s**"));
}

/// Each file of a page is written by the part of benches/reproduce.sh that the page names.
#[test]
fn every_file_can_be_measured_again() {
    let script = read("benches/reproduce.sh");
    for (file, part) in FILES {
        let body = script.split(&format!("\n{part}() {{\n")).nth(1);
        let body = body.and_then(|rest| rest.split("\n}\n").next());
        let body = body.unwrap_or_else(|| panic!("reproduce.sh has no part {part}"));
        assert!(
            body.contains(&format!("measure {file} ")),
            "{part} of reproduce.sh does not measure {file}"
        );
    }
}
