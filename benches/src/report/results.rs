//! Results of one machine: a folder of CSV files, with how they were measured.
//!
//! `machine.csv` describes the machine; `measured.csv` has for each file the program's commit, the
//! date and the rounds. `benches/reproduce.sh` writes both. A page uses files of one commit: that
//! of the comparison with llama.cpp at half of the FFN if it exists, otherwise that of most files.

use std::path::{Path, PathBuf};

use super::csv::Csv;

/// The file whose commit a page uses.
const HEADLINE: &str = "offload-50.csv";

/// Files of a page, and the part of `benches/reproduce.sh` that makes each.
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

/// A folder in `benches/results/`.
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
    /// The folder has no results.
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

    /// Name of the folder, which is that of the machine.
    pub fn name(&self) -> String {
        let name = self.dir.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Commit of the measured program.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// A value of `machine.csv`.
    pub fn fact(&self, what: &str) -> String {
        let row = self.machine.find(&[("what", what)]);
        row.map_or("?", |row| row.text("value")).to_owned()
    }

    /// First and last day of measurements with this commit.
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

    /// A file measured with this commit.
    pub fn csv(&self, file: &str) -> Option<Csv> {
        let row = self.measured.find(&[("file", file)])?;
        let ours = row.text("commit") == self.commit;
        ours.then(|| Csv::read(&self.dir.join(file))).flatten()
    }

    /// Number of rounds of a file, in words.
    pub fn rounds(&self, file: &str) -> String {
        let row = self.measured.find(&[("file", file)]);
        let rounds = row.map_or("?", |row| row.text("rounds"));
        match rounds {
            "1" => "one run each".to_owned(),
            rounds => format!("medians and ranges of {rounds} interleaved rounds"),
        }
    }

    /// Text in place of a missing table.
    pub fn left_out(&self, file: &str) -> String {
        let part = part_of(file);
        let how = format!("`benches/reproduce.sh DIR {part}`");
        match self.measured.find(&[("file", file)]) {
            Some(row) => format!(
                "Left out: `{file}` is of another commit ({}); {how} measures it again.\n",
                row.text("commit")
            ),
            None => format!("Left out: not measured on this machine; {how} measures it.\n"),
        }
    }
}

/// Commit of the headline's file, otherwise the one of most files.
fn commit_of(measured: &Csv) -> Option<String> {
    if let Some(row) = measured.find(&[("file", HEADLINE)]) {
        return Some(row.text("commit").to_owned());
    }
    let commits: Vec<&str> = measured.rows().map(|row| row.text("commit")).collect();
    let times = |commit: &str| commits.iter().filter(|c| **c == commit).count();
    let most = commits.iter().max_by_key(|commit| times(commit))?;
    Some((*most).to_owned())
}
