//! The results of one machine: a folder of CSV files, and what is known of how they were made.
//!
//! `machine.csv` says what the machine is, `measured.csv` names for each file the commit of the
//! program, the date and the rounds. `benches/reproduce.sh` writes both. A page is made of files of one
//! commit: that of the comparison with llama.cpp at half of the FFN, where it is there, else that of
//! most files.

use std::path::{Path, PathBuf};

use super::csv::Csv;

/// The file that says which commit a page is about.
const HEADLINE: &str = "offload-50.csv";

/// The files that a page is made of, and the parts of `benches/reproduce.sh` that make them.
pub const FILES: [(&str, &str); 27] = [
    ("kernels.csv", "device"),
    ("cache.csv", "device"),
    ("predictor.csv", "device"),
    ("fio.csv", "device"),
    ("in-memory-llama-1b.csv", "memory"),
    ("in-memory-bamboo-7b.csv", "memory"),
    ("decode-dense.csv", "memory"),
    ("decode-exact.csv", "memory"),
    ("decode-oracle.csv", "memory"),
    ("decode-predicted.csv", "memory"),
    ("decode-predicted-50.csv", "memory"),
    ("decode-contexts-exact.csv", "memory"),
    ("decode-contexts-dense.csv", "memory"),
    ("offload-50.csv", "disk"),
    ("offload-25.csv", "disk"),
    ("offload-75.csv", "disk"),
    ("offload-100.csv", "disk"),
    ("sweep.csv", "runs"),
    ("sweep-policies.csv", "runs"),
    ("latency.csv", "runs"),
    ("prefill.csv", "runs"),
    ("batch.csv", "runs"),
    ("ladder.csv", "runs"),
    ("table-6-relu.csv", "runs"),
    ("table-6-silu.csv", "runs"),
    ("latency-steady.csv", "steady"),
    ("plan.csv", "plan"),
];

fn part_of(file: &str) -> &'static str {
    let known = FILES.iter().find(|known| known.0 == file);
    known.map_or("all", |known| known.1)
}

/// A folder below `benches/results/`.
pub struct Results {
    dir: PathBuf,
    machine: Csv,
    measured: Csv,
    commit: String,
}

impl Results {
    /// Opens a folder.
    ///
    /// # Errors
    /// No folder of results.
    pub fn open(dir: &Path) -> Result<Self, String> {
        let need = |name: &str| {
            let path = dir.join(name);
            Csv::read(&path).ok_or_else(|| format!("{} cannot be read", path.display()))
        };
        let (machine, measured) = (need("machine.csv")?, need("measured.csv")?);
        let commit = commit_of(&measured).ok_or("measured.csv names no file")?;
        Ok(Self {
            dir: dir.to_path_buf(),
            machine,
            measured,
            commit,
        })
    }

    /// The folder's name, which is the machine's.
    pub fn name(&self) -> String {
        let name = self.dir.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// The commit of the program that everything here was measured with.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// What `machine.csv` says of something.
    pub fn fact(&self, what: &str) -> String {
        let row = self.machine.find(&[("what", what)]);
        row.map_or("?", |row| row.text("value")).to_owned()
    }

    /// First and last day of the measurements of the page's commit.
    pub fn days(&self) -> String {
        let all = self.measured.rows();
        let mut days: Vec<&str> = all
            .filter(|row| row.text("commit") == self.commit)
            .map(|row| row.text("date"))
            .collect();
        days.sort_unstable();
        match (days.first(), days.last()) {
            (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
            (Some(day), _) => (*day).to_owned(),
            _ => "?".to_owned(),
        }
    }

    /// A file of the page's commit.
    pub fn csv(&self, file: &str) -> Option<Csv> {
        let row = self.measured.find(&[("file", file)])?;
        let ours = row.text("commit") == self.commit;
        ours.then(|| Csv::read(&self.dir.join(file))).flatten()
    }

    /// How often each point of a file was measured.
    pub fn rounds(&self, file: &str) -> String {
        let row = self.measured.find(&[("file", file)]);
        let rounds = row.map_or("?", |row| row.text("rounds"));
        match rounds {
            "1" => "one run each".to_owned(),
            rounds => format!("medians and ranges of {rounds} rounds in turns"),
        }
    }

    /// In place of a table whose file is not there.
    pub fn left_out(&self, file: &str) -> String {
        let part = part_of(file);
        let how = format!("`benches/reproduce.sh DIR {part}`");
        match self.measured.find(&[("file", file)]) {
            Some(row) => format!(
                "Left out: `{file}` is of another commit ({}); {how} measures it again.\n",
                row.text("commit")
            ),
            None => format!("Left out: not measured on this machine; {how} does it.\n"),
        }
    }
}

/// That of the headline's file, else the one of most files.
fn commit_of(measured: &Csv) -> Option<String> {
    if let Some(row) = measured.find(&[("file", HEADLINE)]) {
        return Some(row.text("commit").to_owned());
    }
    let commits: Vec<&str> = measured.rows().map(|row| row.text("commit")).collect();
    let times = |commit: &str| commits.iter().filter(|c| **c == commit).count();
    let most = commits.iter().max_by_key(|commit| times(commit))?;
    Some((*most).to_owned())
}
