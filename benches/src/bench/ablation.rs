//! `emberflow-lab ablation`: speed with bundles, cache, cluster pipeline and a device added one by
//! one (PowerInfer-2, Fig. 14).

use std::fs::File;

use serde::Serialize;

use super::paper::LADDER;
use crate::cli::AblationArgs;
use emberflow::bench::bound::{Bound, Device, NOTE};
use emberflow::bench::child::{Child, Decoding, Run};
use emberflow::bench::facts::{Facts, file_of};
use emberflow::bench::output::{Results, Rows, Table, may_write, percent};
use emberflow::bench::rounds::{Agreement, Series, in_turns};
use emberflow::bench::sweep::{bounds, memory_of, model_of};
use emberflow::chart::{Labels, bars};
use emberflow::stats::Range;
use emberflow::{Failure, progress};

/// One policy on one device.
#[derive(Debug, Serialize)]
struct AblationRow {
    /// `--io` of the runs.
    io: String,
    policy: &'static str,
    /// The mechanism that this policy adds to the one before.
    adds: &'static str,
    tokens_per_s: Range,
    wait_share: f64,
    hit_rate: f64,
    /// Bytes per read; megabytes read per token.
    read_len: f64,
    read_mb_per_token: f64,
    /// Speed relative to the policy before; 1 for the first.
    factor: f64,
    /// Speed relative to the first policy.
    of_first: f64,
    /// The paper's value, measured by its authors on their phone.
    paper_tokens_per_s: f64,
    /// See `paper_tokens_per_s`.
    paper_factor: f64,
    bound: Bound,
    /// Token time relative to the bound, over the rounds.
    of_bound: Range,
    note: Option<String>,
}

/// Runs the command.
pub fn command(args: &AblationArgs) -> Result<(), Failure> {
    let bench = &args.bench;
    may_write(&bench.output, "ablation", Some(&bench.model), None)?;
    let (tokens, rounds) = (bench.tokens_or(16), bench.rounds_or(3));
    let facts = Facts::of(&bench.model)?;
    let child = Child::new(bench)?;
    // Reports wrong names before minutes have passed.
    let open = |io: &String| Device::open(&bench.model, io, bench.quick);
    let ios = &args.io;
    let mut devices: Vec<Device> = ios.iter().map(open).collect::<Result<_, _>>()?;
    let simulated = devices.iter().any(Device::is_simulated);
    if simulated {
        warm(&file_of(&bench.model)?)?;
    }
    let rungs = &LADDER[..LADDER.len() - usize::from(args.device.is_none())];
    let points: Vec<(&str, &PolicyStep)> = (ios.iter())
        .flat_map(|io| rungs.iter().map(move |rung| (io.as_str(), rung)))
        .collect();
    let names: Vec<String> = (points.iter())
        .map(|(io, rung)| format!("{}, {io}", rung.1))
        .collect();
    let mut before = || devices.iter_mut().try_for_each(Device::measure);
    let series = in_turns(&names, rounds, &mut before, &mut |i, _| {
        let (io, rung) = points[i];
        let run = Decoding {
            share: args.share,
            ..Decoding::of(bench, tokens, io)
        };
        let mut more = vec!["--ablation", rung.0];
        if let Some(device) = &args.device {
            let last = i % rungs.len() == rungs.len() - 1;
            more.extend(["--device", if last { device } else { "none" }]);
        }
        child.run(&run.with(&more), None)
    })?;
    let memory = memory_of(&series);
    let rows: Vec<AblationRow> = (ios.iter().zip(&devices))
        .zip(series.chunks(rungs.len()))
        .flat_map(|((io, device), series)| ladder(io, series, device, memory))
        .collect();
    let model = model_of(&series)?;
    let what = format!(
        "decoding step by step, {} of the FFN in memory",
        percent(args.share)
    );
    let (title, how) = (
        format!("{model}: {what}"),
        format!("{what}, {tokens} tokens, {rounds} interleaved rounds"),
    );
    Results {
        bench: "ablation",
        svg: chart(&title, &facts.line(), ios, &rows),
        table: table(&rows),
        csv: csv(&rows),
        agreement: Some(Agreement::of(series.iter())),
        model: Some(model),
        facts,
        how,
        body: Rows { rows: &rows },
        notes: notes(simulated),
    }
    .finish(&bench.output)
}

/// A policy: name, added mechanism, the paper's tokens per second.
type PolicyStep = (&'static str, &'static str, f64);

/// Notes for the reader; some measurements are `simulated`.
fn notes(simulated: bool) -> Vec<String> {
    let mut notes = vec![
        "paper: PowerInfer-2, Fig. 14 and §7.5, measured by its authors with Bamboo-7B on a OnePlus 12; its \
         rates are theirs, and only the factors compare"
            .to_owned(),
        NOTE.into(),
    ];
    if simulated {
        notes.push(
            "sim: reads come from the page cache of this machine at the pace of a model of the device; \
             they are no measurements of a phone"
                .into(),
        );
    }
    notes
}

/// Reads the file once, so that the page cache serves it and the real disk does not slow a
/// simulated one.
fn warm(path: &std::path::Path) -> Result<(), Failure> {
    let file = File::open(path).map_err(Failure::file(path))?;
    let len = file.metadata().map_or(0, |m| m.len());
    let bar = progress::bytes("reading the file once", len);
    std::io::copy(&mut bar.wrap_read(file), &mut std::io::sink()).map_err(Failure::file(path))?;
    bar.finish_and_clear();
    Ok(())
}

/// The policies on one device, each relative to the one before.
fn ladder(io: &str, series: &[Series], device: &Device, memory: f64) -> Vec<AblationRow> {
    let of = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let speeds: Vec<Range> = (series.iter())
        .map(|s| s.range(|r| r.decode_tokens_per_s))
        .collect();
    let one = |(i, (series, rung)): (usize, (&Series, &PolicyStep))| {
        let before = i.saturating_sub(1);
        let (bound, of_bound) = bounds(series, device, memory);
        let per_token = |run: &Run, values: &[u64]| {
            values.iter().sum::<u64>() as f64 / run.details.ms.len().max(1) as f64
        };
        let bytes = series.range(|r| per_token(r, &r.details.bytes_read)).median;
        let reads = series.range(|r| per_token(r, &r.details.reads)).median;
        AblationRow {
            io: io.to_owned(),
            policy: rung.0,
            adds: rung.1,
            tokens_per_s: speeds[i],
            wait_share: series.range(Run::wait_share).median,
            hit_rate: series.range(Run::hit_rate).median,
            read_len: of(bytes, reads),
            read_mb_per_token: bytes / 1e6,
            factor: of(speeds[i].median, speeds[before].median),
            of_first: of(speeds[i].median, speeds[0].median),
            paper_tokens_per_s: rung.2,
            paper_factor: rung.2 / LADDER[before].2,
            bound,
            of_bound,
            note: series.refused.clone(),
        }
    };
    series.iter().zip(&LADDER).enumerate().map(one).collect()
}

fn table(rows: &[AblationRow]) -> Table {
    let mut table = Table::new(
        "device | step | policy | tokens/s | factor | of the first | waiting | hits | \
         MB/token | bound, ms | limit | of bound | paper: tokens/s | paper: factor | \
         paper: of the first",
    );
    for r in rows {
        let speed = r.tokens_per_s.show(2);
        let [bound, limit, of_bound] = r.bound.cells(r.of_bound);
        table.rows.push(vec![
            r.io.clone(),
            r.adds.into(),
            r.policy.into(),
            r.note.as_ref().map_or(speed, Clone::clone),
            format!("{:.2}", r.factor),
            format!("{:.1}", r.of_first),
            percent(r.wait_share),
            percent(r.hit_rate),
            format!("{:.1}", r.read_mb_per_token),
            bound,
            limit,
            of_bound,
            format!("{}", r.paper_tokens_per_s),
            format!("{:.2}", r.paper_factor),
            format!("{:.1}", r.paper_tokens_per_s / LADDER[0].2),
        ]);
    }
    table
}

fn csv(rows: &[AblationRow]) -> Table {
    let mut table = Table::new(
        "io | policy | adds | tokens_per_s | tokens_per_s_min | tokens_per_s_max | factor | \
         of_first | wait_share | hit_rate | read_len | read_mb_per_token | \
         paper_tokens_per_s | paper_factor | bound_ms | of_bound",
    );
    for r in rows {
        let t = r.tokens_per_s;
        table.rows.push(vec![
            r.io.clone(),
            r.policy.into(),
            r.adds.into(),
            format!("{:.4}", t.median),
            format!("{:.4}", t.min),
            format!("{:.4}", t.max),
            format!("{:.4}", r.factor),
            format!("{:.4}", r.of_first),
            format!("{:.4}", r.wait_share),
            format!("{:.4}", r.hit_rate),
            format!("{:.0}", r.read_len),
            format!("{:.3}", r.read_mb_per_token),
            format!("{}", r.paper_tokens_per_s),
            format!("{:.4}", r.paper_factor),
            format!("{:.4}", r.bound.ms),
            format!("{:.4}", r.of_bound.median),
        ]);
    }
    table
}

/// Speeds relative to the first policy, which compare across devices and with the paper.
fn chart(title: &str, facts: &str, io: &[String], rows: &[AblationRow]) -> String {
    let mut names: Vec<String> = io.to_vec();
    names.push("paper (their phone)".into());
    let shown = |rung: &&PolicyStep| rows.iter().any(|r| r.adds == rung.1);
    let groups: Vec<(String, Vec<f64>)> = (LADDER.iter().filter(shown))
        .map(|rung| {
            let here = rows.iter().filter(|r| r.adds == rung.1);
            let mut values: Vec<f64> = here.map(|r| r.of_first).collect();
            values.push(rung.2 / LADDER[0].2);
            (rung.1.to_owned(), values)
        })
        .collect();
    let labels = Labels {
        title,
        facts,
        x: "mechanisms, added one by one",
        y: "speed, multiples of the first",
    };
    bars(&labels, &names, &groups)
}
