//! `emberflow-lab kernels`: speed of the kernels of decode and prefill, compared with a plain read
//! of the same memory by the same threads.

use std::time::Duration;

use emberflow::measure::{Effort, LONG, measure};
use emberflow_engine::planner::rates::{FORMATS, Rates, Throughput, counts};
use emberflow_kernels::DType;
use serde::Serialize;

use crate::cli::KernelsArgs;
use emberflow::bench::facts::Facts;
use emberflow::bench::output::{Results, Rows, Table, may_write};
use emberflow::chart::{Labels, bars};
use emberflow::stats::Range;
use emberflow::{Failure, progress, size};

/// More memory than the caches of large processors, and several passes over it; `quick`: fast enough for a test.
fn effort(quick: bool) -> Effort {
    let (ms, memory) = if quick { (1, 4 << 20) } else { (60, 1 << 30) };
    Effort {
        time: Duration::from_millis(ms),
        rounds: 1,
        memory,
        ..Effort::default()
    }
}

/// One kernel with one format, thread count and working set.
#[derive(Debug, Clone, Serialize)]
struct KernelRow {
    threads: u32,
    format: &'static str,
    /// `rows` in sequence, scattered `neurons`, or `products` with several tokens.
    kernel: &'static str,
    /// Bytes of the working set; tokens for products.
    size: u64,
    /// Unit of `rate`: 10^9 bytes or multiply-adds per second.
    unit: &'static str,
    rate: Range,
    /// Fastest plain read of as much memory by the same threads in any round, in 10^9 bytes per
    /// second; absent for products, which are bound by arithmetic.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<f64>,
    /// The rate as a share of the bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    of_bound: Option<Range>,
}

/// Runs the command.
pub fn command(args: &KernelsArgs) -> Result<(), Failure> {
    let (repeat, facts) = (&args.repeat, Facts::here());
    may_write(&repeat.output, "kernels", None, None)?;
    let effort = effort(repeat.quick);
    let steps = repeat.rounds() as usize * counts(facts.machine.cores).len() * FORMATS.len();
    let bar = progress::steps("measuring", steps as u64);
    let rounds: Vec<Rates> = (0..repeat.rounds())
        .map(|_| measure(&effort, || bar.inc(1)))
        .collect::<Result<_, _>>()?;
    bar.finish_and_clear();
    let rows = rows(&rounds);
    Results {
        bench: "kernels",
        model: None,
        svg: chart(&facts.line(), &rows),
        table: table(&rows),
        csv: csv(&rows),
        agreement: None,
        how: format!(
            "kernels by format and threads, rows of {LONG}, {} rounds, each the best of {} ms",
            rounds.len(),
            effort.time.as_millis()
        ),
        facts,
        body: Rows { rows: &rows },
        notes: vec![
            "bound: the fastest plain read of the same memory by the same threads in this run; that of products \
             with many tokens is arithmetic, and is not measured here"
                .into(),
        ],
    }
    .finish(&repeat.output)
}

/// 10^9 bytes per second of rows from a working set, including the cost per row.
fn rate(speed: &Throughput, dtype: DType, set: u64) -> f64 {
    let bytes = dtype.row_bytes(LONG) as f64;
    bytes / speed.ns(1.0, bytes, set as f64)
}

/// All measurements of the rounds, which have the same form.
fn rows(rounds: &[Rates]) -> Vec<KernelRow> {
    let mut rows = Vec::new();
    let Some(first) = rounds.first() else {
        return rows;
    };
    for (t, threads) in first.threads.iter().enumerate() {
        for dtype in FORMATS {
            let kernels = || {
                let kernel = |r: &Rates| r.threads[t].kernel(dtype).cloned();
                rounds.iter().filter_map(kernel)
            };
            let row = |kernel, size, mut rates: Vec<f64>, bound: Option<f64>| {
                let rate = Range::of(&mut rates);
                KernelRow {
                    threads: threads.threads,
                    format: dtype.name(),
                    kernel,
                    size,
                    unit: if bound.is_some() { "GB/s" } else { "GMAC/s" },
                    rate,
                    bound,
                    of_bound: bound.map(|bound| rate.map(|rate| rate / bound)),
                }
            };
            for &(set, _) in &threads.read.gb_per_s {
                // The best round is the bound, since others may have been disturbed.
                let reads = rounds.iter().map(|r| r.threads[t].read.at(set as f64));
                let read = Some(reads.fold(0.0, f64::max));
                let dots = kernels().map(|k| rate(&k.dot, dtype, set)).collect();
                rows.push(row("rows", set, dots, read));
                let neurons = kernels().map(|k| rate(&k.neuron, dtype, set)).collect();
                rows.push(row("neurons", set, neurons, read));
            }
            let tokens = threads.kernel(dtype).map(|k| k.gemm.clone());
            for (tokens, _) in tokens.unwrap_or_default() {
                let speeds = kernels().map(|k| k.gemm_at(f64::from(tokens))).collect();
                rows.push(row("products", u64::from(tokens), speeds, None));
            }
        }
    }
    rows
}

/// Printed rows: the largest memory, the most tokens.
fn is_last(rows: &[KernelRow], row: &KernelRow) -> bool {
    let same = rows.iter().filter(|r| r.kernel == row.kernel);
    same.map(|r| r.size).max() == Some(row.size)
}

fn table(rows: &[KernelRow]) -> Table {
    let mut table = Table::new("threads | format | kernel | of | rate | bound | of bound");
    for r in rows.iter().filter(|row| is_last(rows, row)) {
        let of = match r.bound {
            Some(_) => size::show(r.size),
            None => format!("{} tokens", r.size),
        };
        let share = |s: Range| format!("{} %", s.map(|s| 100.0 * s).show(0));
        table.rows.push(vec![
            r.threads.to_string(),
            r.format.into(),
            r.kernel.into(),
            of,
            format!("{} {}", r.rate.show(1), r.unit),
            r.bound.map_or("–".into(), |b| format!("{b:.1} GB/s")),
            r.of_bound.map_or("–".into(), share),
        ]);
    }
    table
}

fn csv(rows: &[KernelRow]) -> Table {
    let mut table = Table::new(
        "threads | format | kernel | size | unit | rate | rate_min | rate_max | bound | \
         of_bound",
    );
    for r in rows {
        let bounds = [r.bound, r.of_bound.map(|share| share.median)];
        let mut cells = vec![r.threads.to_string(), r.format.into(), r.kernel.into()];
        cells.extend([r.size.to_string(), r.unit.into()]);
        let rate = [r.rate.median, r.rate.min, r.rate.max];
        cells.extend(rate.map(|value| format!("{value:.3}")));
        cells.extend(bounds.map(|b| b.map_or(String::new(), |b| format!("{b:.4}"))));
        table.rows.push(cells);
    }
    table
}

/// Largest memory and most threads, grouped by format.
fn chart(facts: &str, rows: &[KernelRow]) -> String {
    let threads = rows.iter().map(|r| r.threads).max().unwrap_or(1);
    let most = || {
        let rows = rows.iter().filter(|row| is_last(rows, row));
        rows.filter(|r| r.threads == threads)
    };
    let names = ["rows", "neurons", "plain read"];
    let groups: Vec<(String, Vec<f64>)> = (FORMATS.iter())
        .map(|dtype| {
            let of = |kernel: &str| most().find(|r| r.kernel == kernel && r.format == dtype.name());
            let rates = ["rows", "neurons"].map(|kernel| of(kernel).map(|r| r.rate.median));
            let bound = of("rows").and_then(|r| r.bound);
            let values = rates.into_iter().chain([bound]);
            (
                dtype.name().to_owned(),
                values.map(Option::unwrap_or_default).collect(),
            )
        })
        .collect();
    let labels = Labels {
        title: &format!("kernels out of memory, {threads} threads"),
        facts,
        x: "format of the weights",
        y: "GB/s, medians",
    };
    bars(&labels, &names.map(str::to_owned), &groups)
}
