//! `emberflow bench sweep`: decode speed over the share of the FFN in memory (PowerInfer-2, Figs 7, 10 and 12).

use std::path::Path;

use emberflow_engine::Ablation;
use serde::Serialize;

use super::bound::{Bound, Device, NOTE};
use super::cap::{self, Cap};
use super::child::{Decoding, Run};
use super::facts::file_of;
use super::output::{Results, Rows, Table, may_write, mib, percent};
use super::points::{self, Point, Setup};
use super::rounds::{Agreement, Series, in_turns};
use crate::Failure;
use crate::chart::{Curve, Labels, curves};
use crate::cli::{BenchSweepArgs, ModelArg};
use crate::model::open_container;
use crate::stats::Range;

/// Default shares.
const SHARES: [f64; 8] = [0.10, 0.25, 0.40, 0.50, 0.60, 0.75, 0.90, 1.0];

/// Maximum difference between requested and achieved share.
const TOLERANCE: f64 = 0.03;

/// One share and one policy.
#[derive(Debug, Serialize)]
struct SweepRow {
    /// Requested share.
    share: f64,
    policy: &'static str,
    /// Achieved share.
    ffn_resident_share: f64,
    budget_bytes: u64,
    peak_rss_bytes: u64,
    /// `null` with mmap, whose memory belongs to the page cache, and if the peak is unknown.
    within_budget: Option<bool>,
    tokens_per_s: Range,
    ms_per_token: f64,
    wait_share: f64,
    hit_rate: f64,
    bound: Bound,
    /// Token time as a multiple of the bound, over the rounds.
    of_bound: Range,
    /// Why the result is missing or differs from the request.
    note: Option<String>,
}

/// Runs the command.
pub fn command(args: &BenchSweepArgs) -> Result<(), Failure> {
    let bench = &args.bench;
    may_write(
        &bench.output,
        "sweep",
        Some(&bench.model),
        args.beside.as_deref(),
    )?;
    let others = args.beside.as_deref().map(read_curves).transpose()?;
    let shares: &[f64] = match args.shares.as_slice() {
        [] if bench.quick => &[0.45, 1.0],
        [] => &SHARES,
        shares => shares,
    };
    let by_rows = open_container(&bench.model)?.banks().is_empty();
    let policies = match by_rows {
        true => &[Ablation::Full],
        false => &args.policies[..],
    };
    let points = points::each(shares, policies);
    let names = points::names(&points, |policy| policy.name().into());
    let (tokens, rounds) = (bench.tokens_or(32), bench.rounds_or(3));
    let Setup {
        facts,
        mut device,
        child,
    } = Setup::new(bench, &args.io)?;
    let mut notes = Vec::new();
    if by_rows {
        notes.push(
            "matrices by rows: policies apply to neurons in bundles, so only `full` was run".into(),
        );
    }
    let mut cap_said = None;
    let series = in_turns(&names, rounds, &mut || device.measure(), &mut |i, done| {
        let Point { share, variant } = points[i];
        let mut run = Decoding {
            share,
            ..Decoding::of(bench, tokens, &args.io)
        };
        let policy = ["--ablation", variant.name()];
        if variant != Ablation::Mmap {
            return child.run(&run.with(&policy), None);
        }
        run.tokens = args.mmap_tokens.unwrap_or(tokens.min(8));
        let cap = cap_for(&bench.model, budget_at(share, &points, done))?;
        cap_said.get_or_insert(cap.as_ref().err().cloned());
        child.run(&run.with(&policy), cap.as_ref().ok())
    })?;
    let rows = rows(&points, &series, &device);
    let agreement = Agreement::of(series.iter());
    notes.extend(remarks(&rows));
    if let Some(said) = cap_said {
        notes.push(cap_note(said));
    }
    notes.push(NOTE.into());
    let model = model_of(&series)?;
    let how = format!(
        "decoding by share of the FFN in memory, {tokens} tokens, {rounds} interleaved rounds, --io {}",
        args.io
    );
    Results {
        bench: "sweep",
        svg: chart(&model, &facts.line(), &args.io, &rows, others.as_deref()),
        table: table(&rows),
        csv: csv(&rows),
        model: Some(model),
        facts,
        how,
        agreement: Some(agreement),
        body: Rows { rows: &rows },
        notes,
    }
    .finish(&bench.output)
}

/// A memory limit of `budget` bytes for an mmap run, whose file is evicted first; or why there is none.
fn cap_for(model: &ModelArg, budget: Option<u64>) -> Result<Result<Cap, String>, Failure> {
    Ok(match budget {
        Some(bytes) if model.file().is_some() => {
            cap::forget(&file_of(model)?);
            Cap::new(bytes)
        }
        // The bundled model is part of this executable.
        _ if model.file().is_none() => Err("the model is part of this program".into()),
        _ => Err("no other policy gives the budget".into()),
    })
}

/// Note on mmap runs; `why` is the reason that there is no limit.
fn cap_note(why: Option<String>) -> String {
    match why {
        None => {
            "mmap: in a memory control group limited to the budget, with a cold page cache".into()
        }
        Some(why) => {
            format!("mmap: without a memory limit ({why}), so the page cache may hold everything")
        }
    }
}

/// Name of the model, or why no run succeeded.
pub fn model_of(series: &[Series]) -> Result<String, Failure> {
    let run = series.iter().find_map(Series::first);
    run.map(|run| run.model.clone()).ok_or_else(|| {
        let why = series.iter().find_map(|s| s.refused.clone());
        Failure::Child(format!(
            "nothing could run: {}",
            why.unwrap_or_else(|| "no points were requested".into())
        ))
    })
}

/// The budget that another policy used at the same share.
fn budget_at(share: f64, points: &[Point<Ablation>], done: &[Series]) -> Option<u64> {
    let here = points.iter().zip(done).filter(|(p, _)| p.share == share);
    let here = here.filter(|(p, _)| p.variant != Ablation::Mmap);
    let mut runs = here.filter_map(|(_, s)| s.first());
    runs.next().map(|run| run.memory.budget_bytes)
}

/// Memory bandwidth, for runs that cannot measure it.
pub fn memory_of(series: &[Series]) -> f64 {
    let speeds = series.iter().flat_map(|s| &s.runs);
    let mut speeds: Vec<f64> = speeds
        .map(|run| run.details.memory_gb_per_s)
        .filter(|&s| s > 0.0)
        .collect();
    Range::of(&mut speeds).median
}

/// The bound of the run with the median time, and the range of the ratio over all runs.
pub fn bounds(series: &Series, device: &Device, memory: f64) -> (Bound, Range) {
    let mut runs: Vec<&Run> = series.runs.iter().collect();
    runs.sort_by(|a, b| a.ms_per_token().total_cmp(&b.ms_per_token()));
    let bound = |run: &Run| Bound::of(run, device, memory);
    let middle = runs.get(runs.len().saturating_sub(1) / 2);
    (
        middle.map(|run| bound(run)).unwrap_or_default(),
        series.range(|run| bound(run).ratio),
    )
}

fn rows(points: &[Point<Ablation>], all: &[Series], device: &Device) -> Vec<SweepRow> {
    let memory = memory_of(all);
    let one = |(point, series): (&Point<Ablation>, &Series)| {
        let Point {
            share,
            variant: policy,
        } = *point;
        let (bound, of_bound) = bounds(series, device, memory);
        let first = series.first();
        let resident = first.map_or(0.0, |r| r.memory.ffn_resident_share);
        // The other policies use the budget of `full`, of which they hold a smaller share.
        let full = Point {
            share,
            variant: Ablation::Full,
        };
        let full = (points.iter().zip(all)).find(|(p, _)| **p == full);
        let held = full.and_then(|(_, s)| Some(s.first()?.memory.ffn_resident_share));
        let held = held.filter(|&held| held > share + TOLERANCE);
        let peak = series.runs.iter().filter_map(|r| r.memory.peak_rss_bytes);
        let within: Option<Vec<bool>> = series.runs.iter().map(Run::within_budget).collect();
        let judged = policy != Ablation::Mmap && first.is_some();
        SweepRow {
            share,
            policy: policy.name(),
            ffn_resident_share: resident,
            budget_bytes: first.map_or(0, |r| r.memory.budget_bytes),
            peak_rss_bytes: peak.max().unwrap_or(0),
            within_budget: within
                .filter(|_| judged)
                .map(|all| all.iter().all(|&ok| ok)),
            tokens_per_s: series.range(|r| r.decode_tokens_per_s),
            ms_per_token: series.range(Run::ms_per_token).median,
            wait_share: series.range(Run::wait_share).median,
            hit_rate: series.range(Run::hit_rate).median,
            bound,
            of_bound,
            note: series.refused.clone().or_else(|| {
                held.map(|held| format!("skipped: the smallest budget holds {}", percent(held)))
            }),
        }
    };
    points.iter().zip(all).map(one).collect()
}

/// Notes on the rows.
fn remarks(rows: &[SweepRow]) -> Vec<String> {
    let mut notes = Vec::new();
    let (mut judged, mut above) = (0, Vec::new());
    for row in rows.iter().filter(|r| r.within_budget.is_some()) {
        judged += 1;
        if row.within_budget == Some(false) {
            above.push(format!("{} at {}", row.policy, percent(row.share)));
        }
    }
    notes.push(if above.is_empty() {
        format!("peak memory: within the budget at all {judged} points")
    } else {
        format!("peak memory: ABOVE the budget at {}", above.join(", "))
    });
    let full: Vec<&SweepRow> = (rows.iter())
        .filter(|r| r.policy == "full" && r.note.is_none())
        .collect();
    if full.len() > 1 {
        let mut sorted = full;
        sorted.sort_by(|a, b| a.share.total_cmp(&b.share));
        let drops: Vec<String> = (sorted.windows(2))
            .filter(|w| w[1].tokens_per_s.median < w[0].tokens_per_s.median)
            .map(|w| {
                let spreads = w[1].tokens_per_s.max >= w[0].tokens_per_s.min;
                format!(
                    "{:.2} to {:.2} tok/s from {} to {}{}",
                    w[0].tokens_per_s.median,
                    w[1].tokens_per_s.median,
                    percent(w[0].share),
                    percent(w[1].share),
                    if spreads { " (the ranges overlap)" } else { "" }
                )
            })
            .collect();
        notes.push(if drops.is_empty() {
            "full: monotone, never slower with more memory".into()
        } else {
            format!("full: NOT monotone: {}", drops.join("; "))
        });
    }
    notes
}

fn table(rows: &[SweepRow]) -> Table {
    let mut table = Table::new(
        "FFN in memory | policy | tokens/s | I/O wait | hits | peak / budget, MiB | \
         bound, ms | limit | of bound",
    );
    for row in rows {
        let point = vec![percent(row.share), row.policy.to_owned()];
        let refused = row.note.as_ref().filter(|_| row.tokens_per_s.median == 0.0);
        table.add(point, refused, || {
            let speed = row.tokens_per_s.show(2);
            let note = row.note.iter().map(|n| format!(", {n}"));
            let (peak, budget) = (mib(row.peak_rss_bytes), mib(row.budget_bytes));
            let mut cells = vec![
                note.fold(speed, |speed, note| speed + &note),
                percent(row.wait_share),
                percent(row.hit_rate),
                format!("{peak} / {budget}"),
            ];
            cells.extend(row.bound.cells(row.of_bound));
            cells
        });
    }
    table
}

fn csv(rows: &[SweepRow]) -> Table {
    let mut table = Table::new(
        "share | policy | ffn_resident_share | tokens_per_s | tokens_per_s_min | \
         tokens_per_s_max | ms_per_token | wait_share | hit_rate | budget_bytes | \
         peak_rss_bytes | computed_bytes | memory_gb_per_s | read_bytes | read_len | \
         disk_mb_per_s | bound_ms | of_bound | note",
    );
    for r in rows {
        let (b, t) = (&r.bound, r.tokens_per_s);
        table.rows.push(vec![
            r.share.to_string(),
            r.policy.into(),
            format!("{:.4}", r.ffn_resident_share),
            format!("{:.4}", t.median),
            format!("{:.4}", t.min),
            format!("{:.4}", t.max),
            format!("{:.4}", r.ms_per_token),
            format!("{:.4}", r.wait_share),
            format!("{:.4}", r.hit_rate),
            r.budget_bytes.to_string(),
            r.peak_rss_bytes.to_string(),
            format!("{:.0}", b.computed_bytes),
            format!("{:.2}", b.memory_gb_per_s),
            format!("{:.0}", b.read_bytes),
            format!("{:.0}", b.read_len),
            format!("{:.1}", b.disk_mb_per_s),
            format!("{:.4}", b.ms),
            format!("{:.4}", r.of_bound.median),
            r.note.clone().unwrap_or_default(),
        ]);
    }
    table
}

fn chart(
    model: &str,
    facts: &str,
    io: &str,
    rows: &[SweepRow],
    others: Option<&[Curve]>,
) -> String {
    let mut lines: Vec<Curve> = Vec::new();
    for row in rows.iter().filter(|r| r.note.is_none()) {
        let point = (row.share, row.tokens_per_s);
        match lines.iter_mut().find(|c| c.name == row.policy) {
            Some(curve) => curve.points.push(point),
            None => lines.push(Curve {
                name: row.policy.to_owned(),
                points: vec![point],
            }),
        }
    }
    for curve in others.unwrap_or_default() {
        lines.push(Curve {
            name: curve.name.clone(),
            points: curve.points.clone(),
        });
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    let tick = |i: u32| (f64::from(i) / 5.0, format!("{} %", 20 * i));
    let ticks: Vec<(f64, String)> = (0..=5).map(tick).collect();
    let labels = Labels {
        title: &format!("{model}: decoding by share of the FFN in memory, --io {io}"),
        facts,
        x: "share of the FFN in memory",
        y: "tokens/s, median and range",
    };
    curves(&labels, &ticks, &lines)
}

/// Reads curves of other programs from a CSV file, whose columns may be in any order.
fn read_curves(path: &Path) -> Result<Vec<Curve>, Failure> {
    let text = std::fs::read_to_string(path).map_err(Failure::file(path))?;
    parse_curves(&text)
        .map_err(|reason| Failure::Usage(format!("--beside {}: {reason}", path.display())))
}

fn parse_curves(text: &str) -> Result<Vec<Curve>, String> {
    let mut lines = text.lines().filter(|l| !l.trim().is_empty());
    let head = fields(lines.next().unwrap_or_default());
    let column = |name: &str| {
        let place = head.iter().position(|h| h == name);
        place.ok_or_else(|| format!("no column {name:?}; expected share, name, median, low, high"))
    };
    let places = [
        column("share")?,
        column("median")?,
        column("low")?,
        column("high")?,
    ];
    let name_at = column("name")?;
    let mut curves: Vec<Curve> = Vec::new();
    for (i, line) in lines.enumerate() {
        let row = fields(line);
        let name = row.get(name_at).cloned().unwrap_or_default();
        if name.starts_with("emberflow") {
            continue;
        }
        let mut numbers = [0.0; 4];
        for (number, &at) in numbers.iter_mut().zip(&places) {
            let text = row.get(at).map_or("", String::as_str);
            *number = text
                .trim()
                .parse()
                .map_err(|_| format!("line {}: {text:?} is not a number", i + 2))?;
        }
        let [share, median, min, max] = numbers;
        let point = (share, Range { median, min, max });
        match curves.iter_mut().find(|c| c.name == name) {
            Some(curve) => curve.points.push(point),
            None => curves.push(Curve {
                name,
                points: vec![point],
            }),
        }
    }
    Ok(curves)
}

/// Fields of a CSV line.
fn fields(line: &str) -> Vec<String> {
    let (mut out, mut quoted) = (vec![String::new()], false);
    for c in line.trim_end().chars() {
        match c {
            // A doubled quote closes and reopens; our names contain none.
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(String::new()),
            _ => out.last_mut().into_iter().for_each(|field| field.push(c)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_programs_are_read_from_csv() {
        let text = "share,name,median,low,high\n0.5,\"emberflow full\",6,5,7\n\
                    0.5,\"llama.cpp mmap, read-ahead 4 KiB\",0.05,0.04,0.06\n\
                    0.25,\"llama.cpp mmap, read-ahead 4 KiB\",0.02,0.01,0.03\n";
        let curves = parse_curves(text).unwrap();
        assert_eq!(curves.len(), 1);
        assert_eq!(curves[0].name, "llama.cpp mmap, read-ahead 4 KiB");
        let (share, range) = curves[0].points[1];
        assert_eq!((share, range.min, range.median), (0.25, 0.01, 0.02));
        assert!(parse_curves("a,b\n").is_err_and(|e| e.contains("share")));
        let bad = "share,name,median,low,high\n0.5,x,fast,1,1\n";
        assert!(parse_curves(bad).is_err_and(|e| e.contains("line 2")));
    }

    #[test]
    fn a_share_below_the_smallest_budget_is_refused() {
        use crate::bench::rounds::tests::{run, series};
        let device = Device::open(&ModelArg { model: None }, "sim:ufs4", true).unwrap();
        let points = [
            (0.1, Ablation::Full),
            (0.1, Ablation::LlmFlash),
            (1.0, Ablation::Full),
        ]
        .map(|(share, variant)| Point { share, variant });
        // At every share, all policies hold everything.
        let all: Vec<Series> = ["a", "b", "c"].map(|n| series(n, vec![run(&["h"])])).into();
        let rows = rows(&points, &all, &device);
        for row in &rows[..2] {
            let note = row.note.as_deref();
            assert_eq!(note, Some("skipped: the smallest budget holds 100.0 %"));
        }
        assert_eq!(rows[2].note, None);
        let killed = Series {
            refused: Some("killed: out of memory".into()),
            runs: Vec::new(),
            ..all[0].clone()
        };
        let table = table(&super::rows(&points[..1], &[killed], &device));
        assert_eq!(table.rows[0][2], "killed: out of memory");
    }

    fn row(share: f64, speed: f64, within: bool) -> SweepRow {
        SweepRow {
            share,
            policy: "full",
            ffn_resident_share: share,
            budget_bytes: 1,
            peak_rss_bytes: 1,
            within_budget: Some(within),
            tokens_per_s: Range::of(&mut [speed]),
            ms_per_token: 1.0,
            wait_share: 0.0,
            hit_rate: 1.0,
            bound: Bound::default(),
            of_bound: Range::default(),
            note: None,
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = remarks(&[row(0.5, 2.0, true), row(0.1, 1.0, true)]);
        assert!(good[0].contains("all 2 points") && good[1].contains("monotone, never"));
        let bad = remarks(&[row(0.1, 2.0, true), row(0.5, 1.0, false)]);
        assert!(
            bad[0].contains("ABOVE the budget at full at 50.0 %"),
            "{bad:?}"
        );
        assert!(bad[1].contains("NOT monotone: 2.00 to 1.00"), "{bad:?}");
    }
}
