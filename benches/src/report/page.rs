//! [`Report::make`] fills the template `benches/report.md`: a line `@name` becomes a table or a
//! sentence. If its file is missing, a line says which command measures it.

use std::path::{Path, PathBuf};

use emberflow::chart::{Curve, Labels, curves};
use emberflow::stats::Range;

use super::csv::CsvRow;
use super::results::Results;
use super::tables::{OFFLOAD, best_llama, budget, ours, times_llama};
use super::text::num;
use super::{judge, parts, tables};

/// First and last line of the measured part of README.md.
pub const MARKS: [&str; 2] = [
    "<!-- measured: made by benches/examples/report.rs, do not edit -->",
    "<!-- end of measured -->",
];

/// Pages generated from a folder of results.
pub struct Report {
    /// Text of `benches/README.md`.
    pub page: String,
    /// Text between [`MARKS`] in `README.md`.
    pub summary: String,
    /// The chart and its path from the root; absent without a sweep.
    pub picture: Option<(PathBuf, String)>,
}

impl Report {
    /// Generates the pages from `folder`, a path from `root`.
    ///
    /// # Errors
    /// A file that cannot be read, or an unknown name in the template.
    pub fn make(root: &Path, folder: &Path) -> Result<Self, String> {
        let results = Results::open(&root.join(folder))?;
        let path = root.join("benches/report.md");
        let template = std::fs::read_to_string(&path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let mut page = format!(
            "<!-- Made from {} by cargo run --release -p emberflow-benches --example report; \
             change benches/report.md or the CSV files instead. -->\n",
            folder.display()
        );
        for line in template.lines() {
            match line.strip_prefix('@') {
                Some(name) => page += &part(&results, name)?,
                None => {
                    page += line;
                    page.push('\n');
                }
            }
        }
        let picture = picture(&results).map(|svg| (folder.join("memory-speed.svg"), svg));
        Ok(Self {
            summary: summary(&results, picture.as_ref().map(|p| &*p.0)),
            page,
            picture,
        })
    }

    /// `readme` with the summary between the marks.
    ///
    /// # Errors
    /// A README without [`MARKS`].
    pub fn in_readme(&self, readme: &str) -> Result<String, String> {
        let (before, rest) = readme.split_once(MARKS[0]).ok_or("README.md has no mark")?;
        let (_, after) = rest.split_once(MARKS[1]).ok_or("README.md has no end")?;
        let [begin, end] = MARKS;
        Ok(format!("{before}{begin}\n{}{end}{after}", self.summary))
    }
}

/// The folder a page was generated from.
pub fn folder_of(page: &str) -> Option<PathBuf> {
    let rest = page.strip_prefix("<!-- Made from ")?;
    rest.split_whitespace().next().map(PathBuf::from)
}

/// The text for a line of the template.
fn part(r: &Results, name: &str) -> Result<String, String> {
    Ok(match name {
        "machine" => machine(r),
        "headline" => headline(r),
        "picture" => match picture(r) {
            Some(_) => format!(
                "![tokens per second by process memory](results/{}/memory-speed.svg)\n",
                r.name()
            ),
            None => r.left_out("sweep.csv"),
        },
        "offload" => tables::offload(r),
        "sweep" => tables::sweep(r),
        "in-memory" => tables::in_memory(r),
        "papers" => judge::papers(r),
        "targets" => judge::targets(r),
        "decode" => tables::decode(r),
        "contexts" => tables::contexts(r),
        "latency" => tables::latency(r),
        "ladder" => tables::ladder(r),
        "batch" => tables::batch(r),
        "prefill" => tables::prefill(r),
        "kernels" => parts::kernels(r),
        "predictor" => parts::predictor(r),
        "cache" => parts::cache(r),
        "fio" => parts::fio(r),
        "plan" => parts::plan(r),
        _ => return Err(format!("benches/report.md: nothing is called @{name}")),
    })
}

/// Machine and date.
fn machine(r: &Results) -> String {
    format!(
        "Everything on this page was measured on one machine with one version of the program, possibly an \
         older one than this:\n\n\
         | | |\n|---|---|\n\
         | program | commit `{}`, measured {} |\n\
         | machine | {} cores of {} ({}), {}, {} |\n\
         | disk | {} |\n\
         | llama.cpp | {} |\n\
         | files | [results/{name}](results/{name}) |\n",
        r.commit(),
        r.days(),
        r.fact("cores"),
        r.fact("processor"),
        r.fact("details"),
        r.fact("memory"),
        r.fact("kernel"),
        r.fact("disk"),
        r.fact("llama.cpp"),
        name = r.name(),
    )
}

/// The main result in one sentence.
fn headline(r: &Results) -> String {
    let (share, file) = OFFLOAD[2];
    let Some(csv) = r.csv(file) else {
        return r.left_out(file);
    };
    let (Some(us), Some(times)) = (ours(&csv, "full"), times_llama(&csv)) else {
        return r.left_out(file);
    };
    let memory = budget(r, share).map_or(String::new(), |gib| {
        format!(" ({gib:.2} GiB for the whole process)")
    });
    format!(
        "With half of its feed-forward weights in memory{memory}, a model with the shape of Bamboo-7B generates **{} tokens/s** \
         on {} cores of {}, **{} times** llama.cpp's best in a memory control group of the same size ({} \
         tokens/s).\n",
        num(us),
        r.fact("cores"),
        r.fact("processor"),
        num(times),
        num(best_llama(&csv)),
    )
}

/// The measured part of the README.
fn summary(r: &Results, picture: Option<&Path>) -> String {
    let mut text = String::new();
    if let Some(picture) = picture {
        text += &format!(
            "![tokens per second by process memory: Emberflow, LLM in a flash, llama.cpp]({})\n\n",
            picture.display()
        );
    }
    text += &headline(r);
    text += &format!(
        "The model has random weights and the published activation statistics (10 % of the neurons active); \
         commit `{}`, {}.\n",
        r.commit(),
        r.days()
    );
    text
}

/// Chart of speed by memory of the process; `None` without a sweep.
fn picture(r: &Results) -> Option<String> {
    let sweep = r.csv("sweep.csv")?;
    let mut lines = vec![Curve {
        name: "Emberflow".into(),
        points: sweep.rows().map(point).collect(),
    }];
    if let Some(policies) = r.csv("sweep-policies.csv") {
        let theirs = (policies.rows()).filter(|row| row.text("policy") == "llmflash");
        lines.push(Curve {
            name: "LLM in a flash (--policy llmflash)".into(),
            points: theirs.map(point).collect(),
        });
    }
    lines.push(Curve {
        name: "llama.cpp, same limit".into(),
        points: llama(r),
    });
    lines.retain(|line| !line.points.is_empty());
    let most = sweep.rows().map(memory).fold(0.0, f64::max);
    let ticks: Vec<(f64, String)> = (1..=most.ceil() as u32)
        .map(|gib| (f64::from(gib), gib.to_string()))
        .collect();
    let facts = format!(
        "commit {}, {}, {} cores of {}",
        r.commit(),
        r.days(),
        r.fact("cores"),
        r.fact("processor")
    );
    let labels = Labels {
        title: "decode, shape of Bamboo-7B in 4 bits",
        facts: &facts,
        x: "memory of the whole process, GiB",
        y: "tokens/s, median and range",
    };
    Some(curves(&labels, &ticks, &lines))
}

/// The budget of a row, in GiB.
fn memory(row: CsvRow<'_>) -> f64 {
    row.or_zero("budget_bytes") / f64::from(1 << 30)
}

/// Memory and speed in a row of a sweep.
fn point(row: CsvRow<'_>) -> (f64, Range) {
    let speed = Range {
        median: row.or_zero("tokens_per_s"),
        min: row.or_zero("tokens_per_s_min"),
        max: row.or_zero("tokens_per_s_max"),
    };
    (memory(row), speed)
}

/// Memory and speed of the fastest llama.cpp configuration under each limit.
fn llama(r: &Results) -> Vec<(f64, Range)> {
    let mut points = Vec::new();
    for (share, file) in OFFLOAD {
        let (Some(csv), Some(gib)) = (r.csv(file), budget(r, share)) else {
            continue;
        };
        let theirs = (csv.rows()).filter(|row| row.text("name").starts_with("llama.cpp"));
        let best = theirs.max_by(|a, b| a.or_zero("median").total_cmp(&b.or_zero("median")));
        if let Some(best) = best.filter(|best| best.or_zero("median") > 0.0) {
            let speed = Range {
                median: best.or_zero("median"),
                min: best.or_zero("low"),
                max: best.or_zero("high"),
            };
            points.push((gib, speed));
        }
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}
