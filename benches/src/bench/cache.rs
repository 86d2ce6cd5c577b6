//! `emberflow-lab cache`: nanoseconds to find, pin, release and replace a neuron of the cold
//! region, compared with a dependent memory access.

use std::time::Duration;

use emberflow::measure::cache::{ColdRates, measure};
use serde::Serialize;

use crate::cli::CacheArgs;
use emberflow::bench::facts::Facts;
use emberflow::bench::output::{Results, Rows, Table, may_write};
use emberflow::chart::{Curve, Labels, curves};
use emberflow::stats::Range;
use emberflow::{Failure, progress, size};

/// Name of a measured operation, and its rate.
type Operation = (&'static str, fn(&ColdRates) -> f64);

const STEPS: [Operation; 4] = [
    ("look up", |r| r.lookup_ns),
    ("find and pin", |r| r.pin_ns),
    ("release", |r| r.release_ns),
    ("replace", |r| r.replace_ns),
];

/// One operation in a cache of one size.
#[derive(Debug, Serialize)]
struct CacheRow {
    /// Neurons in the cache.
    slots: u32,
    /// Bytes of the cache's tables.
    table_bytes: u64,
    step: &'static str,
    /// Nanoseconds per neuron.
    ns: Range,
    /// Bound: nanoseconds per dependent access to as many bytes as the tables have.
    access_ns: Range,
    /// Time relative to the bound, round by round.
    of_bound: Range,
}

/// Runs the command.
pub fn command(args: &CacheArgs) -> Result<(), Failure> {
    let (repeat, facts) = (&args.repeat, Facts::here());
    may_write(&repeat.output, "cache", None, None)?;
    let time = Duration::from_millis(if repeat.quick { 2 } else { 50 });
    let sizes = if repeat.quick {
        &args.slots[..args.slots.len().min(1)]
    } else {
        &args.slots[..]
    };
    let rounds = repeat.rounds();
    let bar = progress::steps("measuring", u64::from(rounds) * sizes.len() as u64);
    let mut found: Vec<Vec<ColdRates>> = vec![Vec::new(); sizes.len()];
    for _ in 0..rounds {
        for (found, &slots) in found.iter_mut().zip(sizes) {
            found.push(measure(slots, time)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mut rows = Vec::new();
    for (&slots, rounds) in sizes.iter().zip(&found) {
        let range = |of: &dyn Fn(&ColdRates) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(of).collect();
            Range::of(&mut values)
        };
        rows.extend(STEPS.map(|(step, of)| CacheRow {
            slots,
            table_bytes: rounds.first().map_or(0, |r| r.table_bytes),
            step,
            ns: range(&of),
            access_ns: range(&|r| r.access_ns),
            of_bound: range(&|r| of(r) / r.access_ns.max(1e-9)),
        }));
    }
    Results {
        bench: "cache",
        model: None,
        svg: chart(&facts.line(), &rows),
        table: table(&rows),
        csv: csv(&rows),
        agreement: None,
        facts,
        how: format!(
            "bookkeeping of the cold region by its size, {rounds} rounds, each the best of {} ms",
            time.as_millis()
        ),
        body: Rows { rows: &rows },
        notes: vec![
            "bound: an access to memory of the tables' size whose place is known only when the one before is \
             done; neurons are asked for in ascending order, one in five, so a step may take less"
                .into(),
            "the cache is full and holds half of all neurons".into(),
        ],
    }
    .finish(&repeat.output)
}

fn table(rows: &[CacheRow]) -> Table {
    let mut table = Table::new("neurons held | tables | step | ns/neuron | bound, ns | of bound");
    for r in rows {
        table.rows.push(vec![
            r.slots.to_string(),
            size::show(r.table_bytes),
            r.step.into(),
            r.ns.show(1),
            r.access_ns.show(1),
            r.of_bound.show(2),
        ]);
    }
    table
}

fn csv(rows: &[CacheRow]) -> Table {
    let mut table =
        Table::new("slots | table_bytes | step | ns | ns_min | ns_max | access_ns | of_bound");
    for r in rows {
        let mut cells = vec![
            r.slots.to_string(),
            r.table_bytes.to_string(),
            r.step.into(),
        ];
        let ns = [r.ns.median, r.ns.min, r.ns.max, r.access_ns.median];
        cells.extend(ns.map(|ns| format!("{ns:.3}")));
        cells.push(format!("{:.4}", r.of_bound.median));
        table.rows.push(cells);
    }
    table
}

/// Time by size: a curve for each operation and one for the bound.
fn chart(facts: &str, rows: &[CacheRow]) -> String {
    let x = |slots: u32| f64::from(slots).log2();
    let line = |name: &str, points: Vec<(f64, Range)>| {
        let mut points = points;
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Curve {
            name: name.to_owned(),
            points,
        }
    };
    let of = |step: &'static str| rows.iter().filter(move |r| r.step == step);
    let mut lines: Vec<Curve> = (STEPS.iter())
        .map(|(step, _)| line(step, of(step).map(|r| (x(r.slots), r.ns)).collect()))
        .collect();
    let bound = of(STEPS[0].0).map(|r| (x(r.slots), r.access_ns));
    lines.push(line("dependent access", bound.collect()));
    let ticks: Vec<(f64, String)> = of(STEPS[0].0)
        .map(|r| (x(r.slots), r.slots.to_string()))
        .collect();
    let labels = Labels {
        title: "bookkeeping of the neuron cache",
        facts,
        x: "neurons held",
        y: "ns per neuron, median and range",
    };
    curves(&labels, &ticks, &lines)
}
