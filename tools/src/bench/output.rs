//! Output of benchmarks.

use std::io::Write;
use std::path::{Path, PathBuf};

use emberflow_engine::meta::ContainerMeta;
use serde::Serialize;

use super::facts::Facts;
use super::rounds::Agreement;
use crate::cli::{ModelArg, OutputArgs};
use crate::model::open_container;
use crate::{Failure, atomic, print_json};

/// Checks all output files before anything is measured. `bench` is the benchmark's name; `model` is `None` if only
/// the machine is measured; `also` is another file that is read.
///
/// # Errors
/// A usage error, as in [`atomic`]; a model that cannot be opened, if files are named after it.
pub fn may_write(
    args: &OutputArgs,
    bench: &str,
    model: Option<&ModelArg>,
    also: Option<&Path>,
) -> Result<(), Failure> {
    let reads = [model.and_then(ModelArg::file), also];
    atomic::may_write_each([&args.csv, &args.svg], args.force, &reads)?;
    if args.out.is_some() {
        let name = model.map(|model| -> Result<String, Failure> {
            let container = open_container(model)?;
            Ok(ContainerMeta::parse(container.meta(), container.path())?
                .config
                .name)
        });
        let name = name.transpose()?;
        for path in folder_files(args, &Facts::here(), name.as_deref(), bench)
            .iter()
            .flatten()
        {
            atomic::may_write_below(path, args.force, &reads)?;
        }
    }
    Ok(())
}

/// Files written by `--out`: CSV, SVG and JSON.
fn folder_files(
    args: &OutputArgs,
    facts: &Facts,
    model: Option<&str>,
    bench: &str,
) -> Option<[PathBuf; 3]> {
    let dir = args.out.as_ref()?;
    let usual = || Path::new("benches/results").join(facts.folder_name());
    let dir = dir.clone().unwrap_or_else(usual);
    let model = model.map(|m| file_name(m) + "-").unwrap_or_default();
    Some(["csv", "svg", "json"].map(|ext| dir.join(format!("{model}{bench}.{ext}"))))
}

/// A result in all output formats.
pub struct Results<B> {
    /// Name of the benchmark.
    pub bench: &'static str,
    /// Name of the model; `None` if only the machine is measured.
    pub model: Option<String>,
    /// Machine and file.
    pub facts: Facts,
    /// Settings as text.
    pub how: String,
    /// Whether all variants gave the same logits; `None` if there are none.
    pub agreement: Option<Agreement>,
    /// Additional members of the JSON object.
    pub body: B,
    /// Table of the text output.
    pub table: Table,
    /// The same with one number per field.
    pub csv: Table,
    /// The chart.
    pub svg: String,
    /// Notes and warnings.
    pub notes: Vec<String>,
}

/// A body with one row per point.
#[derive(Serialize)]
pub struct Rows<'a, R> {
    /// The points.
    pub rows: &'a [R],
}

/// A table of text.
#[derive(Default)]
pub struct Table {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// One field per column.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table; columns are separated as in Markdown: `name | tokens/s`.
    pub fn new(columns: &str) -> Self {
        Self {
            columns: columns.split(" | ").map(str::to_owned).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row: `cells` followed by the numbers, or by the reason why there are none.
    pub fn add(
        &mut self,
        mut cells: Vec<String>,
        refused: Option<&String>,
        numbers: impl FnOnce() -> Vec<String>,
    ) {
        match refused {
            None => cells.extend(numbers()),
            Some(why) => {
                cells.push(why.clone());
                cells.resize(self.columns.len(), "–".into());
            }
        }
        self.rows.push(cells);
    }

    /// As Markdown with aligned columns.
    pub fn markdown(&self) -> String {
        let all = || std::iter::once(&self.columns).chain(&self.rows);
        let width = |i: usize| {
            let lens = all()
                .filter_map(|row| row.get(i))
                .map(|c| c.chars().count());
            lens.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = (row.iter().zip(&widths))
                .map(|(cell, &width)| format!("{cell:width$}"))
                .collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rule: Vec<String> = widths.iter().map(|&w| "-".repeat(w.max(3))).collect();
        let head = line(&self.columns);
        let rows: String = self.rows.iter().map(line).collect();
        format!("{head}| {} |\n{rows}", rule.join(" | "))
    }

    /// As CSV, quoted where necessary.
    pub fn csv(&self) -> String {
        let field = |text: &String| {
            if text.contains([',', '"', '\n']) {
                format!("\"{}\"", text.replace('"', "\"\""))
            } else {
                text.clone()
            }
        };
        let line = |row: &Vec<String>| {
            let fields: Vec<String> = row.iter().map(field).collect();
            fields.join(",") + "\n"
        };
        line(&self.columns) + &self.rows.iter().map(line).collect::<String>()
    }
}

/// Output of `--json`.
#[derive(Serialize)]
struct Json<'a, B> {
    bench: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    machine: &'a Facts,
    how: &'a str,
    #[serde(flatten)]
    agreement: Option<Agreed<'a>>,
    #[serde(flatten)]
    body: &'a B,
    notes: &'a [String],
    written: &'a [PathBuf],
}

#[derive(Serialize)]
struct Agreed<'a> {
    hashes_equal: bool,
    logits_hash: &'a str,
    differing: &'a [String],
}

impl<B: Serialize> Results<B> {
    fn json<'a>(&'a self, written: &'a [PathBuf]) -> Json<'a, B> {
        Json {
            bench: self.bench,
            model: self.model.as_deref(),
            machine: &self.facts,
            how: &self.how,
            agreement: self.agreement.as_ref().map(|a| Agreed {
                hashes_equal: a.equal(),
                logits_hash: &a.hash,
                differing: &a.differing,
            }),
            body: &self.body,
            notes: &self.notes,
            written,
        }
    }

    /// Text output.
    fn text(&self, written: &[PathBuf]) -> String {
        let model = self.model.as_ref().map(|model| format!("{model}: "));
        let mut lines = vec![
            self.facts.line(),
            format!("{}{}\n", model.unwrap_or_default(), self.how),
            self.table.markdown(),
        ];
        if let Some(a) = self.agreement.as_ref().filter(|a| a.equal()) {
            lines.push(format!(
                "logits: identical in all {} runs ({})",
                a.runs, a.hash
            ));
        }
        lines.extend(self.notes.iter().cloned());
        lines.extend(
            written
                .iter()
                .map(|path| format!("written: {}", path.display())),
        );
        lines.join("\n") + "\n"
    }

    /// Writes the requested files and prints the result.
    ///
    /// # Errors
    /// A file that cannot be written (after printing the result); a failed check if hashes differ.
    pub fn finish(self, args: &OutputArgs) -> Result<(), Failure> {
        let mut written = Vec::new();
        // Print the result even if it cannot be written: it took minutes.
        let kept = self.write(args, &mut written);
        if args.json {
            print_json(&self.json(&written))?;
        } else {
            write!(std::io::stdout().lock(), "{}", self.text(&written))?;
        }
        kept?;
        match &self.agreement {
            Some(a) if !a.equal() => Err(Failure::Fault(format!(
                "the logits of {} differ from those of the first run",
                a.differing.join(", ")
            ))),
            _ => Ok(()),
        }
    }

    fn write(&self, args: &OutputArgs, written: &mut Vec<PathBuf>) -> Result<(), Failure> {
        let mut write = |path: PathBuf, text: &str| -> Result<(), Failure> {
            atomic::write(&path, text.as_bytes())?;
            written.push(path);
            Ok(())
        };
        let csv = self.csv.csv();
        if let Some(path) = &args.csv {
            write(path.clone(), &csv)?;
        }
        if let Some(path) = &args.svg {
            write(path.clone(), &self.svg)?;
        }
        let files = folder_files(args, &self.facts, self.model.as_deref(), self.bench);
        if let Some([to_csv, to_svg, to_json]) = files {
            if let Some(dir) = to_csv.parent() {
                std::fs::create_dir_all(dir).map_err(Failure::file(dir))?;
            }
            write(to_csv, &csv)?;
            write(to_svg, &self.svg)?;
            let text =
                serde_json::to_string_pretty(&self.json(&[])).map_err(std::io::Error::from)?;
            write(to_json, &(text + "\n"))?;
        }
        Ok(())
    }
}

/// A model's name as part of a file name.
fn file_name(model: &str) -> String {
    let name = model.rsplit('/').next().unwrap_or_default().to_lowercase();
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    name.chars()
        .map(|c| if fits(c) { c } else { '-' })
        .collect()
}

/// Formats a share in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Formats bytes in MiB.
pub fn mib(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_lines_up_and_quotes() {
        let mut table = Table::new("name | n");
        table.rows.push(vec!["a, \"b\"".into(), "1".into()]);
        assert_eq!(table.csv(), "name,n\n\"a, \"\"b\"\"\",1\n");
        let text = table.markdown();
        let lens: Vec<usize> = text.lines().map(str::len).collect();
        assert!(
            lens.len() == 3 && text.contains("| a, \"b\" | 1 |"),
            "{text}"
        );
    }

    #[test]
    fn models_give_names_of_files() {
        assert_eq!(file_name("synth/Bamboo 7B.v1"), "bamboo-7b.v1");
    }
}
