//! `emberflow-lab batch`: several texts decoded at once (PowerInfer-2, Fig. 13 and §2.2).

use serde::Serialize;

use crate::cli::BatchArgs;
use emberflow::Failure;
use emberflow::bench::bound::{Bound, Device, NOTE};
use emberflow::bench::child::{Decoding, Run, mean};
use emberflow::bench::output::{Results, Rows, Table, may_write, mib, percent};
use emberflow::bench::points::{Point, Setup, each};
use emberflow::bench::rounds::{Agreement, Series};
use emberflow::bench::sweep::{bounds, memory_of, model_of};
use emberflow::chart::{Curve, Labels, curves};
use emberflow::stats::Range;

/// One share of the FFN in memory and number of texts.
#[derive(Debug, Serialize)]
struct BatchRow {
    share: f64,
    texts: u16,
    /// Tokens per second of all texts together.
    tokens_per_s: Range,
    ms_per_pass: f64,
    /// Speed relative to one text.
    gain: f64,
    /// Share of the neurons that fire for at least one text.
    needed_share: f64,
    /// Share of the clusters that are hot in the plan for this number of texts.
    hot_cut: f64,
    /// Bytes of the hot region.
    hot_bytes: u64,
    hit_rate: f64,
    wait_share: f64,
    within_budget: Option<bool>,
    bound: Bound,
    /// Pass time relative to the bound, over the rounds.
    of_bound: Range,
    note: Option<String>,
}

/// Runs the command.
pub fn command(args: &BatchArgs) -> Result<(), Failure> {
    let bench = &args.bench;
    may_write(&bench.output, "batch", Some(&bench.model), None)?;
    let points = each(&args.shares, &args.sizes);
    let (tokens, rounds) = (bench.tokens_or(32), bench.rounds_or(3));
    let mut setup = Setup::new(bench, &args.io)?;
    let decoding = Decoding::of(bench, tokens, &args.io);
    let named = |size: u16| size.to_string();
    let more = |size: u16| ["--best-of".into(), size.to_string()];
    let series = setup.decode(&decoding, rounds, &points, named, more)?;
    let facts = setup.facts;
    let rows = rows(&points, &series, &setup.device);
    let model = model_of(&series)?;
    let title = format!("{model}: texts at once, --io {}", args.io);
    let mut notes = vec![
        "each text is the one that its seed gives alone; the hashes compared are those of every text"
            .to_owned(),
        "paper: PowerInfer-2, Fig. 2, Bamboo-7B: neurons that fire nearly always are below 1 % of a layer \
         with one text and 75 % with 32; Fig. 13 has batches of 4 on a phone's CPU and NPU, whose speeds \
         are given as ratios to other programs only"
            .into(),
        NOTE.into(),
    ];
    if rows.iter().any(|r| r.within_budget == Some(false)) {
        notes.push("peak memory: ABOVE the budget at some points".into());
    }
    let how = format!(
        "texts decoded together, {tokens} tokens each, {rounds} interleaved rounds, --io {}",
        args.io
    );
    Results {
        bench: "batch",
        svg: chart(&title, &facts.line(), &rows),
        table: table(&rows),
        csv: csv(&rows),
        agreement: Some(agreement(&series)),
        model: Some(model),
        facts,
        how,
        body: Rows { rows: &rows },
        notes,
    }
    .finish(&bench.output)
}

fn rows(points: &[Point<u16>], all: &[Series], device: &Device) -> Vec<BatchRow> {
    let memory = memory_of(all);
    let speed = |s: &Series| s.range(|r| r.decode_tokens_per_s);
    let one = |(point, series): (&Point<u16>, &Series)| {
        let Point {
            share,
            variant: texts,
        } = *point;
        let alone = Point { share, variant: 1 };
        let single = points.iter().position(|&p| p == alone);
        let single = single.map_or(0.0, |i| speed(&all[i]).median);
        let tokens_per_s = speed(series);
        let first = series.first();
        let (bound, of_bound) = bounds(series, device, memory);
        let within: Option<Vec<bool>> = series.runs.iter().map(Run::within_budget).collect();
        BatchRow {
            share,
            texts,
            tokens_per_s,
            ms_per_pass: series.range(Run::ms_per_token).median,
            gain: if single > 0.0 {
                tokens_per_s.median / single
            } else {
                0.0
            },
            needed_share: series.range(|r| mean(&r.details.needed_share)).median,
            hot_cut: first.map_or(0.0, |r| r.details.hot_cut),
            hot_bytes: first.map_or(0, |r| r.memory.hot),
            hit_rate: series.range(Run::hit_rate).median,
            wait_share: series.range(Run::wait_share).median,
            within_budget: within.map(|all| all.iter().all(|&ok| ok)),
            bound,
            of_bound,
            note: series.refused.clone(),
        }
    };
    points.iter().zip(all).map(one).collect()
}

/// Compares every text of every run with the same seed's text in the first run that has it.
fn agreement(all: &[Series]) -> Agreement {
    let mut known: Vec<&str> = Vec::new();
    let mut differing: Vec<String> = Vec::new();
    let runs = || all.iter().flat_map(|s| s.runs.iter().map(move |r| (s, r)));
    for (series, run) in runs() {
        let samples = run.best_of.iter().flat_map(|b| &b.samples);
        for (seed, sample) in samples.enumerate() {
            match known.get(seed) {
                Some(&hash) if hash != sample.logits_hash => {
                    differing.push(format!("{} (text {seed})", series.name));
                }
                Some(_) => {}
                None => known.push(&sample.logits_hash),
            }
        }
    }
    differing.dedup();
    Agreement {
        hash: known.first().map_or(String::new(), |h| (*h).to_owned()),
        runs: runs().count(),
        differing,
    }
}

fn table(rows: &[BatchRow]) -> Table {
    let mut table = Table::new(
        "FFN in memory | texts | tokens/s | gain | ms/pass | neurons needed | hot cut | \
         hot region, MiB | hits | waiting | bound, ms | limit | of bound",
    );
    for r in rows {
        let point = vec![percent(r.share), r.texts.to_string()];
        table.add(point, r.note.as_ref(), || {
            let mut cells = vec![
                r.tokens_per_s.show(2),
                format!("{:.2}", r.gain),
                format!("{:.2}", r.ms_per_pass),
                percent(r.needed_share),
                percent(r.hot_cut),
                mib(r.hot_bytes),
                percent(r.hit_rate),
                percent(r.wait_share),
            ];
            cells.extend(r.bound.cells(r.of_bound));
            cells
        });
    }
    table
}

fn csv(rows: &[BatchRow]) -> Table {
    let mut table = Table::new(
        "share | texts | tokens_per_s | tokens_per_s_min | tokens_per_s_max | gain | \
         ms_per_pass | needed_share | hot_cut | hot_bytes | hit_rate | wait_share | \
         bound_ms | of_bound",
    );
    for r in rows {
        let t = r.tokens_per_s;
        let mut cells = vec![r.share.to_string(), r.texts.to_string()];
        let numbers = [t.median, t.min, t.max, r.gain, r.ms_per_pass];
        cells.extend(numbers.map(|v| format!("{v:.4}")));
        cells.extend([r.needed_share, r.hot_cut].map(|v| format!("{v:.4}")));
        cells.push(r.hot_bytes.to_string());
        let rest = [r.hit_rate, r.wait_share, r.bound.ms, r.of_bound.median];
        cells.extend(rest.map(|v| format!("{v:.4}")));
        table.rows.push(cells);
    }
    table
}

fn chart(title: &str, facts: &str, rows: &[BatchRow]) -> String {
    let mut lines: Vec<Curve> = Vec::new();
    let mut ticks: Vec<(f64, String)> = Vec::new();
    for r in rows.iter().filter(|r| r.note.is_none()) {
        let name = format!("{} of the FFN in memory", percent(r.share));
        // Doublings are equal steps.
        let x = f64::from(r.texts).log2();
        match lines.iter_mut().find(|c| c.name == name) {
            Some(line) => line.points.push((x, r.tokens_per_s)),
            None => lines.push(Curve {
                name,
                points: vec![(x, r.tokens_per_s)],
            }),
        }
        if ticks.iter().all(|t| t.0 != x) {
            ticks.push((x, r.texts.to_string()));
        }
    }
    let labels = Labels {
        title,
        facts,
        x: "texts at once",
        y: "tokens/s of all, median and range",
    };
    curves(&labels, &ticks, &lines)
}
